"""`report`: the contents of the page and the Markdown, also for broken results."""

from __future__ import annotations

import base64
import html
import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from tiny_experiments import NASTY, PICTURES, a_result

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

import flashattn_ext
from flashattn_ext_lab import report
from flashattn_ext_lab.experiments import render
from flashattn_ext_lab.experiments.result import Comparison, Result
from flashattn_ext_lab.main import main


class Page(HTMLParser):
    """Tables as lists of rows of texts, all references, the names of all tags, and the targets of links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.references: list[str] = []
        self.tags: list[str] = []
        self.ids: set[str] = set()
        self._in_cell = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids |= {value or "" for name, value in attributes if name == "id"}
        self.references += [value or "" for name, value in attributes if name in ("src", "href", "srcset", "data")]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.tables[-1][-1][-1] += data


def test_html_has_every_table_and_picture(out: Path, results: dict[str, Result]) -> None:
    text = (out / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    for name, result in results.items():
        header, lines = render.shown_table(result)
        assert [header, *lines] in page.tables, name
        if name in PICTURES:
            picture = base64.b64encode((out / f"{name}.png").read_bytes()).decode()
            assert f"data:image/png;base64,{picture}" in page.references
    assert ["torch", torch.__version__] in page.tables[0]
    assert ["flashattn_ext", flashattn_ext.__version__] in page.tables[0]


def test_html_loads_nothing(out: Path) -> None:
    text = (out / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    loaded = [reference for reference in page.references if not reference.startswith("#")]
    assert len(loaded) == len(PICTURES)
    assert all(reference.startswith("data:image/png;base64,") for reference in loaded)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert not any(word in text for word in ("http:", "https:", "url(", "@import"))


def test_html_begins_with_the_findings_and_links_them_to_the_tables(out: Path, results: dict[str, Result]) -> None:
    text = (out / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    places = {reference.removeprefix("#") for reference in page.references if reference.startswith("#")}
    assert places <= page.ids
    for name, result in results.items():
        assert {name, f"{name}-table"} <= places
        assert text.index(html.escape(result.found, quote=False).replace("'", "&#39;")) < text.index("<table")


def test_markdown_begins_with_the_findings(out: Path, results: dict[str, Result]) -> None:
    opening, *sections = (out / "report.md").read_text(encoding="utf-8").split("\n## ")
    for (name, result), section in zip(results.items(), sections, strict=True):
        assert f"- [{name}](#{name}): {report.escape(result.found)}\n" in opening
        assert section.startswith(f"{name}: ")
    assert (out / "report.md").read_text(encoding="utf-8").count('<a id="') == len(results)


class Nesting(HTMLParser):
    """Raises where a tag is closed that is not the innermost open one."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img"):  # these have no end tag
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_well_formed(out: Path) -> None:
    nesting = Nesting()
    nesting.feed((out / "report.html").read_text(encoding="utf-8"))
    nesting.close()
    assert not nesting.open


BROWSER = next(filter(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome")), None)

if BROWSER:  # where there is one

    def test_browser_draws_the_report(out: Path, tmp_path: Path) -> None:
        pyplot = pytest.importorskip("matplotlib.pyplot")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        places = [f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={tmp_path / 'shot.png'}"]
        page = (out / "report.html").as_uri()
        subprocess.run([BROWSER, *options, *places, "--window-size=1200,2400", page], check=True, timeout=120)
        shot = pyplot.imread(tmp_path / "shot.png")[..., :3]
        assert shot.shape == (2400, 1200, 3)
        assert (shot.max(axis=-1) - shot.min(axis=-1) > 0.3).sum() > 1000  # curves of the first pictures
        for part in (shot[:1200], shot[1200:]):
            assert 0.005 < (part.max(axis=-1) < 0.5).mean() < 0.3  # dark text on a bright page


def test_markdown_has_every_table_and_picture(out: Path, results: dict[str, Result]) -> None:
    text = (out / "report.md").read_text(encoding="utf-8")
    for name, result in results.items():
        assert (f"![{name}]({name}.png)" in text) == (name in PICTURES) and f"`{result.command}`" in text
        for line in render.shown_table(result)[1]:
            cells = [report.escape(cell) for cell in line]
            assert "| " + " | ".join(cells) + " |" in text


def test_nasty_strings_are_escaped(tmp_path: Path) -> None:
    result = a_result(
        title=NASTY,
        rows=[[1, 1.0, NASTY]],
        notes=[NASTY],
        comparisons=[Comparison(NASTY, NASTY, NASTY)],
        machine={NASTY: NASTY},
        command=NASTY,
        error=NASTY,
    )
    render.write_json(result, tmp_path / "matmul.json")
    render.write_plot(result, tmp_path / "matmul.png")
    assert main(["report", str(tmp_path)]) == 0
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "script" not in page.tags and [["figure", "article", "here"], [NASTY] * 3] in page.tables
    lines = (tmp_path / "report.md").read_text(encoding="utf-8").splitlines()
    [row] = [line for line in lines if line.startswith("| 1 | ")]
    assert "<script>" not in row and row.replace("\\|", "").count("|") == 4


def test_machines_are_grouped() -> None:
    results = [a_result(name=name, machine={"device": device}) for name, device in zip("abc", "xyx", strict=True)]
    assert report.machines(results) == [(["a", "c"], {"device": "x"}), (["b"], {"device": "y"})]


@pytest.mark.parametrize(
    "content",
    [
        None,
        "{",
        "[]",
        '{"format": "other"}',
        '{"format": "flashattn_ext experiment 1"}',
        json.dumps({**a_result().to_json(), "rows": [[1]]}),
        json.dumps({**a_result().to_json(), "rows": [[1, 2.0, {}]]}),
        json.dumps({**a_result().to_json(), "notes": [1]}),
        json.dumps({**a_result().to_json(), "machine": {"device": None}}),
    ],
)
def test_report_without_usable_results(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None) -> None:
    if content is not None:
        (tmp_path / "matmul.json").write_text(content)
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("flashattn-ext report: ") and error.count("\n") == 1
    assert ("has no results; first: flashattn-ext experiments" if content is None else "not a result") in error


def test_report_keeps_results_without_pictures(out: Path, tmp_path: Path) -> None:
    shutil.copy(out / "matmul.json", tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    references = Page((tmp_path / "report.html").read_text(encoding="utf-8")).references
    assert references and all(reference.startswith("#") for reference in references)
    assert "![" not in (tmp_path / "report.md").read_text(encoding="utf-8")
