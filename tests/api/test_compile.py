"""torch.compile without a graph break, and torch.library.opcheck of every op."""

from __future__ import annotations

import pytest
import torch
from helpers import TENSORS, Case, cu_seqlens, make_inputs, refusal

import flashattn_ext
from flashattn_ext.options import CallOptions, CallTensors, differentiable

OPTIONS = {
    "plain": dict(),
    "causal": dict(causal=True, window_size=(20, -1)),
    "smooth": dict(smooth_softmax=True),
    "sink": dict(sink=(4,)),
    "scores": dict(softcap=2.0, alibi_slopes=(4,), relative_bias=(4, 7), bias=(1, 4, 1, 33)),
    "seeded dropout": dict(dropout_p=0.3, rng_seed=3),
}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def compiled(function, **kwargs):
    return torch.compile(function, fullgraph=True, backend="aot_eager", **kwargs)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.dtypes("float32", "bfloat16")
def test_forward_and_backward(device: str, dtype: torch.dtype, name: str) -> None:
    options = dict(OPTIONS[name])
    inputs = make_inputs(Case(dtype=dtype, Hq=4), device)
    leaves, shapes = [inputs.q, inputs.k, inputs.v], {n: s for n, s in options.items() if n in TENSORS}
    leaves += [torch.randn(shape, device=device, requires_grad=True) for shape in shapes.values()]

    def loss(q, k, v, *others):
        given = {**options, **dict(zip(shapes, others, strict=True))}
        out, lse = flashattn_ext.forward(q * 1.5, k, v, **given, return_lse=True)
        return out.float().square().sum() + lse.sum(), out

    expected = torch.autograd.grad(loss(*leaves)[0], leaves)
    total, out = compiled(loss)(*leaves)
    torch.testing.assert_close(out, loss(*leaves)[1])
    for got, ref in zip(torch.autograd.grad(total, leaves), expected, strict=True):
        torch.testing.assert_close(got, ref)


def test_with_the_default_compiler(device: str) -> None:
    """Inductor generates code around the op: the whole chain works, not only the tracing."""
    inputs = make_inputs(Case(Hq=4), device)

    def block(q, k, v):
        return torch.relu(flashattn_ext.forward(q * 2, k, v, causal=True)).sum()

    function = torch.compile(block, fullgraph=True)
    leaves = [inputs.q, inputs.k, inputs.v]
    for got, ref in zip(
        torch.autograd.grad(function(*leaves), leaves), torch.autograd.grad(block(*leaves), leaves), strict=False
    ):
        torch.testing.assert_close(got, ref, rtol=1e-4, atol=1e-5)


def test_varlen(device: str) -> None:
    inputs = make_inputs(Case(lengths_q=(10, 0, 33), lengths_k=(20, 4, 33)), device)

    def loss(q, k, v, cu_q, cu_k):
        return flashattn_ext.varlen_forward(q, k, v, cu_q, cu_k, 33, 33, causal=True).square().sum()

    leaves, starts = [inputs.q, inputs.k, inputs.v], tuple(inputs.cu_seqlens.values())
    expected = torch.autograd.grad(loss(*leaves, *starts), leaves)
    got = torch.autograd.grad(compiled(loss)(*leaves, *starts), leaves)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_dynamic_shapes(device: str) -> None:
    function = compiled(lambda q, k: flashattn_ext.forward(q, k, k, causal=True).square().sum(), dynamic=True)
    for B, Sq, Sk in ((2, 8, 8), (2, 33, 65), (3, 17, 40), (5, 64, 2)):
        q = torch.randn(B, Sq, 2, 16, device=device, requires_grad=True)
        k = torch.randn(B, Sk, 1, 16, device=device, requires_grad=True)
        got = torch.autograd.grad(function(q, k), [q, k])
        expected = torch.autograd.grad(flashattn_ext.forward(q, k, k, causal=True).square().sum(), [q, k])
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_new_lengths_need_no_new_compilation(device: str) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = torch.compile(lambda q: flashattn_ext.forward(q, q, q), fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for length in (8, 33, 65, 100):
        function(torch.randn(2, length, 2, 16, device=device))
        frames.append(counter.frame_count)
    assert len(set(frames)) == 1, frames


def test_export(device: str) -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return flashattn_ext.forward(q, q, q, causal=True)

    q = torch.randn(2, 33, 2, 16, device=device)
    program = torch.export.export(Attention(), (q,))
    torch.testing.assert_close(program.module()(q), Attention()(q))


# Options of the opcheck calls besides tensors and sizes; every other option has its default, which is off.
ASKED = {"softmax_scale": 0.25, "causal": True, "window_left": 8, "window_right": -1}


def op_tensors(device: str, dtype: torch.dtype, varlen: bool, bhsd: bool, extras: tuple[str, ...]) -> CallTensors:
    """The tensors that every attention op begins with; tensors that are not named are None."""
    shape = (30, 4, 16) if varlen else (2, 4, 15, 16) if bhsd else (2, 15, 4, 16)
    q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))
    starts = cu_seqlens([20, 10], device) if varlen else None
    none = CallTensors(*[None] * len(CallTensors._fields))
    named = {"q": q, "k": k, "v": v, "cu_seqlens_q": starts, "cu_seqlens_k": starts}
    keys = 30 if varlen else 15
    shapes = {"sink": (4,), "alibi_slopes": (4,), "relative_bias": (4, 5), "bias": (2, 1, 1, keys)}
    named |= {
        name: torch.randn(shape, device=device, requires_grad=True) for name, shape in shapes.items() if name in extras
    }
    if "mask" in extras:
        shape = (1, keys, 2) if varlen else (1, 1, keys, 2)
        mask = flashattn_ext.Mask(torch.randint(0, 15, shape, dtype=torch.int32, device=device))
        named |= {"mask_intervals": mask.intervals, "mask_extremes": mask.extremes()}
    return none._replace(**named)


EXTRAS = {
    "bare": (),
    "dropout+sink": ("dropout", "sink"),
    "scores": ("softcap", "alibi_slopes", "relative_bias", "bias"),
    "mask": ("mask",),
}


# What an op does under the compiler depends on the options and the layout, not on the dtype and the backend.
@pytest.mark.no_emulator
@pytest.mark.dtypes("bfloat16")
@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("bshd", "bare"),
        ("bhsd", "dropout+sink"),
        ("bhsd", "scores"),
        ("bshd", "mask"),
        ("varlen", "scores"),
        ("varlen", "mask"),
    ],
)
def test_opcheck(device: str, dtype: torch.dtype, layout: str, name: str) -> None:
    varlen, bhsd = layout == "varlen", layout == "bhsd"
    extras = tuple(extra for extra in EXTRAS[name] if not (varlen and extra == "bias"))
    dropout = "dropout" in extras
    ops = torch.ops.flashattn_ext
    seqlen = 20 if varlen else 15
    options = CallOptions(
        **ASKED, max_seqlen_q=seqlen, max_seqlen_k=seqlen, bhsd=bhsd, dropout_p=0.2 if dropout else 0.0,
        softcap=2.0 if "softcap" in extras else 0.0, origin=[1, 2] if dropout else None,
    )  # fmt: skip
    call = (*op_tensors(device, dtype, varlen, bhsd, extras), *options)
    keeps_centres = "alibi_slopes" in extras
    returns = keeps_centres and not refusal(Case(max_logits=True), device)
    torch.library.opcheck(ops.forward.call, (*call, 5 if dropout else None, returns))
    out, lse, _ = ops.forward.call(*call, 5 if dropout else None, returns)
    rng_state = ops.rng_state(out, 5) if dropout else None
    scalars = [torch.tensor(value, dtype=torch.float64) for value in options if type(value) is float]
    assert len(scalars) == sum(str(a.type) == "number" for a in ops.forward.default._schema.arguments)
    keeps_words = dropout
    for given in ([], scalars):
        torch.library.opcheck(ops.forward.default, (*call, rng_state, keeps_words, keeps_centres, returns, given))
        torch.testing.assert_close(ops.forward(*call, rng_state, keeps_words, keeps_centres, returns, given)[0], out)
    for dlse in (None, torch.randn_like(lse)):
        centres = torch.rand(*lse.shape, 3, device=device) if keeps_centres else None
        words = torch.stack([lse * 1.4427, 0 * lse], -1) if keeps_words else None
        gradients = (torch.randn_like(out), dlse, out, lse, words, centres, True, dlse is None, True, rng_state)
        without = [
            t.detach() if isinstance(t, torch.Tensor) else t for t in (*call, *gradients)
        ]  # it has no derivative
        torch.library.opcheck(ops.backward.call, tuple(without))
        torch.library.opcheck(ops.backward.default, (*without, []))


@pytest.mark.parametrize(("layout", "name"), [("bhsd", "dropout+sink"), ("bhsd", "scores"), ("varlen", "mask")])
def test_opcheck_of_second_derivatives(layout: str, name: str) -> None:
    """On the CPU, whose backend alone has kernels for them."""
    varlen, bhsd, dtype = layout == "varlen", layout == "bhsd", torch.bfloat16
    extras = tuple(extra for extra in EXTRAS[name] if not (varlen and extra == "bias"))
    dropout = "dropout" in extras
    ops, seqlen = torch.ops.flashattn_ext, 20 if varlen else 15
    options = CallOptions(
        **ASKED, max_seqlen_q=seqlen, max_seqlen_k=seqlen, bhsd=bhsd, dropout_p=0.2 if dropout else 0.0,
        softcap=2.0 if "softcap" in extras else 0.0, origin=[1, 2] if dropout else None,
    )  # fmt: skip
    tensors = op_tensors("cpu", dtype, varlen, bhsd, extras)
    with torch.no_grad():
        out, lse, _ = ops.forward.call(*tensors, *options, 5 if dropout else None, False)
    rng_state = ops.rng_state(out, 5) if dropout else None
    words = torch.stack([lse * 1.4427, 0 * lse], -1) if dropout else None
    tangents = [None if t is None else torch.randn_like(t.detach()) for t in differentiable(tensors)]
    arguments = (*tensors, *options, out, lse, words, rng_state, *tangents)
    torch.library.opcheck(ops.jvp.call, arguments)
    torch.library.opcheck(ops.jvp.default, (*arguments, []))
    tout, tlse = (t.detach() for t in ops.jvp.call(*arguments))
    detached = [t.detach() if isinstance(t, torch.Tensor) else t for t in (*tensors, *options)]
    for dlse, given in ((None, tangents), (torch.randn_like(lse), [None] * 2 + tangents[2:])):
        dout, needs = torch.randn_like(out), (True, dlse is None, True)
        second = (*detached, out, lse, words, rng_state, dout, dlse, tout, tlse, *given, *needs)
        torch.library.opcheck(ops.second.call, second)
        torch.library.opcheck(ops.second.default, (*second, []))


@pytest.mark.parametrize("shape", [(1, 2, 40, 2), (3, 1100, 2), (2, 1, 0, 2)])
def test_opcheck_of_the_extremes(device: str, shape: tuple[int, ...]) -> None:
    intervals = torch.randint(0, 50, shape, dtype=torch.int32, device=device)
    torch.library.opcheck(torch.ops.flashattn_ext.mask_extremes.default, (intervals,))


def test_opcheck_of_the_dropout_mask(device: str) -> None:
    ops = torch.ops.flashattn_ext
    rng_state = ops.rng_state(torch.empty(0, device=device), -5)
    assert rng_state.tolist() == [-5, 0]
    torch.library.opcheck(ops.rng_state.default, (torch.empty(0, device=device), -5))
    torch.library.opcheck(ops.dropout_mask.call, (rng_state, 2, 3, 5, 7, 0.3, None))
    torch.library.opcheck(ops.dropout_mask.default, (rng_state, 2, 3, 5, 7, 0.3, [1, 2, 16, 64], []))


@pytest.mark.dtypes("float32", "bfloat16", "float16", "float64")
def test_meta_tensors(device: str, dtype: torch.dtype) -> None:
    """Fake implementations give the shapes, dtypes and strides of the real ones, without data."""
    real = make_inputs(Case(dtype=dtype, Sq=5, Sk=9, Hq=4, Hk=2, D=16, Dv=24), device)
    expected = flashattn_ext.forward(real.q, real.k, real.v, return_lse=True)
    meta = [t.detach().to("meta").requires_grad_() for t in (real.q, real.k, real.v)]
    got = flashattn_ext.forward(*meta, return_lse=True)
    for a, b in zip(got, expected, strict=True):
        assert a.is_meta and a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
