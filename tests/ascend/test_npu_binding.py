"""The binding to torch_npu, run: NPU tensors through torch.ops, the library's own loading, stream, queue, random state and stages,
with the emulator under its kernels. tests/npu/device.cpp is the NPU, and stands in for what torch_npu and CANN bring.

Collected where tools/check_npu_binding.sh has fetched torch_npu's headers.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import warm_python
from helpers import run_python

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def built() -> None:
    subprocess.run([ROOT / "tools" / "check_npu_binding.sh", sys.executable], check=True)


PRELUDE = """
import os
import sys
sys.executable = os.environ["TEST_PYTHON"]  # the rungs of `doctor` are processes of it, which have torch already
import device
import torch
import flashattn_ext

def fails(kind, words, function):
    try:
        function()
    except Exception as error:
        assert type(error) is kind and words in str(error), (type(error), str(error))
    else:
        raise SystemExit("did not raise")

def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[1])).half()
"""


def on_device(code: str, soc: str = "Ascend910B3", **env: str) -> str:
    path = f"{ROOT / 'tests' / 'npu'}:{ROOT}"
    # The six rungs of `doctor` are a process each, which on a busy machine take longer than the 120 seconds of run_python.
    env |= {"PYTHONPATH": path, "TEST_NPU_SOC": soc, "TEST_PYTHON": warm_python.interpreter()}
    done = run_python(PRELUDE + textwrap.dedent(code), 400, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("dtype", ["half", "bfloat16", "float"])
def test_forward_and_backward_are_those_of_the_kernels(dtype: str) -> None:
    """Bit for bit what the same kernels give for tensors of the CPU; and no call waits for the device."""
    on_device(f"""
        q, k, v = (t.{dtype}() for t in (random(2, 70, 4, 64), random(2, 90, 2, 64), random(2, 90, 2, 48)))
        sink = torch.randn(4)

        def run(where):
            leaves = [t.to(where).requires_grad_() for t in (q, k, v, sink)]
            out, lse = flashattn_ext.forward(
                *leaves[:3], sink=leaves[3], causal=True, dropout_p=0.2, rng_seed=3, return_lse=True
            )
            if where == "npu":
                assert device.queued() == 3 and out.device == lse.device == torch.device("npu:0")
            grads = torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), torch.ones_like(lse)))
            return [t.detach().cpu() for t in (out, lse, *grads)]

        got = run("npu")
        letters = {{"half": "fp16", "bfloat16": "bf16", "float": "fp32"}}["{dtype}"]
        stages = ["forward_dropout", "backward_prepare", "backward_dropout", "backward_finish"]
        ran = device.ran()
        assert ran == [f"{{stage}}_{{letters}}" for stage in stages], ran
        with flashattn_ext.use_backend("ascend-emulator"):
            expected = run("cpu")
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    """)


def test_packed_rows_of_no_sequence_are_cleared() -> None:
    on_device("""
        q, k = random(20, 2, 32), random(30, 2, 32)
        starts = [torch.tensor(s, dtype=torch.int32, device="npu") for s in ([3, 5, 12], [0, 9, 20])]
        leaves = [t.to("npu").requires_grad_() for t in (q, k, k)]
        out, lse = flashattn_ext.varlen_forward(*leaves, *starts, 9, 11, return_lse=True)
        dq, dk, dv = torch.autograd.grad(out, leaves, torch.ones_like(out))
        outside = [0, 1, 2, *range(12, 20)]
        assert (out.cpu()[outside] == 0).all() and (lse.cpu()[:, outside] == -torch.inf).all()
        assert (dq.cpu()[outside] == 0).all() and (dk.cpu()[20:] == 0).all() and (dv.cpu()[20:] == 0).all()
        for t in (out, lse, dq, dk, dv):
            assert not t.cpu().isnan().any()
        with flashattn_ext.use_backend("cpu"):
            expected = flashattn_ext.forward(q[None, 5:12].float(), k[None, 9:20].float(), k[None, 9:20].float())
        torch.testing.assert_close(out.detach().cpu()[5:12].float(), expected[0], rtol=2e-3, atol=2e-3)
    """)


def test_randomness_is_the_generators() -> None:
    on_device("""
        q, v = torch.zeros(1, 40, 2, 1, device="npu", dtype=torch.float16), torch.ones(1, 40, 2, 8, device="npu").half()

        def call():
            return flashattn_ext.forward(q, q, v, dropout_p=0.5).cpu()

        torch.manual_seed(11)
        first, second = call(), call()
        torch.manual_seed(11)
        assert torch.equal(call(), first) and torch.equal(call(), second) and not torch.equal(first, second)
        torch.manual_seed(12)
        assert not torch.equal(call(), first)

        # A captured call draws anew at each replay.
        device.capture(11, 0)
        out = flashattn_ext.forward(q, q, v, dropout_p=0.5)
        device.end_capture()
        results = []
        for seed, offset in ((11, 0), (11, 4), (12, 0), (11, 0)):
            device.replay(seed, offset)
            results.append(out.cpu())
        assert torch.equal(results[0], results[3])
        assert not torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    """)


def test_mask_is_that_of_every_device() -> None:
    on_device("""
        call = (2, 3, 21, 131, 0.3, -5)
        assert torch.equal(flashattn_ext.dropout_mask(*call, device="npu").cpu(), flashattn_ext.dropout_mask(*call))
        assert device.ran() == ["dropout_mask"]
        assert flashattn_ext.dropout_mask(1, 2, 0, 5, 0.3, 1, device="npu").shape == (1, 2, 0, 5)
        assert device.ran() == []
        q = torch.zeros(1, 0, 2, 8, device="npu").half()
        assert flashattn_ext.forward(q, q, q).shape == q.shape and device.ran() == []
    """)


def test_what_is_refused() -> None:
    on_device("""
        q = random(1, 20, 2, 16).to("npu")
        words = "backend 'ascend': fp64 inputs are not implemented by the Ascend C kernels"
        fails(NotImplementedError, words, lambda: flashattn_ext.forward(q.double(), q.double(), q.double()))
        with torch.autocast("npu", dtype=torch.bfloat16):
            assert flashattn_ext.forward(q.float(), q.float(), q.float()).dtype == torch.bfloat16
        fails(ValueError, "k: expected the device of q (npu:0), got cpu", lambda: flashattn_ext.forward(q, q.cpu(), q))
        device.set_format(29)
        fails(ValueError, "q: expected a tensor in rows, got one in the NPU's own format 29; convert it: torch_npu.npu_format_cast",
              lambda: flashattn_ext.forward(q, q, q))
        device.set_format(2)
        with flashattn_ext.use_backend("ascend"):
            fails(RuntimeError, "use_backend('ascend') takes tensors on 'npu', got 'cpu'",
                  lambda: flashattn_ext.forward(q.cpu(), q.cpu(), q.cpu()))
        fails(ValueError, "choose one of 'cpu', 'ascend'", lambda: flashattn_ext.use_backend("cuda-sm80"))
    """)


def test_a_library_for_another_chip_is_refused() -> None:
    on_device(
        """
        q = random(1, 20, 2, 16).to("npu")
        words = ("the Ascend C kernels were built for Ascend910B1 (Atlas A2), but this device is Ascend910_9391 (Atlas A3); "
                 "build the kernels again, from the checkout: bash build.sh -arch 910_93")
        for _ in range(2):
            fails(RuntimeError, words, lambda: flashattn_ext.forward(q, q, q))
    """,
        soc="Ascend910_9391",
    )


# --- the ladder of `doctor` --------------------------------------------------------------------------------------------------

CLIMB = """
    from flashattn_ext_lab import npu_ladder
    npu_ladder.PATIENCE_SECONDS = {patience}
    for rung in npu_ladder.climb():
        print(*rung, sep="|")
"""


def climb(broken: str, patience: int = 300) -> list[list[str]]:
    """Name, whether it holds, and text of every rung, with one kernel broken."""
    text = on_device(textwrap.dedent(CLIMB).format(patience=patience), TEST_NPU_BREAK=broken)
    return [line.split("|") for line in text.splitlines()]


def test_every_rung_holds_and_doctor_shows_them(tmp_path: Path) -> None:
    text = on_device(
        """
        from flashattn_ext_lab import doctor
        assert doctor.report(None) == 0
    """,
        TEST_NPU_KERNELS=str(tmp_path / "kernels"),
    )
    rungs = [line for line in text.splitlines() if "npu: " in line]
    assert len(rungs) == 7 and all(line.startswith("ok ") for line in rungs), text
    assert "all 16506 bits of the mask are the CPU's" in rungs[0]
    assert all("largest difference from the CPU" in line for line in rungs[1:5])
    assert "out, lse and gradients of 15 calls" in rungs[5]
    assert "12 calls of scaled_dot_product_attention agree with the CPU; torch_npu's own do in 12" in rungs[6]
    assert "ok    device: inf, NaN" in text and "INF/NAN mode" in text
    # The first and the next to last rung run every kernel, but that of tools/npu_times.py.
    lines = (line.split("|") for line in (tmp_path / "kernels").read_text().splitlines())
    ran = {rung: kernels for rung, *kernels in lines}
    kernels = re.findall(r"flash_(\w+)\)", (ROOT / "ascend_c" / "kernel_list.h").read_text())
    assert {*ran["mask kernel"], *ran["every kernel"], "fix_rate"} == {*kernels}


def test_doctor_warns_of_saturation() -> None:
    text = on_device(
        """
        from flashattn_ext_lab import doctor, npu_ladder
        npu_ladder.RUNGS.clear()
        assert doctor.report(None) == 0
    """,
        TEST_NPU_SATURATES="1",
    )
    assert "miss  device: inf, NaN" in text and "saturation mode" in text and "INF_NAN_MODE_FORCE_DISABLE" in text


def test_doctor_says_where_torchs_own_attention_drops_the_mask() -> None:
    text = on_device(
        """
        from flashattn_ext_lab import npu_ladder
        assert npu_ladder.main("compared with torch") == 0
    """,
        TEST_NPU_SDPA="drops_mask",
    )
    assert (
        "torch_npu's own do in 6, drop the mask in: a bool mask at D = 64, an additive mask at D = 64, a bool mask"
        in text
    )


def test_scaled_dot_product_attention_runs_here() -> None:
    """Forward and backward through autograd, any head dim, and what is left to torch goes to torch_npu's own kernel."""
    on_device("""
        from flashattn_ext.integrations import sdpa
        attention = torch.nn.functional.scaled_dot_product_attention
        q, k = random(2, 2, 40, 80), random(2, 2, 60, 80)
        visible = torch.ones(40, 60, dtype=torch.bool).tril(10)

        def run(where, **options):
            leaves = [t.clone().to(where).requires_grad_() for t in (q, k, k)]
            out = attention(*leaves, **{name: value.to(where) for name, value in options.items()})
            return [t.detach().cpu() for t in (out, *torch.autograd.grad(out, leaves, torch.ones_like(out)))]

        with sdpa.activate(report=True) as report:
            got = run("npu", attn_mask=visible)
            kernels = device.ran()
            with torch.no_grad():
                own = attention(*(t.to("npu") for t in (q, k, k)), is_causal=True, attn_mask=None, dropout_p=0.0).cpu()
            assert report.ours == 2 and not report.torchs, report
            assert [name.split("_")[0] for name in kernels] == ["forward", "backward", "backward", "backward"], kernels
            expected = run("cpu", attn_mask=visible)
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
            device.ran()
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), torch.no_grad():
                left = attention(*(t.to("npu") for t in (q, k, k)), is_causal=True)
            assert device.ran() == ["torch_npus_attention"] and report.torchs.total() == 1, report
            torch.testing.assert_close(left.cpu(), own, rtol=1e-2, atol=1e-2)
        # torch_npu's kernel is back.
        attention(*(t.to("npu") for t in (q, k, k)))
        assert device.ran() == ["torch_npus_attention"]
    """)


@pytest.mark.parametrize(
    ("broken", "rung", "words"),
    [
        ("flash_dropout_mask:skip", "mask kernel", "of 16506 bits of the mask differ"),
        ("flash_backward_prepare_fp16:skip", "prepare", "gradients of q and the sink without keys, result 0"),
        ("flash_forward_fp16:error", "forward of one tile", "error 507015"),
        (
            "flash_forward_fp16:missing",
            "forward of one tile",
            "RuntimeError: flashattn_ext: the kernel flash_forward_fp16 was not started: the Ascend runtime reports error 107001: "
            "[kernel flash_forward_fp16 is not registered]",
        ),
        ("flash_forward_dropout_bf16:skip", "forward", "torch.bfloat16, result 0: difference from the CPU nan"),
        (
            "flash_forward_mask_fp32:skip",
            "every kernel",
            "with a Mask, torch.float32, result 0: difference from the CPU nan",
        ),
    ],
)
def test_a_rung_says_what_is_broken(broken: str, rung: str, words: str) -> None:
    on_device(
        f"""
        import contextlib
        import io
        from flashattn_ext_lab import npu_ladder
        with contextlib.redirect_stderr(io.StringIO()) as said:
            assert npu_ladder.main({rung!r}) == 1
        assert {words!r} in said.getvalue(), said.getvalue()
    """,
        TEST_NPU_BREAK=broken,
    )


def test_the_first_broken_rung_ends_the_ladder() -> None:
    rungs = climb("flash_backward_prepare_fp16:skip")
    assert [holds for _, holds, _ in rungs] == ["True", *["False"] * 6], rungs
    assert rungs[1][0] == "prepare" and "gradients of q and the sink without keys, result 0" in rungs[1][2]
    assert all(text == "not tried" for _, _, text in rungs[2:])


def test_memory_of_the_results_is_filled_first() -> None:
    """Device memory outlives a process: it could hold the right results of an earlier one."""
    on_device("""
        from flashattn_ext_lab import npu_ladder
        filled = []
        full = torch.full
        def recorded(size, value, **options):
            filled.append((size, value, options["device"], device.ran()))
            return full(size, value, **options)
        torch.full = recorded
        npu_ladder.RUNGS["forward of one tile"]()
        out, lse = (128 * 64 * 2,), (128 * 4,)
        assert filled == [(out, 255, "npu", []), (lse, 255, "npu", [])], filled
    """)


def test_the_error_of_an_earlier_operator_is_not_ours() -> None:
    on_device("""
        q = random(1, 20, 2, 16).to("npu")
        device._library.npu_fail_before(107002)
        assert flashattn_ext.forward(q, q, q).cpu().isfinite().all()
    """)


def test_a_kernel_that_hangs_is_named() -> None:
    rungs = climb("flash_dropout_mask:hang", patience=5)
    assert rungs[0] == ["mask kernel", "False", "no answer within 5 seconds: a kernel hangs"]


def test_times_beside_torch_npu(tmp_path: Path) -> None:
    """tools/npu_times.py, with the host's clock. The stand-in for the NPU has no attention of its own: it gets ours."""
    text = on_device(f"""
        import sys
        from pathlib import Path
        sys.path.append({str(ROOT / "tools")!r})
        import npu_times
        torch.nn.functional.scaled_dot_product_attention = lambda q, k, v, is_causal, dropout_p: flashattn_ext.forward(
            q, k, v, layout="bhsd", causal=is_causal, dropout_p=dropout_p
        )
        npu_times.WARMUP, npu_times.RUNS, npu_times.HEADS, npu_times.CALLS = 0, 1, 2, ((40, 32, True, 0.0),)
        rates = npu_times.npu_rates
        rates.TIMES, rates.WARMUP, rates.RUNS, rates.LAUNCHES, rates.REPORT = 17, 0, 1, 1, Path({str(tmp_path)!r}) / "b" / "r.txt"
        npu_times.main()
        npu_times.main()
        assert device.ran() == [] and rates.REPORT.read_text().count("an empty launch: ") == 2
    """)
    measured = re.findall(r"\| (rows \(ND\)|fractals \(NZ\)) \| (\d+) \| -?[\d.]+ \| -?[\d.]+ \|", text)
    assert measured == 2 * [(layout, n) for layout in ("rows (ND)", "fractals (NZ)") for n in ("64", "128", "256")]
    ours, torch_npus = text.splitlines()[-2:]
    for line, name in ((ours, "flashattn_ext"), (torch_npus, "torch_npu")):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[:7] == ["1", "2", "40", "32", "causal", "0.0", name], line
        assert float(cells[7]) > 0 and float(cells[8]) > 0, line
