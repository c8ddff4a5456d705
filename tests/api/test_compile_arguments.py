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


def number(values: torch.Tensor) -> Any:
    """A number that the compiler does not know: the value of an element that the graph computes."""
    return (values + 0).max().item()


def packed_by_lengths(q: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    starts, longest = torch.nn.functional.pad(lengths.cumsum(0).int(), (1, 0)), number(lengths)
    return flashattn_ext.varlen_forward(q, q, q, starts, starts, longest, longest, causal=True)


def packed_of_flash_attn(q: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    starts, longest = torch.nn.functional.pad(lengths.cumsum(0).int(), (1, 0)), number(lengths)
    return flashattn_ext.flash_attn_varlen_func(q, q, q, starts, starts, longest, longest, window_size=(longest, 0))


def step_with_cache(q: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return flashattn_ext.flash_attn_with_kvcache(
        q[None, :1], q[None], q[None], cache_seqlens=number(lengths), num_splits=number(lengths)
    )


def with_option(**options: Callable[[Any], Any]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def call(q: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        given = {name: make(number(lengths)) for name, make in options.items()}
        return flashattn_ext.forward(q[None], q[None], q[None], **given)

    return call


FROM_ITEM: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "max_seqlen": packed_by_lengths,
    "max_seqlen of flash-attn": packed_of_flash_attn,
    "window_size": with_option(window_size=lambda n: (n, 0)),
    "window_size of flash-attn": lambda q, n: flashattn_ext.flash_attn_func(
        q[None], q[None], q[None], window_size=(number(n), -7)
    ),
    "rng_seed": with_option(rng_seed=lambda n: n, dropout_p=lambda n: 0.5),
    "origin": with_option(origin=lambda n: (0, 0, n, 0), causal=lambda n: True),
    "cache_seqlens": step_with_cache,
}


@pytest.mark.parametrize("name", FROM_ITEM)
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_numbers_of_the_graph_itself(device: str, name: str) -> None:
    """A comparison with the range of 64 bits asked for their values: no graph without a break."""
    call, q = FROM_ITEM[name], torch.randn(10, HEADS, DIM, device=device, requires_grad=name != "cache_seqlens")
    compiled, counter = compile_counting(call, "aot_eager")
    for lengths in ([4, 6], [3, 7], [1, 9]):
        given = torch.tensor(lengths, device=device)
        out, expected = compiled(q, given), call(q, given)
        assert torch.equal(out, expected)
        if q.requires_grad:
            got, wanted = (torch.autograd.grad(t.square().sum(), q)[0] for t in (out, expected))
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 1


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_number_of_the_graph_is_checked_when_it_runs() -> None:
    q = torch.randn(10, HEADS, DIM)
    compiled, _ = compile_counting(with_option(window_size=lambda n: (n - 9, 0)), "aot_eager")
    compiled(q, torch.tensor([4, 9]))
    with pytest.raises((RuntimeError, ValueError)):
        compiled(q, torch.tensor([4, 7]))  # a window of -2
    compiled, _ = compile_counting(lambda q, n: step_with_cache(q, n - 9), "aot_eager")
    with pytest.raises((RuntimeError, ValueError)):
        compiled(q, torch.tensor([4, 8]))  # -1 is not the whole cache
