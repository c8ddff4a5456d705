"""Measure the kernels beside PyTorch's own attention: same inputs, same run, interleaved calls,
medians. `decode` measures calls with a key-value cache, on the GPU where there is one. `ascend-emulator` models instead: time and traffic of the Ascend C kernels. `tune` compares
the tile sizes of our kernels with each other. `distributed`, started by torchrun, measures attention over
a sequence that several ranks share.
"""

from __future__ import annotations

import argparse
import importlib
import json

from .console import CommandError, positive
from .devices import use_threads
from .files import writable_file, write_text

# What can be measured -> the module that does, with measure(quick, options) and show(results, markdown).
BENCHES = {
    "cpu": "bench_cpu",
    "cuda": "bench_cuda",
    "decode": "bench_decode",
    "ascend-emulator": "bench_ascend",
    "tune": "bench_tune",
    "distributed": "bench_distributed",
}
# Options of some targets alone.
OPTIONS = {
    "sets": ("--set", ("cuda",)),
    "passes": ("--pass", ("cuda",)),
    "peers": ("--peers", ("cuda", "distributed")),
    "sustained": ("--sustained", ("cuda",)),
    "backend": ("--backend", ("cuda", "tune")),
    "device": ("--device", ("tune",)),
    "tokens": ("--tokens", ("distributed",)),
    "trace": ("--trace", ("distributed",)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", choices=BENCHES, help="what to measure")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="few calls, on the CPU of small shapes, with CUDA without accuracy: a smoke test, not a measurement",
    )
    parser.add_argument("--threads", type=positive, help="CPU threads; without it, PyTorch's choice")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--json", metavar="FILE", help="also write every number to FILE")
    cuda = parser.add_argument_group("bench cuda")
    cuda.add_argument(
        "--set", metavar="NAME", action="append", dest="sets", help="a set of rows, may be repeated; without it, all"
    )
    cuda.add_argument("--pass", choices=("forward", "backward", "both"), dest="passes", help="without it, both")
    cuda.add_argument("--peers", metavar="NAME,...", help="compare with these alone; without it, all that are here")
    cuda.add_argument(
        "--sustained",
        action="store_true",
        default=None,
        help="beside bursts, 200 ms of each call without a pause, thrice",
    )
    cuda.add_argument("--backend", metavar="NAME", help="ours, also of bench tune; without it, the preferred one")
    ranks = parser.add_argument_group("bench distributed")
    ranks.add_argument("--tokens", type=positive, help="length of the whole sequence; without it, 65536 on GPUs")
    ranks.add_argument(
        "--trace", metavar="PREFIX", help="write timelines for chrome://tracing to PREFIX.<exchange>.json, of GPUs"
    )
    tune = parser.add_argument_group("bench tune")
    tune.add_argument("--device", choices=("auto", "cpu", "cuda"), help="without it, auto: CUDA where it is there")


def run(arguments: argparse.Namespace) -> int:
    options = {name: value for name in OPTIONS if (value := getattr(arguments, name)) is not None}
    for flag, targets in (OPTIONS[name] for name in options):
        if arguments.target not in targets:
            raise CommandError(f"{flag} is an option of bench {' and '.join(targets)}, not of {arguments.target}")
    path = writable_file("--json", arguments.json) if arguments.json else None
    use_threads(arguments.threads)
    bench = importlib.import_module(f".{BENCHES[arguments.target]}", __package__)
    results = bench.measure(quick=arguments.quick, **options)
    if not results:  # another rank has them
        return 0
    bench.show(results, markdown=arguments.markdown)
    if path:
        write_text(path, json.dumps(results, indent=1) + "\n")
    return 0
