"""Extension of griffe (mkdocs.yml): the API reference shows the signatures that help() shows.

A function without `*more` and `**unknown` (flashattn_ext/names.py), and with every option in place of **options where the decorator
`lists` of flashattn_ext/calls.py has listed them. griffe reads sources; those options are only known to the imported package.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import griffe

_CATCH_ALLS = ("more", "unknown")


class SignaturesOfHelp(griffe.Extension):
    def on_function(self, *, func: griffe.Function, **_others: Any) -> None:
        if any("lists" in str(decorator.value) for decorator in func.decorators):
            shown = inspect.signature(getattr(importlib.import_module(func.module.path), func.name)).parameters.values()
            func.parameters = griffe.Parameters(*(_parameter(p, func.parameters) for p in shown))
        else:
            func.parameters = griffe.Parameters(*(p for p in func.parameters if p.name not in _CATCH_ALLS))


def _parameter(shown: inspect.Parameter, own: griffe.Parameters) -> griffe.Parameter:
    if shown.name in own:
        return own[shown.name]
    return griffe.Parameter(
        shown.name,
        annotation=shown.annotation,
        kind=griffe.ParameterKind.keyword_only,
        default=repr(shown.default),
    )
