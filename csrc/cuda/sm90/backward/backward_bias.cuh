// A bias of every score in the backward (backward.cuh), and its gradient. TMA loads the bias tiles together with the
// query tiles. They are read transposed, since scores are. The gradient of the bias is dS. Each warpgroup writes its
// part of dS to the shared memory buffer of its dq, and the adder warp of that warpgroup adds dS and dq alternately.
#pragma once

#include "cuda/sm90/shared/dq_adder.cuh"
#include "cuda/tile/panels.cuh"

namespace flashattn_ext::sm90 {

// The row address that a lane gives to ldmatrix and stmatrix, for 16 queries from 16 * step on and 16 keys in a
// panel of [queries][64 keys]. Transposed, the registers have the layout of packed scores (PackedScores::Packed).
template <class T, int kQueries>
__device__ __forceinline__ T* transposed_row(T (&panel)[kQueries][kPanelColumns], int key, int step) {
  const int lane = threadIdx.x % 32, chunk = (key / 8 + lane / 8 % 2) ^ (lane % 8);
  return panel[step * 16 + lane / 16 * 8 + lane % 8] + chunk * 8;
}

// Products x of a warp's 16 keys, the first of which is `key` in the panel, become natural logits: scale * x + bias.
// Returns whether the bias hides any score of the warp, with -inf.
template <class T, int N, int kQueries>
__device__ __forceinline__ bool add_bias_panel(float (&x)[N][4], T (&bias)[kQueries][kPanelColumns], int key,
                                               float scale) {
  static_assert(N * 8 == kQueries);
  uint32_t pairs[N / 2][4];
#pragma unroll
  for (int step = 0; step < N / 2; ++step) ptx::ldmatrix_transposed(pairs[step], transposed_row(bias, key, step));
  uint32_t lowest = pairs[0][0];
  const auto each_pair = [&](const auto& body) {
    unrolled<N, 2>([&](int n, int r) { body(pairs[n / 2][n % 2 * 2 + r], x[n][2 * r], x[n][2 * r + 1]); });
  };
  each_pair([&](uint32_t pair, float& even, float& odd) {
    const float2 added = TensorCore<T>::unpack(pair);
    lowest = ptx::min_x2(lowest, pair, T());
    even = fmaf(even, scale, added.x);
    odd = fmaf(odd, scale, added.y);
  });
  // A bias of -inf hides the score, even a NaN.
  const float2 least = TensorCore<T>::unpack(lowest);
  if (!__any_sync(~0u, fminf(least.x, least.y) == -infinity())) return false;
  each_pair([&](uint32_t pair, float& even, float& odd) {
    const float2 added = TensorCore<T>::unpack(pair);
    if (added.x == -infinity()) even = -infinity();
    if (added.y == -infinity()) odd = -infinity();
  });
  return true;
}

// Writes a warpgroup's part of dS to shared memory, not transposed, in the layout of the tensor map of the bias's
// gradient, and signals the adder warp. The layout is fp32 in two panels of 32 keys, or packed in one panel of 64.
// First waits until the buffer is free.
template <class T>
__device__ __forceinline__ void pass_bias_gradient(DqPart<8>& part, const float (&dscores)[8][4],
                                                   const uint32_t (&packed)[4][4], int group, bool wide) {
  const int key = threadIdx.x / 32 % 4 * 16;
  ptx::named_barrier_sync(kDqEmpty + group, kDqThreads);
  if (wide) {
    auto& panel = reinterpret_cast<float (&)[2][64][32]>(part)[key / 32];
    unrolled<8, 4>([&](int n, int e) {
      const int query = 2 * lane_in_quad() + e % 2, column = key % 32 + quad() + 8 * (e / 2);
      panel[8 * n + query][(column / 4 ^ query) * 4 + column % 4] = dscores[n][e];
    });
  } else {
    auto& panel = reinterpret_cast<T(&)[64][kPanelColumns]>(part);
#pragma unroll
    for (int step = 0; step < 4; ++step) ptx::stmatrix_transposed(transposed_row(panel, key, step), packed[step]);
  }
  pass_dq(group);
}

// The adder warp of one warpgroup. In every step it adds dS, if the bias's gradient is wanted, and then dq of the step
// before.
template <class Kernel>
struct BiasGradientAdder : DqAdder<Kernel> {
  using Base = DqAdder<Kernel>;
  using Base::shared, Base::p, Base::works, Base::step;
  using typename Base::Walk;

  const BiasedBackwardMaps& maps;
  const int group;

  __device__ BiasGradientAdder(SharedOf<Kernel>& shared, const AttnGradParams& p, const BackwardWorkspace& workspace,
                               const BiasedBackwardMaps& maps, int group)
      : Base(shared, p, workspace, maps, group), maps(maps), group(group) {}

  __device__ void add_tiles() {
    admit_part();
    for_each_work(shared, works, [&](const BackwardWork& work) {
      if (uniform(work.tiles) > 0) add_tile(work);
      release(shared.work_empty[works.stage]);
    });
    ptx::bulk_wait<0>();
  }

 private:
  struct Step {
    int h, m;
  };

  __device__ __forceinline__ void add_tile(const BackwardWork& work) {
    bool first = true;
    Step before{};
    for (Walk now(p, work, static_cast<int>(p.group_size())); now.left > 0; now.advance()) {
      if (p.dbias.data) {
        await_part();
        if (Base::leads()) {
          start_bias_gradient(work, now);
          ptx::bulk_commit();
          ptx::bulk_wait_read<0>();
        }
        admit_part();
      }
      add_dq(work, before, !first);
      first = false;
      before = {now.h, now.m};
    }
    add_dq(work, before, true);
  }
  // exists: false on the first step of a key tile, before the buffer holds dq.
  __device__ __forceinline__ void add_dq(const BackwardWork& work, const Step& now, bool exists) {
    await_part();
    if (Base::leads() && exists) {
      if (p.deterministic) Base::await_earlier_keys(work, now);
      Base::start(work, now, group);
      ptx::bulk_commit();
      ptx::bulk_wait_read<0>();
    }
    admit_part();
    if (p.deterministic && exists) admit_later_keys(work, now);
  }
  // Runs after both warps have added their parts.
  __device__ __forceinline__ void admit_later_keys(const BackwardWork& work, const Step& now) const {
    if (Base::leads()) {
      ptx::bulk_wait<0>();
      __threadfence();
    }
    ptx::named_barrier_sync(kAddersMeet, 2 * 32);
    if (Base::leads() && group == 0) Base::admit_later_keys(work, now);
  }
  __device__ __forceinline__ void start_bias_gradient(const BackwardWork& work, const Walk& now) const {
    const int row = now.m * Kernel::kQueries, key = work.key0 + group * 64;
    if (p.dbias.dtype == DType::kFloat32) {
      for (int i = 0; i < 2; ++i) {
        ptx::tma_add(&maps.dbias, shared.dq[group][2 * i], key + 32 * i, row, now.h, work.b);
      }
    } else {
      ptx::tma_store(&maps.dbias, shared.dq[group], key, row, now.h, work.b);
    }
  }

  // await_part: waits until the warpgroup has written its part. admit_part: lets it write the next one.
  __device__ __forceinline__ void await_part() const { ptx::named_barrier_sync(kDqFull + group, kDqThreads); }
  __device__ __forceinline__ void admit_part() const {
    __syncwarp();
    ptx::named_barrier_arrive(kDqEmpty + group, kDqThreads);
  }
};

}  // namespace flashattn_ext::sm90
