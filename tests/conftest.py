"""Which devices, backends and instruction sets the tests run on.

A test that takes `device` runs once per device of `--device` (default: every device present); one marked `every_isa` runs
on the CPU once per instruction set that this machine has. A test that also takes `dtype` runs for every dtype that the
device supports, or for those that its `dtypes` marker names, and on one device more: `ascend-emulator`, where it is built,
is tensors of the CPU through the Ascend C kernels. On all of them results and workspaces are poisoned before a kernel
sees them (poison.py).

Of the product of a test's parameters, instruction sets and dtypes, the CPU and the emulator run a part in which every pair of values
occurs (covering.py); GPUs and NPUs, and all devices under `--exhaustive`, run the whole product.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import covering
import hypothesis
import poison
import pytest
import torch

import flashattn_ext
from flashattn_ext import _C

# torch.compile looks for the vectors that the C++ compiler and this machine have by compiling and loading a program for each kind, in each
# process; and code with vectors takes longer to compile. What surrounds our calls computes the same without.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

ALL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
EMULATOR = "ascend-emulator"
RANDOM_CALLS = 40
EMULATOR_LIBRARY = Path(flashattn_ext.__file__).parent / "_ascend_emulator.so"
SECONDS = Path(__file__).parent / "seconds.txt"  # of each file that takes a second or more
TORCH_NPU = Path(__file__).parents[1] / "build/npu_binding" / f"torch_npu-{torch.__version__.split('+')[0]}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        action="append",
        choices=("cpu", "cuda", "npu", EMULATOR),
        help="device to test on, may be repeated (default: every device present)",
    )
    parser.addoption("--backend", help="force a backend by name, as use_backend() does")
    parser.addoption("--write-seconds", action="store_true", help="write the time of each file to tests/seconds.txt")
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="the whole product of all parameters, and ten times as many random calls",
    )


def register_profiles(exhaustive: bool) -> None:
    """How many random calls the tests of hypothesis make, for each target. They are the same in every run, except in the profile "deep",
    which is chosen by hand: HYPOTHESIS_PROFILE=deep.
    """
    common = dict(deadline=None, suppress_health_check=list(hypothesis.HealthCheck), print_blob=True)
    hypothesis.settings.register_profile("ci", max_examples=RANDOM_CALLS, derandomize=True, **common)
    hypothesis.settings.register_profile("exhaustive", max_examples=10 * RANDOM_CALLS, derandomize=True, **common)
    hypothesis.settings.register_profile("deep", max_examples=5000, **common)
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "exhaustive" if exhaustive else "ci"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "every_isa: on the CPU, run once per instruction set of the machine")
    config.addinivalue_line("markers", "dtypes(*names): the dtypes of the `dtype` argument, as torch attribute names")
    config.addinivalue_line(
        "markers",
        "shapes_for(devices, parameter=values, ...): other devices run these values alone, because only kernels of these devices tell "
        "the others apart",
    )
    config.addinivalue_line(
        "markers",
        "nightly: on the CPU and the emulator under --exhaustive alone, because another test finds the same faults in fewer cases",
    )
    config.addinivalue_line(
        "markers", "every_pair: of a test without a device, every pair of its parameters' values runs"
    )
    config.addinivalue_line(
        "markers", "whole_product: every combination of the test's parameters runs, not every pair of values"
    )
    config.addinivalue_line("markers", "computes_in_fp32: beside its dtype; not for devices that have no fp32")
    config.addinivalue_line(
        "markers",
        "no_emulator: long calls that run the usual kernels there, which other tests cover, or calls that it refuses",
    )
    register_profiles(config.getoption("--exhaustive"))
    poison.poison_empty_tensors()
    if config.getoption("--backend"):
        flashattn_ext.use_backend(config.getoption("--backend"))


def axes_of(item: pytest.Item) -> tuple[object, ...] | None:
    """The values of an item's parameters, its instruction set and its dtype, one for each parametrize mark; None for an item that always
    runs: one without a device and the marker `every_pair`, one on an accelerator, and one of a test with the marker `whole_product`.
    """
    call = getattr(item, "callspec", None)
    if call is None or item.get_closest_marker("whole_product"):
        return None
    if not call.params.keys() & {"device", "isa"} and not item.get_closest_marker("every_pair"):
        return None
    target = call.params.get("device", ("cpu", None))
    if not isinstance(target, tuple):  # a test that has no device on this machine: pytest reports it as skipped
        return None
    device, isa = target
    if device not in ("cpu", EMULATOR):
        return None
    together = [mark.args[0] for mark in item.iter_markers("parametrize")]
    names = [re.split(r"\s*,\s*", each) if isinstance(each, str) else each for each in together]
    return (
        (device, isa or call.params.get("isa")),
        call.params.get("dtype"),
        *(repr([call.params[name] for name in each]) for each in names),
    )


def is_for_another_backend(item: pytest.Item) -> bool:
    """Whether a value of a parameter is one that only another backend tells from the others (marker `shapes_for`)."""
    call = getattr(item, "callspec", None)
    if call is None or not isinstance(call.params.get("device", ()), tuple):
        return False
    return any(
        call.params.get("device", ("cpu",))[0] not in mark.args[0].split()
        and any(call.params[name] not in values for name, values in mark.kwargs.items())
        for mark in item.iter_markers("shapes_for")
    )


def chosen_items(items: list[pytest.Item]) -> set[pytest.Item]:
    """The items that run without `--exhaustive`."""
    chosen, products = set(), collections.defaultdict(list)
    for item in items:
        if is_for_another_backend(item):
            continue
        axes = axes_of(item)
        if axes is None:
            chosen.add(item)
        elif item.get_closest_marker("nightly"):
            continue
        else:
            products[item.nodeid.split("[")[0]].append((item, axes))
    for name, cases in products.items():
        chosen |= {cases[n][0] for n in covering.of_pairs([axes for _, axes in cases], name)}
    return chosen


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out cases (chosen_items), and sets the order in which parallel processes take files (`--no-loadscope-reorder`): those that take
    longest come first, so that no process ends long after the others.
    """
    by_name = any("[" in argument for argument in config.args)  # a case that is named runs
    if not config.getoption("--exhaustive") and not by_name:
        chosen = chosen_items(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
    if "PYTEST_XDIST_WORKER" in os.environ:
        seconds = {name: float(number) for number, name in map(str.split, SECONDS.read_text().splitlines())}

        def place(item: pytest.Item) -> tuple[float, str]:
            name = file_of(item.nodeid)
            return -seconds.get(name, 0), name

        items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Python's garbage collector walked through the 14000 collected tests again and again, in a fourteenth of the processor time of all
    tests. None of them becomes garbage.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def file_of(test: str) -> str:
    return test.split("::")[0].removeprefix("tests/")


_spent: collections.Counter[str] = collections.Counter()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--write-seconds") and "PYTEST_XDIST_WORKER" not in os.environ:
        lines = [f"{seconds:.0f} {name}" for name, seconds in _spent.most_common() if seconds >= 1]
        SECONDS.write_text("\n".join(lines) + "\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Names a failed test at once, beside the list at the end, which a run that is killed never prints."""
    _spent[file_of(report.nodeid)] += report.duration
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.when} failed: {report.nodeid}", file=sys.stderr, flush=True)


def present_devices() -> list[str]:
    devices = ["cpu"]
    if torch.cuda.is_available() and "cuda" in str(flashattn_ext.build_info()["backends"]):
        devices.append("cuda")
    if importlib.util.find_spec("torch_npu") and "ascend" in flashattn_ext.build_info()["backends"]:
        devices.append("npu")
    if EMULATOR_LIBRARY.exists():
        devices.append(EMULATOR)
    return devices


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Test files that need a GPU, the built emulator or torch_npu's headers, where these are missing."""
    if collection_path.name == "test_ascend_backend.py":
        return None if EMULATOR_LIBRARY.exists() else True
    if collection_path.name == "test_npu_binding.py":
        return None if TORCH_NPU.exists() else True
    devices = config.getoption("--device") or present_devices()
    on_cuda = (
        "test_cuda.py",
        "test_cuda_block_masks.py",
        "test_cuda_large_logits.py",
        "test_cuda_packed_heads.py",
        "test_kvcache_cuda.py",
    )
    return True if collection_path.name in on_cuda and "cuda" not in devices else None


@pytest.hookimpl(trylast=True)  # the targets of a case follow each other: helpers.py computes its references once
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" not in metafunc.fixturenames:
        return
    every_isa = metafunc.definition.get_closest_marker("every_isa") is not None
    named = metafunc.definition.get_closest_marker("dtypes")
    dtypes = [getattr(torch, name) for name in named.args] if named else ALL_DTYPES
    takes_dtype = "dtype" in metafunc.fixturenames
    rows, ids = [], []
    for device in metafunc.config.getoption("--device") or present_devices():
        for isa in _C.cpu_isas() if device == "cpu" and every_isa else [None]:
            target = f"{device}-{isa}" if isa else device
            computes_in_fp32 = metafunc.definition.get_closest_marker("computes_in_fp32") is not None
            if device in (EMULATOR, "npu") and "decode" in metafunc.definition.path.parts:
                continue
            left_out = metafunc.definition.get_closest_marker("no_emulator") is not None
            if device == EMULATOR and (not takes_dtype or computes_in_fp32 or left_out):
                continue
            if not takes_dtype:
                rows.append((device, isa))
                ids.append(target)
                continue
            for dtype in dtypes:
                if dtype == torch.float64 and device != "cpu":
                    continue  # fp64 exists on the CPU alone
                if dtype == torch.float32 and device == EMULATOR:
                    continue
                if isa in ("avx512_bf16", "neon_bf16") and dtype != torch.bfloat16:
                    continue  # these run the kernels of avx512 or neon, as tests/kernels/test_isa.py checks
                rows.append(((device, isa), dtype))
                ids.append(f"{target}-{str(dtype).removeprefix('torch.')}")
    if takes_dtype:  # the instruction sets of a dtype follow each other, too: they have the same references
        order = sorted(range(len(rows)), key=lambda n: dtypes.index(rows[n][1]))
        rows, ids = [rows[n] for n in order], [ids[n] for n in order]
    names = "device,dtype" if takes_dtype else "device"
    metafunc.parametrize(names, rows, ids=ids, indirect=["device"])


@contextlib.contextmanager
def cpu_kernels(isa: str) -> Iterator[None]:
    """The kernels of an instruction set run."""
    before = _C.cpu_isa()
    _C.set_cpu_isa(isa)
    try:
        yield
    finally:
        _C.set_cpu_isa(before)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device's name; while the test runs, CPU tensors use the kernels of the parametrised instruction set or of the emulator."""
    name, isa = request.param
    if name == EMULATOR:
        with flashattn_ext.use_backend(EMULATOR):
            yield "cpu"
        return
    if isa is None:
        yield name
        return
    with cpu_kernels(isa):
        yield name


@pytest.fixture(params=_C.cpu_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """For tests of the CPU alone: each instruction set, whose kernels run while the test does."""
    with cpu_kernels(request.param):
        yield request.param


@pytest.fixture(scope="session")
def exhaustive(pytestconfig: pytest.Config) -> bool:
    return bool(pytestconfig.getoption("--exhaustive"))


@pytest.fixture
def deterministic() -> Iterator[None]:
    """For comparisons bit by bit: accelerators add gradients in a fixed order only under deterministic algorithms."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(20240607)


@pytest.fixture
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
