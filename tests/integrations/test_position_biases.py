"""Position biases of transformers' models: which of them become relative biases, and their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed: pip install -e '.[hf]'")

from families import FAMILIES, padding_mask  # noqa: E402
from test_transformers_masks import BATCH, Layer, expected, tensors  # noqa: E402

import flashattn_ext  # noqa: E402
from flashattn_ext.integrations import _position_biases  # noqa: E402
from flashattn_ext.integrations import transformers as fax  # noqa: E402

fax.register()


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each call of forward."""
    calls: list[dict[str, Any]] = []
    forward = flashattn_ext.forward
    monkeypatch.setattr(
        flashattn_ext, "forward", lambda *args, **options: calls.append(options) or forward(*args, **options)
    )
    return calls


@pytest.mark.parametrize("lengths", [(12, 12), (1, 12), (5, 12), (12, 5)])
def test_position_bias_of_distances(lengths: tuple[int, int], given: list[dict[str, Any]]) -> None:
    """A bias that depends on the distance alone becomes a relative bias, in the result and in the gradient of the table."""
    Sq, Sk = lengths
    q, k, v = tensors(Sq, Sk)
    table = torch.randn(40, 4, requires_grad=True)
    bias = table[torch.arange(Sk) - torch.arange(Sq)[:, None] + 20].permute(2, 0, 1)[None]
    got, _ = fax.attention(Layer(), q, k, v, None, position_bias=bias)
    want = expected(q, k, v, bias=bias)
    torch.testing.assert_close(got, want)
    weights = torch.randn_like(want)
    gradients = [torch.autograd.grad((out * weights).sum(), table, retain_graph=True)[0] for out in (got, want)]
    torch.testing.assert_close(*gradients)
    assert given[-1]["bias"] is None and given[-1]["relative_bias"].shape == (4, 2 * max(Sq, Sk) - 1)


def test_position_bias_of_another_kind() -> None:
    """It is added unchanged, alone or together with an additive mask."""
    q, k, v = tensors()
    bias, added = torch.randn(1, 4, 12, 12, requires_grad=True), torch.randn(BATCH, 1, 12, 12)
    for mask in (None, added):
        got = fax.attention(Layer(), q, k, v, mask, position_bias=bias)[0]
        want = expected(q, k, v, bias=bias if mask is None else bias + mask)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), bias)[0] for out in (got, want)))


def of_rows(table: Tensor, rows: Tensor) -> Tensor:
    """As T5 makes its bias [1, H, Sq, Sk] from rows [Sq, Sk] of a table [n, H]."""
    return table[rows].permute(2, 0, 1)[None]


def biases() -> dict[str, tuple[Tensor, Tensor]]:
    """A bias that has one value on each diagonal, and what its gradient is computed for; each entry has a gradient of its own."""
    whole = torch.zeros(1, 4, 12, 12, requires_grad=True)
    table = torch.zeros(144, 4, requires_grad=True)
    shared = torch.zeros(40, 4, requires_grad=True)
    distances = torch.arange(12) - torch.arange(12)[:, None] + 20
    per_head = nn.Parameter(torch.zeros(4, 12, 12))
    return {
        "a parameter": (whole, whole),
        "a parameter of each head": (per_head[None], per_head),
        "a parameter times a number": (whole * 2, whole),
        "a row for each pair": (of_rows(table, torch.arange(144).view(12, 12)), table),
        "rows in another order": (of_rows(shared, distances.flip(0)), shared),
        "a sum of rows of distances and a parameter": (of_rows(shared, distances) + whole, whole),
    }


@pytest.mark.parametrize("name", biases())
def test_a_bias_that_is_zero_at_its_initialisation_gets_its_whole_gradient(
    name: str, given: list[dict[str, Any]]
) -> None:
    """Its values depend on the distance alone, but not its gradient."""
    torch.manual_seed(3)
    q, k, v = tensors()
    bias, leaf = biases()[name]
    got, want = fax.attention(Layer(), q, k, v, None, position_bias=bias)[0], expected(q, k, v, bias=bias)
    assert given[-1]["relative_bias"] is None
    gradients = [torch.autograd.grad(out.square().sum(), leaf, retain_graph=True)[0] for out in (got, want)]
    torch.testing.assert_close(*gradients)
    assert (gradients[1] != 0).sum() >= 12 * 4


def test_without_a_gradient_the_values_decide(given: list[dict[str, Any]]) -> None:
    """As in the cross attention of T5, whose bias is zero, and in inference."""
    q, k, v = tensors()
    whole = torch.zeros(1, 4, 12, 12, requires_grad=True)
    for bias in (torch.zeros(1, 4, 12, 12), whole.detach()):
        fax.attention(Layer(), q, k, v, None, position_bias=bias)
        assert given[-1]["bias"] is None and given[-1]["relative_bias"] is not None
    with torch.no_grad():
        fax.attention(Layer(), q, k, v, None, position_bias=whole)
    assert given[-1]["bias"] is None
    fax.attention(
        Layer(), q, k, v, None, position_bias=whole
    )  # what was found for the tensor without a gradient is not used with one
    assert given[-1]["relative_bias"] is None


def test_a_tangent_of_a_bias_that_is_zero() -> None:
    """Forward mode: the graph does not show the tangent."""
    q, k, v = tensors()
    zero, direction = torch.zeros(1, 4, 12, 12), torch.randn(1, 4, 12, 12)

    def attend(bias: Tensor) -> Tensor:
        out: Tensor = fax.attention(Layer(), q, k, v, None, position_bias=bias)[0]
        return out

    got = torch.func.jvp(attend, (zero,), (direction,))[1]
    want = torch.func.jvp(lambda bias: expected(q, k, v, bias=bias), (zero,), (direction,))[1]
    torch.testing.assert_close(got, want)
    gradients = [
        torch.func.grad(lambda bias, f=f: f(bias).square().sum())(zero)
        for f in (attend, lambda b: expected(q, k, v, bias=b))
    ]
    torch.testing.assert_close(*gradients)


def test_a_checkpoint_is_not_computed_again_to_read_its_graph() -> None:
    """Layers of T5 get their bias from the first one, of whose graph a checkpoint keeps no tensors."""
    embedding = nn.Embedding(40, 4)
    distances = torch.arange(12) - torch.arange(12)[:, None] + 20
    q, k, v = tensors()
    calls: list[str] = []

    def bias_of(distances: Tensor) -> Tensor:
        calls.append("bias")
        return embedding(distances).permute(2, 0, 1).unsqueeze(0)

    def layer(bias: Tensor) -> Tensor:
        calls.append("layer")
        out: Tensor = fax.attention(Layer(), q, k, v, None, position_bias=bias)[0]
        return out

    plain = layer(bias_of(distances))
    (want,) = torch.autograd.grad(plain.square().sum(), embedding.weight)
    for checkpointed in (False, True):
        calls.clear()
        bias = torch.utils.checkpoint.checkpoint(bias_of, distances, use_reentrant=False)
        out = torch.utils.checkpoint.checkpoint(layer, bias, use_reentrant=False) if checkpointed else layer(bias)
        assert calls == ["bias", "layer"]
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), embedding.weight)[0], want)


def test_t5_takes_its_bias_from_a_table(given: list[dict[str, Any]]) -> None:
    """In training, also where every weight of the table is zero."""
    if lacking := FAMILIES["t5"].lacking():
        pytest.skip(lacking)
    model = FAMILIES["t5"].make()
    model.set_attn_implementation("fax")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "relative_attention_bias" in name:
                parameter.zero_()
    inputs = FAMILIES["t5"].inputs(torch.Generator().manual_seed(3), padding_mask("right"))
    model(**inputs).logits.square().sum().backward()
    assert len(given) == 6 and all(options["bias"] is None for options in given)
    table = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    assert (table.grad != 0).any(1).sum() > 4


def test_a_graph_that_is_not_understood() -> None:
    """Then the bias stays what it is."""
    table = torch.randn(40, 4, requires_grad=True)
    distances = torch.arange(12) - torch.arange(12)[:, None] + 20
    assert _position_biases.is_of_distance(of_rows(table, distances))
    assert _position_biases.is_of_distance(of_rows(table, distances).double())
    for other in (
        of_rows(table, distances).exp(),
        of_rows(table, distances).transpose(2, 3),
        table[distances][None].permute(0, 3, 1, 2),
    ):
        assert not _position_biases.is_of_distance(other)
