"""A C++ compiler for tools/documented_commands.py, which builds the checkout once more, from its source distribution.

    python tools/reused_objects.py CHECKOUT FOLDER COMPILER ARGUMENTS...

For a source in a tree below FOLDER it copies the object that the build of CHECKOUT has made of the same text with the same options, and
writes the list of its headers. Both sources go through the preprocessor, so that a file that the tree lacks is an error. Everything else
goes to the compiler, with -O1: nothing that runs in FOLDER is measured.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

# Options that decide what an object contains. Include folders differ, and the preprocessor shows what they bring.
DECIDES = re.compile(r"-[DUOfm]|-std=")


def preprocessed(command: list[str]) -> str:
    return subprocess.run([*command, "-E", "-P"], check=True, stdout=subprocess.PIPE, text=True).stdout


def without(command: list[str], *options: str) -> list[str]:
    """The command without these options and the word after each."""
    left_out = {n + step for n, word in enumerate(command) if word in options for step in (0, 1)}
    return [word for n, word in enumerate(command) if n not in left_out]


def is_newer_than_sources(built: Path, checkout: Path) -> bool:
    sources = (path for path in (checkout / "csrc").rglob("*") if path.suffix in (".cpp", ".h", ".def"))
    return all(path.stat().st_mtime <= built.stat().st_mtime for path in sources)


def reused(checkout: Path, folder: Path, command: list[str]) -> bool:
    """Whether the object that the command makes is now a copy of the checkout's."""
    sources = [Path(word) for word in command if word.endswith(".cpp") and Path(word).is_relative_to(folder)]
    if len(sources) != 1 or "-c" not in command or "-MF" not in command:
        return False
    tree = folder / sources[0].relative_to(folder).parts[0]
    target, headers = (Path(command[command.index(option) + 1]) for option in ("-o", "-MF"))
    if not target.is_relative_to(tree):
        return False
    built = checkout / target.relative_to(tree)
    rules = next((path for path in (each / "build.ninja" for each in built.parents) if path.exists()), None)
    if rules is None or not built.exists() or not is_newer_than_sources(built, checkout):
        return False
    known = set(rules.read_text().split())
    if not all(word in known for word in command if DECIDES.match(word)):
        return False
    bare = [word for word in without(command, "-o", "-MF") if word not in ("-c", "-MMD")]
    text = preprocessed([*bare, "-MMD", "-MF", str(headers), "-MT", str(target)])
    if text.replace(str(tree), str(checkout)) != preprocessed([w.replace(str(tree), str(checkout)) for w in bare]):
        return False
    shutil.copyfile(built, target)
    return True


if __name__ == "__main__":
    try:
        if reused(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]):
            sys.exit()
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
    os.execvp(sys.argv[3], [*sys.argv[3:], "-O1"])
