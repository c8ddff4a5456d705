// How the device divides a call into parts (plan.h).
#pragma once

#include "../../key_locator.h"
#include "../common/rows.cuh"
#include "../common/warp.cuh"
#include "plan.h"
#include "tiles.h"

namespace flashattn_ext::decode {

// What there is to do for one sequence. Keys are counted by the rows of its room in the cache (KeyLocator::run_of_row).
struct SequenceWork {
  int queries;
  int tiles;       // of packed rows
  int first_row;   // the row of key 0
  int length;      // keys
  int begin, end;  // the rows that some query sees
  int64_t units;   // of these keys, at least one

  template <int kRows>
  static __device__ __forceinline__ SequenceWork of(const DecodeParams& p, const Plan& plan, int b) {
    SequenceWork work;
    const KeyLocator keys(p, b);
    work.queries = static_cast<int>(query_sequence(p, b).length);
    work.tiles = (work.queries * plan.group + kRows - 1) / kRows;
    work.length = static_cast<int>(keys.length);
    work.first_row = static_cast<int>(keys.first_new_row + keys.new_keys - keys.length);
    const Limits visible = Mask32(p, work.queries, work.length).keys_of(0, work.queries);
    work.begin = work.first_row + visible.begin;
    work.end = work.first_row + visible.end;
    work.units = max(1, (work.end + kUnitKeys - 1) / kUnitKeys - work.first_unit());
    return work;
  }
  __device__ __forceinline__ int first_unit() const { return begin / kUnitKeys; }
  // Units of all tasks of the sequence.
  __device__ __forceinline__ int64_t task_units(const DecodeParams& p) const { return units * tiles * p.heads_k; }
};

// One part of a task.
struct Part {
  int b, head_k, row_tile;
  int begin, end;  // rows of the room
  bool is_first;   // of the task: it has the sink
  int slot;        // where it is added up from; -1: it is the whole task
};

// The thread block's share of the line of all units, and where it begins.
struct Share {
  int64_t all, blocks;     // units of the call; thread blocks that share them, each at least one
  int64_t begin, end;      // of the thread block
  int b;                   // the sequence of unit `begin`
  int64_t sequence_begin;  // the first unit of that sequence

  // All lanes of a warp call it together.
  template <int kRows>
  static __device__ __forceinline__ Share of(const DecodeParams& p, const Plan& plan, int block) {
    const int lane = threadIdx.x % 32, batch = static_cast<int>(p.batch);
    auto units_of = [&](int b) { return b < batch ? SequenceWork::of<kRows>(p, plan, b).task_units(p) : int64_t{0}; };
    Share share;
    share.all = 0;
    for (int b = lane; b < batch; b += 32) share.all += units_of(b);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      share.all += __shfl_xor_sync(~0u, share.all, distance);
    }
    share.blocks = min(static_cast<int64_t>(plan.blocks), share.all);
    share.begin = share.end = share.sequence_begin = 0;
    share.b = batch;
    if (block >= share.blocks) return share;
    share.begin = share.all * block / share.blocks;
    share.end = share.all * (block + 1) / share.blocks;
    int64_t before = 0;
    for (int first = 0; first < batch; first += 32) {
      const int64_t own = units_of(first + lane);
      int64_t through = own;  // units up to this lane's sequence, which counts
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int64_t other = __shfl_up_sync(~0u, through, distance);
        if (lane >= distance) through += other;
      }
      const uint32_t beyond = __ballot_sync(~0u, before + through > share.begin);
      if (beyond != 0) {
        const int found = __ffs(static_cast<int>(beyond)) - 1;
        share.b = first + found;
        share.sequence_begin = before + __shfl_sync(~0u, through - own, found);
        return share;
      }
      before += __shfl_sync(~0u, through, 31);
    }
    return share;
  }

  // Goes on to a unit: of this sequence, which has so many units, or after its end.
  __device__ __forceinline__ void advance(int64_t unit, int64_t sequence_units) {
    begin = unit;
    if (unit < sequence_begin + sequence_units) return;
    sequence_begin += sequence_units;
    ++b;
  }

  // The thread block that has a unit.
  __device__ __forceinline__ int block_of(int64_t unit) const {
    return static_cast<int>(((unit + 1) * blocks - 1) / all);
  }
};

}  // namespace flashattn_ext::decode
