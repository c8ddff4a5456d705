"""Make one page of the results of `flashattn-ext experiments`: DIR/report.html, which needs no other file, and DIR/report.md beside
the pictures. Both begin with the findings.
"""

from __future__ import annotations

import argparse
import base64
import html
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .console import CommandError, are_numbers, require, write_text, writing
from .experiments import EXPERIMENTS
from .experiments.render import shown_table
from .experiments.result import Result

TITLE = "Experiments with fused attention"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="the --out of the experiments")


def run(arguments: argparse.Namespace) -> int:
    jinja2 = require("jinja2")
    directory = Path(arguments.directory)
    results = read_results(directory)
    contents = dict(title=TITLE, machines=machines(results), sections=[_section(of, directory) for of in results])
    languages = {"report.html": dict(autoescape=True), "report.md": dict(finalize=escape, trim_blocks=True)}
    for name, options in languages.items():
        environment = jinja2.Environment(undefined=jinja2.StrictUndefined, **options)
        template = environment.from_string(Path(__file__).with_name(f"{name}.j2").read_text(encoding="utf-8"))
        with writing(str(directory / name)):
            write_text(directory / name, template.render(contents))
        print(directory / name)
    return 0


def read_results(directory: Path) -> list[Result]:
    """The results in a directory, in the order of EXPERIMENTS."""
    results = []
    for path in (directory / f"{name}.json" for name in EXPERIMENTS):
        if path.exists():
            try:
                results.append(Result.from_json(json.loads(path.read_bytes())))
                if results[-1].name != path.stem:
                    raise ValueError("a result of another experiment")
            except OSError as error:
                raise CommandError(f"{path}: {error.strerror}") from None
            except (ValueError, TypeError, KeyError, AttributeError):
                raise CommandError(f"{path} is not a result of this version; run that experiment again") from None
    if not results:
        raise CommandError(f"{directory} has no results; first: flashattn-ext experiments all --out {directory}")
    return results


def machines(results: Iterable[Result]) -> list[tuple[list[str], dict[str, str]]]:
    """Every machine and build that was measured on, with the names of its experiments."""
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for result in results:
        groups.setdefault(tuple(result.machine.items()), []).append(result.name)
    return [(names, dict(machine)) for machine, names in groups.items()]


def _section(result: Result, directory: Path) -> dict[str, Any]:
    """One experiment for the pages: its result, the shown part of its table, and its picture as a data URI, or ""."""
    (header, lines), picture = shown_table(result), directory / f"{result.name}.png"
    encoded = base64.b64encode(picture.read_bytes()).decode() if picture.exists() else ""
    kinds = ["number" if are_numbers(column) else "word" for column in zip(*lines, strict=True)]
    uri = encoded and f"data:image/png;base64,{encoded}"
    return {"result": result, "header": header, "kinds": kinds, "lines": lines, "picture": uri}


def escape(text: str) -> str:
    """Text that Markdown shows unchanged, also inside a table. What a template marks as safe stays as it is."""
    if hasattr(text, "__html__"):
        return text
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", html.escape(" ".join(text.split()), quote=False))
