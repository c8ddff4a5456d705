"""Train a small GPT on text, byte by byte, through the attention of this package.

The run has one directory: checkpoint.pt, loss.png, sample.txt and metrics.json. Ctrl-C (or SIGTERM) saves a checkpoint and
stops; the same command resumes the run, and ends with the same result as an uninterrupted run.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import asdict
from pathlib import Path

import torch

from . import ranks
from .console import (
    CommandError,
    above_zero,
    fraction,
    make_console,
    make_directory,
    picture,
    positive,
    require,
    seed,
    write_text,
    zero_or_more,
)
from .data import Corpus, load_corpus
from .devices import DEVICES, choose_device, describe_machine, peak_memory_bytes, use_threads
from .model import ATTENTION, SOFTMAX, ModelConfig
from .trainer import PACKING, TrainConfig, Trainer

DTYPES = ("float32", "bfloat16")
SAMPLE_PROMPT = b"\nThe "
SAMPLE_TEMPERATURE = 0.7
CURVE_POINTS = 100  # points of the training loss, each a mean


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def meanings(choices: dict[str, str]) -> str:
        return "; ".join(f"{name}: {text}" for name, text in choices.items())

    run = parser.add_argument_group("run").add_argument
    run("--out", default="runs/train", metavar="DIR", help="directory of the run")
    run("--restart", action="store_true", help="start over even if --out has a checkpoint")
    run("--text", metavar="FILE", help="training text; by default CPython's documentation topics")
    run("--packing", choices=PACKING, default="windows", help=meanings(PACKING))
    run("--seed", type=seed, default=0, help="of initialization, batches and dropout")
    run("--device", default="auto", help=f"{', '.join(DEVICES)}; auto: an accelerator with kernels, else the CPU")
    run("--dtype", choices=["auto", *DTYPES], default="auto", help="auto: bfloat16 on accelerators, else float32")
    run("--threads", type=positive, help="CPU threads; by default PyTorch's choice")
    sharing = "ranks that share each row of a batch; torchrun starts them, and the rest is data parallelism"
    run("--context-parallel", type=positive, default=1, metavar="C", help=sharing)
    logits = "write the largest logit of each step to metrics.json and loss.png"
    run("--log-max-logits", action="store_true", help=logits)
    run("--sample-bytes", type=positive, default=600, help="length of the generated text")

    model = parser.add_argument_group("model").add_argument
    model("--attention", choices=ATTENTION, default="flashattn", help="attention implementation")
    model("--softmax", choices=SOFTMAX, default="smooth", help=meanings(SOFTMAX))
    model("--layers", type=positive, default=4, help="number of blocks")
    model("--width", type=positive, default=128, help="of the residual stream")
    model("--heads", type=positive, default=4, help="query heads")
    model("--kv-heads", type=positive, default=2, help="KV heads")
    model("--context", type=positive, default=256, help="bytes that the model sees")
    model("--dropout", type=fraction, default=0.05, help="probability, of attention weights and of residual branches")

    optimization = parser.add_argument_group("optimization").add_argument
    optimization("--steps", type=positive, default=1000, help="optimizer steps")
    optimization("--batch-size", type=positive, default=8, help="windows per step")
    optimization("--learning-rate", type=above_zero, default=4e-3, help="peak, after the warm-up")
    optimization("--warmup", type=fraction, default=0.05, help="fraction of the steps in which the rate rises")
    optimization("--weight-decay", type=zero_or_more, default=0.1, help="of matrices; vectors are not decayed")
    optimization("--clip", type=above_zero, default=1.0, help="largest norm of the gradient")
    for name, what in (("--validate-every", "validations"), ("--checkpoint-every", "checkpoints")):
        optimization(name, type=positive, default=100, metavar="STEPS", help=f"between {what}")


def run(arguments: argparse.Namespace) -> int:
    require("matplotlib")  # before the training, not after it
    use_threads(arguments.threads)
    device = choose_device(arguments.device, needs_backend=arguments.attention == "flashattn")
    _check(arguments)
    options, dtype = vars(arguments), arguments.dtype
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else "bfloat16"
    model = ModelConfig(**{name: options[name] for name in ModelConfig.__dataclass_fields__})
    shared = TrainConfig.__dataclass_fields__.keys() & options.keys() - {"dtype", "text"}
    text = str(Path(arguments.text).resolve()) if arguments.text else None
    config = TrainConfig(model=model, dtype=dtype, text=text, **{name: options[name] for name in shared})
    corpus = load_corpus(arguments.text, config.context)
    directory = make_directory(arguments.out)
    if not ranks.started_by_torchrun():
        return _train(arguments, config, corpus, device, directory)
    if device.type != "cpu" and device.index is None:  # this rank's device among several
        device = torch.device(device.type, ranks.local_rank())
    with ranks.joined(device):
        return _train(arguments, config, corpus, device, directory)


def _train(arguments: argparse.Namespace, config: TrainConfig, corpus: Corpus, device: torch.device, out: Path) -> int:
    layout = ranks.layout_of(arguments.context_parallel, config.batch_size, device)
    console = make_console()
    console.quiet = not layout.is_first
    trainer = Trainer(config, corpus, device, out, console, layout, arguments.log_max_logits)
    if layout.ranks > 1:
        sharing = f"{layout.data_ranks} share a batch, {arguments.context_parallel} share each of its rows"
        console.print(f"{layout.ranks} ranks: {sharing}")
    text = f"{len(corpus.train):,} bytes of {corpus.name}"
    attention = f"{config.model.attention} attention on {device} ({config.dtype})"
    console.print(f"{trainer.parameter_count():,} parameters, {text}, {attention}")
    if trainer.resume(restart=arguments.restart):
        console.print(f"resuming {trainer.checkpoint_path} at step {trainer.step} of {config.steps}")
    if stopped_by := trainer.train(arguments.checkpoint_every):
        saved = f"stopped at step {trainer.step}, saved {trainer.checkpoint_path}"
        console.print(f"{saved}; the same command resumes the run")
        return 128 + stopped_by
    if layout.is_first:
        _finish(trainer, arguments.sample_bytes)
    return 0


def _finish(trainer: Trainer, sample_bytes: int) -> None:
    """Writes loss.png, metrics.json and sample.txt, and prints the result."""
    _, loss = trainer.validation_losses[-1]
    _write_loss_curve(trainer)
    _write_metrics(trainer, loss)
    # Equal weights and seeds write equal texts.
    generator = torch.Generator().manual_seed(trainer.config.seed)
    trainer.model.eval()
    trainer.model.shared = None  # one rank writes
    generated = trainer.model.generate(SAMPLE_PROMPT, sample_bytes, SAMPLE_TEMPERATURE, generator)
    sample = generated.decode(errors="replace").strip() + "\n"
    write_text(trainer.directory / "sample.txt", sample)
    trainer.console.rule("sample")
    trainer.console.print(sample, markup=False, highlight=False)
    trainer.console.rule()
    trainer.console.print(f"loss.png, sample.txt and metrics.json are in {trainer.directory}")
    trainer.console.print(f"final validation loss: {loss:.4f} nats/byte")


def _write_loss_curve(trainer: Trainer) -> None:
    """The training loss, averaged over intervals of steps, the validation loss, and on a second axis the largest logit."""
    interval, model = max(1, trainer.step // CURVE_POINTS), trainer.config.model
    ends = [*range(interval, trainer.step, interval), trainer.step]
    starts = range(0, trainer.step, interval)
    means = [statistics.fmean(trainer.train_losses[first : first + interval]) for first in starts]
    with picture(trainer.directory / "loss.png", height=5) as axes:
        axes.plot(ends, means, label="training")
        axes.plot(*zip(*trainer.validation_losses, strict=True), marker="o", markersize=3, label="validation")
        title = f"{trainer.parameter_count():,} parameters, {model.attention} attention, {model.softmax} softmax"
        axes.set(xlabel="step", ylabel="nats per byte", title=title)
        lines = axes.get_lines()
        if trainer.max_logits:
            right, logits = axes.twinx(), zip(*trainer.max_logits, strict=True)
            lines += right.plot(*logits, color="gray", linewidth=0.8, label="largest logit")
            right.set(ylabel="largest logit")
        axes.legend(handles=lines)


def _write_metrics(trainer: Trainer, loss: float) -> None:
    """Options, losses (nats per byte), time and memory of the run as JSON."""
    tokens = trainer.step * trainer.config.batch_size * trainer.config.context
    metrics = {
        "final_validation_loss": loss,
        "parameters": trainer.parameter_count(),
        "tokens": tokens,
        "seconds": trainer.seconds,
        "tokens_per_second": tokens / trainer.seconds,
        "peak_memory_bytes": peak_memory_bytes(trainer.device),
        **describe_machine(trainer.device),
        "device": str(trainer.device),
        "config": asdict(trainer.config),
        "validation_losses": trainer.validation_losses,
        "train_losses": trainer.train_losses,
        **({"max_logits": trainer.max_logits} if trainer.max_logits else {}),
    }
    write_text(trainer.directory / "metrics.json", json.dumps(metrics, indent=1) + "\n")


def _check(given: argparse.Namespace) -> None:
    """Checks the values that argparse cannot check, and names the option that is wrong."""
    head_dim, limit = given.width // given.heads, 512 if given.attention == "flashattn" else math.inf

    def refuse(wrong: object, message: str) -> None:
        if wrong:
            raise CommandError(message)

    pairs = f"--width {given.width} must be an even multiple of --heads {given.heads} (rotary embeddings rotate pairs)"
    refuse(given.width % given.heads or head_dim % 2, pairs)
    refuse(
        head_dim > limit,
        f"--width {given.width} over --heads {given.heads} makes heads of {head_dim}; accepted by --attention "
        f"{given.attention} are up to {limit}: more --heads, or a smaller --width",
    )
    shared = f"--context-parallel got {given.context_parallel}, which requires --attention flashattn"
    refuse(given.context_parallel > 1 and given.attention != "flashattn", shared)
    logits = f"--log-max-logits got --attention {given.attention}, which does not return them; accepted is flashattn"
    refuse(given.log_max_logits and given.attention != "flashattn", logits)
    refuse(given.heads % given.kv_heads, f"--heads {given.heads} must be a multiple of --kv-heads {given.kv_heads}")
    boundaries = f"--packing documents got --text {given.text}, a file without document boundaries"
    comes = "accepted is the text that comes with Python: omit --text"
    refuse(given.packing == "documents" and given.text, f"{boundaries}; {comes}")
