"""Memory: linear in the sequence length, and little beyond the outputs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import allocated_bytes, run_python

import flashattn_ext

MIB = 1 << 20


def tensors(S: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, S, 2, 64).to(dtype) for _ in range(3))


def nbytes(*ts: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in ts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_beyond_the_outputs(dtype: torch.dtype, varlen: bool, restore_threads: None) -> None:
    """Forward: under 2 MiB per thread. Backward: the same, plus fp32 accumulators of the gradients."""
    torch.set_num_threads(2)
    q, k, v = tensors(2048, dtype)
    function, extra = flashattn_ext.forward, {}
    if varlen:
        q, k, v = (t[0] for t in (q, k, v))
        starts = torch.tensor([0, 1000, 2048], dtype=torch.int32)
        function = flashattn_ext.varlen_forward
        extra = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=1048, max_seqlen_k=1048)
    with torch.no_grad():
        out, lse = function(q, k, v, **extra, causal=True, return_lse=True)
        forward = allocated_bytes(lambda: function(q, k, v, **extra, causal=True))
        assert forward - nbytes(out, lse) < 2 * 2 * MIB
        dout = torch.randn_like(out)
        backward = allocated_bytes(lambda: flashattn_ext.backward(dout, q, k, v, out, lse, **extra, causal=True))
        accumulators = 4 * (q.numel() + k.numel() + v.numel())
        assert backward - nbytes(q, k, v) - accumulators < 2 * 2 * MIB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_grows_linearly(dtype: torch.dtype) -> None:
    def total(S: int) -> int:
        q, k, v = (t.requires_grad_() for t in tensors(S, dtype))
        return allocated_bytes(
            lambda: flashattn_ext.forward(q, k, v, causal=True, smooth_softmax=True).sum().backward()
        )

    assert total(4096) < 2.2 * total(2048)


def test_peak_of_the_process() -> None:
    """One score matrix of this call would be 256 MiB in fp32."""
    done = run_python(
        """
        import resource, torch, flashattn_ext
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        def step(S):
            q, k, v = (torch.randn(1, S, 1, 64, requires_grad=True) for _ in range(3))
            flashattn_ext.forward(q, k, v, causal=True, dropout_p=0.1).sum().backward()
        step(128)
        before = peak()
        step(8192)
        print(peak() - before)
        """,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 80


def test_repeated_calls_leak_nothing() -> None:
    done = run_python(
        """
        import resource, torch, flashattn_ext
        q, k, v = (torch.randn(1, 1024, 4, 64, requires_grad=True) for _ in range(3))
        def steps(n):
            for _ in range(n):
                out, lse = flashattn_ext.forward(q, k, v, dropout_p=0.1, smooth_softmax=True, causal=True, return_lse=True)
                torch.autograd.grad(out.sum() + lse.sum(), [q, k, v])
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        before = steps(10)
        print(steps(40) - before)
        """,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 10


# A system with base pages of 64 KB, as the library sees it. Others see the real pages: CUDA's do not start with such ones.
LARGE_PAGES = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
long sysconf(int name) {
  Dl_info caller;
  int ours = dladdr(__builtin_return_address(0), &caller) && strstr(caller.dli_fname, "/flashattn_ext/_C");
  return ours && name == _SC_PAGESIZE ? 65536 : ((long (*)(int))dlsym(RTLD_NEXT, "sysconf"))(name);
}
int madvise(void* address, size_t length, int advice) {
  fprintf(stderr, "madvise %zu %zu %d\\n", (size_t)address, length, advice);
  return 0;
}
"""


def test_huge_pages_are_asked_for_in_whole_base_pages(tmp_path: Path) -> None:
    (tmp_path / "pages.c").write_text(LARGE_PAGES)
    library = tmp_path / "pages.so"
    compiler = [*os.environ.get("CXX", "c++").split(), "-w", "-x", "c", "-shared", "-fPIC"]
    subprocess.run([*compiler, tmp_path / "pages.c", "-o", library, "-ldl"], check=True)
    done = run_python(
        """
        import torch, flashattn_ext
        q = torch.randn(1, 1024, 2, 8)
        bias = torch.zeros(1, 2, 1024, 1024, requires_grad=True)
        flashattn_ext.forward(q, q, q, bias=bias).sum().backward()
        """,
        LD_PRELOAD=str(library),
        python=sys.executable,  # one that has started already would have loaded nothing before
    )
    lines = [line.split()[1:] for line in done.stderr.splitlines() if line.startswith("madvise")]
    huge = [(int(address), int(length)) for address, length, advice in lines if advice == "14"]
    assert done.returncode == 0 and huge, done.stderr
    assert all(address % 65536 == 0 and length % 65536 == 0 for address, length in huge)
    assert any(length > 7 * MIB for _, length in huge)
