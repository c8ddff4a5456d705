"""Files that are replaced atomically, and text that is UTF-8 in every locale."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .console import CommandError


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path` and moves it there when the block succeeds.

    A reader of `path` sees the old file or the new one, even if the process is killed in between. An OSError from the block names
    `path` where it names no file.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replaces the file at once. A character that UTF-8 cannot encode (for example a lone surrogate of a file name) is written as an escape."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(text.encode(errors="backslashreplace"))


def make_directory(name: str) -> Path:
    """The directory of `--out name`, created if necessary, in which files can be written."""
    directory = Path(name)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _probe(directory)
    except OSError as error:
        raise CommandError(f"--out {name}: cannot write there ({error.strerror}); choose another directory") from None
    return directory


def writable_file(option: str, name: str) -> Path:
    """The path of `option name`, where a file can be written: checked before the work whose result goes there."""
    path = Path(name)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        _probe(path.parent)
    except OSError as error:
        raise CommandError(f"{option} {name}: cannot write there ({error.strerror})") from None
    return path


def _probe(directory: Path) -> None:
    """Raises OSError where no file can be created."""
    with tempfile.TemporaryFile(dir=directory):
        pass
