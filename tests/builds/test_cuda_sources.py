"""The table of CUDA kernels and what is made of it: sources, their architectures, dispatch, a page."""

from __future__ import annotations

import collections
import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "csrc"))

import kernel_page  # noqa: E402
import kernel_table  # noqa: E402
import sources  # noqa: E402

ROWS = sources.table()
NVCC = shutil.which("nvcc")
# A build for Ampere, with PTX for newer GPUs, and Hopper.
DEFAULT = [f"-gencode=arch=compute_{target}" for target in ("80,code=sm_80", "80,code=compute_80", "90a,code=sm_90a")]

# Prints every row as the C++ compiler reads it, and the rows that calls run.
PROGRAM = r"""
#include <cstdio>
#include <string>

#include "cuda/choose.h"

using namespace flashattn_ext;

template <class Row>
void print(const char* array, const Row& row) {
  std::printf("row %s %u %d %d %d %d %d\n", array, row.types, row.head_dims.qk, row.head_dims.v, int(row.options),
              int(row.gpus), row.spill);
}

constexpr const char* kNames[] = {
    "",
#define STAGE(architecture, array, stage, header, entries) #array,
#include "cuda/table/stages.def"
};
void run(const TableRow& row) { std::printf("run %s %d\n", kNames[int(row.stage)], row.row); }

// Runs the first row of a stage that serves the call. For stages whose kernels run only some of these calls.
template <Stage kStage, bool kOnHopper = true>
void run_if_served(const KernelCall& call) {
  int i = 0;
  for (const auto& row : RowsOf<kStage>::kTable) {
    if (serves(row, call) && !(kOnHopper && row.gpus == kOtherGpus)) return run({kStage, i, call.type});
    ++i;
  }
}

int main() {
  for (const auto& row : kernel_table::kSm80Forward) print("kSm80Forward", row);
  for (const auto& row : kernel_table::kSm80Backward) print("kSm80Backward", row);
  for (const auto& row : kernel_table::kSm80HeadsForward) print("kSm80HeadsForward", row);
  for (const auto& row : kernel_table::kSm80HeadsBackward) print("kSm80HeadsBackward", row);
  for (const auto& row : kernel_table::kSm80Jvp) print("kSm80Jvp", row);
  for (const auto& row : kernel_table::kSm80Second) print("kSm80Second", row);
  for (const auto& row : kernel_table::kSm90Forward) print("kSm90Forward", row);
  for (const auto& row : kernel_table::kSm90ShortForward) print("kSm90ShortForward", row);
  for (const auto& row : kernel_table::kSm90Invariant) print("kSm90Invariant", row);
  for (const auto& row : kernel_table::kSm90PackGqa) print("kSm90PackGqa", row);
  for (const auto& row : kernel_table::kSm90Backward) print("kSm90Backward", row);
  for (const auto& row : kernel_table::kSm90Heads) print("kSm90Heads", row);
  for (const auto& row : kernel_table::kSm90FewQueriesBackward) print("kSm90FewQueriesBackward", row);
  for (const auto& row : kernel_table::kSm90Jvp) print("kSm90Jvp", row);
  for (const auto& row : kernel_table::kSm90Second) print("kSm90Second", row);
  for (const auto& row : kernel_table::kDecode)
    std::printf("row kDecode %u %d %d %d\n", row.types, row.head_dim, row.tile.rows(), row.spill);
  for (const auto& row : kernel_table::kFewQueriesBackward)
    std::printf("row kFewQueriesBackward %u %d %d %d\n", row.types, row.head_dim, 16 * row.row_tiles, row.spill);
  const Chooser every(Family::kEveryGpu, {}), hopper(Family::kHopper, {});
  for (unsigned type : {1u, 2u, 4u}) {
    for (int qk = 1; qk <= 512; ++qk) {
      for (int v : {qk, 1, 128, 129, 512}) {
        AttnParams p;
        p.dtype = type == kFp16 ? DType::kFloat16 : type == kBf16 ? DType::kBFloat16 : DType::kFloat32;
        p.head_dim = qk, p.head_dim_v = v;
        for (Options options : {kPlain, kDropout, kIntervals, kScores, kBias, kOtherBiasOrOrigin, kScores | kDropout, kBlocks,
                                kBlocks | kScores}) {
          for (bool largest : {false, true}) {
            const KernelCall call{type, qk, v, options, largest};
            run(every.forward_row(call)), run(hopper.forward_row(call));
            run_if_served<Stage::kSm90PackGqa>(call);        // others run the kernels of decode/
            run_if_served<Stage::kSm80HeadsForward>(call);  // more keys run the rows above
            run_if_served<Stage::kSm90ShortForward>(call);
            if (options == kPlain) run_if_served<Stage::kSm90Forward>({type, qk, v, kBrief});
            if (options == kPlain) run_if_served<Stage::kSm90Forward>({type, qk, v, kFewTiles});
            if (options == kPlain) run_if_served<Stage::kSm90Forward>({type, qk, v, kBriefFewTiles});
            if (largest) continue;
            run(every.backward_row(call)), run(hopper.backward_row(call));
            const TableRow row = hopper.backward_row(call);
            std::printf("hopper %s %d\n", kNames[int(row.stage)], row.row);
            // Where query heads of a group add up.
            if (options == kPlain) run_if_served<Stage::kSm90Backward>({type, qk, v, kGroups});
            run_if_served<Stage::kSm80HeadsBackward, false>(call);  // more keys or queries run the row above
            run_if_served<Stage::kSm90Heads>(call);     // others, and few or long sequences, run the row above
            run_if_served<Stage::kSm90FewQueriesBackward>(call);  // others run those of decode/ or of many queries
            if (qk > 256 || v > 256) continue;          // supports() refuses derivatives above
            AttnParams q = p;
            if (options & kDropout) q.dropout_threshold = 128;
            if (options & kIntervals) q.intervals.data = reinterpret_cast<const int32_t*>(&q);
            if (options & kBlocks) q.blocks.lists = reinterpret_cast<const int32_t*>(&q);
            if (options & kScores) q.softcap = 1;
            if (options == kBias) q.bias = {&q, p.dtype, 0, 0, 0};
            if (options == kOtherBiasOrOrigin) q.origin.length_mask = 0;
            run(every.jvp_row(q)), run(hopper.jvp_row(q));
            run(every.second_row(q)), run(hopper.second_row(q));
          }
        }
        for (Options options : {kPlain, kIntervals, kUnlisted}) {
          for (bool largest : {false, true}) {
            const KernelCall call{type, qk, v, options, largest, true};
            run(every.forward_row(call)), run(hopper.forward_row(call));
          }
        }
        for (Options options : {kFp8, kFp8Scores, kFp8 | kIntervals, kFp8 | kOtherBiasOrOrigin}) {
          for (bool largest : {false, true}) {
            if (type != kBf16) continue;  // a prefill has widened fp8; the forward does where no kernel reads it
            const KernelCall call{type, qk, v, options, largest}, narrow{kE4m3, qk, v, options, largest};
            if (qk <= 256 && v <= 256) run(hopper.forward_row(narrow));
            run(every.forward_row(call)), run(hopper.forward_row(call));
          }
        }
      }
    }
  }
}
"""


@functools.cache
def compiled() -> list[str]:
    """What the program above prints: each line once."""
    folder = Path(subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip())
    try:
        (folder / "table.cpp").write_text(PROGRAM)
        command = ["c++", "-std=c++17", f"-I{ROOT / 'csrc'}", str(folder / "table.cpp"), "-o", str(folder / "table")]
        subprocess.run(command, check=True, capture_output=True)
        printed = subprocess.run([folder / "table"], check=True, capture_output=True, text=True).stdout
    finally:
        shutil.rmtree(folder)
    return [*dict.fromkeys(printed.splitlines())]


def test_python_reads_the_rows_that_the_compiler_reads() -> None:
    bits, gpus = {"fp16": 1, "bf16": 2, "fp32": 4, "fp8": 16}, ["kHopper", "kOtherGpus", "kEveryGpu"]
    expected = collections.Counter()
    for row in ROWS:
        about: list[object] = [row.array, sum(bits[dtype] for dtype in row.dtypes), row.head_dim]
        if row.architecture == "decode":
            about.append(row.tile_rows)
        else:
            about += [row.head_dim_v, kernel_table.option_bits()[row.options], gpus.index(row.gpus)]
        about.append(-1 if row.spill is None else row.spill)
        expected["row " + " ".join(map(str, about))] += 1
    assert set(expected.values()) == {1}, "two rows for one kernel"
    assert sorted(expected) == sorted(line for line in compiled() if line.startswith("row "))


def test_every_call_has_a_kernel_and_every_kernel_has_calls() -> None:
    runs = {line.removeprefix("run ") for line in compiled() if line.startswith("run ")}
    assert "" not in runs
    of_array = {
        name: [row for row in ROWS if row.array == name]
        for name in kernel_table.stages()
        if name[1:5] in ("Sm80", "Sm90")
    }
    assert runs == {f"{name} {i}" for name, rows in of_array.items() for i in range(len(rows))}


def test_hopper_compiles_the_kernels_of_sm80_that_its_dispatch_picks() -> None:
    """And no others: a row for every GPU is one that a call on Hopper runs."""
    rows = [row for row in ROWS if row.array == "kSm80Backward"]
    picked = {int(line.split()[-1]) for line in compiled() if line.startswith("hopper kSm80Backward")}
    assert picked == {i for i, row in enumerate(rows) if row.gpus == "kEveryGpu"}


def test_gradients_of_one_class_have_one_layout() -> None:
    """One kernel for each class finishes dq, whichever kernel has summed it up: warps, queries and thread blocks are the same."""
    for array in ("kSm80Backward", "kSm80Second"):
        layouts = collections.defaultdict(set)
        for row in ROWS:
            if row.array == array:
                layouts[row.dtypes, row.head_dim].add(tuple((tile[0], tile[2], tile[5]) for tile in row.tiles))
        assert layouts and all(len(its) == 1 for its in layouts.values())


def test_every_row_says_what_chose_its_tile() -> None:
    """In a note of its own, with the rates where speed decided, or in that of its group."""
    assert not [row for row in ROWS if not row.note and not row.group]
    assert not [row for row in ROWS if len(row.competing) > 1 and not re.search(r"\d+ / \d+", row.note)]


def test_a_note_that_ends_in_a_colon_is_for_the_rows_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def row(head_dim: int) -> str:
        return f"    {{k16Bit, {head_dim}, kPlain, kHopper, 0, {{{{64, 64, 2, 1}}}}}},"

    array = "inline constexpr KernelRow<sm90::BackwardTile> {}[] = {{"
    lines = [array.format("kSm90Backward"), "    // why, in", "    // two lines:", row(64), "    // 500 / 400", row(80)]
    lines += [f"{row(96)}  // 600 / 500", row(128), "    // another reason:", row(256), "};"]
    lines += [array.format("kSm90Heads"), row(64), "};"]
    (tmp_path / "kernel_table.h").write_text("\n".join(lines))
    monkeypatch.setattr(kernel_table, "TABLE", tmp_path / "kernel_table.h")
    rows = kernel_table.table.__wrapped__()
    assert [row.note for row in rows] == ["", "500 / 400", "600 / 500", "", "", ""]
    assert [row.group for row in rows] == [*["why, in two lines"] * 4, "another reason", ""]
    notes = ["- 80, plain: 500 / 400", "- 96, plain: 600 / 500", "- 64 to 128, plain: why, in two lines"]
    assert kernel_page._notes(rows[:4]).split("\n") == ["", *notes, ""]


def test_tiles_compete_unless_the_shared_memory_of_the_gpu_chooses() -> None:
    by_memory = {row.array for row in ROWS if len(row.tiles) > 1 and len(row.competing) == 1}
    assert by_memory == {"kSm80Forward", "kSm80Backward", "kSm80Second"}
    assert {row.head_dim for row in ROWS if row.array == "kSm80Forward" and row.competing != row.tiles} == {
        384,
        512,
    }
    compete = {row.array for row in ROWS if len(row.competing) > 1}
    assert compete == {"kSm80Forward", "kSm90Forward", "kSm90Backward", "kSm90Jvp"}  # what `bench tune` has calls for


def test_a_line_that_is_not_a_row_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = kernel_table.TABLE.read_text().replace("    {k16Bit, 96,  kPlain,", "    {k16Bit, 96,  kPlain,  # ", 1)
    (tmp_path / "kernel_table.h").write_text(text.replace("}},\n", "}}\n", 1))
    monkeypatch.setattr(kernel_table, "TABLE", tmp_path / "kernel_table.h")
    with pytest.raises(ValueError, match="not a row of kSm80Forward"):
        kernel_table.table.__wrapped__()


# Sources


def test_every_row_is_instantiated_once() -> None:
    texts = "".join(sources.cuda_instances(sm90=True).values())
    defined = re.findall(r"^template (.*);$", texts, re.M)
    assert len(defined) == len({*defined})
    assert {*defined} == {function for row in ROWS for dtype in row.dtypes for function in row.functions(dtype)}


def test_every_stage_has_rows_and_a_header_that_defines_its_functions() -> None:
    assert {*kernel_table.stages()} == {row.array for row in ROWS}
    for stage in kernel_table.stages().values():
        text = (ROOT / "csrc" / stage.header).read_text()
        for function in stage.functions:
            result, name = re.match(r"(\w+) flashattn_ext::\w+::(\w+)<", function).groups()
            assert re.search(rf"^{result} {name}\(", text, re.M), f"{stage.header} does not define {name}"


def test_a_line_that_is_not_a_stage_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stages.def").write_text(
        kernel_table.STAGES.read_text().replace("STAGE(sm90, kSm90Jvp,", "STAGE(kSm90Jvp,")
    )
    monkeypatch.setattr(kernel_table, "STAGES", tmp_path / "stages.def")
    with pytest.raises(ValueError, match=r"not a stage: STAGE\(kSm90Jvp"):
        kernel_table.stages.__wrapped__()


def test_rows_of_a_source_are_for_the_same_gpus() -> None:
    for rows in sources.rows_of_sources(sm90=True).values():
        assert len({row.gpus for row, _ in rows}) == 1


@pytest.mark.skipif(NVCC is None or shutil.which("nm") is None, reason="needs nvcc and nm")
def test_dispatch_refers_to_every_kernel(tmp_path: Path) -> None:
    """The functions that the compiled dispatch files need are those that the sources of the table define."""
    used = set()
    for name in ("sm80/dispatch.cu", "sm90/dispatch.cu"):
        target = "-gencode=arch=compute_80,code=sm_80"
        command = [NVCC, "-std=c++17", "-DFLASHATTN_EXT_SM90", f"-I{ROOT / 'csrc'}", target]
        subprocess.run([*command, "-c", str(ROOT / "csrc/cuda" / name), "-o", tmp_path / "a.o"], check=True)
        symbols = subprocess.run(["nm", "-Cu", tmp_path / "a.o"], capture_output=True, text=True, check=True).stdout
        used |= {*re.findall(r"flashattn_ext::\w+::\w+<.*>(?=\()", symbols)}
    defined = set()
    for function in re.findall(r"^template \S+ ([^(]*)\(", "".join(sources.cuda_instances(sm90=True).values()), re.M):
        spelled = re.sub(
            r"flashattn_ext::(k\w+)",
            lambda found: f"(flashattn_ext::Options){kernel_table.option_bits()[found[1]]}",
            function,
        )
        defined.add(spelled)
    assert used == defined


def test_without_hopper() -> None:
    names = [*sources.cuda_instances(sm90=False)]
    assert names and not [name for name in names if "sm90" in name]


def test_sources_are_written_once(tmp_path: Path) -> None:
    """A build compiles every source that is newer than its object."""
    found = sources.cuda_sources(tmp_path, sm90=True)
    times = {path: path.stat().st_mtime_ns for path in found}
    changed = tmp_path / "sm80_forward_fp16_64.cu"
    changed.write_text("")
    assert sources.cuda_sources(tmp_path, sm90=True) == found
    assert {path for path in found if path.stat().st_mtime_ns != times[path]} == {changed}
    assert '#include "cuda/sm80/forward/forward.cuh"' in changed.read_text()


def test_a_build_joins_the_sources_that_compile_quickly(tmp_path: Path) -> None:
    """Every kernel is instantiated once, with its own header and for the GPUs that it had in a source of its own."""
    instances = sources.cuda_instances(sm90=True)
    paths = [path for path in sources.cuda_sources(tmp_path, sm90=True, package=True) if path.parent == tmp_path]
    texts = {path.stem: path.read_text() for path in paths}
    templates = [
        sorted(line for text in found.values() for line in re.findall(r"^template .*", text, re.M))
        for found in (texts, instances)
    ]
    assert templates[0] == templates[1] and 2 * len(texts) < len(instances)
    assert not [name for name in texts if "+" in name and "sm90_" not in name]
    for name, text in texts.items():
        parts = name.split("+")
        alone = {part.replace("_16bit_", f"_{dtype}_") for part in parts for dtype in ("bf16", "fp16")}
        for targets in (DEFAULT, DEFAULT[:1], DEFAULT[2:], [DEFAULT[0], DEFAULT[2]]):
            wanted = {tuple(sources.targets_of(Path(f"{one}.cu"), targets)) for one in alone}
            assert wanted == {tuple(sources.targets_of(Path(f"{name}.cu"), targets))}
        headers = {re.search(r"^#include .*", instances[f"{one}.cu"], re.M)[0] for one in alone}
        assert re.findall(r"^#include .*", text, re.M) == [*headers]
        assert len(parts) <= sources.MOST_JOINED and len(f"{name}.cuda.o") < 255  # the longest name of a file


def test_a_build_starts_with_the_sources_that_take_longest(tmp_path: Path) -> None:
    """Several sources that are one take no longer than a limit, and no source outside the table takes long."""
    paths = sources.cuda_sources(tmp_path, sm90=True, package=True)
    seconds = {path: sources.seconds(path) for path in paths}
    assert all((path.parent == tmp_path) == (its > 0) for path, its in seconds.items())
    assert all(its <= sources.LONGEST or "+" not in path.stem for path, its in seconds.items())
    bf16, both = (sources.seconds(Path(f"sm90_backward_{dtype}_128.cu")) for dtype in ("bf16", "16bit"))
    two = sources.seconds(Path("sm90_backward_16bit_128+sm90_backward_bf16_128.cu"))
    assert 0 < bf16 == both / 2 == two / 3
    # With and without dropout, two tiles for the GPUs of 8.0 and one for Hopper; fp32 takes twice as long.
    assert sources.seconds(Path("sm80_backward_fp32_128.cu")) == 2 * 3 * 2 * sources.SECONDS["sm80", "backward"]


def test_a_check_joins_the_sources_that_it_compiles(tmp_path: Path) -> None:
    """The same kernels, for the same GPUs and with the same host code; those whose machine code is read are apart from the others."""
    apart = sources.cuda_sources(tmp_path / "apart", sm90=True, checked="apart")
    joined = sources.cuda_sources(tmp_path / "joined", sm90=True, checked="joined")
    names = [path.stem for path in joined if path.parent == tmp_path / "joined"]
    assert sorted("+".join(names).split("+")) == sorted(
        path.stem for path in apart if path.parent == tmp_path / "apart"
    )
    assert 2 * len(joined) < len(apart) and {path for path in joined if path.stem not in names} < {*apart}
    templates = [
        sorted(line for path in found for line in re.findall(r"^template .*", path.read_text(), re.M))
        for found in (apart, joined)
    ]
    assert templates[0] == templates[1]
    instances = sources.cuda_instances(sm90=True)
    for name in names:
        commands = [
            sources.nvcc_command(["nvcc", *DEFAULT, sources.FAST, "-c", f"somewhere/{one}.cu"], once=True)[:-1]
            for one in (name, *name.split("+"))
        ]
        assert all(command == commands[0] for command in commands)
        headers = {re.search(r"^#include .*", instances[f"{one}.cu"], re.M)[0] for one in name.split("+")}
        assert re.findall(r"^#include .*", (tmp_path / "joined" / f"{name}.cu").read_text(), re.M) == [*headers]
        assert len({sources.is_read(Path(f"{one}.cu")) for one in name.split("+")}) == 1


def test_a_measurement_compiles_what_it_calls(tmp_path: Path) -> None:
    """Functions of the other instances exist, so that the library loads, but they throw."""
    only = [name for name in sources.tuned_sources("sm90", 1, "bf16") if name.endswith("_128")]
    assert only == ["sm90_forward_bf16_128", "sm90_backward_bf16_128"]
    found = sources.cuda_sources(tmp_path, sm90=True, only=only)
    assert [path.stem for path in found if path.parent == tmp_path] == ["left_out", *sorted(only)]
    stubs = (tmp_path / "left_out.cu").read_text().count("template <>")
    functions = sum(text.count("template ") for text in sources.cuda_instances(sm90=True).values())
    # the three of forward and backward with and without dropout, and two of backward with groups
    assert stubs == functions - 8
    assert "sm90_forward_fp16_192x128" in sources.tuned_sources("sm90", 1, "fp16")


def test_the_list_needs_no_package(tmp_path: Path) -> None:
    """tools/check_cuda_sources.sh runs it with any Python."""
    command = [sys.executable, "-I", "-S", ROOT / "csrc" / "sources.py", "write", tmp_path]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    assert {*map(Path, filter(None, lines))} == {*sources.cuda_sources(tmp_path, sm90=True)}


# Architectures


@pytest.mark.parametrize(
    ("source", "targets", "kept"),
    [
        ("sm90_forward_bf16_128", DEFAULT, DEFAULT[2:]),
        ("sm80_forward_bf16_128", DEFAULT, DEFAULT[:2]),
        ("sm80_forward_bf16_128", DEFAULT[2:], DEFAULT[2:]),  # a build for Hopper alone
        ("sm80_forward_bf16_128", [DEFAULT[0], DEFAULT[2]], [DEFAULT[0], DEFAULT[2]]),  # no PTX that Hopper could run
        ("sm80_forward_fp32_128", DEFAULT, DEFAULT),
        ("sm80_backward_bf16_128_general", DEFAULT, DEFAULT),
        ("decode_split_bf16_128", DEFAULT, DEFAULT),
        ("combine", DEFAULT, DEFAULT),
    ],
)
def test_a_source_is_compiled_for_the_gpus_that_run_it(source: str, targets: list[str], kept: list[str]) -> None:
    def command(level: str, targets: list[str]) -> list[str]:
        return ["nvcc", *targets, level, "-c", f"somewhere/{source}.cu", "-o", "a.o"]

    level = "-O1" if source in sources.rows_of_sources(sm90=True) else "-O3"  # of host code
    assert sources.nvcc_command(command("-O3", targets)) == command(level, kept)
    once = sources.nvcc_command(command("-O3", targets), once=True)
    assert once[: once.index(level)] == ["nvcc", kept[0]]


def test_host_code_is_compiled_once() -> None:
    """Of every stage and group of options one source goes to the host compiler, and every source outside the table."""
    with_host_code = sources.sources_with_host_code()
    names = sources.rows_of_sources(sm90=True)
    assert {row.stage for name in with_host_code for row, _ in names[name]} == {row.stage for row in ROWS}
    assert {row.options for name in with_host_code for row, _ in names[name]} == {row.options for row in ROWS}
    for name in [*names, "combine"]:
        command = sources.nvcc_command(["nvcc", *DEFAULT, "-c", f"somewhere/{name}.cu"], once=True)
        compiled_by_host = name in {*with_host_code, "combine"}
        assert ("-c" in command, "-Xcompiler=-fsyntax-only" in command) == (compiled_by_host, compiled_by_host)
        assert ("-cubin" in command) != compiled_by_host


def test_forwards_that_the_batch_size_chooses_take_as_many_keys() -> None:
    """The keys of a step decide the order of sums: a sequence has the same bits alone and in a batch."""
    keys = {
        (row.stage, row.head_dim, row.options): row.tiles[0][0 if row.stage == "forward_short" else 1]
        for row in ROWS
        if row.architecture == "sm90" and row.stage in ("forward", "forward_short") and row.head_dim == row.head_dim_v
    }
    others = {
        ("forward", "kFewTiles"): ("forward", "kPlain"),
        ("forward", "kBriefFewTiles"): ("forward", "kBrief"),
        ("forward_short", "kPlain"): ("forward", "kBrief"),
    }
    pairs = [(key, others[key[0], key[2]]) for key in keys if (key[0], key[2]) in others]
    assert len(pairs) == 4
    for (stage, head_dim, options), (other_stage, other) in pairs:
        assert keys[stage, head_dim, options] == keys[other_stage, head_dim, other]


def test_machine_code_that_the_check_reads_is_optimised() -> None:
    """Sources that are read are optimised, and for them alone ptxas prints registers, which --once compares with the rows."""
    for name in [*sources.rows_of_sources(sm90=True), "combine"]:
        is_read = name in {*sources.read_sources(), "combine"}
        for source in (f"{name}.cu", f"sm80_jvp_bf16_64+{name}.cu", f"{name}+sm80_jvp_bf16_64.cu")[
            : 1 if name == "combine" else 3
        ]:
            command = ["nvcc", *DEFAULT, sources.FAST, sources.PRINTS_REGISTERS, "-c", f"somewhere/{source}"]
            once = sources.nvcc_command(command, once=True)
            assert (sources.FAST in once, sources.PRINTS_REGISTERS in once) == (not is_read, is_read), source
            assert sources.PRINTS_REGISTERS in sources.nvcc_command(command), source


def test_the_dispatch_of_hopper_is_compiled_for_hopper() -> None:
    command = ["nvcc", *DEFAULT, "-O3", "-c", "csrc/cuda/sm90/dispatch.cu"]
    assert sources.nvcc_command(command) == ["nvcc", DEFAULT[2], "-O3", "-c", "csrc/cuda/sm90/dispatch.cu"]


def test_host_code_of_both_16_bit_types_is_that_of_one() -> None:
    command = sources.nvcc_command(["nvcc", *DEFAULT, "-O3", "-c", "somewhere/sm90_forward_16bit_128.cu"])
    assert command == ["nvcc", DEFAULT[2], "-O1", "-c", "somewhere/sm90_forward_16bit_128.cu"]


# Documentation


def test_the_page_shows_the_table() -> None:
    written = (ROOT / "docs" / "cuda_kernels.md").read_text()
    assert written == sources.page(), "run: python3 csrc/sources.py page > docs/cuda_kernels.md"
