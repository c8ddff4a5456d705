"""Times of the backend "ascend" and of torch_npu's own attention on this NPU, for docs/ascend_first_run.md.

    python tools/npu_times.py

Forward, and forward with backward, in milliseconds: the median of ten runs after three warm-up runs, each timed with stream events. First
the rates of flashattn_ext_lab/npu_rates.py, which are also added to build/npu_report.txt.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch_npu  # noqa: F401  for versions of torch that do not autoload it

import flashattn_ext
from flashattn_ext_lab import npu_rates

WARMUP, RUNS = 3, 10
HEADS = 32
# Rows, head dim, causal, dropout.
CALLS = (
    (1024, 128, False, 0.0),
    (8192, 64, False, 0.0),
    (8192, 128, False, 0.0),
    (8192, 128, True, 0.0),
    (8192, 128, False, 0.1),
    (8192, 256, False, 0.0),
)


def milliseconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(WARMUP + RUNS):
        begin, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.npu.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[WARMUP:])


def both(attention: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> str:
    """Times of forward, and of forward with backward; or the error."""
    try:
        forward = milliseconds(lambda: attention(*(t.detach() for t in inputs)))
        dout = torch.ones_like(attention(*inputs))
        whole = milliseconds(lambda: torch.autograd.grad(attention(*inputs), inputs, dout))
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return f"{forward:.3f} | {whole:.3f}"


def main() -> None:
    info = flashattn_ext.build_info()
    print(
        f"{torch.npu.get_device_name()}, torch {torch.__version__}, kernels for {info['ascend_soc']}; fp16, milliseconds"
    )
    rates = npu_rates.table()
    npu_rates.append_to_report(rates)
    print(rates)
    print("| B | H | S | D | mask | dropout | which | forward | forward and backward |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for seqlen, dim, causal, dropout in CALLS:
        inputs = [torch.randn(1, seqlen, HEADS, dim).half().to("npu").requires_grad_() for _ in range(3)]

        def ours(q, k, v, causal=causal, dropout=dropout):
            return flashattn_ext.forward(q, k, v, causal=causal, dropout_p=dropout)

        def torch_npus(q, k, v, causal=causal, dropout=dropout):
            heads_first = (t.transpose(1, 2) for t in (q, k, v))
            return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal, dropout_p=dropout)

        for name, attention in (("flashattn_ext", ours), ("torch_npu", torch_npus)):
            mask = "causal" if causal else "full"
            print(
                f"| 1 | {HEADS} | {seqlen} | {dim} | {mask} | {dropout} | {name} | {both(attention, inputs)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
