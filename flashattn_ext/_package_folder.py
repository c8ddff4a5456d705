"""Chooses the folder that this package runs from, in a checkout from which pip has also installed it.

Python looks in the current folder first, so a checkout's `flashattn_ext/` hides the package that `pip install .` has
built and installed elsewhere. If the sources were not built in place, the installed package runs.
"""

from __future__ import annotations

import re
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

# Files that a build writes into the package.
GENERATED = ("_build_config.py", "_ascend_config.py")


def running_folder(found: str) -> str:
    """The folder to load the modules of this package from: `found`, where Python found it, or an installed one if only that is built.

    Raises:
        RuntimeError: only an installed package is built, but from other sources; names both and what to do.
    """
    here = Path(found)
    if _is_built(here):
        return found
    others = (Path(entry or ".", here.name) for entry in sys.path)
    installed = next((folder for folder in others if folder.resolve() != here.resolve() and _is_built(folder)), None)
    if installed is None:
        return found  # _build.load() raises the error
    if different := _different_source(here, installed):
        raise RuntimeError(
            f"flashattn_ext was imported from {here}, which is not built, and the package installed in {installed} was made "
            f"from other sources ({different} differs); install these with: pip install {here.parent}, or start Python "
            "from another folder to use the installed one"
        )
    return str(installed)


def _is_built(folder: Path) -> bool:
    """Whether the folder has a compiled module for this Python and this torch."""
    if not any((folder / f"_C{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
        return False
    try:
        import torch

        config = (folder / GENERATED[0]).read_text(encoding="utf-8")
    except (ImportError, OSError):
        return False
    built_for = re.search('BUILT_FOR_TORCH = "(.*)"', config)
    return built_for is not None and same_series(built_for[1], torch.__version__)


def same_series(a: str, b: str) -> bool:
    """Whether a library that was compiled for torch `a` fits torch `b`."""
    return a.split(".")[:2] == b.split(".")[:2]


def _different_source(a: Path, b: Path) -> str:
    """The first Python file that is missing in one folder or differs between them; empty if there is none."""
    names = {str(path.relative_to(folder)) for folder in (a, b) for path in folder.rglob("*.py")}
    for name in sorted(names - set(GENERATED)):
        if not ((a / name).exists() and (b / name).exists() and (a / name).read_bytes() == (b / name).read_bytes()):
            return name
    return ""
