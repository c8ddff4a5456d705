"""Jobs of test_training.py: the training script's steps over several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from flashattn_ext_lab.data import load_corpus
from flashattn_ext_lab.model import ModelConfig
from flashattn_ext_lab.ranks import Layout, layout_of
from flashattn_ext_lab.trainer import TrainConfig, Trainer

CONTEXT = 192  # four ranks that share a row have 64, 64, 64 and 0 bytes of it


def new_trainer(directory: Path, text: str, packing: str, layout: Layout, steps: int = 6) -> Trainer:
    model = ModelConfig(layers=2, width=32, heads=4, kv_heads=2, dropout=0.0, softmax="sink", attention="flashattn")
    config = TrainConfig(
        model=model, text=text or None, context=CONTEXT, dtype="float32", seed=1, steps=steps, batch_size=4, learning_rate=4e-3, warmup=0.1,
        weight_decay=0.1, clip=1.0, validate_every=3 if text else 6, packing=packing,
    )  # fmt: skip
    corpus = load_corpus(text or None, CONTEXT)
    directory.mkdir(exist_ok=True)
    return Trainer(config, corpus, torch.device("cpu"), directory, Console(quiet=True), layout)


def train(directory: str, text: str, packing: str, context_parallel: int, until: int | None) -> None:
    """Resumes the run in the directory, trains to its end or until a step, and saves."""
    layout = layout_of(context_parallel, 4, torch.device("cpu"))
    assert layout.ranks == dist.get_world_size() and layout.data_ranks * context_parallel == layout.ranks
    trainer = new_trainer(Path(directory), text, packing, layout)
    trainer.resume(restart=False)
    while trainer.step < (until or trainer.config.steps):
        trainer.one_step()
        trainer.validate_when_due()
    trainer.save()
    dist.barrier()  # rank 0 has saved when the job is done


def layouts_are_checked(_device: str) -> None:
    from flashattn_ext_lab.console import CommandError

    wrong: list[tuple[int, int, str]] = [
        (3, 4, "accepted are divisors of the 4 ranks"),
        (1, 6, "accepted are multiples of 4"),
    ]
    for context_parallel, batch_size, message in wrong:
        try:
            layout_of(context_parallel, batch_size, torch.device("cpu"))
        except CommandError as error:
            assert message in str(error), error
        else:
            raise AssertionError(message)


def dropout_differs_between_ranks(directory: str, text: str) -> None:
    layout = layout_of(2, 4, torch.device("cpu"))
    new_trainer(Path(directory), text, "windows", layout)
    drawn: list[Any] = [None] * layout.ranks
    dist.all_gather_object(drawn, torch.rand(1).item())
    assert len(set(drawn)) == layout.ranks
