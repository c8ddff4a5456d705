"""The library's modules import each other in one direction: docs/architecture.md draws it."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "flashattn_ext"
FILES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
# The package itself composes its modules: it is imported by none of them.
MODULES = {name: path for name, path in FILES.items() if name not in ("__init__", "__main__")}


def imported(module: str) -> Iterator[str]:
    """The modules of the library that one imports, also inside functions and for type checkers."""
    package = module.split(".")[:-1]
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = [*package[: len(package) - node.level + 1], *(node.module.split(".") if node.module else [])]
        for name in node.names:
            found = [part for part in (".".join([*base, name.name]), ".".join(base)) if part in MODULES]
            yield from found[:1]


def test_no_module_imports_itself_through_others() -> None:
    graph = {module: set(imported(module)) for module in MODULES}
    assert graph["calls"] >= {"arguments", "mask", "options"}  # imports are found
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"these import each other: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize("folder", ["integrations", "distributed"])
def test_the_library_imports_none_of_its(folder: str) -> None:
    importers = {
        f"{module} imports {name}"
        for module in MODULES
        if not module.startswith(f"{folder}.")
        for name in imported(module)
        if name.startswith(f"{folder}.") and not (folder == "distributed" and module.startswith("integrations."))
    }
    assert not importers


def test_distributed_reads_no_private_name_of_the_library() -> None:
    private = []
    for module, path in MODULES.items():
        if not module.startswith("distributed."):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        own = {
            alias.asname or alias.name: node.level
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        private += [f"{module}: {name}" for name, level in own.items() if level == 2 and name.startswith("_")]
        private += [
            f"{module}: {ast.unparse(node)}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and isinstance(node.value, ast.Name)
            if own.get(node.value.id) == 2 and node.value.id in MODULES
        ]
    assert not private
