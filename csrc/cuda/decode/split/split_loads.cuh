// The copies of the split-KV attention kernel (split_tile.cuh): queries, and keys and values in runs of adjacent keys.
#pragma once

#include "cuda/decode/split/split_tile.cuh"

namespace flashattn_ext::decode {

template <class Key, int kHeadDim, int kTileRows>
__device__ void Split<Key, kHeadDim, kTileRows>::load_queries() {
  const int64_t start = query_sequence(p, part().b).start;
  const int columns = static_cast<int>(p.head_dim), rows = work().queries * plan.group;
  const bool in_vectors = rows_are_aligned(p.q);
#pragma unroll 1
  for (int v = threadIdx.x; v < kAllRows * kQueryVectors; v += blockDim.x) {
    const int i = v / kQueryVectors, column = v % kQueryVectors * kVectorElements;
    const Row at = row(i);
    const bool exists = row_of_head(i) < rows;
    const T* const from = exists ? row_pointer<const T>(p.q, part().b, at.head, start + at.query) + column : nullptr;
    T* const to = q_tile() + i * kQueryStride + column;
    const int elements = exists ? columns - column : 0;
    if (Format::widen_query(p, to, part().b, at.head, start + at.query, column, elements)) continue;
    in_vectors ? copy_vector(to, from, elements) : copy_elements(to, from, elements);
  }
}

// Locates the runs that this lane copies in a step, one step before their copy: the load from the block table then
// overlaps the computation.
template <class Key, int kHeadDim, int kTileRows>
__device__ __forceinline__ void Split<Key, kHeadDim, kTileRows>::locate(Walk& walk, int step) const {
  if (step >= walk.steps) return;
#pragma unroll
  for (int i = 0; i < kLaneRuns; ++i) {
    const int row = (walk.first + step * teams) * kKeys + run_key(i);
    const int run_row = min(row, walk.keys.end - 1) / kRunKeys * kRunKeys;
    const KeyRun run = Format::kSparesInstructions ? walk.locator.run_of_row(run_row, kRunKeys, walk.reciprocal)
                                                   : walk.locator.run_of_row(run_row, kRunKeys);
    walk.runs.k[i] = row_pointer<const Key>(p.k, run.entry, part().head_k, run.row);
    walk.runs.v[i] = row_pointer<const Key>(p.v, run.entry, part().head_k, run.row);
  }
}

// Starts copying the keys and values of a step.
template <class Key, int kHeadDim, int kTileRows>
__device__ __forceinline__ void Split<Key, kHeadDim, kTileRows>::load(T* to, const Runs& runs, int step,
                                                                      const Limits& keys) const {
  const int columns = kHeads * static_cast<int>(p.head_dim), columns_v = kHeads * static_cast<int>(p.head_dim_v);
  const bool all = whole && step * kKeys >= keys.begin && (step + 1) * kKeys <= keys.end;
#pragma unroll
  for (int i = 0; i < kLaneRuns; ++i) {
    const int key = run_key(i), row = step * kKeys + key;
    T* const k_to = to + key * kRowElements;
    T* const v_to = k_to + kKeys * kRowElements;
    if (all) {
      load_whole_run(k_to, runs.k[i], p.k.row_stride);
      load_whole_run(v_to, runs.v[i], p.v.row_stride);
    } else {
      load_run(k_to, runs.k[i], p.k.row_stride, columns, row, keys);
      load_run(v_to, runs.v[i], p.v.row_stride, columns_v, row, keys);
    }
  }
}

// A run without masked keys and padding columns, the common case in the mainloop.
template <class Key, int kHeadDim, int kTileRows>
__device__ __forceinline__ void Split<Key, kHeadDim, kTileRows>::load_whole_run(T* to, const Key* from,
                                                                                int64_t row_stride) const {
#pragma unroll
  for (int phase = 0; phase < kPeriod; ++phase) {
    const int v = run_lane() + kRunLanes * phase, key = v / kRowVectors, column = v % kRowVectors * kVectorElements;
    const Key* source = from + key * row_stride + column * kPack;
    T* const target = to + key * kRowElements;
    const int place = column ^ KeyTile::places(key);
#pragma unroll
    for (int i = 0; i < kRunVectors / (kRunLanes * kPeriod); ++i) {
      // key < kPeriodKeys, a power of two, so key and `further` have no bits in common.
      const int further = i * kPeriodKeys;
      ptx::cp_async(target + further * kRowElements + (place ^ KeyTile::places(further)), source, true);
      source += kPeriodKeys * row_stride;
    }
  }
}

// row: cache row of the first key of the run. Keys outside `keys` are not read and become zero.
template <class Key, int kHeadDim, int kTileRows>
__device__ __forceinline__ void Split<Key, kHeadDim, kTileRows>::load_run(T* to, const Key* from, int64_t row_stride,
                                                                          int columns, int row,
                                                                          const Limits& keys) const {
  const auto copy = [&](int v, const auto& copy_one) {
    const int key = v / kRowVectors, column = v % kRowVectors * kVectorElements;
    const bool exists = row + key >= keys.begin && row + key < keys.end;
    copy_one(to + KeyTile::offset(key, column), from + key * row_stride + column * kPack,
             exists ? columns - column * kPack : 0);
  };
  if (aligned) {
#pragma unroll 4
    for (int i = 0; i < kRunVectors / kRunLanes; ++i) copy(run_lane() + kRunLanes * i, copy_vector<Key>);
  } else {
#pragma unroll 1
    for (int v = run_lane(); v < kRunVectors; v += kRunLanes) copy(v, copy_elements<Key>);
  }
}

}  // namespace flashattn_ext::decode
