"""README and docs are correct: examples run, links lead somewhere, and a tool that CI runs checks the commands."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {".py", ".sh", ".h", ".cpp", ".cu", ".cuh"}
DESIGN_PAGES = (
    "architecture", "ascend_emulator", "ascend_kernels", "dataflow", "decoding", "distributed", "sm80", "sm90_backward",
    "sm90_derivatives", "sm90_forward", "sm90_fp8",
)  # fmt: skip
sys.path.insert(0, str(ROOT / "tools"))

import check_reference  # noqa: E402
import documented_commands  # noqa: E402
import draw_masks  # noqa: E402
from helpers import run_python  # noqa: E402

from flashattn_ext_lab.console import INSTALL_EXTRAS  # noqa: E402


@pytest.fixture
def no_ranks_afterwards() -> Iterator[None]:
    """README's blocks initialise a process group of one rank; it is destroyed afterwards."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("page", documented_commands.CODE)
def test_examples_run(page: str, no_ranks_afterwards: None, capsys: pytest.CaptureFixture[str]) -> None:
    """The output of a page's code blocks is in its text blocks."""
    names: dict = {}
    exec(documented_commands.program(page), names)
    out = names["out"] if "out" in names else names["gradients"]()[0]
    assert out.ndim >= 3 and bool(out.isfinite().all())
    shown = re.findall(r"^```text\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)
    assert capsys.readouterr().out == "".join(shown)


def test_no_text_installs_this_package_from_an_index() -> None:
    """No index has it: `flashattn_ext[hf]` would be somebody else's. Packages are named, or the extra of the checkout."""
    folders = ("docs", "examples", "flashattn_ext_lab", "tools", "tests/cli", ".github")
    files = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".md", ".sh", ".yml"}
    ]
    files += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    advice = re.compile(r"pip install[^\n]*\bflashattn[-_]ext\b")
    assert len(files) > 100
    for path in files:
        found = advice.search(path.read_text(encoding="utf-8"))
        assert not found, f"{path.relative_to(ROOT)}: {found[0]}"


def test_the_named_packages_are_those_of_the_extra() -> None:
    extra = re.search(r"^cli = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    names = re.findall(r'"([a-z0-9]+)', extra[1])
    assert INSTALL_EXTRAS.startswith(f"pip install {' '.join(names)} ")


def test_readme_is_one_screen() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120 and len(text.split()) <= 900


def test_reference_has_every_public_name_and_argument() -> None:
    assert len(check_reference.public_names()) > 25
    assert not check_reference.problems()


def test_an_undocumented_argument_is_found() -> None:
    def function(a: int, b: int) -> int:
        """Adds.

        Args:
            a: the first, described
                in two lines.

        Returns:
            a + b.
        """
        return a + b

    found = check_reference.problems_of(
        "function", function, needs_returns=True, needs_raises=True, parameters=["a", "b"]
    )
    assert list(found) == ["function: Args: does not describe b", "function: has no Raises:"]


def test_pictures_of_masks_are_those_of_their_code() -> None:
    drawn = draw_masks.pictures()
    assert len(drawn) > 10
    outdated = [path for path, text in drawn.items() if (ROOT / "docs" / path).read_text(encoding="utf-8") != text]
    assert not outdated, "run tools/draw_masks.py"


def test_every_command_is_checked() -> None:
    commands = documented_commands.all_commands()
    assert len(commands) > 20
    without_rule = [command for command in commands if documented_commands.rule_of(command) is None]
    assert not without_rule, "tools/documented_commands.py has no rule for them"


def test_commands_are_found_in_blocks_and_lines() -> None:
    text = "```\nmake train      # all\nsource <CANN>/x\n```\nSee `make lint`, `q.T`, `bash build.sh -arch 910`.\n```python\nmake\n```\n"
    assert documented_commands.documented(text) == ["make train", "make lint", "bash build.sh -arch 910"]


PAGES = [*ROOT.glob("*.md"), *(page for folder in ("csrc", "docs", "lab") for page in (ROOT / folder).rglob("*.md"))]


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            assert "://" in target or (page.parent / target).exists(), f"{page}: {target}"


@functools.cache
def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page, explicit ones, and entries of the reference."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in re.findall(r"^#+ (.+)$", text, re.M)]
    explicit = set(re.findall(r'<a (?:id|name)="([^"]+)"', text)) | set(re.findall(r"^::: (\S+)$", text, re.M))
    return explicit | {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_anchors_exist() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                named = page.parent / target if target else page
                assert anchor in anchors(named), f"{page}: {target}#{anchor}"


def test_pages_that_the_code_names_exist() -> None:
    folders = ("csrc", "ascend_c", "flashattn_ext", "tests", "tools", "examples")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES]
    named = {
        (path, page)
        for path in sources
        for page in re.findall(r"(?<!/)\b(?:docs|lab)/[\w/]+\.md", path.read_text(encoding="utf-8"))
    }
    assert named and not [f"{path}: {page}" for path, page in named if not (ROOT / page).exists()]


def test_the_recipe_of_an_option_names_every_file_of_the_soft_cap() -> None:
    """By its path, by its name after a folder of its step, or by that folder with a slash at the end."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    recipe = text[text.index("\n## Adding an option") : text.index("\n## Adding a backend")]
    folders = ("csrc", "ascend_c", "flashattn_ext", "flashattn_ext_lab", "tools")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in {*SOURCES, ".def"}]
    named = [path for path in sources if re.search(r"\bsoftcap\b", path.read_text(encoding="utf-8"))]
    whole_folders = re.findall(r"`(csrc/cuda/\w+/|flashattn_ext_lab/)`", recipe)
    missing = []
    for path in (path.relative_to(ROOT) for path in named):
        in_folder = any(str(path).startswith(folder) for folder in whole_folders)
        if not in_folder and not re.search(rf"`(?:[\w/]+/)?{re.escape(path.name)}`", recipe):
            missing.append(str(path))
    assert len(named) > 20 and not missing


@pytest.mark.parametrize("name", DESIGN_PAGES)
def test_a_design_page_is_short(name: str) -> None:
    """Experiments and measurements go to lab/logs."""
    assert (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8").count("\n") <= 150


TELL_POLICY = """
import os, runpy, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"))
            sys.exit()

sys.meta_path.insert(0, Finder())
sys.path.insert(0, os.path.dirname({path!r}))
runpy.run_path({path!r}, run_name="__main__")
"""


@pytest.mark.parametrize("name", ["finetune_transformers", "nanogpt", "on_policy", "sinks"])
@pytest.mark.parametrize(("given", "policy"), [(None, "passive"), ("active", "active")])
def test_threads_of_examples_do_not_spin(
    name: str, given: str | None, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The OpenMP runtime reads its policy when torch is imported: it is set before that, unless the user has set it."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    path = str(ROOT / "examples" / f"{name}.py")
    done = run_python(
        TELL_POLICY.format(path=path), python=sys.executable, **({} if given is None else {"OMP_WAIT_POLICY": given})
    )
    assert done.stdout.split() == [policy], done.stderr
