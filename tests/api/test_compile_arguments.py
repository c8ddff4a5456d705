"""torch.compile of every public function: tensors that are the same object, and scalars that change from call to call."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from helpers import cu_seqlens

import flashattn_ext

HEADS, DIM, LENGTH = 2, 16, 10


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def rows(device: str, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, HEADS, DIM, device=device)


def dense(device: str) -> dict[str, Any]:
    return {name: rows(device, 2, LENGTH) for name in "qkv"}


def packed(device: str) -> dict[str, Any]:
    starts = {f"cu_seqlens_{t}": cu_seqlens([4, 6], device) for t in "qk"}
    return {**{name: rows(device, LENGTH) for name in "qkv"}, **starts, "max_seqlen_q": 6, "max_seqlen_k": 6}


def kv_packed(device: str) -> dict[str, Any]:
    arguments = packed(device)
    del arguments["k"], arguments["v"]
    return {**arguments, "kv": torch.randn(LENGTH, 2, HEADS, DIM, device=device)}


def dense_backward(device: str) -> dict[str, Any]:
    statistics = {name: torch.randn(2, HEADS, LENGTH, device=device).abs() for name in ("lse", "dlse")}
    return {**dense(device), "dout": rows(device, 2, LENGTH), "out": rows(device, 2, LENGTH), **statistics}


def packed_backward(device: str) -> dict[str, Any]:
    statistics = {name: torch.randn(HEADS, LENGTH, device=device).abs() for name in ("lse", "dlse")}
    return {**packed(device), "dout": rows(device, LENGTH), "out": rows(device, LENGTH), **statistics}


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[[str], dict[str, Any]]]] = {
    "forward": (flashattn_ext.forward, dense),
    "varlen_forward": (flashattn_ext.varlen_forward, packed),
    "backward": (flashattn_ext.backward, dense_backward),
    "backward, packed": (flashattn_ext.backward, packed_backward),
    "FlashAttention": (flashattn_ext.FlashAttention(DIM), dense),
    "flash_attention_npu": (flashattn_ext.flash_attention_npu, dense),
    "flash_attn_func": (flashattn_ext.flash_attn_func, dense),
    "flash_attn_varlen_func": (flashattn_ext.flash_attn_varlen_func, packed),
    "flash_attn_varlen_kvpacked_func": (flashattn_ext.flash_attn_varlen_kvpacked_func, kv_packed),
}


def pairs_of(arguments: dict[str, Any]) -> list[tuple[str, ...]]:
    """Names of tensors that may be one object, two at a time, and q, k and v at once."""
    tensors = {name: t for name, t in arguments.items() if isinstance(t, torch.Tensor)}
    same = [pair for pair in combinations(tensors, 2) if tensors[pair[0]].shape == tensors[pair[1]].shape]
    alike = [pair for pair in same if tensors[pair[0]].dtype == tensors[pair[1]].dtype]
    return [*alike, *([("q", "k", "v")] if {"q", "k", "v"} <= tensors.keys() else [])]


ALIASES = [(name, pair) for name, (_, make) in FUNCTIONS.items() for pair in pairs_of(make("cpu"))]


@pytest.mark.parametrize(("name", "same"), ALIASES, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_tensors_may_be_the_same_object(device: str, name: str, same: tuple[str, ...]) -> None:
    function, make = FUNCTIONS[name]
    arguments = make(device)
    arguments.update(dict.fromkeys(same[1:], arguments[same[0]]))
    # The raw backward is not differentiable.
    leaves = [] if "backward" in name else [t.requires_grad_() for t in arguments.values() if is_floating(t)]

    def results(function: Callable[..., Any]) -> list[torch.Tensor]:
        outs = function(**arguments)
        outs = [outs] if isinstance(outs, torch.Tensor) else [t for t in outs if t is not None]
        return outs + (list(torch.autograd.grad(outs[0].square().sum(), leaves)) if leaves else [])

    expected = results(function)
    for got, ref in zip(results(torch.compile(function, fullgraph=True, backend="aot_eager")), expected, strict=True):
        torch.testing.assert_close(got, ref)


def is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


# Nine values: torch.compile's recompile limit is 8 by default.
NUMBERS = {
    "softcap": [0.5 * n for n in range(1, 10)],
    "softmax_scale": [0.1 * n for n in range(1, 10)],
    "dropout_p": [0.05 + 0.1 * n for n in range(9)],
    "rng_seed": [5, 2**40, -3, 2**63 - 1, 1, 0, -(2**63), 7, 8],
}
WINDOW = {"window_size": [(n, 2 * n + 3) for n in range(2, 11)]}
LENGTHS = {"max_seqlen_q": list(range(6, 15)), "max_seqlen_k": list(range(7, 16))}
DROPOUT_MASK = {name: [2, 3, 4, 5, 6, 7, 8, 9, 10] for name in ("B", "H", "Sq", "Sk")} | {
    name: NUMBERS[name] for name in ("dropout_p", "rng_seed")
}


def without_seed(numbers: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: values for name, values in numbers.items() if name != "rng_seed"}


CHANGING = {
    "forward": {**NUMBERS, **WINDOW},
    "varlen_forward": {**NUMBERS, **WINDOW, **LENGTHS},
    "backward": {**NUMBERS, **WINDOW},
    "backward, packed": {**NUMBERS, **WINDOW, **LENGTHS},
    "flash_attention_npu": {"softmax_scale": NUMBERS["softmax_scale"]},
    "flash_attn_func": without_seed({**NUMBERS, **WINDOW}),
    "flash_attn_varlen_func": without_seed({**NUMBERS, **WINDOW, **LENGTHS}),
    "flash_attn_varlen_kvpacked_func": without_seed({**NUMBERS, **WINDOW, **LENGTHS}),
    "dropout_mask": DROPOUT_MASK,
}


def compile_counting(function: Callable[..., Any], backend: str) -> tuple[Callable[..., Any], Any]:
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, backend=counter), counter


def check_values(
    function: Callable[..., Any], arguments: dict[str, Any], changing: dict[str, list[Any]], backend: str
) -> None:
    """Nine calls, each with other values, have the results of the eager function, and compile at most twice."""
    compiled, counter = compile_counting(function, backend)
    for n in range(9):
        values = {name: of_call[n] for name, of_call in changing.items()}
        results = []
        for f in (function, compiled):
            torch.manual_seed(n)
            leaves = {name: t.clone().requires_grad_() for name, t in arguments.items() if is_floating(t)}
            is_raw = "out" in leaves
            given = arguments if is_raw else {**arguments, **leaves}
            outs = f(**{**given, **values})
            outs = [outs] if isinstance(outs, torch.Tensor) else [t for t in outs if t is not None]
            if leaves and not is_raw:
                outs += torch.autograd.grad(outs[0].square().sum(), list(leaves.values()))
            results.append(outs)
        for expected, got in zip(*results, strict=True):
            torch.testing.assert_close(got, expected)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("name", CHANGING)
def test_scalars_may_change(device: str, name: str) -> None:
    if name == "dropout_mask":
        function, arguments = flashattn_ext.dropout_mask, {"device": device}
    else:
        function, make = FUNCTIONS[name]
        arguments = make(device)
    check_values(function, arguments, CHANGING[name], "aot_eager")


@pytest.mark.parametrize("name", [*NUMBERS, *WINDOW])
def test_each_scalar_may_change_alone(device: str, name: str) -> None:
    fixed = {"dropout_p": 0.3, "rng_seed": 3}
    values = ({**NUMBERS, **WINDOW})[name]
    check_values(flashattn_ext.forward, {**dense(device), **fixed}, {name: values}, "aot_eager")


def test_scalars_may_change_in_generated_code(device: str) -> None:
    """Inductor makes tensors of floats; seeds beyond 32 bits arrive whole."""
    check_values(flashattn_ext.forward, dense(device), CHANGING["forward"], "inductor")


def test_a_drawn_mask_with_a_changing_probability(device: str) -> None:
    compiled, counter = compile_counting(flashattn_ext.flash_attn_func, "aot_eager")
    q = torch.zeros(1, 256, 1, 8, device=device)
    v = torch.eye(256, device=device)[None, :, None]
    for n in range(9):
        p = 0.05 + 0.1 * n
        kept = (compiled(q, q, v, dropout_p=p) > 0).float().mean().item()
        assert abs(kept - (1 - p)) < 0.02
    assert counter.frame_count <= 2
