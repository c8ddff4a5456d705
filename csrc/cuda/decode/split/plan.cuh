// Work division on the device. plan.h defines task, part, unit, share and slot.
#pragma once

#include "backend/key_locator.h"
#include "cuda/decode/split/plan.h"
#include "cuda/decode/split/tiles.h"
#include "cuda/tile/rows.cuh"
#include "cuda/tile/warp.cuh"

namespace flashattn_ext::decode {

// The work of one sequence. Keys are addressed by cache row: the row within the cached sequence, counted with the
// leftpad rows (KeyLocator::run_of_row).
struct SequenceWork {
  int queries;
  int tiles;       // tiles of query rows of a KV head
  int first_row;   // cache row of key 0
  int length;      // keys
  int begin, end;  // cache rows of the keys that are visible to at least one query
  int unit_keys;   // keys per unit
  int units;       // units per task, at least one: a fully masked task still writes its output

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
    work.unit_keys = kUnitKeys;
    if (plan.part_keys > 0) {
      // A sequence that exceeds max_seqlen_q or max_seqlen_k is not split: the workspace may lack slots for its parts.
      const bool is_known = work.queries <= p.seqlen_q && work.length <= p.seqlen_k;
      work.unit_keys = is_known ? plan.part_keys : kWholeSequence;
      work.units = max(1, (work.end + work.unit_keys - 1) / work.unit_keys - work.begin / work.unit_keys);
    } else {
      work.units = max(1, (work.end + kUnitKeys - 1) / kUnitKeys - work.begin / kUnitKeys);
    }
    return work;
  }
  __device__ __forceinline__ int first_unit() const { return begin / unit_keys; }
  static constexpr int kWholeSequence = 1 << 30;  // keys; exceeds every length that Mask32 accepts
  // Number of units of all tasks of the sequence.
  __device__ __forceinline__ int task_units(const DecodeParams& p) const {
    return units * tiles * static_cast<int>(p.heads_k);
  }
};

// One part (KV split) of a task.
struct Part {
  int b, head_k, row_tile;
  int begin, end;  // cache rows
  bool is_first;   // the first part of its task, which includes the sink
  int slot;        // destination of the partial result; -1: the part is the whole task and writes the final output
};

// The thread block's share: a contiguous range of the call's units.
struct Share {
  int all, blocks;     // units of the call; thread blocks with at least one unit each
  int begin, end;      // units of this thread block; `begin` advances as parts are taken
  int b;               // the sequence of unit `begin`
  int sequence_begin;  // the first unit of that sequence

  // Writes the share of the thread block to `share` and, unless the share is empty, the work of its first sequence to
  // `begun`. Both are in shared memory and visible to all threads on return. All threads must call it: each thread
  // reads the lengths of a few adjacent sequences, so that the loads of a large batch overlap.
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
    int through = own;  // inclusive prefix sum of the units of all threads
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
    // Block i begins at unit all * i / blocks, computed without overflow in 32 bits.
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

  // Moves `begin` to `unit`, which is in the current sequence of sequence_units units or the first one after it.
  __device__ __forceinline__ void advance(int unit, int sequence_units) {
    begin = unit;
    if (unit < sequence_begin + sequence_units) return;
    sequence_begin += sequence_units;
    ++b;
  }

  // The thread block whose share contains `unit`.
  __device__ __forceinline__ int block_of(int unit) const {
    return static_cast<int>((static_cast<int64_t>(unit + 1) * blocks - 1) / all);
  }
};

}  // namespace flashattn_ext::decode
