"""Threads: the same bits for every number of them, repeatable, and safe to call from several at once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import Case, Result, assert_same_bits, make_inputs, run

import flashattn_ext

pytestmark = pytest.mark.usefixtures("deterministic")

CASES = {
    "dense": Case(B=2, Sq=257, Sk=200, Hq=4, Hk=2, causal=True, use_lse=True),
    "varlen": Case(lengths_q=(130, 0, 7, 64), lengths_k=(200, 3, 7, 1), sink_dtype=torch.float32),
    "dropout+sink": Case(B=3, Sq=100, Sk=130, dropout_p=0.3, rng_seed=1, sink_dtype=torch.float32, use_lse=True),
    "one head": Case(B=1, Sq=300, Sk=500, Hq=1, Hk=1),
    "a bias of all heads": Case(B=2, Sq=64, Sk=64, Hq=16, Hk=16, bias="bq"),
}


def assert_same_result(got: Result, expected: Result) -> None:
    assert_same_bits(got.out, expected.out, "out")
    assert_same_bits(got.lse, expected.lse, "lse")
    for name, grad in expected.grads.items():
        assert_same_bits(got.grads[name], grad, f"d{name}")


def with_dtype(name: str, dtype: torch.dtype) -> Case:
    return Case(**{**CASES[name].__dict__, "dtype": dtype})


@pytest.mark.every_isa
@pytest.mark.parametrize("name", CASES)
def test_bits_do_not_depend_on_the_thread_count(
    device: str, dtype: torch.dtype, name: str, restore_threads: None
) -> None:
    case = with_dtype(name, dtype)
    inputs = make_inputs(case, device)
    torch.set_num_threads(1)
    expected = run(case, inputs)
    for threads in (2, 3, 5):
        torch.set_num_threads(threads)
        assert_same_result(run(case, inputs), expected)


@pytest.mark.parametrize("name", CASES)
def test_a_repeated_call_gives_the_same_bits(device: str, dtype: torch.dtype, name: str) -> None:
    case = with_dtype(name, dtype)
    inputs = make_inputs(case, device)
    expected = run(case, inputs)
    for _ in range(5):
        assert_same_result(run(case, inputs), expected)


def test_deterministic_argument_changes_nothing_but_the_order(device: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(Case(dtype=dtype, Sq=100, Sk=130), device)
    leaves = [inputs.q, inputs.k, inputs.v]
    runs = []
    for _ in range(2):
        out = flashattn_ext.forward(*leaves, deterministic=True)
        runs.append((out, *torch.autograd.grad(out.float().sum(), leaves)))
    for a, b in zip(*runs, strict=True):
        assert_same_bits(a, b)


def test_concurrent_calls_do_not_disturb_each_other(device: str, dtype: torch.dtype) -> None:
    """Eight Python threads, each with its own call, get the results of calls one at a time."""
    cases = [with_dtype(name, dtype) for name in CASES] * 2
    all_inputs = [make_inputs(case, device) for case in cases]
    expected = [run(case, inputs) for case, inputs in zip(cases, all_inputs, strict=True)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            for got, ref in zip(pool.map(run, cases, all_inputs), expected, strict=True):
                assert_same_result(got, ref)


def test_other_threads_run_meanwhile() -> None:
    """The call releases the interpreter lock: a Python thread makes progress while attention computes on the CPU."""
    q = torch.randn(1, 4096, 4, 64)
    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(flashattn_ext.forward, q, q, q)
        steps = 0
        while not busy.done():
            steps += 1
    assert steps > 100


def test_work_is_shared_by_the_threads_of_torch(restore_threads: None) -> None:
    """Other threads do much of the work: the process spends more CPU time than the calling thread."""
    torch.set_num_threads(2)
    q, k, v = (torch.randn(1, 2048, 8, 64, requires_grad=True) for _ in range(3))
    for _ in range(3):
        process, caller = time.process_time(), time.thread_time()
        flashattn_ext.forward(q, k, v)
        process, caller = time.process_time() - process, time.thread_time() - caller
        if process > 1.3 * caller:
            break
    assert process > 1.3 * caller
