"""Compare the kernels with PyTorch's own attention: same inputs, same run, interleaved calls, medians.

`decode` measures decoding with a KV cache, on the GPU where there is one. `ascend-emulator` models time and traffic of the
Ascend C kernels instead of measuring. `tune` compares the tile sizes of our kernels with each other. `distributed`, started by
torchrun, measures attention over a sequence that is sharded over several ranks.
"""

from __future__ import annotations

import argparse
import importlib
import json
from typing import Any

from .console import CommandError, positive, writable_file, write_text
from .devices import use_threads

# Each target -> its module, which defines measure(quick, options) and show(results, markdown).
BENCHES = {
    "cpu": "bench_cpu",
    "cuda": "bench_cuda",
    "decode": "bench_decode",
    "ascend-emulator": "bench_ascend",
    "tune": "bench_tune",
    "distributed": "bench_distributed",
}
PEERS = "compare with these only; by default with all that can be imported"
TRACE = "write timelines of GPUs for chrome://tracing to PREFIX.<exchange>.json"
SUSTAINED = "besides bursts, time 200 ms of each call without a pause, three times"
# Options that only some targets have: name -> flag, targets, and the rest of its definition.
OPTIONS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "sets": ("--set", ("cuda",), {"metavar": "NAME", "action": "append", "help": "a set of rows, may be repeated; by default all"}),
    "passes": ("--pass", ("cuda",), {"choices": ("forward", "backward", "both"), "help": "by default both"}),
    "sustained": ("--sustained", ("cuda",), {"action": "store_true", "default": None, "help": SUSTAINED}),
    "peers": ("--peers", ("cuda", "distributed"), {"metavar": "NAME,...", "help": PEERS}),
    "backend": ("--backend", ("cuda", "tune"), {"metavar": "NAME", "help": "ours; by default the preferred one"}),
    "device": ("--device", ("tune",), {"choices": ("auto", "cpu", "cuda"), "help": "by default auto: CUDA if available"}),
    "tokens": ("--tokens", ("distributed",), {"type": positive, "help": "length of the whole sequence; by default 65536 on GPUs"}),
    "trace": ("--trace", ("distributed",), {"metavar": "PREFIX", "help": TRACE}),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", choices=BENCHES, help="what to measure")
    quick = "few calls, small shapes on the CPU, no accuracy on CUDA: a smoke test, not a measurement"
    add("--quick", action="store_true", help=quick)
    add("--threads", type=positive, help="CPU threads; by default PyTorch's choice")
    add("--markdown", action="store_true", help="print a Markdown table")
    add("--json", metavar="FILE", help="also write every number to FILE")
    groups: dict[tuple[str, ...], Any] = {}
    for name, (flag, targets, definition) in OPTIONS.items():
        title = " and ".join(f"bench {target}" for target in targets)
        group = groups.setdefault(targets, parser.add_argument_group(title))
        group.add_argument(flag, dest=name, **definition)


def run(arguments: argparse.Namespace) -> int:
    options = {name: value for name in OPTIONS if (value := getattr(arguments, name)) is not None}
    for flag, targets, _ in (OPTIONS[name] for name in options):
        if arguments.target not in targets:
            raise CommandError(f"{flag} is an option of bench {' and '.join(targets)}, not of {arguments.target}")
    path = writable_file("--json", arguments.json) if arguments.json else None
    use_threads(arguments.threads)
    bench = importlib.import_module(f".{BENCHES[arguments.target]}", __package__)
    results = bench.measure(quick=arguments.quick, **options)
    if not results:  # only rank 0 has results
        return 0
    bench.show(results, markdown=arguments.markdown)
    if path:
        write_text(path, json.dumps(results, indent=1) + "\n")
    return 0
