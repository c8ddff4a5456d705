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
  int units;       // of these keys, at least one

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
  __device__ __forceinline__ int task_units(const DecodeParams& p) const {
    return units * tiles * static_cast<int>(p.heads_k);
  }
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
  int all, blocks;     // units of the call; thread blocks that share them, each at least one
  int begin, end;      // of the thread block
  int b;               // the sequence of unit `begin`
  int sequence_begin;  // the first unit of that sequence

  // Writes the share of the thread block, and the work of the sequence that it begins in unless it is empty, to shared
  // memory, and returns when they are there. All threads call it together; each reads the lengths of some neighbouring
  // sequences, so that a long batch waits for memory but once.
  template <int kRows>
  static __device__ __forceinline__ void find(Share* share, SequenceWork* begun, const DecodeParams& p,
                                              const Plan& plan) {
    __shared__ int of_warps[kMaxWarps];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int batch = static_cast<int>(p.batch), each = (batch + blockDim.x - 1) / blockDim.x;
    SequenceWork work{};
    const int first = min(static_cast<int>(threadIdx.x) * each, batch), end = min(first + each, batch);
    int own = 0;
    for (int b = first; b < end; ++b) {
      work = SequenceWork::of<kRows>(p, plan, b);
      own += work.task_units(p);
    }
    int through = own;  // units up to this thread's last sequence, which counts
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(~0u, through, distance);
      if (lane >= distance) through += other;
    }
    if (lane == 31) of_warps[warp] = through;
    __syncthreads();
    int all = 0;
    for (int w = 0; w < warps; ++w) {
      if (w == warp) through += all;
      all += of_warps[w];
    }
    // The first unit of a block is all * block / blocks.
    const int blocks = min(plan.blocks, all), block = blockIdx.x;
    if (block >= blocks) {
      if (threadIdx.x == 0) *share = {all, blocks, 0, 0, batch, 0};
    } else {
      const int each_block = all / blocks, left = all % blocks;
      const int begin = each_block * block + left * block / blocks;
      if (through - own <= begin && begin < through) {
        int b = first, before = through - own;
        if (end - first > 1) work = SequenceWork::of<kRows>(p, plan, b);
        for (; before + work.task_units(p) <= begin; work = SequenceWork::of<kRows>(p, plan, ++b)) {
          before += work.task_units(p);
        }
        *begun = work;
        *share = {all, blocks, begin, each_block * (block + 1) + left * (block + 1) / blocks, b, before};
      }
    }
    __syncthreads();
  }

  // Goes on to a unit: of this sequence, which has so many units, or after its end.
  __device__ __forceinline__ void advance(int unit, int sequence_units) {
    begin = unit;
    if (unit < sequence_begin + sequence_units) return;
    sequence_begin += sequence_units;
    ++b;
  }

  // The thread block that has a unit.
  __device__ __forceinline__ int block_of(int unit) const {
    return static_cast<int>((static_cast<int64_t>(unit + 1) * blocks - 1) / all);
  }
};

}  // namespace flashattn_ext::decode
