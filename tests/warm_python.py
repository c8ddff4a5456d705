"""Python processes that have torch already: the import of torch takes most of the processor time of a small program.

`interpreter()` is a program that takes the arguments of `python` and does what it does, in a process of its own: with its own working
directory, environment, arguments, files and exit status. The process is a fork of a server that has imported torch and nothing of this
project, which each process imports anew.

What Python, the C library and torch read when they start is the same in every fork. For an environment whose variables of that kind
differ from the server's, and for options of `python` itself, the program runs `python`.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import marshal
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from importlib.metadata import entry_points
from pathlib import Path
from typing import NoReturn

# A fork follows Python's own variables PYTHONPATH and PYTHONSAFEPATH. The other exception says whether torch loads backends of other
# packages: interpreter() needs none to be there.
READ_AT_START = re.compile(
    r"(?!(PYTHONPATH|PYTHONSAFEPATH|TORCH_DEVICE_BACKEND_AUTOLOAD)$)"
    r"(PYTHON\w|OMP_|GOMP_|KMP_|MKL_|OPENBLAS_|ATEN_|MALLOC_|GLIBC_|LD_|LC_|LANG|TORCH_|CUDA_VISIBLE_)"
)


@functools.cache
def interpreter() -> str:
    """The program. Its server starts with the first call and ends with this process."""
    if entry_points(group="torch.backends"):
        return sys.executable  # torch loads a backend of another package when it is imported
    folder = tempfile.TemporaryDirectory(prefix="warm")
    program, place = Path(folder.name, "python"), Path(folder.name, "socket")
    program.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -IS "{Path(__file__).with_name("warm_client.py")}" "{place}" "$@"\n'
    )
    program.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen(16)
        server = subprocess.Popen(
            [sys.executable, __file__, str(listener.fileno())], pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def stop() -> None:
        server.stdin.close()
        server.wait()
        folder.cleanup()

    atexit.register(stop)
    return str(program)


def read_at_start(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if READ_AT_START.match(name)}


def of_python_itself(arguments: list[str]) -> bool:
    return not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-c", "-m"))


class Server:
    """Forks a process for each request, until its standard input ends."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.running: dict[socket.socket, int] = {}  # processes, by the connection to the client
        self.woken, self.wakes = os.pipe()
        os.set_blocking(self.wakes, False)
        signal.set_wakeup_fd(self.wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> tuple[list[str], str, dict[str, str]]:
        """Returns in a fork: the arguments, the working directory and the environment of its client, whose files are the fork's."""
        while True:
            ready, _, _ = select.select([0, self.listener, self.woken, *self.running], [], [])
            if 0 in ready:
                sys.exit()
            if self.woken in ready:
                os.read(self.woken, 4096)
                self.answer()
            for connection in [*self.running]:
                if connection in ready:  # the client has ended, because its test waits no longer
                    pid = self.running.pop(connection)
                    os.killpg(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    connection.close()
            if self.listener in ready:
                request = self.accept()
                if request:
                    return request

    def answer(self) -> None:
        """Sends the exit statuses of processes that have ended to their clients."""
        for connection, pid in [*self.running.items()]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.running[connection]
                connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
                connection.close()

    def accept(self) -> tuple[list[str], str, dict[str, str]] | None:
        """Reads a request and forks; returns the request in the fork alone."""
        connection, _ = self.listener.accept()
        length, files, _, _ = socket.recv_fds(connection, 8, 3)
        with connection.makefile("rb") as stream:
            arguments, folder, environment = marshal.loads(stream.read(int.from_bytes(length, "little")))
        if of_python_itself(arguments) or read_at_start(environment) != read_at_start(dict(os.environ)):
            connection.sendall(b"python")
            pid = None
        else:
            pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            self.leave(connection, files)
            return arguments, folder, environment
        for file in files:
            os.close(file)
        if pid:
            self.running[connection] = pid
        else:
            connection.close()
        return None

    def leave(self, connection: socket.socket, files: list[int]) -> None:
        """In a fork: takes the client's files in place of everything that is the server's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for each in (connection, self.listener, *self.running):
            each.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
        for file in (*files, self.woken, self.wakes):
            os.close(file)


def prepare(arguments: list[str], folder: str, environment: dict[str, str], paths: list[str]) -> None:
    """Makes this process what `python` is before it runs its program. paths: sys.path without what the call and PYTHONPATH add."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # of another TMPDIR
    program = arguments[0] if arguments[0].startswith("-") else ""
    first = {"-c": "", "-m": folder}.get(program, str(Path(arguments[0]).resolve().parent))
    is_safe = sys.version_info >= (3, 11) and environment.get("PYTHONSAFEPATH")
    added = [str(Path(folder, path)) for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*([] if is_safe else [first]), *added, *paths]
    importlib.invalidate_caches()
    for path in map(Path, sys.path[: -len(paths)]):
        others = {
            str(name)
            for name in (*path.glob("*.py"), *(init.parent for init in path.glob("*/__init__.py")))
            if name.stem in sys.modules and name.stem not in ("__main__", "sitecustomize")
        }
        if others:
            sys.exit(f"tests/warm_python.py has imported another {others}: start sys.executable instead")
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    if any(Path(path, "sitecustomize.py").exists() for path in added):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
        sys.stdout.flush()


def run(arguments: list[str]) -> None:
    """Runs a program as `python` does."""
    sys.orig_argv[:] = [sys.executable, *arguments]
    if arguments[0] == "-m":
        sys.argv = ["-m", *arguments[2:]]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def end(arguments: list[str]) -> NoReturn:
    """Runs a program and ends this process as `python` does, but without freeing every module, which took most of the time."""
    status = 0
    try:
        run(arguments)
    except SystemExit as stopped:
        if isinstance(stopped.code, str):
            print(stopped.code, file=sys.stderr)
        status = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        status = 120
    os._exit(status & 255)


if __name__ == "__main__":
    given = [str(Path(path).resolve()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    installed = [path for path in sys.path[1:] if path not in given]
    importlib.import_module("torch")
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page
    asked = Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    prepare(*asked, installed)
    end(asked[0])
