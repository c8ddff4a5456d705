// The policy of scores of the Hopper backward (backward_gradients.cuh) with a BlockMask: what ListedStep and
// Shared::has_marks (backward_blocks.cuh) say of a step.
#pragma once

#include "cuda/score/block_mask.cuh"
#include "cuda/sm90/backward/backward_gradients.cuh"
#include "cuda/sm90/shared/backward_blocks.cuh"

namespace flashattn_ext::sm90 {

// Transposes 32 x 32 bits: lane i has row i, bit j of which is column j, and gets column i.
__device__ __forceinline__ uint32_t transposed_bits(uint32_t x) {
  uint32_t low = 0xFFFFu;  // the bits of the lower half of each square
#pragma unroll
  for (int size = 16; size > 0; size /= 2, low ^= low << size) {
    const uint32_t other = __shfl_xor_sync(~0u, x, size);
    const bool upper = threadIdx.x & size;
    x = upper ? (x & ~low) | (other >> size & low) : (x & low) | (other << size & ~low);
  }
  return x;
}

template <class Packing>
struct ListedGradients : UnbiasedGradients<Packing> {
  static constexpr int kQueries = Packing::kTiles * 8;
  using Seen = SeenQueries<1, Packing::kTiles>;
  Seen seen;  // of a step with marks

  template <class Step, class Walk>
  __device__ __forceinline__ Nothing begin(const Step& step, const BackwardWork& work, const Walk&) {
    if (step.has_marks != 0) find_seen(step.p, listed(step), work, step.warp_key);
    return {};
  }
  template <class Step, class Walk>
  __device__ __forceinline__ void weigh(typename Packing::Packed& weights, typename Packing::Scores& scores,
                                        const Step& step, const BackwardWork& work, const Walk&, bool, Nothing) {
    Packing::weigh_seen(weights, scores, step.workspace.score, step.lse(), step.has_marks != 0, [&]() -> const Seen& {
      if (step.has_marks & kMarkedRows) {
        const ListedStep& now = listed(step);
        step.subtract_words(scores, step.workspace.score, work.b, now.h, now.m * kQueries);
      }
      return seen;
    });
  }
  template <class Step, class Work, class Walk>
  __device__ __forceinline__ void differentiate(typename Packing::Scores& dscores,
                                                const typename Packing::Packed& weights, const Step& step, const Work&,
                                                const Walk&, bool) {
    Packing::differentiate(dscores, weights, step.workspace.score, step.delta(), step.has_marks != 0, [&] {
      if (step.has_marks & kMarkedRows) step.clear_rows(dscores);
    });
  }

 private:
  template <class Step>
  static __device__ __forceinline__ const ListedStep& listed(const Step& step) {
    return step.shared.listed[0].steps[step.stage];
  }
  __device__ __forceinline__ void find_seen(const AttnParams& p, const ListedStep& now, const BackwardWork& work,
                                            int warp_key) {
    const int m = uniform(now.m), bits = uniform(now.bits), row = m * kQueries + 2 * t();
    const Mask32 mask = work.mask(p);
    seen = Seen([&](int, int r) {
      const Limits rows = rows_that_see(mask, work.key0 + warp_key + g() + 8 * r);
      return Limits{rows.begin - row, rows.end - row};
    });
    if (bits != kWholeBlock) keep_seen(PartialBlock(p, bits), place_in_block<kQueries>(m), warp_key);
  }
  // Keeps the queries that see the lane's keys g and g + 8 by the bits of a block, as SeenQueries::keep does. Each lane
  // loads those of one query in 32, for the 16 keys of the warp. row, key: the first of both, in the block.
  __device__ __forceinline__ void keep_seen(const PartialBlock& block, int row, int key) {
    static_assert(Seen::kWords % 2 == 0);
    uint32_t bits[Seen::kWords];
#pragma unroll
    for (int i = 0; i < Seen::kWords; ++i) bits[i] = block.of_row<16>(row + 32 * i + lane(), key).words[0];
#pragma unroll
    for (int i = 0; i < Seen::kWords; i += 2) {
      const uint32_t columns = transposed_bits((bits[i] & 0xFFFF) | bits[i + 1] << 16);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          seen.queries[0][r][i + half] &= __shfl_sync(~0u, columns, 16 * half + 8 * r + g()) >> (2 * t());
        }
      }
    }
  }
};

}  // namespace flashattn_ext::sm90
