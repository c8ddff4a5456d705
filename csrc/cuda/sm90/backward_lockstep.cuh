// The mainloop of backward.cuh without ping-pong (BackwardOrder::kLockstep): both warpgroups issue the same products at
// the same time, as in FlashAttention-4's kernel for Hopper, and synchronise once in a step, when dS^T of both is in
// shared memory. dq is computed in its own step. Unlike in that kernel, the next score product is issued while dq of a
// step is still being computed and written, so that the tensor cores nearly always have work of both warpgroups.
// docs/sm90_backward.md has the order.
#pragma once

#include "../common/scores.cuh"
#include "dq_adder.cuh"
#include "products.cuh"

namespace flashattn_ext::sm90 {

// The arithmetic of one lane in such a step. Without ping-pong there are registers enough to keep weights in fp32 until
// dS is computed, which saves unpacking them. lse, delta: from the lane's first query on.

// Turns score products into weights, in place.
template <bool kMasked, class Score, int kTiles>
__device__ __forceinline__ void weigh_in_place(float (&x)[kTiles][4], const Score& score, const float* lse,
                                               const SeenBy<1>& seen_by) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const float2 row_lse = *reinterpret_cast<const float2*>(lse + n * 8);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[n][e] = weight_of(score, score.stored(x[n][e]), e % 2 ? row_lse.y : row_lse.x);
      if (kMasked && !seen_by.includes(0, e / 2, n * 8 + e % 2)) x[n][e] = 0;
    }
  }
}

// Turns dP into dS, in place.
template <bool kMasked, class Score, int kTiles>
__device__ __forceinline__ void differentiate_in_place(float (&x)[kTiles][4], const float (&weights)[kTiles][4],
                                                       const Score& score, const float* delta) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const float2 row_delta = *reinterpret_cast<const float2*>(delta + n * 8);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[n][e] = gradient_of(score, 0.f, weights[n][e], x[n][e], e % 2 ? row_delta.y : row_delta.x);
      if (kMasked && weights[n][e] == 0) x[n][e] = 0;  // also when dP is not finite
    }
  }
}

// The loop of one warpgroup over the queries of a key tile. Kernel: Backward.
//
// The barrier in add_products is the only one that the two buffers of dS^T need. A warpgroup reaches the barrier of
// step n after its dq product of step n - 1 is complete. The other warpgroup overwrites dS^T of step n - 1 only after
// it.
template <class Kernel>
class LockstepWalk {
  using T = typename Kernel::Element;
  static constexpr int kQueries = Kernel::kQueries, kTiles = kQueries / 8;

 public:
  __device__ __forceinline__ LockstepWalk(Kernel& kernel, const BackwardWork& work)
      : kernel(kernel),
        shared(kernel.shared),
        work(work),
        now(kernel.p, work, static_cast<int>(kernel.p.group_size())) {
    unmasked = Kernel::Scores::unmasked_queries(kernel.p, work.mask(kernel.p), work.key0 + kernel.group * 64, 64);
    unmasked = {uniform(unmasked.begin), uniform(unmasked.end)};
  }

  // The first and the last step are peeled, so that no product is in flight when the loop exits: otherwise the compiler
  // serialises all products.
  __device__ __forceinline__ void run() {
    ptx::barrier_wait(&shared.k_full[kernel.keys.stage], kernel.keys.parity);
    kernel.clear_tail_of_keys(work);
    ptx::barrier_wait(&shared.v_full[kernel.keys.stage], kernel.keys.parity);
    find_weights<false>();
    while (now.left > 1) {
      add_products();
      ptx::wgmma_wait<1>();
      release_queries();
      now.advance();
      find_weights<true>();
    }
    add_products();
    ptx::wgmma_wait<0>();
    ptx::hold(dq);
    release_queries();
    release(shared.keys_empty[kernel.keys.stage]);
    kernel.keys.advance();
    write(shared.part_of(kernel.group), dq, kernel.group);
    hand_over(kernel.group);
  }

 private:
  // The first half of a step: computes the weights and dP^T. kHasDq: the dq product of the step before is in flight;
  // its dq is written during the score product and handed over during the dP^T product.
  template <bool kHasDq>
  __device__ __forceinline__ void find_weights() {
    const int stage = kernel.queries.stage, row0 = now.m * kQueries;
    ptx::barrier_wait(&shared.q_full[stage], kernel.queries.parity);
    if (kernel.p.is_varlen() && work.length_q - row0 < kQueries) {
      ptx::barrier_wait(&shared.dout_full[stage], kernel.queries.parity);
      kernel.clear_tail_of_queries(work, now);
    }
    score_product<Kernel::kColumns>(scores, shared.k[kernel.keys.stage], kernel.group * 64, shared.q[stage]);
    if constexpr (kHasDq) {
      ptx::wgmma_wait<1>();
      ptx::hold(dq);
      write(shared.part_of(kernel.group), dq, kernel.group);
    }
    ptx::barrier_wait(&shared.dout_full[stage], kernel.queries.parity);
    score_product<Kernel::kValueColumns>(dscores, shared.v[kernel.keys.stage], kernel.group * 64, shared.dout[stage]);
    if constexpr (kHasDq) hand_over(kernel.group);
    ptx::wgmma_wait<1>();
    ptx::hold(scores);
    const float* const lse = shared.lse[stage] + column();
    if (is_masked()) {
      const SeenBy<1> seen_by(work.mask(kernel.p), row0 + column(), work.key0 + kernel.warp_key + g());
      weigh_in_place<true>(scores, kernel.workspace.score, lse, seen_by);
    } else {
      weigh_in_place<false>(scores, kernel.workspace.score, lse, {});
    }
    pack_scores<T>(kernel.weights, scores);
    ptx::wgmma_wait<0>();
    ptx::hold(dscores);
  }

  // The second half: turns dP^T into dS^T, and leaves the products for dv, dk and dq in flight, in this order.
  __device__ __forceinline__ void add_products() {
    const int stage = kernel.queries.stage;
    const float* const delta = shared.delta[stage] + column();
    accumulate(kernel.dv, kernel.weights, shared.dout[stage]);
    if (is_masked()) {
      differentiate_in_place<true>(dscores, scores, kernel.workspace.score, delta);
    } else {
      differentiate_in_place<false>(dscores, scores, kernel.workspace.score, delta);
    }
    typename Kernel::Scores::Packed packed;
    pack_scores<T>(packed, dscores);
    kernel.buffer ^= 1;
    store_panels(shared.dscores[kernel.buffer], kernel.warp_key, packed);
    accumulate(kernel.dk, packed, shared.q[stage]);
    ptx::fence_async_shared();
    ptx::named_barrier_sync(kDscores, 2 * kGroupThreads);
    kernel.query_product(dq, 0);
  }

  // Runs after the products for dv and dk are complete.
  __device__ __forceinline__ void release_queries() {
    ptx::hold(kernel.dv);
    ptx::hold(kernel.dk);
    ptx::barrier_arrive(&shared.queries_empty[kernel.queries.stage]);
    kernel.queries.advance();
  }
  __device__ __forceinline__ bool is_masked() const { return Kernel::Scores::is_masked(unmasked, now.m * kQueries); }
  static __device__ __forceinline__ int column() { return 2 * t(); }  // the lane's first query

  Kernel& kernel;
  typename Kernel::Shared& shared;
  const BackwardWork& work;
  typename Kernel::Walk now;
  Limits unmasked;  // queries that see all of this warpgroup's keys
  float scores[kTiles][4], dscores[kTiles][4], dq[Kernel::kDqTiles][4];
};

}  // namespace flashattn_ext::sm90
