"""tests/warm_python.py: its processes are what `python` makes of the same arguments, environment and files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm_python

SHOWN = (
    "import os, sys; print(sys.argv[1:], sys.path[0], os.getcwd(), sys.orig_argv[1:], __name__, os.environ.get('SEEN'))"
)


def run(program: str, *arguments: object, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=60, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {
        "script.py": SHOWN,
        "package/__init__.py": "import sys; print(sys.argv)",
        "package/__main__.py": SHOWN,
        "elsewhere/found.py": "print('found')",
        "elsewhere/sitecustomize.py": "print('customized')",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ("-c", SHOWN, "a", "-b"),
        ("-m", "package", "a"),
        ("script.py", "a"),
        ("-c", "import found"),
        ("-c", "import sys; print(sys.stdin.read()); print('error', file=sys.stderr); sys.exit(7)"),
        ("-c", "import sys; sys.exit('in words')"),
        ("-c", "import atexit; atexit.register(print, 'at the end'); 1 / 0"),
        ("-c", "import os; os.abort()"),
        ("-I", "-c", SHOWN),
    ],
    ids=str,
)
def test_does_what_python_does(folder: Path, arguments: tuple[str, ...]) -> None:
    environment = {**os.environ, "PYTHONPATH": "elsewhere", "SEEN": "yes"}
    warm, cold = (
        run(program, *arguments, cwd=folder, env=environment, input="given")
        for program in (warm_python.interpreter(), sys.executable)
    )
    assert (warm.returncode, warm.stdout) == (cold.returncode, cold.stdout)
    assert warm.stderr.splitlines()[-1:] == cold.stderr.splitlines()[-1:]


def test_a_fork_has_torch_and_nothing_of_this_project() -> None:
    names = run(warm_python.interpreter(), "-c", "import sys; print(*sys.modules)").stdout.split()
    assert "torch" in names and not {name.split(".")[0] for name in names} & {"flashattn_ext", "flashattn_ext_lab"}


@pytest.mark.parametrize("change", [{"OMP_NUM_THREADS": "3"}, {"PYTHONHASHSEED": "5"}], ids=str)
def test_what_python_reads_when_it_starts_needs_a_new_one(change: dict[str, str]) -> None:
    code = "import sys; print('torch' in sys.modules)"
    assert run(warm_python.interpreter(), "-c", code, env={**os.environ, **change}).stdout == "False\n"


def test_another_torch_is_refused(tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    done = run(warm_python.interpreter(), "-c", "pass", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1 and "start sys.executable instead" in done.stderr


def test_a_process_ends_with_the_client_that_waits_for_it(tmp_path: Path) -> None:
    code = f"import os, time; print(os.getpid(), file=open({str(tmp_path / 'pid')!r}, 'w'), flush=True); time.sleep(60)"
    with subprocess.Popen([warm_python.interpreter(), "-c", code]) as client:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().endswith("\n"):
            time.sleep(0.01)
        client.kill()
    place = Path("/proc", (tmp_path / "pid").read_text().strip())
    end = time.monotonic() + 30
    while place.exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not place.exists()
