"""The outputs of a finished run: loss.png, metrics.json, sample.txt."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import torch

import flashattn_ext

from .console import require
from .devices import peak_memory_bytes
from .files import atomic_path, write_text
from .trainer import Trainer

SAMPLE_PROMPT = b"\nThe "
SAMPLE_TEMPERATURE = 0.7
CURVE_POINTS = 100


def write_loss_curve(trainer: Trainer) -> None:
    """The training loss, averaged over intervals of steps, the validation loss, and on a second axis the largest logit."""
    require("matplotlib").use("Agg")
    plot = require("matplotlib.pyplot")
    interval, losses = max(1, trainer.step // CURVE_POINTS), trainer.train_losses
    parts = [losses[first : first + interval] for first in range(0, trainer.step, interval)]
    ends = [min((n + 1) * interval, trainer.step) for n in range(len(parts))]
    figure, axes = plot.subplots(figsize=(8, 5))
    axes.plot(ends, [sum(part) / len(part) for part in parts], label="training")
    axes.plot(*zip(*trainer.validation_losses, strict=True), marker="o", markersize=3, label="validation")
    model = trainer.config.model
    title = f"{trainer.parameter_count():,} parameters, {model.attention} attention, {model.softmax} softmax"
    axes.set(xlabel="step", ylabel="nats per byte", title=title)
    axes.grid(alpha=0.3)
    lines = axes.get_lines()
    if trainer.max_logits:
        right = axes.twinx()
        lines += right.plot(*zip(*trainer.max_logits, strict=True), color="gray", linewidth=0.8, label="largest logit")
        right.set(ylabel="largest logit")
    axes.legend(handles=lines)
    with atomic_path(trainer.directory / "loss.png") as path:
        figure.savefig(path, dpi=120, bbox_inches="tight")
    plot.close(figure)


def write_metrics(trainer: Trainer, loss: float) -> None:
    """Options, losses (nats per byte), time and memory of the run as JSON."""
    tokens = trainer.step * trainer.config.batch_size * trainer.config.context
    metrics: dict[str, Any] = {
        "final_validation_loss": loss,
        "parameters": trainer.parameter_count(),
        "tokens": tokens,
        "seconds": trainer.seconds,
        "tokens_per_second": tokens / trainer.seconds,
        "peak_memory_bytes": peak_memory_bytes(trainer.device),
        "device": str(trainer.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "flashattn_ext": flashattn_ext.__version__,
        "config": asdict(trainer.config),
        "validation_losses": trainer.validation_losses,
        "train_losses": trainer.train_losses,
        **({"max_logits": trainer.max_logits} if trainer.max_logits else {}),
    }
    write_text(trainer.directory / "metrics.json", json.dumps(metrics, indent=1) + "\n")


def write_sample(trainer: Trainer, length: int) -> str:
    """Text that the model writes; the same weights and seed write the same text."""
    generator = torch.Generator().manual_seed(trainer.config.seed)
    trainer.model.eval()
    trainer.model.shared = None  # one rank writes
    generated = trainer.model.generate(SAMPLE_PROMPT, length, SAMPLE_TEMPERATURE, generator)
    text = generated.decode(errors="replace").strip() + "\n"
    write_text(trainer.directory / "sample.txt", text)
    return text
