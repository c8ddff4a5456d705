// Which parts a thread block of the split-KV attention kernel (split_tile.cuh) computes.
#pragma once

#include "cuda/decode/split/split_tile.cuh"

namespace flashattn_ext::decode {

template <class Key, int kHeadDim, int kTileRows>
__device__ void Split<Key, kHeadDim, kTileRows>::run_fixed() {
  const int heads = static_cast<int>(p.heads_k), split = blockIdx.x % plan.splits, task = blockIdx.x / plan.splits;
  const int b = task / plan.row_tiles / heads, head = task / plan.row_tiles % heads;
  const SequenceWork work = SequenceWork::of<kRows>(p, plan, b);
  const IndexRange keys = split_keys({work.begin, work.end}, kUnitKeys, plan.splits, split);
  // Causal calls start with the longest row tiles. An unsplit sequence may have more row tiles than plan.row_tiles.
  int row_tile = plan.row_tiles - 1 - task % plan.row_tiles;
  if (plan.splits > 1 && split == 0 && threadIdx.x == 0) {
    const int slot = task * plan.splits, parts = row_tile < work.tiles ? plan.splits : 0;
    plan.split_tasks[task] = {b, head, row_tile, parts, slot, slot};
  }
  if (threadIdx.x == 0) {
    const int slot = plan.splits > 1 ? static_cast<int>(blockIdx.x) : -1;
    parts()[now] = {b, head, 0, static_cast<int>(keys.begin), static_cast<int>(keys.end), split == 0, slot};
    works()[now] = work;
  }
  __syncthreads();
  for (; row_tile < works()[now].tiles; row_tile += plan.row_tiles) {
    if (threadIdx.x == 0) parts()[now].row_tile = row_tile;
    __syncthreads();
    Walk walk = start();
    walk_keys(walk);
    finish();
  }
}

template <class Key, int kHeadDim, int kTileRows>
__device__ void Split<Key, kHeadDim, kTileRows>::run_share() {
  __shared__ Share share;                    // the parts that are not yet taken
  const bool is_early = plan.knows_lengths;  // the previous kernel may still be running
  if (threadIdx.x == 0) is_early ? forget_begun_task() : forget_task();
  Share::find<kRows>(&share, &works()[now], p, plan);
  if (!find_part(&share, now, true, is_early)) {
    if (is_early) begin_memory_accesses(), store_begun_task();
    return;
  }
  Walk walk = start(is_early);
  if (is_early) store_begun_task();
  for (;;) {
    const bool has_next = find_part(&share, now ^ 1);  // overlaps the copies of this part's first keys
    walk_keys(walk);
    if (kAhead && has_next) walk = start_next();
    finish();
    if (!has_next) return;
    now ^= 1;
    if (!kAhead) walk = start();
  }
}

// Takes the next part from the share. Returns false if the share is empty. is_known: whether works()[which] already
// describes the sequence. is_early: nothing may be written to global memory yet.
template <class Key, int kHeadDim, int kTileRows>
__device__ __forceinline__ bool Split<Key, kHeadDim, kTileRows>::find_part(Share* share, int which, bool is_known,
                                                                           bool is_early) {
  for (; share->begin < share->end; is_known = false) {
    const SequenceWork work = is_known ? works()[which] : SequenceWork::of<kRows>(p, plan, share->b);
    Part part{};
    const int end = next_part(*share, &part, work, is_early);
    const bool found = end > share->begin;
    __syncthreads();  // all threads have read the share
    if (threadIdx.x == 0) {
      parts()[which] = part;
      works()[which] = work;
      share->advance(end, work.task_units(p));
    }
    __syncthreads();
    if (found) return true;
  }
  return false;
}

// Fills in the first part of the share, and returns the unit after it. Returns share.begin if the sequence has no
// units left.
template <class Key, int kHeadDim, int kTileRows>
__device__ __forceinline__ int Split<Key, kHeadDim, kTileRows>::next_part(const Share& share, Part* part,
                                                                          const SequenceWork& work, bool is_early) {
  const int block = static_cast<int>(blockIdx.x);
  const int unit = share.begin - share.sequence_begin;
  if (unit >= work.task_units(p)) return share.begin;  // the share continues in the next sequence
  const int task = unit / work.units, task_begin = share.sequence_begin + task * work.units;
  const bool is_unit = plan.part_keys > 0;
  const int task_end = task_begin + work.units, end = is_unit ? share.begin + 1 : min(task_end, share.end);
  const int first_unit = work.first_unit() - task_begin;
  const bool is_first = share.begin == task_begin, is_last = end == task_end;
  part->b = share.b;
  part->head_k = task / work.tiles;
  part->row_tile = task % work.tiles;
  part->begin = max(work.begin, (first_unit + share.begin) * work.unit_keys);
  part->end = min(work.end, (first_unit + end) * work.unit_keys);
  part->is_first = is_first;
  if (is_unit) {
    // Invalid, overlapping cu_seqlens could need more slots than the workspace has.
    const bool is_split = work.units > 1 && task_end <= plan.slots;
    part->slot = is_split ? share.begin : -1;
    if (is_first && threadIdx.x == 0) {
      const int parts = is_split ? work.units : 0;
      begin_task(task_of(*part), {part->b, part->head_k, part->row_tile, parts, task_begin, task_begin}, is_early);
    }
    return end;
  }
  // Slot `block` is for the task that this thread block continues, slot plan.blocks + block for the task that it
  // begins.
  part->slot = is_first && is_last ? -1 : block + (is_first ? plan.blocks : 0);
  if (is_first && (plan.by_task || !is_last) && threadIdx.x == 0) {
    const int at =
        plan.by_task ? (part->b * static_cast<int>(p.heads_k) + part->head_k) * work.tiles + part->row_tile : block;
    const int parts = is_last ? 0 : share.block_of(task_end - 1) - block + 1;
    begin_task(at, {part->b, part->head_k, part->row_tile, parts, block + plan.blocks, block}, is_early);
  }
  return end;
}

}  // namespace flashattn_ext::decode
