"""The emulator of the Ascend C programming model: each instruction against numpy, a real kernel in every scheduling mode,
and kernels with planted faults, which must be reported with their line.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

SOURCES = Path(__file__).parent
EMULATOR = SOURCES.parents[1] / "ascend_c" / "emulator"
PROGRAMS = ("api", "arguments", "faults", "softmax", "mixed", "times")
MODES = ("eager", "late", "random")
ELEMENTS = 1024


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built test programs."""
    folder = tmp_path_factory.mktemp("ascend")
    # Without optimisation: each program runs for some milliseconds, and is compiled in four fifths of the time.
    compile_one = [os.environ.get("CXX", "c++"), "-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", "-c"]
    sources = [
        EMULATOR / "scheduler.cpp",
        EMULATOR / "machine.cpp",
        *(SOURCES / f"{name}.cpp" for name in PROGRAMS),
    ]
    builds = [
        subprocess.Popen([*compile_one, f"-I{EMULATOR / 'include'}", source, "-o", folder / f"{source.stem}.o"])
        for source in sources
    ]
    assert [build.wait() for build in builds] == [0] * len(builds)
    for name in PROGRAMS:
        linked = [folder / f"{name}.o", folder / "scheduler.o", folder / "machine.o", "-o", folder / name]
        subprocess.run([compile_one[0], *linked], check=True)
    return folder


def run(program: Path, *arguments: object) -> tuple[list[str], dict[str, list[float]]]:
    """The errors and warnings that a program printed, and its other lines by their first word."""
    done = subprocess.run([program, *map(str, arguments)], check=True, capture_output=True, text=True)
    errors, rows = [], {}
    for line in done.stdout.splitlines():
        first, _, rest = line.partition(" ")
        if first in ("error:", "warning:"):
            errors.append(rest if first == "error:" else line)
        else:
            rows[first] = [float(value) for value in rest.split()]
    return errors, rows


# --- instructions ---------------------------------------------------------------------------------------------------------


def api(programs: Path, tmp_path: Path, case: str, out_type: type, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a.tofile(tmp_path / "a")
    b.tofile(tmp_path / "b")
    errors, _ = run(programs / "api", case, "late", tmp_path / "a", tmp_path / "b", tmp_path / "out")
    assert errors == []
    return np.fromfile(tmp_path / "out", dtype=out_type)[:ELEMENTS]


def inputs(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    return tuple(random.uniform(0.1, 4, ELEMENTS).astype(dtype) for _ in range(2))


def fresh(dtype: str) -> np.ndarray:
    return np.full(ELEMENTS, -7, dtype)


def places(dtype: str, lanes: int, repeats: int, block: int, repeat: int) -> np.ndarray:
    """Element of every active lane, [repeats, lanes], for strides in blocks of 32 bytes."""
    width = 32 // np.dtype(dtype).itemsize
    lane = np.arange(lanes)
    return (np.arange(repeats)[:, None] * repeat + lane // width * block) * width + lane % width


BINARY = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Max": np.maximum,
    "Min": np.minimum,
}
SCALAR = {"Adds": np.add, "Muls": np.multiply, "Maxs": np.maximum, "Mins": np.minimum}
UNARY = {"Exp": np.exp, "Ln": np.log, "Abs": np.abs}
DTYPES = ("float32", "float16")


@pytest.mark.every_pair
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["count", "mask"])
@pytest.mark.parametrize("name", [*BINARY, *SCALAR, *UNARY])
def test_elementwise(programs: Path, tmp_path: Path, name: str, form: str, dtype: str) -> None:
    a, b = inputs(dtype)
    expected = fresh(dtype)
    if form == "count":
        to = from_a = from_b = np.arange(1000)
    else:
        to = places(dtype, 40, 3, 1, 16)
        from_a = places(dtype, 40, 3, 1 if name in BINARY else 2, 8)
        from_b = places(dtype, 40, 3, 0, 1)
    if name in BINARY:
        expected[to] = BINARY[name](a[from_a], b[from_b])
    elif name in SCALAR:
        expected[to] = SCALAR[name](a[from_a], np.dtype(dtype).type(0.75))
    else:
        expected[to] = UNARY[name](a[from_a].astype(np.float64)).astype(dtype)
    got = api(programs, tmp_path, f"{name}_{form}_{dtype}", dtype, a, b)
    if name in ("Exp", "Ln"):
        np.testing.assert_allclose(got, expected, rtol=2e-3 if dtype == "float16" else 3e-7, atol=1e-7)
    else:
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_multiplication_reads_its_destination(programs: Path, tmp_path: Path, dtype: str) -> None:
    a, b = inputs(dtype)
    expected = fresh(dtype)
    to, of_a, of_b = places(dtype, 40, 3, 1, 16), places(dtype, 40, 3, 0, 1), places(dtype, 40, 3, 1, 8)
    expected[to] = (a[of_a].astype(np.float64) * -7 + b[of_b]).astype(dtype)  # rounded once
    np.testing.assert_array_equal(api(programs, tmp_path, f"FusedMulAdd_mask_{dtype}", dtype, a, b), expected)


def test_scaled_addition_reads_its_destination(programs: Path, tmp_path: Path) -> None:
    a, b = inputs("float32")
    expected = fresh("float32")
    expected[places("float32", 40, 3, 1, 16)] = a[places("float32", 40, 3, 2, 8)].astype(np.float64) * 0.75 - 7
    np.testing.assert_array_equal(api(programs, tmp_path, "Axpy_mask_float32", "float32", a, b), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", [1, 2])
def test_every_second_lane(programs: Path, tmp_path: Path, pattern: int, dtype: str) -> None:
    a, b = inputs(dtype)
    lanes = 256 // np.dtype(dtype).itemsize
    kept = a[places(dtype, lanes, 3, 1, 16)][:, pattern - 1 :: 2].ravel()
    expected = fresh(dtype)
    expected[: kept.size] = kept
    np.testing.assert_array_equal(api(programs, tmp_path, f"GatherMask_{pattern}_{dtype}", dtype, a, b), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fill_and_broadcast(programs: Path, tmp_path: Path, dtype: str) -> None:
    a, b = inputs(dtype)
    lanes = 256 // np.dtype(dtype).itemsize
    counted = fresh(dtype)
    counted[:77] = 2.5
    np.testing.assert_array_equal(api(programs, tmp_path, f"Duplicate_count_{dtype}", dtype, a, b), counted)

    masked = fresh(dtype).reshape(-1, 2 * lanes)  # every second repeat
    masked[:3, [lane for lane in range(64) if lane % 8 >= 4]] = 2.5
    np.testing.assert_array_equal(api(programs, tmp_path, f"Duplicate_mask_{dtype}", dtype, a, b), masked.ravel())

    wide = fresh(dtype)
    for element in range(24):  # repeats are 10 blocks apart
        wide[places(dtype, lanes // 8, 1, 1, 0)[0] + (element // 8 * 10 + element % 8) * lanes // 8] = a[element]
    np.testing.assert_array_equal(api(programs, tmp_path, f"Brcb_{dtype}", dtype, a, b), wide)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions(programs: Path, tmp_path: Path, dtype: str) -> None:
    a, b = inputs(dtype)
    tolerance = 4e-3 if dtype == "float16" else 1e-6
    lanes = 256 // np.dtype(dtype).itemsize
    rows = a.reshape(-1, lanes)[:5, :40] if lanes * 5 <= ELEMENTS else None
    for name, reduce in (("Max", np.max), ("Sum", np.sum)):
        whole = fresh(dtype)
        whole[:15:3] = reduce(rows.astype(np.float64), axis=1)
        got = api(programs, tmp_path, f"WholeReduce{name}_{dtype}", dtype, a, b)
        np.testing.assert_allclose(got, whole, rtol=tolerance)

        block, width = fresh(dtype), lanes // 8
        for row in range(5):
            for first in range(0, 40, width):  # a block of masked lanes is not written
                block[row * 16 + first // width] = reduce(rows[row, first : min(first + width, 40)].astype(np.float64))
        got = api(programs, tmp_path, f"BlockReduce{name}_{dtype}", dtype, a, b)
        np.testing.assert_allclose(got, block, rtol=tolerance)

    got = api(programs, tmp_path, f"WholeReduceMax_index_{dtype}", dtype, a, b)
    np.testing.assert_array_equal(got[0:10:2], rows.max(axis=1))
    index_type = "uint16" if dtype == "float16" else "uint32"
    np.testing.assert_array_equal(got[1:10:2].view(index_type), rows.argmax(axis=1))


def neighbours(a: np.ndarray, torch_type: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """The values of the type just below (or at) and just above (or at) each element, as float64."""
    nearest = torch.from_numpy(a).to(torch_type)
    value = nearest.double().numpy()
    infinity = torch.full_like(nearest, torch.inf)
    down, up = (torch.nextafter(nearest, sign * infinity).double().numpy() for sign in (-1, 1))
    return np.where(value > a, down, value), np.where(value < a, up, value)


@pytest.mark.parametrize("mode", ["RINT", "FLOOR", "CEIL", "ROUND", "TRUNC", "mask"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_cast_narrows(programs: Path, tmp_path: Path, dtype: str, mode: str) -> None:
    torch_type = getattr(torch, dtype)
    random = np.random.default_rng(2)
    a = (random.normal(size=ELEMENTS) * np.exp2(random.integers(-20, 10, ELEMENTS))).astype(np.float32)
    a[:8] = [0, -0.0, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, -1 - 2**-8, 2**-25, 3 * 2**-26]  # ties, subnormals
    raw = api(programs, tmp_path, f"Cast_{mode}_{dtype}", np.uint16, a, a)
    got = torch.from_numpy(raw.view(np.int16)).view(torch_type).double().numpy()
    if mode == "mask":
        expected = np.full(ELEMENTS, -7.0)
        expected[places("float16", 40, 3, 1, 8)] = (
            torch.from_numpy(a[places("float32", 40, 3, 1, 16)]).to(torch_type).double().numpy()
        )
        np.testing.assert_array_equal(got, expected)
        return
    below, above = neighbours(a, torch_type)
    nearest = torch.from_numpy(a).to(torch_type).double().numpy()
    tie = (a - below == above - a) & (below != above)
    expected = {
        "RINT": nearest,
        "FLOOR": below,
        "CEIL": above,
        "ROUND": np.where(tie, np.where(a > 0, above, below), nearest),
        "TRUNC": np.where(a > 0, below, above),
    }[mode]
    np.testing.assert_array_equal(got[:1000], expected[:1000])
    assert (got[1000:] == -7).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_cast_widens(programs: Path, tmp_path: Path, dtype: str) -> None:
    raw = (np.arange(ELEMENTS) * 61 % 2**16).astype(np.uint16)  # every kind of bit pattern
    got = api(programs, tmp_path, f"Cast_widen_{dtype}", np.float32, raw, raw)
    expected = torch.from_numpy(raw.view(np.int16)).view(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(got[:1000], expected[:1000])


INTEGERS = {
    "int32_Add": (np.int32, lambda a, b: a + b),
    "int32_Sub": (np.int32, lambda a, b: a - b),
    "int32_Adds": (np.int32, lambda a, b: a + np.int32(0x70000001)),
    "int32_Muls": (np.int32, lambda a, b: (a.view(np.uint32) * np.uint32(0xD2511F53)).view(np.int32)),
    "int32_ShiftLeft": (np.int32, lambda a, b: (a.view(np.uint32) << np.uint32(7)).view(np.int32)),
    "int32_ShiftRight": (np.int32, lambda a, b: np.where(a < 0, -1, 0)),
    "uint32_ShiftRight": (np.uint32, lambda a, b: a // 2**24),
    "int16_And": (np.int16, np.bitwise_and),
    "int16_Or": (np.int16, np.bitwise_or),
    "int32_CreateVecIndex": (np.int32, lambda a, b: np.arange(5, 5 + ELEMENTS)),
    "int32_to_float": (np.int32, lambda a, b: a.astype(np.float32)),
}


@pytest.mark.parametrize("case", INTEGERS)
def test_integers(programs: Path, tmp_path: Path, case: str) -> None:
    dtype, formula = INTEGERS[case]
    random = np.random.default_rng(5)
    info = np.iinfo(dtype)
    a, b = (random.integers(info.min, info.max, ELEMENTS, dtype=dtype, endpoint=True) for _ in range(2))
    out_type = np.float32 if case == "int32_to_float" else dtype
    got = api(programs, tmp_path, case, out_type, a, b)
    with np.errstate(over="ignore"):
        expected = formula(a, b).astype(out_type)
    np.testing.assert_array_equal(got[:1000], expected[:1000])
    np.testing.assert_array_equal(got[1000:], np.array([-7]).astype(out_type)[0])


def test_float_to_integer_rounds_and_saturates(programs: Path, tmp_path: Path) -> None:
    a = np.random.default_rng(6).normal(size=ELEMENTS).astype(np.float32) * 1e3
    a[:6] = [0.5, 1.5, -2.5, 3e9, -3e9, np.nan]
    got = api(programs, tmp_path, "float_to_int32", np.int32, a, a)
    assert got[:6].tolist() == [0, 2, -2, 2**31 - 1, -(2**31), 0]
    np.testing.assert_array_equal(got[6:1000], np.rint(a[6:1000]).astype(np.int32))


@pytest.mark.parametrize(("mode", "rounded"), [("RINT", np.rint), ("TRUNC", np.trunc)])
def test_half_to_byte_rounds_and_saturates(programs: Path, tmp_path: Path, mode: str, rounded: np.ufunc) -> None:
    a = np.random.default_rng(8).uniform(-20, 300, ELEMENTS).astype(np.float16)
    a[:7] = [0, 1, 0.5, 2.5, 255.5, np.inf, np.nan]
    got = api(programs, tmp_path, f"half_to_uint8_{mode}", np.uint8, a, a)
    expected = np.clip(rounded(np.nan_to_num(a.astype(np.float32))), 0, 255).astype(np.uint8)
    np.testing.assert_array_equal(got[:1000], expected[:1000])
    assert (got[1000:] == 7).all()


def test_atomic_addition(programs: Path, tmp_path: Path) -> None:
    a, _ = inputs("float32")
    expected = fresh("float32")
    expected[:256] += a[:256]
    np.testing.assert_array_equal(api(programs, tmp_path, "atomic", np.float32, a, a), expected)


def test_copies(programs: Path, tmp_path: Path) -> None:
    a, _ = inputs("float32")

    rows = fresh("float32")
    for row in range(5):
        rows[row * 24 : row * 24 + 16] = a[row * 40 : row * 40 + 16]
    np.testing.assert_array_equal(api(programs, tmp_path, "DataCopy_rows", np.float32, a, a), rows)

    padded = fresh("float32")
    for row in range(4):
        padded[row * 32 : row * 32 + 16] = [5.5, *a[3 + row * 20 : 16 + row * 20], 5.5, 5.5]
    np.testing.assert_array_equal(api(programs, tmp_path, "DataCopyPad_load", np.float32, a, a), padded)

    stored = fresh("float32")
    for row in range(4):
        stored[3 + row * 20 : 16 + row * 20] = a[row * 24 : row * 24 + 13]
    np.testing.assert_array_equal(api(programs, tmp_path, "DataCopyPad_store", np.float32, a, a), stored)

    scalar = fresh("float32")
    scalar[3] = a[5] + a[6]
    np.testing.assert_array_equal(api(programs, tmp_path, "scalar", np.float32, a, a), scalar)


# --- a kernel -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns", "blocks"), [(37, 200, 3), (16, 64, 2), (5, 30, 1)])
def test_softmax_kernel(programs: Path, tmp_path: Path, rows: int, columns: int, blocks: int) -> None:
    x = (np.random.default_rng(3).normal(size=(rows, columns)) * 4).astype(np.float16)
    x.tofile(tmp_path / "x")
    results = []
    for mode, seed in [("eager", 0), ("late", 0), *(("random", seed) for seed in range(5))]:
        errors, counters = run(programs / "softmax", mode, seed, blocks, rows, columns, tmp_path / "x", tmp_path / "y")
        assert errors == []
        assert counters["gm_read"] == counters["gm_written"] == [x.nbytes, 0]
        tiles = -(-rows // 8)
        assert counters["MTE2"][0] == counters["MTE3"][0] == tiles
        pitch = (
            -(-columns // 64) * 64
        )  # four buffers of queues and one of scores, each of 8 rows; then rows and their sums
        assert counters["taken"] == [8 * pitch * (4 * 2 + 4) + 8 * 64 * 4 + 8 * 4 + 8 * 8 * 4, 0, 0, 0, 0]
        results.append(np.fromfile(tmp_path / "y", dtype=np.float16).reshape(x.shape))
    expected = torch.softmax(torch.from_numpy(x).double(), dim=1).numpy()
    np.testing.assert_allclose(results[0], expected, rtol=1e-3, atol=6e-8)
    assert all((result == results[0]).all() for result in results)


MIXED_SIZES = [(128, 128, 128, 128), (37, 53, 45, 61), (2, 16, 16, 16), (100, 17, 3, 5)]


def mixed(programs: Path, folder: Path, case: str, mode: str, seed: int, blocks: int, sizes: tuple[int, ...]) -> tuple:
    """Runs (2 A B^T) V of random matrices; returns errors, counters, what came out and what should."""
    m, n, k, d = sizes
    random = np.random.default_rng(4)
    a, b, v = ((random.normal(size=shape) / 4).astype(np.float16) for shape in ((m, k), (n, k), (n, d)))
    paths = [folder / name for name in ("a", "b", "v")]
    for path, values in zip(paths, (a, b, v), strict=True):
        values.tofile(path)
    errors, counters = run(programs / "mixed", case, mode, seed, blocks, *sizes, *paths, folder / "out")
    got = np.fromfile(folder / "out", dtype=np.float16).reshape(blocks, m, -(-d // 16) * 16)[..., :d]
    rounded = (2 * (a.astype(np.float64) @ b.astype(np.float64).T)).astype(np.float16)
    return errors, counters, got, rounded.astype(np.float64) @ v.astype(np.float64)


@pytest.mark.parametrize("sizes", MIXED_SIZES)
def test_cube_and_vector_cores_work_together(programs: Path, tmp_path: Path, sizes: tuple[int, ...]) -> None:
    m, n, k, d = sizes
    results = []
    for mode, seed in [("eager", 0), ("late", 0), *(("random", seed) for seed in range(3))]:
        errors, counters, got, expected = mixed(programs, tmp_path, "none", mode, seed, 2, sizes)
        assert errors == []
        np.testing.assert_allclose(got, np.broadcast_to(expected, got.shape), rtol=3e-3, atol=5e-3)
        assert counters["gm_read"] == [2 * 2 * (m * k + n * k + n * d), 2 * m * n * (4 + 2)]
        whole_n, whole_d = -(-n // 16) * 16, -(-d // 16) * 16  # Fixpipe takes no less
        assert counters["gm_written"] == [2 * 2 * m * whole_d, 2 * m * (whole_n * 4 + n * 2)]
        assert counters["M"][0] == 2 * 2
        results.append(got)
    assert all((result == results[0]).all() for result in results)


def test_products_are_stored_in_fractals(programs: Path, tmp_path: Path) -> None:
    m, _, _, d = sizes = (37, 53, 45, 61)
    errors, _, got, expected = mixed(programs, tmp_path, "out_in_fractals", "random", 0, 2, sizes)
    strips = np.fromfile(tmp_path / "out", dtype=np.float16).reshape(2, -(-d // 16), m, 16)
    got = strips.transpose(0, 2, 1, 3).reshape(2, m, -1)[..., :d]
    assert errors == []
    np.testing.assert_allclose(got, np.broadcast_to(expected, got.shape), rtol=3e-3, atol=5e-3)


def test_double_buffering_overlaps_in_the_time_model(programs: Path, tmp_path: Path) -> None:
    np.zeros((64, 512), np.float16).tofile(tmp_path / "x")
    _, counters = run(programs / "softmax", "eager", 0, 1, 64, 512, tmp_path / "x", tmp_path / "y")
    busy = [counters[pipe][1] for pipe in ("V", "MTE2", "MTE3")]
    assert max(busy) < counters["span"][0] < sum(busy)


# The values of rates.h.
START, BYTES_PER_CYCLE, SAME_ADDRESS, QUEUE_ENTRIES, BARRIER, LOAD = 28, 64, 1.15, 32, 12, 16 + 32768 / 256


def modelled(programs: Path, case: str, number: int) -> dict[str, list[float]]:
    errors, counters = run(programs / "times", case, number)
    assert errors == []
    return counters


def test_small_copies_do_not_reach_the_bandwidth(programs: Path) -> None:
    """16 KB get nine tenths of it; many copies of less pay the start of each."""
    for pieces in (1, 4, 64):
        _, cycles = modelled(programs, "pieces", pieces)["MTE2"]
        assert cycles == pieces * START + 65536 / BYTES_PER_CYCLE
    assert 0.89 < 256 / (START + 256) < 0.91


@pytest.mark.parametrize(("row", "moved"), [(128, 128), (129, 256), (40, 128), (512, 512)])
def test_rows_are_moved_in_whole_pieces(programs: Path, row: int, moved: int) -> None:
    counters = modelled(programs, "rows", row)
    assert counters["MTE2"] == [1, START + 64 * moved / BYTES_PER_CYCLE]
    assert counters["gm_read"][0] == 64 * row  # requested bytes


def test_two_cores_at_one_address_wait_for_each_other(programs: Path) -> None:
    alone = START + 16384 / BYTES_PER_CYCLE
    for distance, expected in ((16384, 2 * alone), (512, 2 * alone), (0, (1 + SAME_ADDRESS) * alone)):
        assert modelled(programs, "beside", distance)["MTE2"][1] == pytest.approx(expected)


def test_the_scalar_unit_waits_while_a_queue_is_full(programs: Path) -> None:
    """Loads into L0A and the barriers between them, then copies, which take longer. 10 loads fit into the queue; of 40, the
    first 24 have begun when the scalar unit comes to the copies.
    """
    spans = {loads: modelled(programs, "load_and_copy", loads)["span"][0] for loads in (10, 40)}
    begun = 40 - QUEUE_ENTRIES // 2
    assert spans[40] - spans[10] == pytest.approx(begun * (LOAD + BARRIER), rel=0.03)


# --- planted faults -------------------------------------------------------------------------------------------------------

# By case: what the report says about it.
FAULTS = {
    "own_event_id_beside_a_pipe": r"SetFlag<HardEvent::MTE2_V>: the TPipe gave the kernel no event id 1",
    "waits_for_own_event_id": r"WaitFlag<HardEvent::MTE2_V>: the TPipe gave the kernel no event id 0: .* AllocEventID or FetchEventID",
    "id_never_released": r"AllocEventID<HardEvent::MTE2_V> without ReleaseEventID",
    "id_released_twice": r"ReleaseEventID<HardEvent::MTE2_V>: id 0 is not from AllocEventID",
    "pads_into_veccalc": r"DataCopyPad: the position of the tensor in UB is VECCALC; on these chips it must be VECIN or VECOUT",
    "pads_from_veccalc": r"DataCopyPad: the position of the tensor in UB is VECCALC",
    "pads_into_a_buffer_for_computing": r"DataCopyPad: the position of the tensor in UB is VECCALC",
    "pipe_in_an_object": r"TPipe: a member of an object; create it in the kernel function",
    "two_pipes": r"TPipe: a second one while the first still exists",
    "address_beside_a_pipe": r"LocalTensor: an address of its own beside a TPipe",
    "pipe_beside_addresses": r"TPipe: the kernel has tensors with addresses of its own \(faults.cpp:\d+\)",
    "address_beyond_ub": r"LocalTensor: 260 bytes at byte 196096 of UB, which has 196352",
    "registers_in_any_state": r"Duplicate: mask and atomic registers are as the kernel before left them: .* InitSocState\(\)",
    "ends_before_its_pipes": r"the kernel ends before the pipes do: .* PipeBarrier<PIPE_ALL>\(\)",
    "index_without_a_pipe": r"CreateVecIndex: it takes an event id from a TPipe",
    "infinity_becomes_finite": r"Cast saturates a result that is not finite; .* set CTRL\[48\]",
    "half_sum_saturates": r"Add saturates a result that is not finite",
    "dropped_wait": r"race: Adds on V reads UB that DataCopy on MTE2 \(faults.cpp:\d+\) writes.*MTE2_V|"
    r"race: DataCopy on MTE2 writes UB that Adds on V \(faults.cpp:\d+\) reads.*V_MTE2",
    "no_flag_before_store": r"race: DataCopy on MTE3 reads UB that Adds on V \(faults.cpp:\d+\) writes.*V_MTE3|"
    r"race: Adds on V writes UB that DataCopy on MTE3 \(faults.cpp:\d+\) reads.*",
    "buffer_reused_too_early": r"race: DataCopy on MTE2 writes UB that Adds on V \(faults.cpp:\d+\) reads|"
    r"race: Adds on V reads UB that DataCopy on MTE2 \(faults.cpp:\d+\) writes",
    "swapped_event_id": r"deadlock: V waits for HardEvent::MTE2_V event 1 .*, which is never set",
    "missing_set": r"deadlock: MTE3 waits for HardEvent::V_MTE3 event 0 .*, which is never set",
    "waits_in_a_circle": r"deadlock: V waits for HardEvent::MTE2_V event 0 .*; MTE2 waits for HardEvent::V_MTE2",
    "leaked_flag": r"SetFlag<HardEvent::MTE3_V>\(2\) is never waited for: the flag leaks",
    "set_twice": r"SetFlag<HardEvent::V_MTE3>\(0\) (while the flag is still set|may come before the wait) .* set twice",
    "set_may_overtake_wait": r"SetFlag<HardEvent::V_MTE3>\(0\) (may come before the wait|while the flag is still set)",
    "event_id_8": r"event id 8, kernels may use 0\.\.5",
    "event_id_6": r"SetFlag<HardEvent::V_MTE3>: event id 6, kernels may use 0\.\.5; 6 and 7 are reserved by the vendor",
    "waits_for_event_id_7": r"WaitFlag<HardEvent::V_MTE3>: event id 7, kernels may use 0\.\.5",
    "empty_mask": r"Abs: the mask is empty",
    "mask_of_0_lanes": r"Duplicate: the mask is empty",
    "overlap_in_one_repeat": r"Abs: source and destination of one repeat overlap partially",
    "overlap_of_widths": r"Cast: source and destination of one repeat overlap partially",
    "overlap_of_lanes": r"Sub: source and destination of one repeat overlap partially",
    "sum_over_its_source": r"WholeReduceSum: source and destination of one repeat overlap",
    "store_stays_in_the_cache": r"data that SetValue writes to GM stays in the scalar unit's cache",
    "load_of_what_is_in_the_cache": r"stays in the scalar unit's cache|"
    r"DataCopy reads bytes of y that a scalar unit has not written back from its cache|reads bytes of y that were never written",
    "read_without_invalidation": r"GetValue reads bytes of y that this launch wrote and .* DataCacheCleanAndInvalid is missing",
    "invalidated_too_early": r"GetValue reads bytes of y that this launch wrote and .* DataCacheCleanAndInvalid is missing",
    "no_barrier_in_v": r"race: Exp on V reads UB that Adds on V .* writes.*PipeBarrier<PIPE_V> is missing",
    "overwritten_while_read": r"race: Muls on V writes UB that Adds on V .* reads.*PipeBarrier<PIPE_V> is missing",
    "integers_saturate": r"Muls saturates an integer; to make integers wrap, clear CTRL\[53\]",
    "integer_sum_saturates": r"Add saturates an integer; to make integers wrap, clear CTRL\[53\]",
    "index_over_unread": r"race: SetValue on S writes UB that Adds on V .* reads.*V_S|"
    r"race: .* on (V|MTE2|MTE3) (reads|writes) UB that SetValue on S .* writes",
    "index_over_unstored": r"race: SetValue on S writes UB that DataCopy on MTE3 .* reads.*MTE3_S|"
    r"race: .* on (V|MTE2|MTE3) (reads|writes) UB that SetValue on S .* writes",
    "atomic_left_on": r"SetAtomicAdd is still on when the kernel ends",
    "adds_to_unwritten": r"DataCopy adds to bytes of y that were never written",
    "writes_an_input": r"DataCopy writes the input tensor x",
    "scalar_reads_too_early": r"race: GetValue on S reads UB that Adds on V .* writes.*V_S|"
    r"race: Adds on V writes UB that GetValue on S .* reads",
    # With scalar_reads_too_early, no_barrier_in_v and index_over_unread: every order that the compiler's automatic
    # synchronisation would have made.
    "scalar_read_after_load": r"race: GetValue on S reads UB that DataCopy on MTE2 .* writes.*MTE2_S|"
    r"race: DataCopy on MTE2 writes UB that GetValue on S .* reads|GetValue reads bytes of UB that were never written",
    "scalar_write_before_vector": r"race: Adds on V reads UB that SetValue on S .* writes.*S_V|"
    r"race: SetValue on S writes UB that Adds on V .* reads",
    "scalar_write_before_load": r"race: DataCopy on MTE2 writes UB that SetValue on S .* writes.*S_MTE2|"
    r"race: SetValue on S writes UB that DataCopy on MTE2 .* writes",
    "scalar_write_before_store": r"race: DataCopy on MTE3 reads UB that SetValue on S .* writes.*S_MTE3|"
    r"race: SetValue on S writes UB that DataCopy on MTE3 .* reads",
    "scalar_write_after_store": r"race: SetValue on S writes UB that DataCopy on MTE3 .* reads.*MTE3_S|"
    r"race: DataCopy on MTE3 reads UB that SetValue on S .* writes",
    "overlap_in_one_instruction": r"Exp: a repeat reads what an earlier repeat of the same instruction wrote",
    "ub_too_big": r"a buffer of 98304 bytes at 98304 ends beyond UB, which has 196352 usable bytes",
    "too_many_buffers": r"all 8 event ids of HardEvent::MTE2_V are taken",
    "misaligned_copy": r"DataCopy: the destination starts at UB byte 4, which is not aligned to 32 bytes",
    "copy_drops_tail": r"DataCopy: 100 elements are 400 bytes, not a multiple of 32",
    "uninitialised_read": r"Adds reads bytes of UB that were never written",
    "gm_read_out_of_bounds": r"DataCopy reads GM out of bounds: bytes 32..1055 of 'x', which has 1024",
    "gm_write_out_of_bounds": r"DataCopyPad writes GM out of bounds: bytes 1012..1027 of 'y', which has 1024",
    "global_tensor_too_small": r"DataCopy accesses 256 bytes of a GlobalTensor that has 240 left",
    "tbuf_too_small": r"TBuf: 1028 bytes requested at offset 0, but the buffer has 1024",
    "tensor_out_of_bounds": r"Duplicate: the destination spans 1028 bytes from its start, but the tensor has 1024",
    "repeat_256": r"Abs: repeat 256 is outside 0\.\.255",
    "stride_256": r"src0RepStride 256 is outside 0\.\.255",
    "mask_65": r"Abs: mask 65, the limit is 64 lanes",
    "burst_4096": r"DataCopyPad: blockCount 4096 is outside 1\.\.4095",
    "cast_mode": r"Cast: float to bfloat16_t takes CAST_RINT, FLOOR",
    "cached_before_it_was_written": r"GetValue reads bytes of y that were written after the scalar unit had cached them",
    "refreshed_behind_it": r"GetValue reads bytes of y that were written after .*DataCacheCleanAndInvalid is missing",
    "overlapping_stores": r"race: DataCopy on MTE3 writes y that DataCopy on MTE3 .* writes.*PipeBarrier<PIPE_MTE3>",
    "foreign_tensor": r"EnQue: the tensor does not come from this queue",
    "freed_twice": r"FreeTensor: the tensor was already freed",
    "used_after_free": r"Adds: a source is a tensor that was already freed or enqueued",
    "dequeue_empty": r"DeQue of an empty queue",
    "alloc_beyond_num": r"AllocTensor: all 1 buffers of the queue are in use",
    "never_freed": r"a tensor of a queue is still allocated when the kernel ends",
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", FAULTS)
def test_fault_is_reported(programs: Path, case: str, mode: str) -> None:
    lines = (SOURCES / "faults.cpp").read_text().splitlines()
    marked = next(number for number, text in enumerate(lines, 1) if text.endswith(f"// fault: {case}"))
    errors, _ = run(programs / "faults", case, mode, 0)
    assert any(re.search(FAULTS[case], error) and f"faults.cpp:{marked}" in error for error in errors), errors


# The same for the mixed kernel.
MIXED_FAULTS = {
    "l1_too_big": r"LocalTensor: 524288 bytes at byte 0 of L1, which has 524032",
    "v_on_cube": r"Adds: the destination is in L1 but must be in UB",
    "cube_on_vector": r"SetFlag<HardEvent::M_FIX>: AIV \d does not have both pipes",
    "no_load_flag": r"race: LoadData on MTE1 reads L1 that Nd2Nz on MTE2 .* writes.*MTE2_MTE1|LoadData reads|"
    r"race: Nd2Nz on MTE2 writes L1 that LoadData on MTE1 .* reads",
    "no_drain_flag": r"Fixpipe on FIX reads L0C that Mmad on M .* writes.*M_FIX|Fixpipe reads bytes of L0C",
    "l0_misaligned": r"LoadData: the destination starts at L0A byte 32, which is not aligned to 512 bytes",
    "wrong_memory": r"LoadData: the destination must be in L0A or L0B",
    "repeat_of_zero": r"LoadData: repeatTimes 0 is outside 1\.\.255",
    "nd2nz_pitch": r"Nd2Nz: srcDValue 65536 is outside 1\.\.65535",
    "gemv": r"Mmad: m = 1 reads A as a vector \(GEMV\); pass 2",
    "reads_beyond_k": r"Mmad reads bytes of L0[AB] that were never written",
    "nan_beyond_the_rows": r"Mmad: a NaN in lanes of [AB] beyond m = 37, n = 64, k = 45 may raise an execution error",
    "columns_not_whole": r"warning: .*Fixpipe: nSize 53, but the documentation requires a multiple of 16",
    "rows_overlap": r"Fixpipe: rows of 64 elements overlap at dstStride 16",
    "accumulates_too_early": r"race: Mmad on M (reads|writes) L0C that Mmad on M .* writes.*PipeBarrier<PIPE_M>",
    "no_quant_to_half": r"Fixpipe: quantPre does not match the type of the destination",
    "out_of_bounds": r"Fixpipe writes GM out of bounds: bytes \d+\.\.\d+ of 'out'",
    "no_cross_wait": r"race: Nd2Nz on MTE2 of AIC \d reads probabilities that DataCopyPad on MTE3 of AIV \d .* writes|"
    r"Nd2Nz reads bytes of probabilities that were never written",
    "set_on_wrong_pipe": r"race: Nd2Nz on MTE2 of AIC \d reads probabilities that DataCopyPad on MTE3 of AIV \d",
    "reads_scores_too_early": r"race: DataCopyPad on MTE2 of AIV \d reads scores that Fixpipe on FIX of AIC \d|"
    r"DataCopyPad reads bytes of scores that were never written",
    "scores_never_announced": r"deadlock between cores: AIC 0 waits for cross-core flag 1 .*; AIV 0 waits for .* flag 0",
    "one_half_is_silent": r"deadlock between cores: AIC \d waits for cross-core flag 1",
    "counter_overflow": r"CrossCoreSetFlag: flag 5 of AIV \d is set 16 times without a wait, but its counter holds at most 15",
    "cross_id_16": r"CrossCoreSetFlag: flag id 16 is outside 0\.\.15",
    "cross_flag_leaks": r"flag 3 of AIV \d is never waited for: its counter leaks",
    "sync_all_in_part": r"deadlock between cores: AIV 0 waits for SyncAll",
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", MIXED_FAULTS)
def test_fault_of_a_mixed_kernel_is_reported(programs: Path, tmp_path: Path, case: str, mode: str) -> None:
    lines = (SOURCES / "mixed.cpp").read_text().splitlines()
    marked = next(n for n, text in enumerate(lines, 1) if case in text.partition("// fault:")[2].split())
    sizes = (16, 16, 16, 16) if case == "accumulates_too_early" else (37, 53, 45, 61)
    errors, *_ = mixed(programs, tmp_path, case, mode, 0, 2, sizes)
    assert any(re.search(MIXED_FAULTS[case], error) and f"mixed.cpp:{marked}" in error for error in errors), errors


# Faults in whole kernels with more than one tile: the line of cube.h that is left out, and the expected report. The second tile has two
# rows.
WHOLE_FAULTS = {
    "no_order_of_sums": ("kOrdered) PipeBarrier<PIPE_M>();", r"Mmad on M .* L0C that Mmad on M .*PipeBarrier<PIPE_M>"),
    "no_wait_for_a_tile": (
        "AscendC::WaitFlag<AscendC::HardEvent::MTE2_MTE1>(event);",
        r"race: LoadData on MTE1 reads L1 that (Nd2Nz|Fill) on MTE2|race: (Nd2Nz|Fill) on MTE2 writes L1 that LoadData|"
        r"Mmad reads bytes of L0[AB] that were never written",
    ),
    "no_k_direction": ("p.kDirectionAlign =", r"Mmad: LoadData 3D wrote rows of 2 fractals into A"),
}


@pytest.fixture(scope="session")
def whole(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By stage: a program with the kernels in which each of the faults can be planted by its name."""
    root, builds, found = EMULATOR.parents[1], [], {}
    folder = tmp_path_factory.mktemp("whole")
    shutil.copytree(root / "ascend_c", folder / "ascend_c", ignore=shutil.ignore_patterns("emulator", "inst", "npu"))
    (folder / "csrc").symlink_to(root / "csrc")
    cube = folder / "ascend_c" / "cube.h"
    lines = cube.read_text().splitlines()
    for case, (taken, _) in WHOLE_FAULTS.items():
        (line,) = (number for number, text in enumerate(lines) if taken in text)
        if case == "no_order_of_sums":  # the statement that the condition belongs to
            assert "if (!begins" in lines[line]
        lines[line] = f'if (planted_fault != "{case}") {{ {lines[line].partition("//")[0]} }}'
    lines.insert(lines.index("#pragma once") + 1, "#include <string>\ninline std::string planted_fault;")
    cube.write_text("\n".join(lines) + "\n")
    for stage, options in {"forward": [], "backward": ["-DWHOLE_BACKWARD"]}.items():
        sources = [
            SOURCES / "whole.cpp",
            folder / "ascend_c" / "dispatch.cpp",
            programs / "scheduler.o",
            programs / "machine.o",
        ]
        command = [
            os.environ.get("CXX", "c++"),
            "-std=c++17",
            "-O0",  # they run for a tenth of a second
            *options,
            f"-I{folder}",
            f"-I{folder / 'csrc'}",
            f"-I{EMULATOR / 'include'}",
        ]
        builds.append(subprocess.Popen([*command, *sources, "-o", folder / stage]))
        found[stage] = folder / stage
    assert [build.wait() for build in builds] == [0] * len(builds)
    return found


@pytest.mark.parametrize("mode", ["eager", "late"])
@pytest.mark.parametrize("case", WHOLE_FAULTS)
def test_fault_of_a_whole_kernel_is_reported(whole: dict[str, Path], case: str, mode: str) -> None:
    program = whole["backward" if case == "no_k_direction" else "forward"]
    assert not run(program, mode, 0, "")[0]
    errors, _ = run(program, mode, 0, case)
    assert any(re.search(WHOLE_FAULTS[case][1], error) for error in errors), errors[:3]


# By case of arguments.cpp: what the report says.
ARGUMENTS = {
    "copy_source_misaligned": "DataCopy: the source starts at UB byte 12, which is not aligned to 32 bytes",
    "copy_target_misaligned": "DataCopy: the destination starts at UB byte 12, which is not aligned to 32 bytes",
    "copy_beyond_tensor": "DataCopy: the destination spans 2080 bytes from its start, but the tensor has 2048",
    "copy_burst_of_zero": "DataCopy: blockLen 0 is outside 1..65535",
    "left_padding_9": "DataCopyPad: leftPadding (elements, at most 32 bytes) 9 is outside 0..8",
    "right_padding_9": "DataCopyPad: rightPadding (elements, at most 32 bytes) 9 is outside 0..8",
    "padding_of_64_bits": "DataCopyPad: 64-bit types can only be padded with 0",
    "binary_position": "Add: the destination is in L1 but must be in UB",
    "binary_source_position": "Add: a source is in L1 but must be in UB",
    "binary_misaligned": "Add: a source starts at UB byte 4100, which is not aligned to 32 bytes",
    "binary_count": "Add: a source spans 260 bytes from its start, but the tensor has 256",
    "binary_repeats": "Add: the destination spans 4352 bytes from its start, but the tensor has 4096",
    "binary_repeat_stride": "Add: a source spans 4128 bytes from its start, but the tensor has 4096",
    "scalar_position": "Muls: a source is in L1 but must be in UB",
    "scalar_misaligned": "Muls: the destination starts at UB byte 4, which is not aligned to 32 bytes",
    "scalar_count": "Muls: the destination spans 100 bytes from its start, but the tensor has 96",
    "unary_position": "Exp: the destination is in L1 but must be in UB",
    "unary_block_stride": "Exp: a source spans 4288 bytes from its start, but the tensor has 4096",
    "cast_count": "Cast: a source spans 100 bytes from its start, but the tensor has 96",
    "fill_position": "Duplicate: the destination is in L1 but must be in UB",
    "fill_misaligned": "Duplicate: the destination starts at UB byte 16, which is not aligned to 32 bytes",
    "fill_repeats": "Duplicate: the destination spans 4352 bytes from its start, but the tensor has 4096",
    "broadcast_position": "Brcb: the destination is in L1 but must be in UB",
    "broadcast_misaligned": "Brcb: the source starts at UB byte 4100, which is not aligned to 32 bytes",
    "broadcast_source": "Brcb: the source spans 64 bytes from its start, but the tensor has 32",
    "broadcast_target": "Brcb: the destination spans 512 bytes from its start, but the tensor has 256",
    "whole_reduce_position": "WholeReduceSum: the destination is in L1 but must be in UB",
    "whole_reduce_target": "WholeReduceMax: the destination spans 12 bytes from its start, but the tensor has 8",
    "whole_reduce_pairs": "WholeReduceMax: the destination spans 16 bytes from its start, but the tensor has 12",
    "whole_reduce_source": "WholeReduceSum: the source spans 4352 bytes from its start, but the tensor has 4096",
    "block_reduce_target": "BlockReduceMax: the destination spans 64 bytes from its start, but the tensor has 32",
    "block_reduce_misaligned": "BlockReduceSum: the destination starts at UB byte 4, which is not aligned to 32 bytes",
    "index_position": "CreateVecIndex: the destination is in L1 but must be in UB",
    "index_misaligned": "CreateVecIndex: the destination starts at UB byte 4, which is not aligned to 32 bytes",
    "index_count": "CreateVecIndex: the destination spans 100 bytes from its start, but the tensor has 96",
    "mask_of_64_lanes": "Exp: mask[1] must be 0 for types of 4 bytes (64 lanes)",
    "rows_position": "Nd2Nz: the destination is in L0A but must be in L1",
    "rows_misaligned": "Nd2Nz: the destination starts at L1 byte 16, which is not aligned to 32 bytes",
    "rows_beyond_tensor": "Nd2Nz: the destination spans 3072 bytes from its start, but the tensor has 2048",
    "matrices_beyond_tensor": "Nd2Nz: the destination spans 2560 bytes from its start, but the tensor has 2048",
    "matrices_misaligned": "Nd2Nz: matrices must begin at multiples of 32 bytes in L1 (dstNzMatrixStride)",
    "zeros_beyond_tensor": "Fill: the destination spans 2112 bytes from its start, but the tensor has 2048",
    "zeros_position": "Fill: the destination is in L0C but must be in L1",
    "load_target_position": "LoadData: the destination must be in L0A or L0B",
    "load_source_position": "LoadData: the source is in L0B but must be in L1",
    "load_target_extent": "LoadData: the destination spans 1024 bytes from its start, but the tensor has 512",
    "load_source_extent": "LoadData: the source spans 2560 bytes from its start, but the tensor has 2048",
    "load_misaligned": "LoadData: the destination starts at L0B byte 256, which is not aligned to 512 bytes",
    "image_rows": "LoadData 3D: rows 16..47 and columns 0..15 are outside an image of 32 rows and 16 columns",
    "image_columns": "LoadData 3D: rows 0..15 and columns 8..23 are outside an image of 32 rows and 16 columns",
    "image_part_of_column": "LoadData 3D: channelSize must be a multiple of 4, kStartPt and kExtension multiples of 8 for fp32",
    "image_target_extent": "LoadData 3D: the destination spans 1024 bytes from its start, but the tensor has 512",
    "image_source_extent": "LoadData 3D: the source spans 2048 bytes from its start, but the tensor has 1536",
    "product_in_hf32": "Mmad: fp32 may be rounded to HF32 (11-bit mantissa) until SetHF32Mode(false) is called",
    "product_without_k_direction": "Mmad: LoadData 3D wrote rows of 2 fractals into A, but with k = 8 and kDirectionAlign false "
    "a row has 1",
    "product_in_any_mode": "Mmad: fp32 may be rounded to HF32 (11-bit mantissa) until SetHF32Mode(false) is called",
    "product_target_position": "Mmad: C is in L0A but must be in L0C",
    "product_left_position": "Mmad: A is in L0B but must be in L0A",
    "product_right_position": "Mmad: B is in L0A but must be in L0B",
    "product_m": "Mmad: m 4096 is outside 0..4095",
    "product_n": "Mmad: n 4096 is outside 0..4095",
    "product_k": "Mmad: k 4096 is outside 0..4095",
    "product_target_extent": "Mmad: C spans 4096 bytes from its start, but the tensor has 3072",
    "product_left_extent": "Mmad: A spans 3072 bytes from its start, but the tensor has 2048",
    "product_right_extent": "Mmad: B spans 3072 bytes from its start, but the tensor has 2048",
    "product_misaligned": "Mmad: C starts at L0C byte 64, which is not aligned to 1024 bytes",
    "drain_position": "Fixpipe: the source is in L0A but must be in L0C",
    "drain_extent": "Fixpipe: the source spans 5120 bytes from its start, but the tensor has 4096",
    "drain_rows": "Fixpipe: mSize 8193 is outside 1..8192",
    "drain_strips": "Fixpipe: strips of 16 of 32 columns and 16 rows overlap or end early at dstStride 31 blocks",
    "drain_stride": "Fixpipe: srcStride 20 must be a multiple of 16, the rows of an L0C fractal",
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_wrong_argument_is_reported(programs: Path, case: str) -> None:
    lines = (SOURCES / "arguments.cpp").read_text().splitlines()
    marked = next(number for number, text in enumerate(lines, 1) if text.endswith(f"// fault: {case}"))
    errors, _ = run(programs / "arguments", case, "eager")
    assert errors == [f"arguments.cpp:{marked}: {ARGUMENTS[case]}"]


# What the device's headers do not compile, by case: the body of a kernel, and what the compiler says here.
REFUSED = {
    "role_in_parentheses": ("if (ASCEND_IS_AIC) {}", "expected primary-expression before .constexpr."),
}
COMPILED = {
    "role": "if ASCEND_IS_AIC {} if ASCEND_IS_AIV {}",
}


def compiler_says(folder: Path, body: str) -> str:
    source = folder / "kernel.cpp"
    source.write_text(
        f'#include "kernel_operator.h"\nusing namespace AscendC;\n__aicore__ void kernel() {{ {body} }}\n'
    )
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-fsyntax-only", f"-I{EMULATOR / 'include'}", source]
    return subprocess.run(command, capture_output=True, text=True).stderr


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_device_refuses_does_not_compile(tmp_path: Path, case: str) -> None:
    body, message = REFUSED[case]
    assert re.search(message, compiler_says(tmp_path, body))


@pytest.mark.parametrize("case", COMPILED)
def test_what_the_device_takes_compiles(tmp_path: Path, case: str) -> None:
    assert compiler_says(tmp_path, COMPILED[case]) == ""


@pytest.mark.parametrize("names", ["Fill", "InitConstValue"])
def test_kernels_compile_with_the_name_that_the_headers_have(tmp_path: Path, names: str) -> None:
    """CANN 8.5 has InitConstValue alone, 9.0.0-beta.1 Fill alone."""
    (tmp_path / "kernel_operator.h").write_text(
        f'#pragma once\n#define Fill {names}\n#include "{EMULATOR}/include/kernel_operator.h"\n#undef Fill\n'
    )
    cube = tmp_path / "cube.cpp"
    cube.write_text(
        f'#include <kernel_operator.h>\n#include "{EMULATOR.parent}/cube.h"\ntemplate class flashattn_ext::ascend::CubeCore<float>;\n'
    )
    command = [
        os.environ.get("CXX", "c++"),
        "-std=c++17",
        "-fsyntax-only",
        f"-I{tmp_path}",
        f"-I{EMULATOR.parents[1] / 'csrc'}",
        cube,
    ]
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""


def device_functions(folder: Path, kernels: list[Path], root: Path) -> dict[str, str]:
    """The text of every function under `root` that the device's compiler sees in the kernels, by its first line."""
    (folder / "kernel_operator.h").touch()
    source = folder / "all.cpp"
    source.write_text("".join(f'#include "{kernel}"\n' for kernel in kernels))
    command = [
        os.environ.get("CXX", "c++"),
        "-std=c++17",
        "-E",
        "-D__NPU_ARCH__=2201",
        f"-I{folder}",
        f"-I{EMULATOR.parents[1] / 'csrc'}",
        source,
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    text, ours = [], False
    for line in done.splitlines():
        if line.startswith("#"):
            ours = str(root) in line
        elif ours:
            text.append(line)
    functions, depth, begin, inside = {}, 0, 0, None
    whole = "\n".join(text)
    for place, letter in enumerate(whole):
        if letter == "{":
            head = whole[begin:place].strip()
            if inside is None and head.endswith((")", "const")) and "(" in head and "=" not in head.split("(")[0]:
                inside = (head, place, depth)
            depth += 1
        if letter == "}":
            depth -= 1
            if inside is not None and inside[2] == depth:
                functions[inside[0]] = whole[inside[1] : place]
                inside = None
        if letter in "{};" and inside is None:
            begin = place + 1
    return functions


def test_functions_are_marked_for_the_device(tmp_path: Path) -> None:
    kernels = sorted((EMULATOR.parent / "inst").glob("*.cpp"))
    functions = device_functions(tmp_path, kernels, EMULATOR.parents[1])
    assert len(functions) > 150 and any("sum_pitch" in head for head in functions)
    assert [head for head in functions if "__aicore__" not in head and "__mix__" not in head] == []
    assert [head for head, body in functions.items() if re.search(r"\bdouble\b", head + body)] == []


def test_a_function_that_is_not_marked_is_found(tmp_path: Path) -> None:
    planted = tmp_path / "planted.h"
    planted.write_text("constexpr int twice(int x) { return 2 * x; }\n__aicore__ int four() { return twice(2); }\n")
    functions = device_functions(tmp_path, [planted], planted)
    assert list(functions) == ["constexpr int twice(int x)", "__aicore__ int four()"]


LEGAL = (
    "flags",
    "ping_pong",
    "scalar_loop",
    "copy_queue",
    "accumulation",
    "index",
    "fetched_id",
    "ordered_additions",
    "refreshed",
    "written_back",
)


@pytest.mark.parametrize("case", LEGAL)
def test_legal_kernel_has_no_report(programs: Path, case: str) -> None:
    for mode, seed in [("eager", 0), ("late", 0), *(("random", seed) for seed in range(8))]:
        errors, rows = run(programs / "faults", f"legal_{case}", mode, seed)
        assert errors == []
        assert rows["y"] == [1, 2, 3, 4]


@pytest.mark.parametrize("case", ["dropped_wait", "no_flag_before_store", "additions_in_any_order"])
def test_late_mode_shows_wrong_data(programs: Path, case: str) -> None:
    _, eager = run(programs / "faults", case, "eager", 0)
    _, late = run(programs / "faults", case, "late", 0)
    assert eager["y"] == [1, 2, 3, 4]
    assert late["y"] != eager["y"]
