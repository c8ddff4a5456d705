"""Experiments with sizes that take moments, and a made-up result."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import ModuleType
from typing import Any

from flashattn_ext_lab.experiments.harness import WHOLE
from flashattn_ext_lab.experiments.result import Column, Comparison, Plot, Result

TINY: dict[str, dict[str, Any]] = {
    "matmul": dict(n=(32, 64), copy_mib=(1,)),
    "scaling": dict(B=1, H=2, S=(32, 64), D=16, dtype="fp32"),
    "causal": dict(B=1, H=2, S=64, D=16, dtype="fp32"),
    "layout": dict(shapes=((1, 2, 32, 16), (2, 1, 48, 24)), dtype="fp32"),
    "alignment": dict(B=1, H=1, S=32, dtype="fp32"),
    "dtypes": dict(B=1, H=2, S=64, D=16),
    "memory": dict(B=1, H=1, S=(1024, 2048), D=64, dtype="fp32"),
    "traffic": dict(B=2, H=3, S=128, D=16, dtype="fp32"),
    "scores": dict(B=1, H=4, S=(512, 1024), D=128, dtype="fp32"),
    "masks": dict(B=1, H=2, S=1024, D=64, dtype="fp32"),
    "tiles": dict(B=1, H=1, S=200, D=16, dtype="fp32", tiles=(64, 128)),
    "profile": dict(B=1, H=2, S=64, D=16, dtype="fp32"),
    "llama": dict(B=1, S=64, heads=2, D=16, mlp=64, layers=2, rounds=2, dtype="fp32"),
    "models": dict(
        train=(("Llama", 48, 1, 1), ("gpt-oss", 48, 1, 2), ("gpt-oss D256", 48, 3, 2)),
        generate=(("Gemma 2", 2, 20, "dynamic", 1), ("Llama", 2, 20, "static", 1)),
        new_tokens=4,
        rounds=2,
        vocabulary=64,
        shrink=16,
        dtype="fp32",
    ),
    "dropout": dict(layers=1, width=16, heads=2, context=32, batch=2, steps=6, validations=2, seeds=2, p=(0.0, 0.25)),
    "smooth": dict(layers=1, width=16, heads=2, context=32, batch=2, steps=12, validations=6, seeds=2),
}
PICTURES = (
    "matmul",
    "scaling",
    "memory",
    "scores",
    "masks",
    "tiles",
    "profile",
    "dropout",
    "smooth",
)  # curves and a timeline
NASTY = "<script>alert('1')</script> & \"quoted\" | *pipe*\nnew line"
PNG = b"\x89PNG\r\n\x1a\n"


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"flashattn_ext_lab.experiments.{name}")


def tiny_sizes(name: str) -> Any:
    return module_of(name).SIZES[WHOLE].replace(**TINY[name])


def a_result(**changes: Any) -> Result:
    result = Result(
        "matmul",
        "a title",
        [Column("n"), Column("time", "ms", ".2f"), Column("remark")],
        [[1, 2.5, ""], [2, None, "why"]],
        notes=["a note"],
        comparisons=[Comparison("speed", "2x", "3x")],
        plot=Plot("line", "n", "ms", {"time": [(1, 2.5)]}),
        machine={"device": "a machine"},
        command="a command",
    )
    return replace(result, **changes)
