"""`train --packing documents`: a document packed into a row is computed independently of the others."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from flashattn_ext_lab import data, model, trainer
from flashattn_ext_lab.data import NOT_PREDICTED
from flashattn_ext_lab.main import main

CONTEXT = 48
LENGTHS = ((20, 1, 27), (48,), (5, 43))  # of the documents in each row
TINY = ["--device=cpu", "--context=512", "--batch-size=2", "--layers=1", "--width=32", "--heads=2", "--kv-heads=1"]
TINY += ["--checkpoint-every=2", "--validate-every=4", "--sample-bytes=4", "--steps=4"]


@pytest.fixture(autouse=True)
def short_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MAX_VALIDATION_WINDOWS", 3)


@pytest.fixture
def corpus() -> data.Corpus:
    pytest.importorskip("pydoc_data.topics")
    return data.load_corpus(None, CONTEXT)


def packed_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, targets and documents [3, CONTEXT]; the last byte of a document has no target."""
    tokens = torch.randint(256, (len(LENGTHS), CONTEXT), generator=torch.Generator().manual_seed(0))
    documents = torch.stack(
        [torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)) for lengths in LENGTHS]
    )
    targets = tokens.roll(-1, 1)
    targets[:, :-1][documents[:, 1:] != documents[:, :-1]] = NOT_PREDICTED
    targets[:, -1] = NOT_PREDICTED
    return tokens, targets, documents


def separate_rows(tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every document in a row of its own, padded on the right."""
    pieces = [
        (of_tokens, of_targets)
        for row_tokens, row_targets, lengths in zip(tokens, targets, LENGTHS, strict=True)
        for of_tokens, of_targets in zip(row_tokens.split(lengths), row_targets.split(lengths), strict=True)
    ]
    alone = torch.zeros(len(pieces), CONTEXT, dtype=torch.long), torch.full((len(pieces), CONTEXT), NOT_PREDICTED)
    for row, piece in enumerate(pieces):
        for into, values in zip(alone, piece, strict=True):
            into[row, : len(values)] = values
    return alone


@pytest.mark.parametrize("softmax", model.SOFTMAX)
@pytest.mark.parametrize("attention", model.ATTENTION)
def test_packed_documents_have_the_loss_of_separate_rows(attention: str, softmax: str) -> None:
    torch.manual_seed(0)
    gpt = model.GPT(model.ModelConfig(2, 32, 4, 2, 0.0, softmax, attention), CONTEXT)
    tokens, targets, documents = packed_rows()
    packed = model.cross_entropy(gpt(tokens, documents), targets)
    separate, of_separate = separate_rows(tokens, targets)
    alone = model.cross_entropy(gpt(separate), of_separate)
    mixed = model.cross_entropy(gpt(tokens), targets)
    torch.testing.assert_close(packed, alone, rtol=2e-6, atol=0)
    assert abs(mixed.item() - alone.item()) > 1e-4  # without the mask the loss differs
    gradients = [torch.autograd.grad(loss, tuple(gpt.parameters())) for loss in (packed, alone)]
    for of_packed, of_alone in zip(*gradients, strict=True):
        torch.testing.assert_close(of_packed, of_alone, rtol=1e-4, atol=1e-6)


def test_positions_restart_with_each_document() -> None:
    documents = torch.tensor([[3, 3, 3, 1, 1, 3], [0, 1, 2, 3, 4, 5]])
    assert model.positions(documents).tolist() == [[0, 1, 2, 0, 1, 0], [0] * 6]


def test_batches_contain_their_documents(corpus: data.Corpus) -> None:
    """A topic ends with a line feed, and no target is the first byte of the next one."""
    batch = data.BatchSampler(corpus.train, 64, 512, 0, corpus.train_documents).next_batch(torch.device("cpu"))
    plain = data.BatchSampler(corpus.train, 64, 512, 0).next_batch(torch.device("cpu"))
    assert torch.equal(batch.tokens, plain.tokens) and plain.documents is None
    begins = batch.documents[:, 1:] != batch.documents[:, :-1]
    assert begins.any() and (batch.tokens[:, :-1][begins] == ord("\n")).all()
    assert torch.equal(batch.targets[:, :-1] == NOT_PREDICTED, begins)
    predicted = batch.targets != NOT_PREDICTED
    assert torch.equal(batch.targets[predicted], plain.targets[predicted])
    assert len(corpus.train_documents) == len(corpus.train)
    assert len(corpus.validation_documents) == len(corpus.validation)
    assert corpus.train_documents.unique().numel() > 50
    held_out = data.validation_batches(corpus.validation, 2, 512, corpus.validation_documents)
    assert [len(part.documents) for part in held_out] == [2, 1]


def test_a_packed_run_resumes_to_the_same_bits(
    tmp_path: Path, corpus: data.Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = ["train", *TINY, "--packing", "documents"]
    assert main([*options, "--out", str(whole)]) == 0
    one_step = trainer.Trainer.one_step

    def interrupted(self: trainer.Trainer) -> None:
        if self.step == 2:
            signal.raise_signal(signal.SIGINT)
        one_step(self)

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "one_step", interrupted)
        assert main([*options, "--out", str(parts)]) == 128 + signal.SIGINT
    assert main([*options, "--out", str(parts)]) == 0
    states = [torch.load(out / "checkpoint.pt", weights_only=True) for out in (whole, parts)]
    assert states[0]["train_losses"] == states[1]["train_losses"] and len(states[0]["train_losses"]) == 4
    assert all(torch.equal(states[1]["model"][name], weight) for name, weight in states[0]["model"].items())
    assert states[0]["config"]["packing"] == "documents"


def test_earlier_runs_are_windows(tmp_path: Path, corpus: data.Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint without a packing resumes as windows, and not as documents."""
    options = ["train", *TINY, "--attention", "unfused", "--out", str(tmp_path)]
    assert main(options) == 0
    path = tmp_path / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    assert state["config"].pop("packing") == "windows"
    torch.save(state, path)
    assert main(options) == 0
    assert "resuming" in capsys.readouterr().out
    assert main([*options, "--packing", "documents"]) == 2
    assert "packing windows -> documents" in capsys.readouterr().err


def test_a_file_has_no_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("text " * 1000)
    assert main(["train", "--packing", "documents", "--text", str(tmp_path / "text"), "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "--packing documents got --text" in error and error.count("\n") == 1
