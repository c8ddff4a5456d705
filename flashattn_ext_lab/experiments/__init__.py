"""Repeat the experiments of articles about fused attention on this machine, and measure what they estimate.

Each experiment prints a table and leaves NAME.json in --out, and NAME.png where there are curves; `flashattn-ext report DIR`
makes one page of them. An experiment that this device cannot run says so in its table, and the others continue.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable
from typing import Any

import torch

from ..console import make_console, make_directory, one_line, positive, require, writing
from ..devices import choose_device, describe_machine, use_threads
from .harness import WHOLE, Context, size_notes
from .render import print_result, write_json, write_plot
from .result import Result

WIDTH = 200  # width of piped tables, which are wider than those of the benchmarks
# Every experiment, in the order of `all` and of the report -> what it measures. Each has a module of its name with SIZES,
# measure(context, sizes, result), which fills in the result, and compare(result), which adds the figures of its table.
EXPERIMENTS = {
    "matmul": "references: the rates of matrix products and copies",
    "scaling": "time over sequence length, compared with unfused attention and PyTorch's own",
    "causal": "cost of the causal mask",
    "layout": "[B, S, H, D] and [B, H, S, D] in place, and the cost of copies",
    "alignment": "head dims that are not multiples of 8, compared with those that are",
    "dtypes": "time and error of fp32, fp16 and bf16",
    "memory": "peak memory over sequence length",
    "traffic": "bytes read from and written to off-chip memory",
    "scores": "softcap and a relative bias with its gradient: time and memory",
    "masks": "masks that models use: time over density, memory",
    "tiles": "tile sizes of the forward: time of each, compared with the default",
    "profile": "profiler traces of one call, fused and unfused",
    "llama": "decoder layers as in LLaMA-13B: step time, tokens per second, memory",
    "models": "models of transformers through each attention: training steps, generate(), memory",
    "dropout": "training with dropout, compared with unfused attention",
    "smooth": "training with plain softmax, smooth softmax and a learned sink",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    described = "; ".join(f"{name}: {text}" for name, text in EXPERIMENTS.items())
    add("name", choices=[*EXPERIMENTS, "all"], metavar="NAME", help=f"{described}; or all")
    add("--device", default="auto", help="auto, cpu or cuda; auto: an accelerator with kernels, else the CPU")
    add("--out", default="runs/experiments", metavar="DIR", help="directory of the results")
    add("--quick", action="store_true", help="small sizes and few calls: all within two minutes")
    add("--threads", type=positive, help="CPU threads; by default PyTorch's choice")


def run(arguments: argparse.Namespace) -> int:
    """The exit status is 1 if an experiment failed."""
    require("matplotlib")  # before the measurements, not after them
    progress = require("rich.progress").Progress
    use_threads(arguments.threads)
    device = choose_device(arguments.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    out = make_directory(arguments.out)
    console = make_console(WIDTH)
    names = list(EXPERIMENTS) if arguments.name == "all" else [arguments.name]
    failed = []
    with progress(console=console, transient=True) as bar:

        def track(steps: Iterable[Any]) -> Iterable[Any]:
            """A progress bar around the steps of one experiment, removed when it ends."""
            task = bar.add_task(f"  {name}")
            try:
                yield from bar.track(steps, task_id=task)
            finally:
                bar.remove_task(task)

        context = Context(device, arguments.quick, out, track)
        for name in bar.track(names, description="experiments"):
            result = run_experiment(name, context)
            print_result(result, console)
            with writing(f"--out {out}"):
                write_json(result, out / f"{name}.json")
                write_plot(result, out / f"{name}.png")
            failed += [name] if result.error else []
    done = f"results are in {out}; flashattn-ext report {out} makes a page of them"
    console.print(done, highlight=False, markup=False)
    return 1 if failed else 0


def run_experiment(name: str, context: Context, sizes: Any = None) -> Result:
    """Measures one experiment, by default with the sizes for the device. If it raises, the result says so."""
    module = importlib.import_module(f".{name}", __package__)
    torch.manual_seed(0)
    if context.on_cuda:
        torch.cuda.empty_cache()  # frees the cache of earlier experiments, which another process may need
    try:
        sizes = sizes or module.SIZES["cpu" if context.on_cpu else "gpu", context.quick]
        result = Result(name, EXPERIMENTS[name], notes=size_notes(sizes, module.SIZES[WHOLE]))
        module.measure(context, sizes, result)
        module.compare(result)
    except Exception as error:  # the other experiments continue after any error
        result = Result(name, EXPERIMENTS[name], error=one_line(error))
    result.machine = {of: str(value) for of, value in describe_machine(context.device).items()}
    result.command = context.command(name)
    return result
