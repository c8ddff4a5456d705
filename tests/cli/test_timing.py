"""How candidates are timed: interleaved, with fresh inputs, in bursts on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from flashattn_ext_lab import timing
from flashattn_ext_lab.experiments import harness as shared
from flashattn_ext_lab.experiments.harness import Context
from flashattn_ext_lab.timing import Timing, time_interleaved


def test_inputs_are_fresh_every_round() -> None:
    context = Context(torch.device("cpu"), quick=True)
    x = context.randn(8, dtype="bf16").requires_grad_()
    seen = []
    timings = context.measure({"a": lambda: seen.append(x.detach().float().sum().item())}, (x,)).timings
    assert len(seen) == timings["a"].rounds + 1  # the warm-up
    assert len(set(seen)) > len(seen) // 2


def test_a_failure_drops_out_of_the_rounds() -> None:
    order: list[str] = []

    def call(name: str) -> None:
        order.append(name)
        if (name == "b" and order.count("b") == 2) or name == "d":
            raise ValueError("no more\nof this")

    failures: dict[str, str] = {}
    calls = {name: lambda name=name: call(name) for name in "abcd"}
    timings = time_interleaved(calls, budget_s=0, min_rounds=2, clock=lambda call: call() or 0.5, failures=failures)
    assert "".join(order) == "abcd" + "abc" + "ca"
    assert failures == {"b": "ValueError: no more", "d": "ValueError: no more"}
    assert timings == {name: Timing(0.5, 0.5, 0.5, 2) for name in "ac"}
    with pytest.raises(ValueError, match="no more"):
        time_interleaved({"d": calls["d"]}, budget_s=0, min_rounds=1)
    assert time_interleaved({"d": calls["d"]}, budget_s=9, min_rounds=1, failures=failures) == {}


@pytest.mark.parametrize(("ms", "launches"), [(2.0, 3), (9.0, 1)])  # 5 ms are a burst
def test_calls_on_a_gpu_are_timed_in_bursts(ms: float, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bursts: list[int] = []

    def burst_ms(call: object, launches: int) -> float:
        bursts.append(launches)
        return ms * launches

    monkeypatch.setattr(timing, "burst_ms", burst_ms)
    monkeypatch.setattr(shared, "synchronize", lambda device: None)
    times = Context(torch.device("cuda"), quick=True).measure({"a": lambda: None}, ())
    assert times.timings["a"].median_s == pytest.approx(ms * 1e-3)
    assert bursts == [2, *[launches] * timing.QUICK_ROUNDS]
