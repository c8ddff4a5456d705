"""Train a small GPT on text, byte by byte, through the attention of this package.

The run lives in one directory: checkpoint.pt, loss.png, sample.txt and metrics.json. Ctrl-C (or
SIGTERM) saves a checkpoint and stops; the same command goes on from there, and ends where the
uninterrupted run would have ended.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from . import ranks
from .console import CommandError, make_console, positive, require, seed
from .data import Corpus, load_corpus
from .devices import DEVICES, choose_device, use_threads
from .files import make_directory
from .model import ATTENTION, MAX_HEAD_DIM, SOFTMAX, ModelConfig
from .trainer import PACKING, TrainConfig, Trainer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    run = parser.add_argument_group("run")
    run.add_argument("--out", default="runs/train", metavar="DIR", help="directory of the run")
    run.add_argument("--restart", action="store_true", help="start over even if --out has a checkpoint")
    run.add_argument("--text", metavar="FILE", help="what to learn; without it, CPython's documentation topics")
    meaning = "; ".join(f"{name}: {text}" for name, text in PACKING.items())
    run.add_argument("--packing", choices=PACKING, default="windows", help=meaning)
    run.add_argument("--seed", type=seed, default=0, help="of initialisation, batches and dropout")
    run.add_argument(
        "--device",
        default="auto",
        help=f"{', '.join(DEVICES)}; auto: an accelerator with kernels, else the CPU",
    )
    run.add_argument(
        "--dtype",
        choices=["auto", *DTYPES],
        default="auto",
        help="auto: bfloat16 on accelerators, else float32",
    )
    run.add_argument("--threads", type=positive, help="CPU threads; without it, PyTorch's choice")
    run.add_argument(
        "--context-parallel",
        type=positive,
        default=1,
        metavar="C",
        help="ranks that share each row of a batch; torchrun starts them, and data parallelism takes the others",
    )
    run.add_argument("--sample-bytes", type=positive, default=600, help="length of the generated text")

    model = parser.add_argument_group("model")
    model.add_argument("--attention", choices=ATTENTION, default="flashattn", help="who computes attention")
    meaning = "; ".join(f"{name}: {text}" for name, text in SOFTMAX.items())
    model.add_argument("--softmax", choices=SOFTMAX, default="smooth", help=meaning)
    model.add_argument("--layers", type=positive, default=4, help="number of blocks")
    model.add_argument("--width", type=positive, default=128, help="of the residual stream")
    model.add_argument("--heads", type=positive, default=4, help="query heads")
    model.add_argument("--kv-heads", type=positive, default=2, help="key and value heads")
    model.add_argument("--context", type=positive, default=256, help="bytes that the model sees")
    model.add_argument(
        "--dropout",
        type=float,
        default=0.05,
        help="probability, of attention weights and of residual branches",
    )

    optimiser = parser.add_argument_group("optimisation")
    optimiser.add_argument("--steps", type=positive, default=1000, help="optimiser steps")
    optimiser.add_argument("--batch-size", type=positive, default=8, help="windows per step")
    optimiser.add_argument("--learning-rate", type=float, default=4e-3, help="peak, after the warm-up")
    optimiser.add_argument("--warmup", type=float, default=0.05, help="share of the steps in which the rate rises")
    optimiser.add_argument("--weight-decay", type=float, default=0.1, help="of matrices; vectors are not decayed")
    optimiser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    optimiser.add_argument("--validate-every", type=positive, default=100, metavar="STEPS", help="between validations")
    optimiser.add_argument(
        "--checkpoint-every",
        type=positive,
        default=100,
        metavar="STEPS",
        help="between checkpoints",
    )


def run(arguments: argparse.Namespace) -> int:
    require("matplotlib")  # before the training, not after it
    use_threads(arguments.threads)
    device = choose_device(arguments.device, needs_backend=arguments.attention == "flashattn")
    config = _config(arguments, device)
    corpus = load_corpus(arguments.text, config.context)
    directory = make_directory(arguments.out)
    if not ranks.started_by_torchrun():
        return _train(arguments, config, corpus, device, directory)
    device = ranks.own_device(device)
    with ranks.joined(device):
        return _train(arguments, config, corpus, device, directory)


def _train(
    arguments: argparse.Namespace, config: TrainConfig, corpus: Corpus, device: torch.device, directory: Path
) -> int:
    layout = ranks.layout_of(arguments.context_parallel, config.batch_size, device)
    console = make_console()
    console.quiet = not layout.is_first
    trainer = Trainer(config, corpus, device, directory, console, layout)
    if layout.ranks > 1:
        console.print(
            f"{layout.ranks} ranks: {layout.data_ranks} share a batch, {arguments.context_parallel} share each of its rows"
        )

    console.print(
        f"{trainer.parameter_count():,} parameters, {len(corpus.train):,} bytes of {corpus.name}, "
        f"{config.model.attention} attention on {device} ({config.dtype})"
    )
    if trainer.resume(restart=arguments.restart):
        console.print(f"resuming {trainer.checkpoint_path} at step {trainer.step} of {config.steps}")
    stopped_by = trainer.train(arguments.checkpoint_every)
    if stopped_by:
        console.print(
            f"stopped at step {trainer.step}, saved {trainer.checkpoint_path}; the same command goes on from there"
        )
        return 128 + stopped_by
    if layout.is_first:
        _finish(trainer, arguments.sample_bytes)
    return 0


def _finish(trainer: Trainer, sample_bytes: int) -> None:
    """Writes what the run leaves behind and prints the result."""
    from .train_outputs import write_loss_curve, write_metrics, write_sample

    loss = trainer.final_validation_loss()
    write_loss_curve(trainer)
    write_metrics(trainer, loss)
    sample = write_sample(trainer, sample_bytes)
    trainer.console.rule("sample")
    trainer.console.print(sample, markup=False, highlight=False)
    trainer.console.rule()
    trainer.console.print(f"loss.png, sample.txt and metrics.json are in {trainer.directory}")
    trainer.console.print(f"final validation loss: {loss:.4f} nats/byte")


def _config(arguments: argparse.Namespace, device: torch.device) -> TrainConfig:
    """Checks the values that argparse cannot, and names the option that is wrong."""
    options = vars(arguments)
    if options["width"] % options["heads"] or (options["width"] // options["heads"]) % 2:
        raise CommandError(
            f"--width {options['width']} must be an even multiple of --heads {options['heads']} "
            "(rotary positions turn pairs)"
        )
    head_dim = options["width"] // options["heads"]
    if options["attention"] in MAX_HEAD_DIM and head_dim > MAX_HEAD_DIM[options["attention"]]:
        raise CommandError(
            f"--width {options['width']} over --heads {options['heads']} makes heads of {head_dim}; accepted by --attention "
            f"{options['attention']} are up to {MAX_HEAD_DIM[options['attention']]}: more --heads, or a smaller --width"
        )
    if options["context_parallel"] > 1 and options["attention"] != "flashattn":
        raise CommandError(
            f"--context-parallel got {options['context_parallel']}, which only --attention flashattn can do"
        )
    if options["heads"] % options["kv_heads"]:
        raise CommandError(f"--heads {options['heads']} must be a multiple of --kv-heads {options['kv_heads']}")
    for name, upper in (("dropout", 1.0), ("warmup", 1.0)):
        if not 0 <= options[name] < upper:
            raise CommandError(f"--{name} got {options[name]}; accepted is 0 up to, not including, {upper:g}")
    for name in ("learning_rate", "clip"):
        if not 0 < options[name] < float("inf"):
            raise CommandError(f"--{name.replace('_', '-')} got {options[name]}; accepted is any positive number")
    if not 0 <= options["weight_decay"] < float("inf"):
        raise CommandError(f"--weight-decay got {options['weight_decay']}; accepted is 0 or more")
    if options["packing"] == "documents" and options["text"]:
        raise CommandError(
            f"--packing documents got --text {options['text']}, a file that does not say where documents end; accepted is "
            "the text that comes with Python: leave --text out"
        )
    dtype = options["dtype"]
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else "bfloat16"
    model = ModelConfig(**{name: options[name] for name in ModelConfig.__dataclass_fields__})
    shared = TrainConfig.__dataclass_fields__.keys() & options.keys() - {"dtype", "text"}
    text = str(Path(options["text"]).resolve()) if options["text"] else None
    return TrainConfig(model=model, dtype=dtype, text=text, **{name: options[name] for name in shared})
