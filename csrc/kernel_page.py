"""Makes docs/cuda_kernels.md of the table of CUDA kernels, for sources.py. Needs only the Python standard library."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_table import SUFFIXES, Row, table

PAGE = """# The compiled CUDA kernels

Made from `csrc/cuda/table/kernel_table.h` by `python3 csrc/sources.py page`; do not edit. Each cell is one kernel in each of the dtypes,
by the class of head dims (a kernel serves every head dim up to its class) and the [options](architecture.md#glossary) that it supports; it holds
the tile, whose sizes the heading explains; "masks" are a Mask or a BlockMask, "intervals" a Mask, "blocks" a BlockMask. A call runs the first
row of the table that serves it, a general kernel if there is no other. Where a cell is empty, general kernels or a larger class serve the call;
Hopper then runs the sm_80 kernels. Figures in notes are TFLOP/s on an H200 (bf16; full / causal, S = 4096 where none is named; with a Mask: one
document / documents of a mean of 1024 tokens, both causal and S = 16384) of the tile and of others.
"""
UNITS = {
    (
        "sm80",
        "forward",
    ): "warps x row tiles of 16 queries, keys of a step, resident blocks, stages (above 256: with 227 KB of shared memory)",
    (
        "sm80",
        "backward",
    ): "warps, keys x queries, thread blocks along the columns, stages, with 227 KB of shared memory",
    ("sm80", "heads_forward"): "keys of a step, warps at most, resident blocks of as many warps",
    ("sm80", "heads_backward"): "queries of a tile x of a step, columns of dq of a warp, warps at most",
    ("sm90", "forward_short"): "keys of a step, resident thread blocks",
    ("sm80", "jvp"): "warps x row tiles of 16 queries, keys of a step, resident blocks",
    ("sm80", "second"): "warps, keys x queries, with 227 KB of shared memory",
    ("sm90", "forward"): "queries x keys of a step, stages, order",
    ("sm90", "invariant"): "queries x keys of a step, stages",
    ("sm90", "pack_gqa"): "rows x keys of a step, stages",
    ("sm90", "backward"): "keys x queries of a step, stages of queries and of keys, order",
    ("sm90", "heads"): "keys x queries of a step, stages of queries and of keys, order",
    ("sm90", "few_queries_backward"): "rows of a KV head x keys of a stage, stages",
    ("sm90", "jvp"): "queries x keys of a step, stages",
    ("sm90", "second"): "keys x queries of a step, stages of queries",
}

TITLES = {("bf16",): "inputs in fp8, widened to bf16", ("fp8",): "fp8"}


def queries_and_keys(row: Row, choice: int = 0) -> tuple[int, int]:
    """The sizes of a tile of a forward."""
    first, second, third = map(int, row.tiles[choice][:3])
    return (16 * first * second, third) if row.architecture == "sm80" else (64 * first, second)


def describe(row: Row, choice: int = 0) -> str:
    """A tile in the words of UNITS."""
    tile = row.tiles[choice]
    if (row.architecture, row.stage) == ("sm80", "forward"):
        stages = tile[4] if len(tile) > 4 else "1"
        return f"{tile[0]} x {tile[1]}, {tile[2]}, {tile[3]}, {stages}"
    if (row.architecture, row.stage) == ("sm80", "jvp"):
        return f"{tile[0]} x {tile[1]}, {tile[2]}, {tile[3]}"
    if row.stage == "forward_short":
        return f"{tile[0]}, {tile[1]}"
    if row.stage == "heads_forward":
        return f"{tile[0]}, {tile[1]}, {tile[2]}"
    if row.stage == "heads_backward":
        return f"{tile[0]} x {tile[1]}, {tile[2]}, {tile[3]}"
    if (row.architecture, row.stage) == ("sm80", "second"):
        return f"{tile[0]}, {tile[1]} x {tile[2]}"
    if row.architecture == "sm80":
        return f"{tile[0]}, {tile[1]} x {tile[2]}, {tile[5]}, {tile[6]}"
    if row.stage in ("forward", "invariant", "pack_gqa", "jvp"):
        order = ", in turn" if tile[3:4] == ("kInTurn",) else ""
        order += ", in two teams" if tile[4:5] == ("true",) else ""
        order += f", {tile[5]} stages of queries" if len(tile) > 5 else ""
        return f"{64 * int(tile[0])} x {tile[1]}, {tile[2]}{order}"
    if row.stage in ("few_queries_backward", "second"):
        return f"{tile[0]} x {tile[1]}, {tile[2]}"
    orders = {
        "kApart": ", dq apart",
        "kApartOnce": ", dq apart, one turn",
        "kPairs": ", in pairs",
        "kThreePhases": ", three phases",
    }
    order = orders.get(tile[4], "") if len(tile) > 4 else ""
    return f"{tile[0]} x {tile[1]}, {tile[2]}, {tile[3]}{order}"


def page() -> str:
    """docs/cuda_kernels.md."""
    text = PAGE
    for architecture, stage in UNITS:
        for dtypes in (("fp16", "bf16"), ("fp32",), ("bf16",), ("fp8",)):
            rows = [
                row for row in table() if (row.architecture, row.stage, row.dtypes) == (architecture, stage, dtypes)
            ]
            if rows:
                text += (
                    f"\n## {architecture} {stage}, {TITLES.get(dtypes, ' and '.join(dtypes))}\n\n{UNITS[architecture, stage]}.\n\n"
                    + _grid(rows)
                )
    text += "\n## Decoding, every GPU\n\nKeys of a step, stages, by the rows of a tile.\n\n" + _decode_grid()
    few = [row for row in table() if (row.architecture, row.stage) == ("decode", "backward")]
    text += "\n## The backward with few queries, every GPU\n\n"
    for dims in sorted({row.head_dim for row in few}):
        sizes = ", ".join(str(row.tile_rows) for row in few if row.head_dim == dims)
        text += f"- D = {dims}, {' and '.join(few[0].dtypes)}: {sizes} rows of a KV head\n"
    return text


def _decode_grid() -> str:
    rows = [row for row in table() if row.stage == "split"]
    columns = list(dict.fromkeys((row.dtypes, row.tile_rows) for row in rows))
    cells = {(row.head_dim, row.dtypes, row.tile_rows): f"{row.tiles[0][3]}, {row.tiles[0][4]}" for row in rows}
    lines = [
        ["D", *(f"{' and '.join(dtypes)}, {count} rows" for dtypes, count in columns)],
        ["---"] * (len(columns) + 1),
    ]
    for head_dim in sorted({row.head_dim for row in rows}):
        lines.append([str(head_dim), *(cells.get((head_dim, *column), "") for column in columns)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + _notes(rows)


def in_words(options: str) -> str:
    """The options of a row, as the page names them."""
    return {"kUnlisted": "all but blocks", "kFewTiles": "few tiles", "kBriefFewTiles": "brief, few tiles"}.get(
        options, options[1:].lower()
    )


def _notes(rows: Sequence[Row]) -> str:
    """A line for the note of each row, and one for each group of the others."""
    groups: dict[str, list[Row]] = {}
    lines = ["\n"]
    for row in rows:
        if row.note:
            about = in_words(row.options) or f"{' and '.join(row.dtypes)}, {row.tile_rows} rows"
            lines.append(f"- {row.head_dim}, {about}: {row.note}\n")
        elif row.group:
            groups.setdefault(row.group, []).append(row)
    for note, others in groups.items():
        options = [*dict.fromkeys(in_words(row.options) for row in others)]
        dims = sorted({row.head_dim for row in others})
        about = "others" if options == [""] else f"{dims[0]} to {dims[-1]}, {', '.join(options)}"
        lines.append(f"- {about}: {note}\n")
    return "".join(lines if len(lines) > 1 else ())


def _grid(rows: Sequence[Row]) -> str:
    columns = [options for options in SUFFIXES if any(row.options == options for row in rows)]
    dims = list(
        dict.fromkeys(
            (row.head_dim, row.head_dim_v) for row in sorted(rows, key=lambda row: (row.head_dim, row.head_dim_v))
        )
    )
    cells = {(row.head_dim, row.head_dim_v, row.options): describe(row) for row in rows}
    text = "| D | " + " | ".join(map(in_words, columns)) + " |\n" + "| --- " * (len(columns) + 1) + "|\n"
    for qk, v in dims:
        name = f"{qk}" if qk == v else f"{qk}x{v}"
        text += f"| {name} | " + " | ".join(cells.get((qk, v, options), "") for options in columns) + " |\n"
    return text + _notes(rows)
