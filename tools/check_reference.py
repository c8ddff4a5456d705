#!/usr/bin/env python3
"""Checks that docs/reference has an entry for every public name, and that every public docstring has the required sections.

tools/check_reference.py        prints what is missing, and fails if anything is missing

A function describes each of its arguments under "Args:", or says "The other arguments are those of NAME." of a function that does; it
has "Returns:" if it returns something, and "Raises:". So do classes (for their constructor) and class methods. Methods need no
"Raises:". Reviewers check shapes, units and dtypes.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"
sys.path.insert(0, str(ROOT))  # this checkout, not an installed package

# Packages that list their public names, and modules in which those are all that they define without an underscore.
LISTED = ("flashattn_ext", "flashattn_ext.distributed")
# flashattn_ext.integrations.torchtitan is not among them: importing it needs torchtitan.
DEFINED = (
    "flashattn_ext.integrations.transformers", "flashattn_ext.integrations.sdpa", "flashattn_ext.integrations.diffusers",
)  # fmt: skip
# Users only import it.
WHOLE = ("flashattn_ext.integrations.dtensor",)


def public_names() -> dict[str, Any]:
    """Every public object, by its public name."""
    found: dict[str, Any] = {}
    for module in map(importlib.import_module, (*LISTED, *DEFINED)):
        names = module.__all__ if module.__name__ in LISTED else _defined(module)
        found |= {f"{module.__name__}.{name}": getattr(module, name) for name in names}
    return found | {name: importlib.import_module(name) for name in WHOLE}


def _defined(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", "") == module.__name__
    ]


def entries() -> set[str]:
    """The names with an entry in docs/reference."""
    pages = (page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    return {name for page in pages for name in re.findall(r"^::: (\S+)$", page, re.M)}


def section(docstring: str, title: str) -> str:
    """The indented lines under a section title; empty without that section."""
    found = re.search(rf"^{title}:\n((?:    .*\n|\n)*)", docstring + "\n", re.M)
    return found[1] if found else ""


def described(docstring: str) -> set[str]:
    """The arguments that a docstring describes, including arguments of a function that it refers to."""
    names = set(re.findall(r"^    (\w+): \S", section(docstring, "Args"), re.M))
    if other := re.search(r"The other arguments\s+are\s+those\s+of\s+(\w+)\.", docstring):
        function = getattr(importlib.import_module("flashattn_ext"), other[1])
        names |= described(inspect.getdoc(function) or "")
    return names


def _parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def _returns(function: Callable[..., Any]) -> bool:
    return inspect.signature(function).return_annotation not in (None, "None")


def problems_of(
    name: str, value: Any, *, needs_returns: bool, needs_raises: bool, parameters: list[str]
) -> Iterator[str]:
    docstring = inspect.cleandoc(value.__doc__ or "")
    if not docstring:
        yield f"{name}: has no docstring"
        return
    if missing := [each for each in parameters if each not in described(docstring)]:
        yield f"{name}: Args: does not describe {', '.join(missing)}"
    if needs_returns and not section(docstring, "Returns"):
        yield f"{name}: has no Returns:"
    if needs_raises and parameters and not section(docstring, "Raises"):
        yield f"{name}: has no Raises:"


def problems_of_class(name: str, cls: type) -> Iterator[str]:
    has_constructor = "__init__" in vars(cls)
    parameters = _parameters(cls) if has_constructor and not _is_made_by_the_package(cls) else []
    is_record = hasattr(cls, "__dataclass_fields__")
    yield from problems_of(name, cls, needs_returns=False, needs_raises=not is_record, parameters=parameters)
    for member, value in vars(cls).items():
        if member.startswith("_") or (
            not getattr(value, "__doc__", None) and any(hasattr(b, member) for b in cls.__bases__)
        ):
            continue  # an override without a docstring is documented in its base class
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if isinstance(value, property):
            yield from problems_of(f"{name}.{member}", value, needs_returns=False, needs_raises=False, parameters=[])
        elif inspect.isfunction(function):
            yield from problems_of(
                f"{name}.{member}",
                function,
                needs_returns=_returns(function),
                needs_raises=isinstance(value, classmethod),
                parameters=_parameters(function),
            )


def _is_made_by_the_package(cls: type) -> bool:
    return "Not made by users" in (cls.__doc__ or "")


def problems() -> list[str]:
    """What is missing, one sentence each."""
    names, found = public_names(), entries()
    missing = [f"{name}: has no entry in docs/reference" for name in names if name not in found]
    unknown = [f"docs/reference: {name} is not a public name" for name in sorted(found - set(names))]
    of_names = []
    for name, value in names.items():
        if inspect.isclass(value):
            of_names += problems_of_class(name, value)
        elif callable(value):
            of_names += problems_of(
                name, value, needs_returns=_returns(value), needs_raises=True, parameters=_parameters(value)
            )
        elif not value.__doc__:
            of_names.append(f"{name}: has no docstring")
    return missing + unknown + of_names


if __name__ == "__main__":
    sys.exit("\n".join(problems()) or 0)
