"""What README and docs show is so: examples run, links lead somewhere, commands are checked by a tool that CI runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
sys.path.insert(0, str(ROOT / "tools"))

import documented_commands  # noqa: E402


@pytest.fixture(scope="module")
def examples() -> dict:
    """The names that README's Python blocks leave."""
    names: dict = {}
    for block in re.findall(r"^```python\n(.*?)^```", README, re.M | re.S):
        exec(block, names)
    return names


def test_examples_run(examples: dict) -> None:
    assert examples["out"].shape == examples["q"].shape and bool(examples["out"].isfinite().all())


def test_every_command_is_checked() -> None:
    commands = documented_commands.all_commands()
    assert len(commands) > 20
    without_rule = [command for command in commands if documented_commands.rule_of(command) is None]
    assert not without_rule, "tools/documented_commands.py has no rule for them"


def test_commands_are_found_in_blocks_and_lines() -> None:
    text = "```\nmake train      # all\nsource <CANN>/x\n```\nSee `make lint`, `q.T`, `bash build.sh -arch 910`.\n```python\nmake\n```\n"
    assert documented_commands.documented(text) == ["make train", "make lint", "bash build.sh -arch 910"]


def test_links_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            assert "://" in target or (page.parent / target).exists(), f"{page}: {target}"
