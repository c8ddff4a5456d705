"""The training loop: AdamW with warm-up and cosine decay, gradient clipping, validation,
checkpoints, resuming.

On the CPU a resumed run gives the same bits as an uninterrupted one: the checkpoint has the
weights, the optimiser, the step, the loss history and every generator that the next step draws
from.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .checkpoint import load_checkpoint, random_state, restore_random_state, save_checkpoint
from .console import CommandError
from .data import NOT_PREDICTED, Batch, BatchSampler, Corpus, validation_batches
from .devices import peak_memory_bytes, synchronize
from .model import GPT, ModelConfig, SharedRows, cross_entropy
from .progress import TrainingProgress
from .ranks import Layout
from .timing import one_line

if TYPE_CHECKING:
    from rich.console import Console

ALONE = Layout()  # one process
FINAL_RATE = 0.05  # where the cosine ends, as a share of the peak
ADAM_BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class TrainConfig:
    """All that decides the result of a run. Resuming needs the same one."""

    model: ModelConfig
    text: str | None
    context: int
    dtype: str
    seed: int
    steps: int
    batch_size: int
    learning_rate: float
    warmup: float
    weight_decay: float
    clip: float
    validate_every: int
    packing: str = "windows"  # a key of PACKING


# How the rows of a batch are made.
PACKING = {
    "windows": "windows of running text, whatever is in them",
    "documents": "the same windows, in which a byte sees its own document alone, and positions begin anew with each",
}


class Training:
    """A model and the steps that train it.

    The losses are in nats per byte.
    """

    def __init__(self, config: TrainConfig, corpus: Corpus, device: torch.device, layout: Layout = ALONE) -> None:
        self.config = config
        self.device = device
        self.layout = layout
        torch.manual_seed(config.seed)
        self.model = GPT(config.model, config.context).to(device)
        self._replica = self._shared_out() if layout.ranks > 1 else self.model
        self.optimiser = _make_optimiser(self.model, config, device)
        train, validation = (
            (corpus.train_documents, corpus.validation_documents) if config.packing == "documents" else (None, None)
        )
        self.sampler = BatchSampler(corpus.train, config.batch_size, config.context, config.seed, train)
        self.validation = validation_batches(corpus.validation, config.batch_size, config.context, validation)
        self.step = 0
        self.train_losses: list[float] = []  # [steps]
        self.validation_losses: list[tuple[int, float]] = []  # (step, loss)

    def _shared_out(self) -> torch.nn.Module:
        """The model with gradients that are means over the ranks, each of which draws dropout of its own."""
        if self.layout.context_group is not None:
            self.model.shared = SharedRows(self.layout.context_group, self.config.context)
        self.seed_for_step(0)
        devices = [self.device] if self.device.type != "cpu" else None
        return torch.nn.parallel.DistributedDataParallel(self.model, device_ids=devices)

    def seed_for_step(self, step: int) -> None:
        """The generators of a rank from this step on, where there are several: no two have the same."""
        torch.manual_seed((self.config.seed * 1_000_003 + step) * self.layout.ranks + self.layout.rank)

    def one_step(self) -> float:
        """Returns the norm of the gradient before it is clipped."""
        rate = learning_rate(self.step, self.config)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        loss = self._loss(self.sampler.next_batch(torch.device("cpu")), self._replica)
        (value,) = self.layout.sums([loss.item()], self.device)
        if not math.isfinite(value):
            raise CommandError(f"the loss became {value} at step {self.step + 1}; try a lower --learning-rate")
        (loss * self.layout.ranks).backward()  # gradients are means over the ranks, the loss is a sum over them
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        synchronize(self.device)
        self.train_losses.append(value)
        self.step += 1
        return norm.item()

    def validate_when_due(self) -> None:
        """Every `validate_every` steps, and after the last one."""
        if self.step % self.config.validate_every == 0 or self.step == self.config.steps:
            self.validation_losses.append((self.step, self.validate()))

    def validate(self) -> float:
        """Mean loss over the held-out windows, without dropout. Draws no random number."""
        self.model.eval()
        total, count = 0.0, 0
        with torch.no_grad():
            for batch in self.validation:
                predicted = int((batch.targets != NOT_PREDICTED).sum())
                total += self._loss(batch, self.model).item() * predicted
                count += predicted
        self.model.train()
        (total,) = self.layout.sums([total], self.device)
        return total / count

    def _loss(self, batch: Batch, model: torch.nn.Module) -> Tensor:
        """The mean over the targets of a batch; of a rank's part of it, the sum over the number of those of the whole."""
        count = int((batch.targets != NOT_PREDICTED).sum()) if self.layout.ranks > 1 else None
        batch = self.layout.part(batch).to(self.device)
        dtype = getattr(torch, self.config.dtype)
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32):
            return cross_entropy(model(batch.tokens, batch.documents), batch.targets, count)


class Trainer(Training):
    """One run in one directory: `train` does the steps that are left, with checkpoints."""

    def __init__(
        self,
        config: TrainConfig,
        corpus: Corpus,
        device: torch.device,
        directory: Path,
        console: Console,
        layout: Layout = ALONE,
    ) -> None:
        super().__init__(config, corpus, device, layout)
        self.corpus = corpus
        self.directory = directory
        self.console = console
        self.checkpoint_path = directory / "checkpoint.pt"
        self.seconds = 0.0  # spent in train(), summed over interruptions

    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def final_validation_loss(self) -> float:
        return self.validation_losses[-1][1]

    def train(self, checkpoint_every: int) -> int:
        """Goes on to the last step.

        Returns 0, or the number of the signal that stopped it after a saved step.
        """
        begin = time.perf_counter() - self.seconds
        with (
            _catch_signals() as stop,
            TrainingProgress(self.console, self.config.steps, self.step) as progress,
        ):
            while self.step < self.config.steps and not stop:
                self.one_step()
                # A signal may reach one rank a step before another: all stop after the same one.
                if self.layout.sums([float(bool(stop))], self.device)[0] and not stop:
                    stop.append(signal.SIGTERM)
                self.validate_when_due()
                self.seconds = time.perf_counter() - begin
                if self.step % checkpoint_every == 0 or self.step == self.config.steps or stop:
                    self.save()
                progress.update(
                    self.step,
                    loss=self.train_losses[-1],
                    validation=self.validation_losses[-1][1] if self.validation_losses else None,
                    tokens=self.config.batch_size * self.config.context,
                    peak_bytes=peak_memory_bytes(self.device),
                )
        return stop[0] if stop and self.step < self.config.steps else 0

    def save(self) -> None:
        if not self.layout.is_first:
            return
        state = {
            "config": asdict(self.config),
            "text_sha256": self.corpus.sha256,
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "random": random_state(self.device),
            "ranks": self.layout.ranks,
            "sampler": self.sampler.state(),
            "step": self.step,
            "seconds": self.seconds,
            "train_losses": self.train_losses,
            "validation_losses": self.validation_losses,
        }
        save_checkpoint(self.checkpoint_path, state)

    def resume(self, *, restart: bool) -> bool:
        """Takes up the saved run, if there is one and it is the same run.

        Returns whether it did.
        """
        if restart or not self.checkpoint_path.exists():
            return False
        state = load_checkpoint(self.checkpoint_path)
        try:
            state = dict(state)
            _check_same_run(state["config"], asdict(self.config), self.checkpoint_path)
            _check_same_text(state["text_sha256"], self.corpus, self.checkpoint_path)
            self._restore(state)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise CommandError(
                f"{self.checkpoint_path} holds no run of this version of train ({one_line(error)}); --restart starts over"
            ) from None
        return True

    def _restore(self, state: dict[str, Any]) -> None:
        """Takes up what save() wrote. What is no such state raises any of many unrelated types."""
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.sampler.restore(state["sampler"])
        self.step = int(state["step"])
        self.seconds = float(state["seconds"])
        self.train_losses = [float(loss) for loss in state["train_losses"]]
        self.validation_losses = [(int(step), float(loss)) for step, loss in state["validation_losses"]]
        restore_random_state(state["random"], self.device)
        if self.layout.ranks > 1 or state.get("ranks", 1) > 1:  # the saved states are those of one rank of several
            self.seed_for_step(self.step)


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of step `step` (from 0): linear warm-up, then a cosine down to FINAL_RATE of the
    peak.
    """
    warmup = int(config.steps * config.warmup)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    return config.learning_rate * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * progress)))


def _make_optimiser(model: GPT, config: TrainConfig, device: torch.device) -> torch.optim.AdamW:
    """AdamW that decays the matrices and leaves norms and sinks alone."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=ADAM_BETAS, fused=fused)


def _check_same_run(saved: dict[str, Any], wanted: dict[str, Any], path: Path) -> None:
    defaults = {of.name: of.default for of in fields(TrainConfig) if of.default is not MISSING}  # older runs lack them
    saved, wanted = ({**defaults, **config, **config["model"]} for config in (saved, wanted))
    different = [name for name in wanted if name != "model" and saved.get(name) != wanted[name]]
    if different:
        changes = ", ".join(f"{name.replace('_', '-')} {saved.get(name)} -> {wanted[name]}" for name in different)
        raise CommandError(
            f"{path} is of a run with other options ({changes}); give the same options to resume, "
            "--restart to start over, or another --out"
        )


def _check_same_text(saved: str, corpus: Corpus, path: Path) -> None:
    if saved != corpus.sha256:
        raise CommandError(
            f"{path} is of a run on other contents of {corpus.name} (SHA-256 {saved[:12]}..., now {corpus.sha256[:12]}...); "
            "give the same text to resume, --restart to start over, or another --out"
        )


@contextlib.contextmanager
def _catch_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM in the yielded list, so that the step under way can end.

    The second one stops at once.
    """
    received: list[int] = []

    def handle(number: int, _frame: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
