"""Measure the kernels beside PyTorch's own attention: same inputs, same run, interleaved calls,
medians.
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

from .checkpoint import atomic_path
from .console import CommandError

BENCHES = {"cpu": "bench_cpu"}  # what can be measured -> the module that does, with measure(quick) and print_rows(rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", choices=BENCHES, help="what to measure")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small shapes, few calls: a smoke test, not a measurement",
    )
    parser.add_argument("--threads", type=int, help="CPU threads; without it, PyTorch's choice")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--json", metavar="FILE", help="also write every number to FILE")


def run(arguments: argparse.Namespace) -> int:
    if arguments.threads is not None:
        if arguments.threads < 1:
            raise CommandError(f"--threads got {arguments.threads}; accepted are whole numbers from 1")
        import torch

        torch.set_num_threads(arguments.threads)
    bench = importlib.import_module(f".{BENCHES[arguments.target]}", __package__)
    results = bench.measure(quick=arguments.quick)
    bench.show(results, markdown=arguments.markdown)
    if arguments.json:
        _write_json(Path(arguments.json), results)
    return 0


def _write_json(path: Path, results: dict[str, object]) -> None:
    try:
        with atomic_path(path) as temporary:
            temporary.write_text(json.dumps(results, indent=1) + "\n")
    except OSError as error:
        raise CommandError(f"--json {path}: cannot write there ({error.strerror})") from None
