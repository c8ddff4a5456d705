// Rows of a head in shared memory, as many as its sequence has. The kernels of whole heads are launched with as many
// warps as the rows of a call need, so sizes are those of the launch and not of a template.
#pragma once

#include "cuda/tile/operand_tile.cuh"
#include "cuda/tile/rows.cuh"
#include "cuda/tile/tile.cuh"

namespace flashattn_ext::sm80 {

// The sequence of a thread block: where its rows begin in the tensors, and how many they are. This one is for kernels
// that run dense calls alone, and compiles to nothing.
template <bool kPacked>
struct HeadSequence {
  static constexpr int query_start = 0, key_start = 0;

  __device__ __forceinline__ HeadSequence(const AttnParams&, int) {}
  static __device__ __forceinline__ int length_q(const AttnParams& p) { return static_cast<int>(p.seqlen_q); }
  static __device__ __forceinline__ int length_k(const AttnParams& p) { return static_cast<int>(p.seqlen_k); }
};
// For kernels of packed calls.
template <>
struct HeadSequence<true> {
  int query_start, queries, key_start, keys;

  __device__ __forceinline__ HeadSequence(const AttnParams& p, int b) {
    const Sequence rows = query_sequence(p, b), columns = key_sequence(p, b);
    query_start = static_cast<int>(rows.start), queries = static_cast<int>(rows.length);
    key_start = static_cast<int>(columns.start), keys = static_cast<int>(columns.length);
  }
  __device__ __forceinline__ int length_q(const AttnParams&) const { return queries; }
  __device__ __forceinline__ int length_k(const AttnParams&) const { return keys; }
};

// The keys that shared memory holds, of which `first` is the first one. The plan of a packed call comes from
// max_seqlen, and a sequence may have more keys: then they come in chunks of as many as the plan has.
struct KeyChunk {
  int first = 0;
  bool is_whole = true;  // whether the chunk has all keys of the sequence

  // How many keys the chunk has. most: keys of the plan.
  __device__ __forceinline__ int keys(int length_k, int most) const {
    return is_whole ? length_k : min(length_k - first, most);
  }
  // The part of an interval of keys that lies in the chunk. most: keys of the plan.
  __device__ __forceinline__ Limits of(const Limits& keys, int most) const {
    if (is_whole) return keys;
    return {max(keys.begin, first), min(keys.end, first + most)};
  }
};

// The threads that copy rows together: a thread's number among them, and how many they are.
struct Team {
  int thread, threads;
};
__device__ __forceinline__ Team block_team() { return {static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)}; }
__device__ __forceinline__ Team warp_team() { return {lane(), 32}; }

// Starts copying `rows` rows of `columns` elements, whole multiples of 16 bytes. The rest of the tile, up to `padded`
// rows of Tile::kColumns, becomes zero.
template <class Tile, class T = typename Tile::Element>
__device__ __forceinline__ void load_rows(const Team& team, T* tile, const T* from, int64_t row_stride, int rows,
                                          int padded, int columns) {
  constexpr int kVectors = Tile::kColumns / Tile::kVector;
  static_assert(32 % kVectors == 0);
  const int column = team.thread % kVectors * Tile::kVector, step = team.threads / kVectors;
  const int count = column < columns ? rows : 0;
  int row = team.thread / kVectors;
  const T* source = from + row * row_stride + column;
#pragma unroll 4
  for (; row < padded; row += step, source += step * row_stride) {
    ptx::cp_async(tile + Tile::offset(row, column), source, row < count);
  }
}

// Calls body(row, column) for the vectors of a tile that load_rows has this thread copy.
template <class Tile, class Body>
__device__ __forceinline__ void for_own_vectors(const Team& team, int padded, const Body& body) {
  constexpr int kVectors = Tile::kColumns / Tile::kVector;
  const int column = team.thread % kVectors * Tile::kVector, step = team.threads / kVectors;
#pragma unroll 4
  for (int row = team.thread / kVectors; row < padded; row += step) body(row, column);
}

}  // namespace flashattn_ext::sm80
