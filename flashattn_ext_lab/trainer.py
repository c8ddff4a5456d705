"""The training loop: AdamW with warm-up and cosine decay, gradient clipping, validation, checkpoints, resuming.

On the CPU a resumed run has the same bits as an uninterrupted one: the checkpoint contains the weights, the optimizer, the step,
the losses and every generator that the next step draws from.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import signal
import statistics
import time
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .console import CommandError, atomic_path, one_line, require
from .data import NOT_PREDICTED, Batch, BatchSampler, Corpus, validation_batches
from .devices import peak_memory_bytes, synchronize
from .model import GPT, ModelConfig, SharedRows, cross_entropy
from .ranks import Layout

if TYPE_CHECKING:
    from rich.console import Console

ALONE = Layout()  # one process
FINAL_RATE = 0.05  # where the cosine ends, as a fraction of the peak
ADAM_BETAS = (0.9, 0.95)
LINES = 20  # lines of a whole run without a terminal
SHOWN_LOSSES = 20  # number of last steps whose mean is shown
LOGS = ("train_losses", "validation_losses", "max_logits")  # attributes that grow with the steps


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides the result of a run; a run is resumed with the same one only."""

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
    "windows": "windows of running text, across the ends of documents",
    "documents": "the same windows, in which a byte sees its own document only, and positions restart with each",
}


class Training:
    """A model and the steps that train it. Losses are in nats per byte."""

    def __init__(
        self, config: TrainConfig, corpus: Corpus, device: torch.device, layout: Layout = ALONE, log_max_logits: bool = False
    ) -> None:  # fmt: skip
        self.config, self.device, self.layout = config, device, layout
        torch.manual_seed(config.seed)
        self.model = GPT(config.model, config.context).to(device)
        self._replica: torch.nn.Module = self.model
        if layout.ranks > 1:  # gradients are means over the ranks, each of which draws its own dropout mask
            if layout.context_group is not None:
                self.model.shared = SharedRows(layout.context_group, config.context)
            self.seed_for_step(0)
            devices = [device] if device.type != "cpu" else None
            self._replica = torch.nn.parallel.DistributedDataParallel(self.model, device_ids=devices)
        parameters = list(self.model.parameters())  # AdamW decays the matrices, and not norms and sinks
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        fused = device.type in ("cpu", "cuda")
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=ADAM_BETAS, fused=fused)
        packed = config.packing == "documents"
        documents = (corpus.train_documents, corpus.validation_documents) if packed else (None, None)
        self.sampler = BatchSampler(corpus.train, config.batch_size, config.context, config.seed, documents[0])
        self.validation = validation_batches(corpus.validation, config.batch_size, config.context, documents[1])
        self.step = 0
        self.train_losses: list[float] = []  # [steps]
        self.validation_losses: list[tuple[int, float]] = []  # (step, loss)
        self.max_logits: list[tuple[int, float]] = []  # (step, the largest logit of all layers and heads), if logged
        for block in self.model.blocks:
            block.attention.logs_max_logits = log_max_logits

    def seed_for_step(self, step: int) -> None:
        """Seeds the generators of one of several ranks from this step on, each rank differently."""
        torch.manual_seed((self.config.seed * 1_000_003 + step) * self.layout.ranks + self.layout.rank)

    def one_step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.config)
        loss = self._loss(self.sampler.next_batch(torch.device("cpu")), self._replica)
        value = self.layout.sum(loss.item(), self.device)
        if not math.isfinite(value):
            raise CommandError(f"the loss became {value} at step {self.step + 1}; try a lower --learning-rate")
        (loss * self.layout.ranks).backward()  # gradients are means over the ranks, the loss is a sum over them
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        synchronize(self.device)
        self.train_losses.append(value)
        self.step += 1
        largest = [block.attention.max_logit for block in self.model.blocks if block.attention.logs_max_logits]
        if largest:
            self.max_logits.append((self.step, self.layout.largest(torch.stack(largest).max().item(), self.device)))

    def validate_when_due(self) -> None:
        """Every `validate_every` steps, and after the last one."""
        if self.step % self.config.validate_every == 0 or self.step == self.config.steps:
            self.validation_losses.append((self.step, self.validate()))

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss over the held-out windows, without dropout. Draws no random numbers."""
        self.model.eval()
        counts = [int((batch.targets != NOT_PREDICTED).sum()) for batch in self.validation]
        losses = [self._loss(batch, self.model).item() for batch in self.validation]
        self.model.train()
        total = sum(loss * count for loss, count in zip(losses, counts, strict=True))
        return self.layout.sum(total, self.device) / sum(counts)

    def _loss(self, batch: Batch, model: torch.nn.Module) -> Tensor:
        """The mean loss over the targets of a batch; for a rank's part, its sum divided by the number of targets of the whole batch."""
        count = int((batch.targets != NOT_PREDICTED).sum()) if self.layout.ranks > 1 else None
        batch = self.layout.part(batch).to(self.device)
        dtype = getattr(torch, self.config.dtype)
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32):
            return cross_entropy(model(batch.tokens, batch.documents), batch.targets, count)


class Trainer(Training):
    """One run in one directory: `train` runs the remaining steps, with checkpoints."""

    def __init__(
        self, config: TrainConfig, corpus: Corpus, device: torch.device, directory: Path, console: Console,
        layout: Layout = ALONE, log_max_logits: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(config, corpus, device, layout, log_max_logits)
        self.corpus, self.directory, self.console = corpus, directory, console
        self.checkpoint_path = directory / "checkpoint.pt"
        self.seconds = 0.0  # spent in train(), summed over interruptions

    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def train(self, checkpoint_every: int) -> int:
        """Runs up to the last step. Returns 0, or the number of the signal that stopped it after a saved step."""
        before, first, steps = self.seconds, self.step, self.config.steps
        batch_bytes = self.config.batch_size * self.config.context
        begin = time.perf_counter() - before
        rich = require("rich.progress")
        columns = [rich.BarColumn(bar_width=24), rich.MofNCompleteColumn(), rich.TextColumn("{task.fields[status]}")]
        columns += [rich.TimeElapsedColumn(), rich.TextColumn("left"), rich.TimeRemainingColumn()]
        bar = rich.Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        task = bar.add_task("train", total=steps, completed=first, status="")
        with _catch_signals() as stop, bar:
            while self.step < steps and not stop:
                self.one_step()
                # A signal may reach one rank a step before another: all stop after the same one.
                if self.layout.sum(float(bool(stop)), self.device) and not stop:
                    stop.append(signal.SIGTERM)
                self.validate_when_due()
                self.seconds = time.perf_counter() - begin
                if self.step % checkpoint_every == 0 or self.step == steps or stop:
                    self.save()
                rate = (self.step - first) * batch_bytes / max(self.seconds - before, 1e-9)
                status = f"loss {statistics.fmean(self.train_losses[-SHOWN_LOSSES:]):.3f}"
                status += f"  val {self.validation_losses[-1][1]:.3f}" if self.validation_losses else ""
                status += f"  {rate:,.0f} tokens/s  peak {peak_memory_bytes(self.device) / 2**20:,.0f} MiB"
                bar.update(task, completed=self.step, status=status)
                if not self.console.is_terminal and self.step * LINES // steps != (self.step - 1) * LINES // steps:
                    self.console.print(f"step {self.step}/{steps}  {status}", highlight=False)
        return stop[0] if stop and self.step < steps else 0

    def save(self) -> None:
        """Writes everything that the next step depends on, and waits until the disk has it."""
        if not self.layout.is_first:
            return
        state = {
            "config": asdict(self.config),
            "text_sha256": self.corpus.sha256,
            "model": self.model.state_dict(),
            "optimiser": self.optimizer.state_dict(),
            "random": {"cpu": torch.get_rng_state()},
            "ranks": self.layout.ranks,
            "sampler": self.sampler.generator.get_state(),
            "step": self.step,
            "seconds": self.seconds,
            **{name: getattr(self, name) for name in LOGS},
        }
        if self.device.type != "cpu":
            state["random"][self.device.type] = getattr(torch, self.device.type).get_rng_state(self.device)
        # It serialises in memory first: on a full disk PyTorch's own writer reports only an unexpected file position.
        serialised = io.BytesIO()
        torch.save(state, serialised)
        with atomic_path(self.checkpoint_path) as temporary, open(temporary, "wb") as file:
            file.write(serialised.getbuffer())
            file.flush()
            os.fsync(file.fileno())

    def resume(self, *, restart: bool) -> bool:
        """Continues the saved run, if there is one and it is the same run. Returns whether it did."""
        path = self.checkpoint_path
        if restart or not path.exists():
            return False
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file raises any of many unrelated types
            what = f"no readable checkpoint ({one_line(error)})"
            raise CommandError(f"{path} is {what}; --restart starts over") from None
        try:
            self._check_same_run(dict(state))
            self._restore(state)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            what = f"no run of this version of train ({one_line(error)})"
            raise CommandError(f"{path} contains {what}; --restart starts over") from None
        return True

    def _check_same_run(self, state: dict[str, Any]) -> None:
        choices = "to resume, --restart to start over, or another --out"
        # Older runs lack fields that have a default.
        defaults = {of.name: of.default for of in fields(TrainConfig) if of.default is not MISSING}
        saved, wanted = ({**defaults, **of, **of["model"]} for of in (state["config"], asdict(self.config)))
        different = [name for name in wanted if name != "model" and saved.get(name) != wanted[name]]
        if different:
            changes = ", ".join(f"{name.replace('_', '-')} {saved.get(name)} -> {wanted[name]}" for name in different)
            what = f"{self.checkpoint_path} is of a run with other options ({changes})"
            raise CommandError(f"{what}; give the same options {choices}")
        if state["text_sha256"] != self.corpus.sha256:
            before, now = (f"{of[:12]}..." for of in (state["text_sha256"], self.corpus.sha256))
            what = f"{self.checkpoint_path} is of a run on other contents of {self.corpus.name} (SHA-256 {before}, now {now})"
            raise CommandError(f"{what}; give the same text {choices}")

    def _restore(self, state: dict[str, Any]) -> None:
        """Restores the state that save() wrote. Anything else raises one of many unrelated types."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimiser"])
        self.sampler.generator.set_state(state["sampler"])
        self.step, self.seconds = int(state["step"]), float(state["seconds"])
        self.train_losses = [float(loss) for loss in state["train_losses"]]
        self.validation_losses = [(int(step), float(loss)) for step, loss in state["validation_losses"]]
        self.max_logits = [(int(step), float(logit)) for step, logit in state.get("max_logits", [])]
        torch.set_rng_state(state["random"]["cpu"])
        kind = self.device.type
        if kind != "cpu" and kind in state["random"]:
            getattr(torch, kind).set_rng_state(state["random"][kind], self.device)
        if self.layout.ranks > 1 or state.get("ranks", 1) > 1:  # the saved generators belong to one rank of several
            self.seed_for_step(self.step)


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of step `step` (from 0): linear warm-up, then a cosine down to FINAL_RATE of the peak."""
    warmup = int(config.steps * config.warmup)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    return config.learning_rate * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * progress)))


@contextlib.contextmanager
def _catch_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM in the yielded list, so that the current step can end. The second one stops at once."""
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
