// How the two warpgroups of dk and dv take turns, and what those do that hand dS^T to a third one, which computes dq
// (backward_apart.cuh, heads_keys.cuh).
#pragma once

#include "cuda/score/scores.cuh"
#include "cuda/sm90/shared/backward_step.cuh"
#include "cuda/sm90/shared/products.cuh"
#include "cuda/sm90/shared/tiles.h"
#include "cuda/tile/ring.cuh"

namespace flashattn_ext::sm90 {

// Two warpgroups that issue products in turn, so that the tensor cores work for one while the other computes: a base
// class of the state of a warpgroup.
struct PingPong {
  const int group;  // 0 or 1

  __device__ __forceinline__ void await_phase() const {
    ptx::named_barrier_sync(kBackwardPingPong + group, 2 * kGroupThreads);
  }
  __device__ __forceinline__ void pass_phase() const {
    ptx::named_barrier_arrive(kBackwardPingPong + 1 - group, 2 * kGroupThreads);
  }
};

// The parts of a walk over the queries of key tiles: a base class. In two turns a step, a warpgroup issues dP^T and dv,
// then dk and the next S^T. Kernel: Backward or HeadBackward.
template <class Kernel>
class KeyGradientTurns {
 protected:
  using T = typename Kernel::Element;
  using Work = typename Kernel::Work;
  using Walk = typename Kernel::Walk;
  using Packing = typename Kernel::Packing;
  using Packed = typename Packing::Packed;
  static constexpr int kQueries = Kernel::kQueries;
  using Products = float[kQueries / 8][4];

  __device__ __forceinline__ explicit KeyGradientTurns(Kernel& kernel) : kernel(kernel), shared(kernel.shared) {}

  // Queries that see all of this warpgroup's keys.
  __device__ __forceinline__ Limits unmasked_queries(const Work& work) const {
    return uniform(Packing::unmasked_queries(kernel.p, work.mask(kernel.p), work.key0 + kernel.group * 64, 64));
  }

  // The turn of dP^T and dv. dv is complete before dS^T is packed: its operands, the weights, then free registers. With
  // dropout these are the kept weights, which take the registers of packed dS^T.
  __device__ __forceinline__ void add_to_dv(Packed& packed, const Walk& now, const Limits& unmasked) {
    Products dscores;
    kernel.await_phase();
    multiply_dscores(dscores);
    accumulate(kernel.dv, kernel.kept_weights(packed), shared.dout[kernel.queries.stage]);
    kernel.pass_phase();
    ptx::wgmma_wait<1>();
    differentiate(dscores, now, unmasked);
    ptx::hold(dscores);
    ptx::wgmma_wait<0>();
    ptx::hold(kernel.dv);
    store_dscores(packed, dscores);
  }
  // The turn of dk and the next S^T: start_dk, then the caller advances to the next queries, then start_next_scores.
  __device__ __forceinline__ void start_dk(const Packed& packed) {
    kernel.await_phase();
    accumulate(kernel.dk, packed, shared.q[kernel.queries.stage]);
    pass_dscores();
  }
  // stage: of the queries of dk, which is complete afterwards; S^T may be in flight. Calls under() while both are
  // computed.
  template <class Under>
  __device__ __forceinline__ void start_next_scores(int stage, const Under& under) {
    ptx::barrier_wait(&shared.q_full[kernel.queries.stage], kernel.queries.parity);
    multiply_scores();
    kernel.pass_phase();
    under();
    ptx::wgmma_wait<1>();
    ptx::hold(kernel.dk);
    ptx::barrier_arrive(&shared.queries_empty[stage]);
  }
  // The last dk of a walk.
  __device__ __forceinline__ void finish_dk(const Packed& packed) {
    start_dk(packed);
    kernel.pass_phase();
    ptx::wgmma_wait<0>();
    ptx::hold(kernel.dk);
  }
  __device__ __forceinline__ void end_walk() {
    ptx::barrier_arrive(&shared.queries_empty[kernel.queries.stage]);
    kernel.queries.advance();
    release(shared.keys_empty[kernel.keys.stage]);
    kernel.keys.advance();
  }

  __device__ __forceinline__ void multiply_scores() {
    score_product<Kernel::kColumns>(scores, shared.k[kernel.keys.stage], kernel.group * 64,
                                    shared.q[kernel.queries.stage]);
    kernel.has_marks = shared.has_marks[kernel.queries.stage];
  }
  __device__ __forceinline__ void multiply_dscores(Products& dscores) {
    score_product<Kernel::kValueColumns>(dscores, shared.v[kernel.value_stage()], kernel.group * 64,
                                         shared.dout[kernel.queries.stage]);
  }
  // After multiply_scores, while S^T is computed.
  __device__ __forceinline__ void begin_step(const Work& work, const Walk& now) {
    kernel.gradients.begin(kernel.this_step(), work, now);
  }
  // S^T, which is complete, becomes P^T.
  __device__ __forceinline__ void find_weights(const Work& work, const Walk& now, const Limits& unmasked) {
    kernel.gradients.weigh(kernel.weights, scores, kernel.this_step(), work, now, is_masked(unmasked, now), Nothing{});
  }
  // dP^T becomes dS^T.
  __device__ __forceinline__ void differentiate(Products& dscores, const Walk& now, const Limits& unmasked) {
    ptx::hold(dscores);
    kernel.gradients.differentiate(dscores, kernel.weights, kernel.this_step(), Nothing{}, now,
                                   is_masked(unmasked, now));
  }
  static __device__ __forceinline__ bool is_masked(const Limits& unmasked, const Walk& now) {
    return is_masked_step<typename Kernel::Visibility, Packing>(unmasked, now);
  }
  // dS^T becomes an operand of dk, and goes to shared memory.
  __device__ __forceinline__ void store_dscores(Packed& packed, const Products& dscores) {
    pack_scores<T>(packed, dscores);
    ptx::barrier_wait(&shared.dscores_empty[kernel.buffers.stage], kernel.buffers.parity ^ 1);
    store_panels(shared.dscores[kernel.buffers.stage], kernel.warp_key, packed);
  }
  __device__ __forceinline__ void pass_dscores() {
    ptx::fence_async_shared();
    ptx::barrier_arrive(&shared.dscores_full[kernel.buffers.stage]);
    kernel.buffers.advance();
  }

  Kernel& kernel;
  SharedOf<Kernel>& shared;
  Products scores;
};

}  // namespace flashattn_ext::sm90
