"""The training loop: AdamW with warm-up and cosine decay, gradient clipping, validation, checkpoints, resuming.

On the CPU a resumed run has the same bits as an uninterrupted one: the checkpoint contains the weights, the optimizer, the step,
the losses and every generator that the next step draws from.
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
from .console import CommandError, one_line
from .data import NOT_PREDICTED, Batch, BatchSampler, Corpus, validation_batches
from .devices import peak_memory_bytes, synchronize
from .model import GPT, ModelConfig, SharedRows, cross_entropy
from .progress import TrainingProgress
from .ranks import Layout

if TYPE_CHECKING:
    from rich.console import Console

ALONE = Layout()  # one process
FINAL_RATE = 0.05  # where the cosine ends, as a fraction of the peak
ADAM_BETAS = (0.9, 0.95)


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
        self,
        config: TrainConfig,
        corpus: Corpus,
        device: torch.device,
        layout: Layout = ALONE,
        log_max_logits: bool = False,
    ) -> None:
        self.config, self.device, self.layout = config, device, layout
        torch.manual_seed(config.seed)
        self.model = GPT(config.model, config.context).to(device)
        self._replica = self._distributed_model() if layout.ranks > 1 else self.model
        self.optimizer = _make_optimizer(self.model, config, device)
        train, validation = None, None
        if config.packing == "documents":
            train, validation = corpus.train_documents, corpus.validation_documents
        self.sampler = BatchSampler(corpus.train, config.batch_size, config.context, config.seed, train)
        self.validation = validation_batches(corpus.validation, config.batch_size, config.context, validation)
        self.step = 0
        self.train_losses: list[float] = []  # [steps]
        self.validation_losses: list[tuple[int, float]] = []  # (step, loss)
        self.max_logits: list[tuple[int, float]] = []  # (step, the largest logit of all layers and heads), if logged
        for block in self.model.blocks:
            block.attention.logs_max_logits = log_max_logits

    def _distributed_model(self) -> torch.nn.Module:
        """The model with gradients that are means over the ranks, each of which draws its own dropout mask."""
        if self.layout.context_group is not None:
            self.model.shared = SharedRows(self.layout.context_group, self.config.context)
        self.seed_for_step(0)
        devices = [self.device] if self.device.type != "cpu" else None
        return torch.nn.parallel.DistributedDataParallel(self.model, device_ids=devices)

    def seed_for_step(self, step: int) -> None:
        """Seeds the generators of one of several ranks from this step on, each rank differently."""
        torch.manual_seed((self.config.seed * 1_000_003 + step) * self.layout.ranks + self.layout.rank)

    def one_step(self) -> None:
        rate = learning_rate(self.step, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self._loss(self.sampler.next_batch(torch.device("cpu")), self._replica)
        (value,) = self.layout.sums([loss.item()], self.device)
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

    def validate(self) -> float:
        """Mean loss over the held-out windows, without dropout. Draws no random numbers."""
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
        begin = time.perf_counter() - self.seconds
        progress = TrainingProgress(self.console, self.config.steps, self.step)
        with _catch_signals() as stop, progress.bar:
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
            "optimiser": self.optimizer.state_dict(),
            "random": random_state(self.device),
            "ranks": self.layout.ranks,
            "sampler": self.sampler.generator.get_state(),
            **{
                name: getattr(self, name)
                for name in ("step", "seconds", "train_losses", "validation_losses", "max_logits")
            },
        }
        save_checkpoint(self.checkpoint_path, state)

    def resume(self, *, restart: bool) -> bool:
        """Continues the saved run, if there is one and it is the same run. Returns whether it did."""
        if restart or not self.checkpoint_path.exists():
            return False
        state = load_checkpoint(self.checkpoint_path)
        try:
            state = dict(state)
            self._check_same_run(state)
            self._restore(state)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise CommandError(
                f"{self.checkpoint_path} contains no run of this version of train ({one_line(error)}); --restart starts over"
            ) from None
        return True

    def _check_same_run(self, state: dict[str, Any]) -> None:
        defaults = {
            of.name: of.default for of in fields(TrainConfig) if of.default is not MISSING
        }  # older runs lack them
        saved, wanted = ({**defaults, **of, **of["model"]} for of in (state["config"], asdict(self.config)))
        different = [name for name in wanted if name != "model" and saved.get(name) != wanted[name]]
        if different:
            changes = ", ".join(f"{name.replace('_', '-')} {saved.get(name)} -> {wanted[name]}" for name in different)
            raise CommandError(
                f"{self.checkpoint_path} is of a run with other options ({changes}); give the same options to resume, "
                "--restart to start over, or another --out"
            )
        if state["text_sha256"] != self.corpus.sha256:
            raise CommandError(
                f"{self.checkpoint_path} is of a run on other contents of {self.corpus.name} (SHA-256 {state['text_sha256'][:12]}..., "
                f"now {self.corpus.sha256[:12]}...); give the same text to resume, --restart to start over, or another --out"
            )

    def _restore(self, state: dict[str, Any]) -> None:
        """Restores the state that save() wrote. Anything else raises one of many unrelated types."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimiser"])
        self.sampler.generator.set_state(state["sampler"])
        self.step = int(state["step"])
        self.seconds = float(state["seconds"])
        self.train_losses = [float(loss) for loss in state["train_losses"]]
        self.validation_losses = [(int(step), float(loss)) for step, loss in state["validation_losses"]]
        self.max_logits = [(int(step), float(logit)) for step, logit in state.get("max_logits", [])]
        restore_random_state(state["random"], self.device)
        if self.layout.ranks > 1 or state.get("ranks", 1) > 1:  # the saved generators belong to one rank of several
            self.seed_for_step(self.step)


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of step `step` (from 0): linear warm-up, then a cosine down to FINAL_RATE of the peak."""
    warmup = int(config.steps * config.warmup)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    return config.learning_rate * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * progress)))


def _make_optimizer(model: GPT, config: TrainConfig, device: torch.device) -> torch.optim.AdamW:
    """AdamW that decays the matrices, and not norms and sinks."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=ADAM_BETAS, fused=fused)


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
