"""Runs the commands and the Python blocks of README.md and docs/ as a new user would, on a machine without GPU and NPU.

    python tools/documented_commands.py          with an interpreter that has torch and `build`, after `make develop`

First it makes the source distribution (without torch), unpacks it and builds its wheel. Commands of pip and of the package
run in the unpacked tree, in an environment of their own, which has torch but not this package; `make` and scripts run in
the checkout. That tree takes the objects of the checkout's own build where they are of the same text (reused_objects.py).
RULES maps every command to the command that runs; a command without a rule is an error, also in tests/builds/test_documentation.py. The
Python blocks of a page in CODE run in that environment as one program. Commands that install run first and alone, all
others in parallel on all cores.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "documented"
COMMAND = re.compile(
    r"(make|pip|python|torchrun|flashattn-ext|bash|FLASHATTN_EXT_\w+=\S+|tools/\w+\.sh) \S|make$|tools/\w+\.sh$"
)

# What runs in place of a matching command.
AS_WRITTEN = "{}"
DRY = "make -n {arguments}"  # CI runs the target itself, or the target changes files or takes long
SYNTAX = "bash -n {program}"
# INSTALLS change the environment or the tree, SHARES use one folder of runs or one port of torchrun, and READS read what
# others have written. The commands of each group run in order.
INSTALLS = re.compile(r"pip |FLASHATTN_EXT_\w+=\S+ pip |python -m build |bash build\.sh")
SHARES = re.compile(r"(flashattn-ext|python -m flashattn_ext) train|make train|python -m torch\.distributed\.run")
READS = re.compile(r"(flashattn-ext|python -m flashattn_ext) report ")


@dataclass(frozen=True)
class Rule:
    command: str  # regular expression of the whole command
    run: str  # what runs instead: {} is the command, {program} and {arguments} are its first word and the others
    refused: str = ""  # the command must fail and say this


RULES = [
    Rule(r"pip install (torch|(-v )?\.|\"\.\[cli\]\")", AS_WRITTEN),
    Rule(r"pip install --no-build-isolation.*", AS_WRITTEN),
    Rule(r"FLASHATTN_EXT_CUDA=0 .*", AS_WRITTEN),
    Rule(r"pip install (\"transformers>=4\.57\" accelerate|diffusers)", AS_WRITTEN),
    Rule(r"pip uninstall flashattn_ext", "pip show flashattn_ext"),  # shows that it is installed under this name
    Rule(r"python examples/\w+\.py", "{} --steps 20"),
    Rule(r"python -m build --sdist", "{} --outdir ../again"),
    Rule(r"python -m flashattn_ext doctor", AS_WRITTEN),
    Rule(r"(flashattn-ext|python -m flashattn_ext) \w+ --help", AS_WRITTEN),
    Rule(r"(flashattn-ext|python -m flashattn_ext) train.*", "{} --steps 2 --width 32 --context 64"),
    Rule(r"(flashattn-ext|python -m flashattn_ext) experiments all .*--quick", AS_WRITTEN),
    Rule(r"flashattn-ext experiments all", "{} --device cpu --out runs/experiments --quick"),
    Rule(r"flashattn-ext experiments tiles", "{} --device cpu --quick"),
    Rule(r"flashattn-ext report", "{} runs/experiments"),
    Rule(r"flashattn-ext report .*", AS_WRITTEN),
    Rule(r"(flashattn-ext|python -m flashattn_ext) bench (cpu|decode|tune).*", "{} --quick"),
    Rule(r"(flashattn-ext|python -m flashattn_ext) bench cuda.*", AS_WRITTEN, refused="needs a CUDA device"),
    Rule(
        r"torchrun .* -m flashattn_ext train.*",
        "python -m torch.distributed.run {arguments} --steps 2 --width 32 --context 64",
    ),
    Rule(r"torchrun .* -m flashattn_ext bench distributed.*", "python -m torch.distributed.run {arguments} --quick"),
    Rule(r"bash build\.sh -arch 910b( -mode check)?", AS_WRITTEN, refused="CANN was not found"),
    Rule(r"python -c \"import torch, torch_npu;.*", AS_WRITTEN, refused="No module named 'torch_npu'"),
    Rule(r"python tools/npu_times\.py .*", "python -m py_compile tools/npu_times.py"),
    Rule(r"bash build\.sh -arch 910 -mode emulator", AS_WRITTEN),
    Rule(r"make train", 'make train ARGS="--steps 2 --width 32 --context 64 --out build/documented/train"'),
    Rule(r"make( .*)?", DRY),
    Rule(r"tools/\w+\.sh( .*)?", SYNTAX),
]

# What README's blocks expect the reader to provide: a model, tokens, a filled cache with a new token for it, ranks (here
# one).
README_NAMES = """
import atexit

import torch
import transformers
from torch import distributed as ranks


class AutoModelForCausalLM:
    @staticmethod
    def from_pretrained(name, **options):
        config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=64, vocab_size=100)
        return transformers.AutoModelForCausalLM.from_config(config, **options)


name, input_ids = "a model", torch.arange(32).view(2, 16)
k_cache, v_cache = torch.randn(2, 2, 1024, 2, 64)
q1, k1, v1 = torch.randn(2, 1, 8, 64), torch.randn(2, 1, 2, 64), torch.randn(2, 1, 2, 64)
ranks.init_process_group("gloo", rank=0, world_size=1, store=ranks.HashStore())
# A thread of gloo that frees tensors while the interpreter ends aborts the process (pytorch/pytorch#179291).
atexit.register(lambda: ranks.is_initialized() and ranks.destroy_process_group())
"""

# The pages whose Python blocks form one program, and the code before the first block.
CODE = {
    "README.md": README_NAMES,
    "docs/index.md": "",
    "docs/training_loop.md": "",
    "docs/masks.md": "",
    "docs/block_masks.md": "",
    "docs/deterministic.md": "",
    "docs/invariant.md": "",
    "docs/migrating.md": "",
    "docs/decoding.md": "",
    "docs/derivatives.md": "",
    "docs/fp8.md": "",
}


def documented(text: str) -> list[str]:
    """The commands of a page: lines of blocks that name no other language, and code within a line."""
    found = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S):
        if language in ("", "sh", "bash", "console"):
            found += [line.split("  #")[0].strip() for line in block.splitlines()]
    found += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    # An upper-case word or <...> is a placeholder: OUT, NAME.
    return [command for command in found if COMMAND.match(command) and not re.search(r"<\w+>|\.\.\.", command)]


def all_commands() -> dict[str, str]:
    """Every command, with the first page that contains it."""
    docs = ROOT / "docs"
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted(docs.glob("*.md")),
        *sorted(docs.glob("reference/*.md")),
    ]
    found: dict[str, str] = {}
    for page in pages:
        for command in documented(page.read_text(encoding="utf-8")):
            found.setdefault(command, page.name)
    return found


def program(page: str) -> str:
    """The concatenated Python blocks of a page in CODE."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return "\n".join([CODE[page], *re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)])


def rule_of(command: str) -> Rule | None:
    return next((rule for rule in RULES if re.fullmatch(rule.command, command)), None)


def run(command: str, folder: Path, env: dict[str, str], refused: str = "") -> str:
    """The failure with the end of its output; empty on success."""
    begin = time.monotonic()
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).strip().splitlines() or [""]
    print(f"{time.monotonic() - begin:6.1f} s  {command}", flush=True)
    if refused:
        return (
            ""
            if done.returncode != 0 and refused in done.stderr
            else f"{command}\n  should say '{refused}', got status {done.returncode}: {lines[-1]}"
        )
    return "" if done.returncode == 0 else "\n  ".join([f"{command}\n  status {done.returncode}", *lines[-20:]])


def environment() -> dict[str, str]:
    """A new virtual environment that sees the packages of this interpreter, but not an editable installation of this one."""
    home = FOLDER / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--clear", home], check=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)})
    Path(packages, "torch.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    pip = home / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec {shlex.quote(str(home / "bin" / "python"))} -m pip "$@"\n')
    pip.chmod(0o755)
    compiler = home / "bin" / "compiler"
    reuses = shlex.join([sys.executable, "-I", str(ROOT / "tools" / "reused_objects.py"), str(ROOT), str(FOLDER)])
    compiler.write_text(f'#!/bin/sh\nexec {reuses} {os.environ.get("CXX", "c++")} "$@"\n')
    compiler.chmod(0o755)
    # Isolated builds use ninja from the package index. The other builds use the same ninja, so that objects are
    # compiled once.
    ninja = Path(sys.executable).parent / "ninja"
    if ninja.exists():
        (home / "bin" / "ninja").symlink_to(ninja)
    path = f"{home / 'bin'}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "CXX": str(compiler), "OMP_WAIT_POLICY": "passive"}


def unpacked_distribution(env: dict[str, str]) -> Path:
    """The source distribution, made without torch, in a folder; its wheel is built with torch."""
    if problem := run(f"python -m build --sdist --outdir {shlex.quote(str(FOLDER))}", ROOT, env):
        sys.exit(problem)
    (archive,) = FOLDER.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(FOLDER, filter="data")
    tree = FOLDER / archive.name.removesuffix(".tar.gz")
    if problem := run("python -m build --wheel --no-isolation", tree, env):
        sys.exit(problem)
    return tree


def jobs(tree: Path, env: dict[str, str]) -> tuple[dict[str, Callable[[], str]], list[str]]:
    """What runs, by its line: functions that return the failure; and the commands without a rule."""
    found: dict[str, Callable[[], str]] = {}
    unknown = []
    for command, page in all_commands().items():
        rule = rule_of(command)
        if rule is None:
            unknown.append(f"{page}: '{command}' has no rule in {Path(__file__).name}")
            continue
        tool, _, arguments = command.partition(" ")
        line = rule.run.format(command, program=tool, arguments=arguments)
        in_checkout = tool in ("make", "bash") or tool.startswith("tools/")
        found.setdefault(line, job(page, line, ROOT if in_checkout else tree, env, rule.refused))
    for page in CODE:
        source = FOLDER / f"{Path(page).stem}.py"
        source.write_text(program(page), encoding="utf-8")
        line = f"python {shlex.quote(str(source))}"
        found[line] = job(page, line, FOLDER, env)
    return found, unknown


def job(page: str, line: str, folder: Path, env: dict[str, str], refused: str = "") -> Callable[[], str]:
    def run_it() -> str:
        problem = run(line, folder, env, refused)
        return f"{page}: {problem}" if problem else ""

    return run_it


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)  # a new user has no runs of an earlier version
    FOLDER.mkdir(parents=True)
    env = environment()
    found, problems = jobs(unpacked_distribution(env), env)

    def in_order(lines: Iterable[str]) -> list[str]:
        return [problem for line in lines if (problem := found[line]())]

    ordered = {kind: [line for line in found if kind.match(line)] for kind in (INSTALLS, SHARES, READS)}
    others = [line for line in found if not any(line in lines for lines in ordered.values())]
    problems += in_order(ordered[INSTALLS])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for failed in pool.map(in_order, [ordered[SHARES], *([line] for line in others)]):
            problems += failed
    problems += in_order(ordered[READS])
    sys.exit("\n".join(problems) or 0)  # sys.exit('') would count as a failure


if __name__ == "__main__":
    main()
