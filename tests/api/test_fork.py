"""Forked processes: attention works in a child of a process that already used it, and never hangs."""

from __future__ import annotations

import sys
import textwrap

import pytest
import torch
from helpers import run_python

PREAMBLE = """
    import os, sys, torch, flashattn_ext
    torch.manual_seed(0)
    torch.set_num_threads(4)
    q = torch.randn(1, 200, 4, 32)  # small: torch's own operators must not need its dead threads

    def work():
        # The raw backward: where torch sees a GPU, its autograd engine refuses to run in forked children.
        out, lse = flashattn_ext.forward(q, q, q, causal=True, return_lse=True)
        return out, *flashattn_ext.backward(out, q, q, q, out, lse, causal=True)[:3]

    def check():
        for got, ref in zip(work(), expected):
            assert torch.equal(got, ref)
"""
SCENARIOS = {
    "fork": """
    expected = work()
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            check()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    check()
    """,
    "fork in a fork": """
    expected = work()
    pid = os.fork()
    if pid == 0:
        check()
        inner = os.fork()
        if inner == 0:
            check()
            os._exit(0)
        os._exit(os.waitpid(inner, 0)[1])
    assert os.waitpid(pid, 0)[1] == 0
    """,
    "multiprocessing": """
    expected = work()
    import multiprocessing
    workers = [multiprocessing.get_context("fork").Process(target=check) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    """,
    "data loader": """
    expected = work()
    from torch.utils.data import DataLoader, Dataset

    class Attended(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return flashattn_ext.forward(q, q, q, causal=True)[0]

    for batch in DataLoader(Attended(), batch_size=2, num_workers=2, multiprocessing_context="fork"):
        assert torch.equal(batch, expected[0][:1].expand_as(batch))
    check()
    """,
    # Tensors so large that torch's own copies and fills would wait for threads that the child lacks.
    "expanded gradients": """
    q = torch.randn(1, 600, 4, 64)
    one = torch.ones(())
    out, lse = flashattn_ext.forward(q, q, q, return_lse=True)

    def gradients():
        both = flashattn_ext.backward(one.expand_as(out), q, q, q, out, lse, dlse=one.expand_as(lse))
        neither = flashattn_ext.backward(None, q, q, q, out, lse)
        return [t.flatten()[:1000] for t in (*both[:3], *neither[:3])]

    expected = gradients()
    pid = os.fork()
    if pid == 0:
        for got, ref in zip(gradients(), expected):
            assert torch.equal(got, ref)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    """,
    "autograd of a sum": """
    q = torch.randn(1, 600, 4, 64, requires_grad=True)

    def gradient():
        out, lse = flashattn_ext.forward(q, q.detach(), q.detach(), return_lse=True)
        dq, = torch.autograd.grad((out, lse), q, (torch.ones(()).expand_as(out), torch.ones(()).expand_as(lse)))
        return dq.flatten()[:1000]

    expected = gradient()
    pid = os.fork()
    if pid == 0:
        # Where torch sees a GPU, its autograd engine refuses to run in forked children.
        assert torch.cuda.is_available() or torch.equal(gradient(), expected)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    """,
    "copies and fills": """
    q = torch.randn(1, 600, 4, 64)
    v = torch.randn(1, 64, 4, 600).transpose(1, 3)  # the last dimension is not contiguous
    starts = torch.tensor([0, 5], dtype=torch.int32)

    def results():
        packed = flashattn_ext.varlen_forward(q[0], q[0], v[0], starts, starts, 5, 5)  # 595 rows belong to no sequence
        return [t.flatten()[:1000] for t in (flashattn_ext.forward(q, q, v), packed)]

    expected = results()
    pid = os.fork()
    if pid == 0:
        for got, ref in zip(results(), expected):
            assert torch.equal(got, ref)
        assert torch.get_num_threads() == 4
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    """,
    "first use in the child, after torch used its threads": """
    torch.randn(2000, 2000).exp().sum()
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    """,
}


# Scenarios that begin with a call in the parent follow each other in one process, which saves the imports.
FIRST_USE = [name for name in SCENARIOS if name.startswith("first use")]
PROCESSES = [[name] for name in FIRST_USE] + [[name for name in SCENARIOS if name not in FIRST_USE]]


@pytest.mark.parametrize("names", PROCESSES, ids=", ".join)
def test_forked_children_compute(names: list[str]) -> None:
    programs = {name: textwrap.dedent(PREAMBLE + SCENARIOS[name]) for name in names}
    code = f"for name, program in {programs!r}.items():\n    exec(program, {{}})\n    print(name, flush=True)\n"
    done = run_python(code, timeout=90)
    assert done.returncode == 0 and done.stdout.splitlines() == names, done.stderr


def test_spawned_worker_imports_cleanly() -> None:
    done = run_python("import torch, flashattn_ext; torch.set_num_threads(2); q = torch.ones(1, 9, 1, 8)\n"
                      "print(flashattn_ext.forward(q, q, q).sum().item())", python=sys.executable)  # fmt: skip
    assert done.returncode == 0 and float(done.stdout) == pytest.approx(torch.ones(72).sum().item()), done.stderr
