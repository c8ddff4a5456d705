"""What can be seen of the backend "ascend" without CANN, NPU or torch_npu: the check of the device, the form of the kernels
that CANN 8 needs, and the messages without a build.

tests/ascend/test_npu_binding.py runs the binding itself.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from helpers import run_python

import flashattn_ext
from flashattn_ext import _build
from flashattn_ext_lab import doctor

ROOT = Path(__file__).parents[2]
KERNELS = sorted((ROOT / "ascend_c" / "inst").glob("*.cpp"))
COMPILER = os.environ.get("CXX", "c++")


# --- the device --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def verdict(tmp_path_factory: pytest.TempPathFactory):
    """The message of a library for one chip on other chips."""
    program = tmp_path_factory.mktemp("npu") / "architecture"
    subprocess.run([COMPILER, "-std=c++17", ROOT / "tests/ascend/architecture.cpp", "-o", program], check=True)

    def run(built_for: str, *devices: str) -> list[str]:
        done = subprocess.run([program, built_for, *devices], check=True, capture_output=True, text=True)
        return done.stdout.splitlines()

    return run


def table() -> dict[str, set[str]]:
    """Series and their chips, from the file that build.sh reads too."""
    rows = re.findall(
        r'ARCHITECTURE\("\w+", "\w+", "(.+)", "(.+)"\)', (ROOT / "ascend_c/npu/architectures.def").read_text()
    )
    return {series: set(chips.split()) for series, chips in rows}


def test_a_library_runs_on_every_chip_of_its_series(verdict) -> None:
    assert table().keys() == {"Atlas A2", "Atlas A3"}
    for chips in table().values():
        for chip in chips:
            assert verdict(chip, *chips) == [""] * len(chips)


@pytest.mark.parametrize(
    ("built_for", "chip", "message"),
    [
        (
            "Ascend910B1",
            "Ascend910_9391",
            "built for Ascend910B1 (Atlas A2), but this device is Ascend910_9391 (Atlas A3); build the kernels again, "
            "from the checkout: bash build.sh -arch 910_93",
        ),
        (
            "Ascend910_9362",
            "Ascend910B4-1",
            "built for Ascend910_9362 (Atlas A3), but this device is Ascend910B4-1 (Atlas A2); build the kernels again, "
            "from the checkout: bash build.sh -arch 910b",
        ),
        ("Ascend910B1", "Ascend910B", "this device is Ascend910B, a first-generation chip"),  # not Atlas A2
        ("Ascend910B1", "Ascend910A", "this device is Ascend910A, a first-generation chip"),
        ("Ascend910B1", "Ascend310P3", "this device is Ascend310P3, which they do not know; bash build.sh -help"),
        ("Ascend910B1", "910B1", "which they do not know"),
        ("Ascend910B1", "", "the Ascend runtime does not name the device"),
    ],
)
def test_another_device_is_refused(verdict, built_for: str, chip: str, message: str) -> None:
    (text,) = verdict(built_for, chip)
    assert message in text


# --- the form of a kernel ----------------------------------------------------------------------------------------------------


def for_the_device(source: Path, folder: Path, *options: str) -> str:
    """A source as CANN's compiler has it behind the preprocessor, with CANN's marks still legible."""
    marks = {"__global__": "KERNEL", "__aicore__": "AICORE", "__mix__(aic, aiv)": "MIXED", "__vector__": "VECTOR"}
    header = "".join(f"#define {name} {mark}\n" for name, mark in marks.items())
    (folder / "kernel_operator.h").write_text(header)
    command = [
        COMPILER,
        "-std=c++17",
        "-E",
        "-P",
        f"-I{folder}",
        f"-I{ROOT / 'csrc'}",
        "-D__NPU_ARCH__=2201",
        *options,
        source,
    ]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "__aicore__" not in text, "a shared header was read before kernel_operator.h"
    return text


@pytest.mark.parametrize("source", KERNELS, ids=lambda path: path.stem)
def test_kernel_is_what_cann_8_can_read(source: Path, tmp_path: Path) -> None:
    """CANN 8 generates launchers from the preprocessed text. It takes everything from the first mark of a kernel to the next
    brace for its signature, and copies the struct of a parameter by its name, if it is a plain one at the start of a line."""
    text = for_the_device(source, tmp_path)
    signatures = re.findall(r"KERNEL\s+AICORE\s+(.+?)\s*\{", text, re.DOTALL)
    assert signatures == [f"void flash_{source.stem}(FlashattnBytes arguments)"]
    (members,) = re.findall(r"^\s*struct\s+FlashattnBytes\s*\{(.*?)\};", text, re.DOTALL | re.MULTILINE)
    assert re.fullmatch(r"\s*alignas\(8\) unsigned char bytes\[\d+\];\s*", members)


def test_launcher_of_cann_9_holds_every_kernel(tmp_path: Path) -> None:
    text = for_the_device(ROOT / "ascend_c/npu/launch.cpp", tmp_path, "-DFLASHATTN_ASC")
    kernels = {name: cores for cores, name in re.findall(r"KERNEL (MIXED|VECTOR) void flash_(\w+)\(", text)}
    assert sorted(kernels) == [path.stem for path in KERNELS]
    for path in KERNELS:
        assert (kernels[path.stem] == "MIXED") == ("KERNEL_TYPE_MIX_AIC_1_2" in path.read_text())
        assert f"flash_{path.stem}<<<static_cast<uint32_t>(blocks), 0, stream>>>(arguments)" in text


ROW = re.compile(r"KERNEL\(FLASHATTN_(\w+), k(\w+), k(\w+), k(\w+), flash_(\w+)\)")
TABLE = ROW.findall((ROOT / "ascend_c/kernel_list.h").read_text())
TYPES = {"fp16": "Float16", "bf16": "BFloat16", "fp32": "Float32"}


def test_every_kernel_is_in_the_list_and_started() -> None:
    listed = [name for *_, name in TABLE]
    launch = (ROOT / "ascend_c/npu/launch.cpp").read_text()
    assert sorted(listed) == [path.stem for path in KERNELS]
    assert sorted(re.findall(r"inst/(\w+)\.cpp", launch)) == sorted(listed)
    assert sorted(re.findall(r"aclrtlaunch_flash_(\w+)\.h", launch)) == sorted(listed)


def test_rows_of_the_table_agree_with_their_names() -> None:
    stages = {
        "ForwardCheck": "forward_check",
        "Forward": "forward",
        "Backward": "backward",
        "Prepare": "backward_prepare",
        "Finish": "backward_finish",
    }
    kinds = {
        "LongOptions": "_long",
        "PlainOptions": "",
        "DropoutOptions": "_dropout",
        "MaskOptions": "_mask",
        "BiasOptions": "_bias",
        "EveryOption": "_general",
    }
    for cores, stage, dtype, options, name in TABLE:
        assert cores == ("MIXED" if stage in ("Forward", "Backward", "FixRate") else "VECTOR")
        if stage in ("DropoutMask", "FixRate"):
            assert name in ("dropout_mask", "fix_rate")
            continue
        stem, letters = name.rsplit("_", 1)
        assert TYPES[letters] == dtype
        assert stem == stages[stage] + (kinds[options] if cores == "MIXED" else "")
        source = (ROOT / "ascend_c/inst" / f"{name}.cpp").read_text()
        assert f"FLASHATTN_ARGUMENTS(flash_{name})" in source
        assert cores == "VECTOR" or f"<{ {'fp16': 'half', 'bf16': 'bfloat16_t', 'fp32': 'float'}[letters] }>" in source


def test_a_call_runs_the_smallest_kernel_that_has_its_options(tmp_path: Path) -> None:
    program = tmp_path / "kernels"
    sources = [ROOT / "tests/ascend/kernels.cpp", ROOT / "ascend_c/dispatch.cpp"]
    subprocess.run(
        [COMPILER, "-std=c++17", "-O0", f"-I{ROOT}", f"-I{ROOT / 'csrc'}", *sources, "-o", program], check=True
    )
    lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    SOFTCAP, BIASES, MASK, DROPOUT, SHORT_STEPS = 1, 2, 4, 8, 16
    expected = []
    for letters in TYPES:
        for options in range(32):
            kind = {0: "", MASK: "_mask", DROPOUT: "_dropout"}.get(options & ~SOFTCAP & ~SHORT_STEPS, "_general")
            forward = "_long" if options == 0 and letters != "fp32" else kind
            backward = "_bias" if options & BIASES and not options & DROPOUT and letters != "fp32" else kind
            expected += [
                f"check {options} flash_forward_check_{letters}",
                f"forward {options} flash_forward{forward}_{letters}",
                f"prepare {options} flash_backward_prepare_{letters}",
                f"backward {options} flash_backward{backward}_{letters}",
                f"finish {options} flash_backward_finish_{letters}",
                f"mask {options} flash_dropout_mask",
            ]
    assert lines == expected


# --- where it was not built --------------------------------------------------------------------------------------------------

NPU_TENSOR = """
    import torch
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("npu")  # torch's own stand-in: tensors without memory
    import flashattn_ext

    def message(function):
        try:
            function()
        except RuntimeError as error:
            assert type(error) is RuntimeError
            print(str(error).splitlines()[0])

    q = torch._C._acc.create_empty_tensor((1, 2, 1, 8), torch.float16)
    message(lambda: flashattn_ext.forward(q, q, q, dropout_p=0.5))
    state = torch._C._acc.create_empty_tensor((2,), torch.int64)
    message(lambda: torch.ops.flashattn_ext.dropout_mask.default(state, 1, 1, 2, 2, 0.5, None, []))
"""


@pytest.mark.skipif(not _build.why_not_ascend(), reason="it was built")
def test_npu_tensors_name_the_command() -> None:
    done = run_python(NPU_TENSOR)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stdout + done.stderr
    for line in lines:
        assert line.startswith("flashattn_ext was built without a backend for 'npu' tensors")
        assert "bash build.sh -arch 910b (Atlas A2), or bash build.sh -arch 910_93 (Atlas A3)" in line


@pytest.mark.skipif(not _build.why_not_ascend(), reason="it was built")
def test_use_backend_names_the_command() -> None:
    with pytest.raises(RuntimeError, match=r"'ascend': not built; .* CANN and torch_npu: bash build\.sh -arch 910b"):
        flashattn_ext.use_backend("ascend")
    assert "ascend" not in flashattn_ext.build_info()["backends"] and flashattn_ext.build_info()["ascend_soc"] == ""


@pytest.mark.skipif(not _build.why_not_ascend(), reason="it was built")
def test_doctor_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    finding = doctor._ascend()
    assert not finding.ok and not finding.needed and finding.text == "not built, and torch_npu not found"
    assert "bash build.sh -arch 910b" in finding.fix


def test_built_for_another_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = types.ModuleType("flashattn_ext._ascend_config")
    config.BUILT_FOR_TORCH, config.SOC = "2.4.1", "Ascend910B1"
    monkeypatch.setitem(sys.modules, "flashattn_ext._ascend_config", config)
    monkeypatch.setattr(flashattn_ext, "_ascend_config", config, raising=False)
    monkeypatch.setattr(_build, "__file__", str(tmp_path / "_build.py"))
    assert _build.why_not_ascend() == f"not built ({tmp_path / '_ascend_npu.so'} is missing)"
    (tmp_path / "_ascend_npu.so").touch()
    assert "built for torch 2.4.1, but torch" in _build.why_not_ascend()
