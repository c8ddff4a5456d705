"""Make one page of the results of `flashattn-ext experiments`: DIR/report.html, which needs no other
file, and DIR/report.md beside the pictures. Both open with what was found.
"""

from __future__ import annotations

import argparse
import base64
import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from .console import CommandError, markdown_table, require
from .experiments import EXPERIMENTS
from .experiments.findings import finding
from .experiments.render import is_numeric, shown_columns
from .experiments.result import Result
from .files import write_text

TITLE = "Experiments with fused attention"
TEMPLATE = Path(__file__).with_name("report.html.j2")
COMPARISON_HEADER = ("figure", "article", "here")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="the --out of the experiments")


def run(arguments: argparse.Namespace) -> int:
    jinja2 = require("jinja2")
    directory = Path(arguments.directory)
    results = read_results(directory)
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
        TEMPLATE.read_text(encoding="utf-8")
    )
    pages = {
        "report.html": template.render(title=TITLE, machines=machines(results), sections=sections(results, directory)),
        "report.md": markdown(results, directory),
    }
    for name, text in pages.items():
        try:
            write_text(directory / name, text)
        except OSError as error:
            raise CommandError(f"{directory / name}: cannot write there ({error.strerror})") from None
        print(directory / name)
    return 0


def read_results(directory: Path) -> list[Result]:
    """The results in a directory, in the order of EXPERIMENTS."""
    results = [_read(path) for name in EXPERIMENTS if (path := directory / f"{name}.json").exists()]
    if not results:
        raise CommandError(f"{directory} has no results; first: flashattn-ext experiments all --out {directory}")
    return results


def _read(path: Path) -> Result:
    try:
        result = Result.from_json(json.loads(path.read_bytes()))
        if result.name != path.stem:
            raise ValueError("a result of another experiment")
        return result
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CommandError(f"{path} is not a result of this version; run that experiment again") from None


def machines(results: Iterable[Result]) -> list[tuple[list[str], dict[str, str]]]:
    """Every machine and build that was measured on, with the names of its experiments."""
    groups: list[tuple[list[str], dict[str, str]]] = []
    for result in results:
        for names, machine in groups:
            if machine == result.machine:
                names.append(result.name)
                break
        else:
            groups.append(([result.name], result.machine))
    return groups


def sections(results: Iterable[Result], directory: Path) -> list[dict[str, object]]:
    """What the HTML template shows of each experiment."""
    return [
        {
            "result": result,
            "header": _header(result),
            "kinds": ["number" if is_numeric(result, index) else "word" for index in shown_columns(result)],
            "lines": _lines(result),
            "finding": finding(result),
            "picture": _data_uri(directory / f"{result.name}.png"),
        }
        for result in results
    ]


def _header(result: Result) -> list[str]:
    return [result.columns[index].heading for index in shown_columns(result)]


def _lines(result: Result) -> list[list[str]]:
    return [[line[index] for index in shown_columns(result)] for line in result.texts()]


def _data_uri(picture: Path) -> str:
    """The picture itself; empty if there is none."""
    if not picture.exists():
        return ""
    return "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()


# Markdown


def markdown(results: Sequence[Result], directory: Path) -> str:
    parts = [f"# {TITLE}", ""]
    parts += [f"- [{result.name}](#{result.name}): {escape(finding(result))}" for result in results]
    parts.append("")
    for names, machine in machines(results):
        parts.append(_table(f"Measured: {', '.join(names)}", ("machine", ""), machine.items()))
    for result in results:
        parts += _markdown_section(result, has_picture=(directory / f"{result.name}.png").exists())
    return "\n".join(parts)


def _markdown_section(result: Result, *, has_picture: bool) -> list[str]:
    parts = [
        f'<a id="{result.name}"></a>',
        "",
        f"## {result.name}: {escape(result.title)}",
        "",
        f"`{result.command}`",
        "",
    ]
    if result.error:
        parts += [f"**Failed**: {escape(result.error)}", ""]
    if has_picture:
        parts += [f"![{result.name}]({result.name}.png)", ""]
    if result.rows:
        parts.append(_table("", _header(result), _lines(result)))
    if result.comparisons:
        lines = [(comparison.what, comparison.article, comparison.ours) for comparison in result.comparisons]
        parts.append(_table("Beside the article:", COMPARISON_HEADER, lines))
    return [*parts, *(f"- {escape(note)}" for note in result.notes), ""]


def _table(title: str, header: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    escaped = [[escape(text) for text in line] for line in lines]
    return markdown_table(escape(title), [escape(text) for text in header], escaped).lstrip("\n")


def escape(text: str) -> str:
    """Text that Markdown shows as it is, also inside a table."""
    text = html.escape(" ".join(text.split()), quote=False)
    for character in "\\`*_[]|":
        text = text.replace(character, "\\" + character)
    return text
