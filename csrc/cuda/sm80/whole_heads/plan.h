// How the kernels of whole heads divide a call: warps and thread blocks, and the shared memory that they need. Host
// code, which choose.h reads too.
#pragma once

#include <algorithm>

#include "cuda/host/call.h"
#include "cuda/host/unit_plan.h"
#include "cuda/table/rows.h"
#include "params.h"

namespace flashattn_ext::sm80 {

// Rows come in the height of an operand of mma.sync.
constexpr int kRowStep = 16;
FLASHATTN_HOST_DEVICE constexpr int whole_steps(int rows) { return (rows + kRowStep - 1) / kRowStep * kRowStep; }

// Whether the backward of whole heads may run a call, for the options of a row of the table. It reads whole vectors of
// `out`. With few keys other kernels have a more accurate delta (find_delta_of_few_keys).
inline bool runs_in_whole_heads(const AttnGradParams& p) {
  return may_run_short_kernels(p) && !sums_rows_of_few_keys(p) && rows_are_aligned(p.out, p.head_dim_v, 2);
}

// `call`, changed so that it runs the kernel for every option.
inline KernelCall with_every_option(KernelCall call) {
  call.options = call.options | kUnlisted;
  return call;
}
// The call whose row is the kernel of `call`. The kernels for a bias alone hold it in shared memory: they take a bias
// of the inputs' 16 bits with up to most_keys keys. The forward holds 16 rows of the bias for each warp, which with
// more than 128 keys would leave room for fewer warps.
inline KernelCall heads_call(const AttnParams& p, const KernelCall& call, int64_t most_keys) {
  const bool may_hold_bias = p.bias.data && p.bias.dtype == p.dtype && p.seqlen_k <= most_keys;
  return call.options == kPlain || may_hold_bias ? call : with_every_option(call);
}
// In a backward: the kernels that hold a bias do not form that gradient.
inline KernelCall heads_call(const AttnGradParams& p, const KernelCall& call, int64_t most_keys) {
  return has_gradient_of_keys(p) ? with_every_option(call)
                                 : heads_call(static_cast<const AttnParams&>(p), call, most_keys);
}
constexpr bool holds_bias(Options kernel) { return kernel == kAnyBias; }
// Whether a kernel has another instance for packed calls.
constexpr bool takes_packed(Options kernel) { return !holds_bias(kernel); }
constexpr bool takes_mask(Options kernel) { return includes(kernel, kIntervals); }
// Keys of the longest calls, and the bytes of one bit for each.
constexpr int kMostHeadKeys = 256, kMarkBytes = kMostHeadKeys / 8;

// How the bias of a tile of queries gets into shared memory: the vectors of each row, where rows are whole vectors
// apart in memory; the vectors of all rows together, where one row follows another; single elements otherwise.
enum class BiasCopy { kRows, kRun, kElements };

// The bias of a tile of queries in shared memory, of 16-bit elements.
struct HeadBiasPlan {
  int pitch;  // elements from one row to the next; 0: the kernel holds no bias
  BiasCopy copy;

  // keys: rows of a tile of keys. A row of a tile is longer by 16 bytes, so that eight rows lie in different banks.
  static HeadBiasPlan of(const AttnParams& p, int keys) {
    if (p.bias.row_stride % 8 == 0) return {keys + 8, BiasCopy::kRows};
    if (p.bias.row_stride == p.seqlen_k) return {static_cast<int>(p.seqlen_k), BiasCopy::kRun};
    return {keys + 8, BiasCopy::kElements};
  }
  // Bytes of a tile of `rows` rows, whose first element may be anywhere in a vector. Its last row may be followed by
  // elements of keys that do not exist, up to a whole step.
  FLASHATTN_HOST_DEVICE int tile_bytes(int rows) const {
    return pitch == 0 ? 0 : (rows * pitch + 2 * kRowStep) / 8 * 8 * 2;
  }
};

// A unit is the 16 rows of one warp.
struct HeadsForwardPlan : UnitPlan {
  int warps;  // of a thread block
  HeadBiasPlan bias;
  int mark_bytes;

  // Warps have two units each or, of longer sequences, three or four, so that the copies of one thread block overlap
  // the products of others. A warp with one unit is faster where a multiprocessor has few. Thread blocks of long
  // sequences have 16 units.
  static HeadsForwardPlan of(const AttnParams& p, const HeadsForwardTile& tile, int multiprocessors, Options kernel) {
    constexpr int kFewUnits = 16, kPairs = 8, kThrees = 24, kLongBlock = 16;
    const int units = static_cast<int>(tile_count(p.seqlen_q, kRowStep)), group = static_cast<int>(p.group_size());
    const int all = units * group;
    const auto warps_of = [&](int rounds) { return (all + rounds - 1) / rounds; };
    int rounds = 4, warps = kLongBlock / rounds;
    if (p.batch * p.heads_k * all <= kFewUnits * multiprocessors) {
      rounds = 1, warps = all;
    } else if (all <= kPairs) {
      rounds = 2, warps = warps_of(2);
    } else if (all <= kThrees) {
      rounds = 4 * warps_of(4) < 3 * warps_of(3) ? 4 : 3;  // the one with fewer idle warps
      warps = warps_of(rounds);
    }
    warps = std::min(warps, tile.warps);
    const int parts = static_cast<int>(tile_count(all, warps * rounds));
    // The tile has whole steps of 32 keys too. A packed sequence may have keys where max_seqlen_k is 0.
    const int keys = whole_steps(whole_steps(static_cast<int>(std::max<int64_t>(p.seqlen_k, 1))) / 2) * 2;
    const HeadBiasPlan bias = holds_bias(kernel) ? HeadBiasPlan::of(p, keys) : HeadBiasPlan();
    return {{parts, (all + parts - 1) / parts, units, group, keys}, warps, bias, takes_mask(kernel) ? kMarkBytes : 0};
  }
  // columns: the class of head dims, of 16-bit elements. Behind the tiles come the generator of dropout and a barrier,
  // and marks of keys or the bias.
  int64_t shared_bytes(int columns) const {
    return int64_t{2 * keys + warps * kRowStep} * columns * 2 + 32 + mark_bytes +
           int64_t{warps} * bias.tile_bytes(kRowStep);
  }
};

// A thread block has a KV head, and a warp for every 16 keys.
struct HeadsBackwardPlan {
  int keys;    // rows of a tile of keys in shared memory
  int rows;    // of a tile of queries
  int tiles;   // of queries, of a query head
  int group;   // query heads of a KV head
  int stages;  // of tiles of queries in shared memory, 1 or 2
  HeadBiasPlan bias;

  // kernel: its options.
  static HeadsBackwardPlan of(const AttnParams& p, const HeadsBackwardTile& tile, Options kernel) {
    const int tiles = static_cast<int>(tile_count(p.seqlen_q, tile.queries)), group = static_cast<int>(p.group_size());
    const int rows = static_cast<int>(tile_count(std::min<int64_t>(p.seqlen_q, tile.queries), tile.step)) * tile.step;
    const int keys = std::max(kRowStep, whole_steps(static_cast<int>(p.seqlen_k)));
    const HeadBiasPlan bias = holds_bias(kernel) ? HeadBiasPlan::of(p, keys) : HeadBiasPlan();
    return {keys, rows, tiles, group, tiles * group > 1 ? 2 : 1, bias};
  }
  FLASHATTN_HOST_DEVICE int warps() const { return keys / kRowStep; }
  // Elements from one key to the next in the tile of dS, whose rows are padded by 16 bytes.
  FLASHATTN_HOST_DEVICE int score_stride() const { return rows + 8; }
  // A tile of queries: rows of q, dout and out, and three numbers of each row.
  FLASHATTN_HOST_DEVICE int stage_bytes(int columns) const { return rows * (3 * columns * 2 + 3 * 4); }
  int64_t shared_bytes(int columns) const {
    return int64_t{keys} * (2 * columns + score_stride()) * 2 +
           int64_t{stages} * (stage_bytes(columns) + bias.tile_bytes(rows));
  }
};

}  // namespace flashattn_ext::sm80
