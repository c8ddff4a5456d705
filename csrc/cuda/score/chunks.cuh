// How the chunks of a row are added up: the one definition for the forward and for decoding. Multiplications and
// additions are written as instructions, so that the compiler contracts neither.
#pragma once

#include "cuda/host/chunks.h"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/rows.cuh"

namespace flashattn_ext {

// The factors of two partial results when they are added.
struct ChunkFactors {
  float earlier, later;
  __device__ __forceinline__ float add(float x, float next) const {
    return __fmaf_rn(next, later, __fmul_rn(x, earlier));
  }
};

// Adds `next`. The factor of a result without visible keys is 0 and the other one 1, so that it changes no bit.
__device__ __forceinline__ ChunkFactors add_chunk(ChunkSum* sum, const ChunkSum& next) {
  const float max = fmaxf(sum->max, next.max), offset = finite_max(max);
  const ChunkFactors factors{ptx::ex2(__fsub_rn(sum->max, offset)), ptx::ex2(__fsub_rn(next.max, offset))};
  *sum = {max, factors.add(sum->sum, next.sum)};
  return factors;
}

// Adds the sink, as a last chunk without values. Returns the factor of the accumulators.
__device__ __forceinline__ float finish_chunks(ChunkSum* sum, float sink) {
  const float factor = add_chunk(sum, {sink, sink_counts(sink) ? 1.f : 0.f}).earlier;
  return __fdiv_rn(factor, sum->sum);
}

// The chunks that have some of `keys`, for key tiles of kKeys; an empty range is at 0.
template <int kKeys>
__device__ __forceinline__ Limits chunks_of(const Limits& keys) {
  constexpr int kChunk = kTilesOfChunk<kKeys> * kKeys;
  return keys.begin < keys.end ? Limits{keys.begin / kChunk, (keys.end - 1) / kChunk + 1} : Limits{0, 0};
}

}  // namespace flashattn_ext
