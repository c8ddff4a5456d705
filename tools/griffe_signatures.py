"""Extension of griffe (mkdocs.yml): the API reference shows functions without `*more` and `**unknown` (flashattn_ext/names.py)."""

from __future__ import annotations

from typing import Any

import griffe


class WithoutCatchAlls(griffe.Extension):
    def on_function(self, *, func: griffe.Function, **_others: Any) -> None:
        func.parameters = griffe.Parameters(*(p for p in func.parameters if p.name not in ("more", "unknown")))
