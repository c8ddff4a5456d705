// The warpgroups of dk and dv in heads.cuh. They ping-pong with two phases of products a step, as in
// backward_apart.cuh: dP^T and dv; dk and the next S^T. The next S^T may be that of the next key tile: a thread block
// with whole heads has short walks, one after the other, and would otherwise stop between any two of them.
#pragma once

#include "../common/scores.cuh"
#include "heads_producer.cuh"
#include "products.cuh"

namespace flashattn_ext::sm90 {

// One of the two warpgroups of dk and dv. Kernel: HeadBackward.
template <class Kernel>
class HeadKeyGradients {
  using T = typename Kernel::Element;
  using Packed = typename Kernel::Scores::Packed;
  using Work = typename Kernel::Work;
  using Walk = typename Kernel::Walk;
  static constexpr int kQueries = Kernel::kQueries;
  static_assert(Kernel::kKeyStages == 2);  // of two key tiles that are joined

 public:
  __device__ __forceinline__ explicit HeadKeyGradients(Kernel& kernel) : kernel(kernel), shared(kernel.shared) {}

  __device__ __forceinline__ void compute_tiles() {
    if (kernel.group == 1) kernel.pass_phase();
    while (const Work* const work = receive(kernel.works)) {
      set_zero(kernel.dk);
      set_zero(kernel.dv);
      if (uniform(work->tiles) > 0) walk(work);
      store();
    }
  }

 private:
  // Walks over the queries of a key tile, and of the next ones without a gap. dk and dv of the last one remain to be
  // written. The last step is peeled, so that no product is in flight when the loop exits: otherwise the compiler
  // serialises all products.
  __device__ __forceinline__ void walk(const Work* work) {
    Limits unmasked = unmasked_queries(*work);
    Walk now = walk_of(*work);
    await_keys();
    ptx::barrier_wait(&shared.q_full[kernel.queries.stage], kernel.queries.parity);
    kernel.await_phase();
    multiply_scores();
    kernel.pass_phase();
    ptx::wgmma_wait<0>();
    ptx::hold(scores);
    find_weights(*work, now, unmasked);
    ptx::barrier_wait(&shared.v_full[kernel.values.stage], kernel.values.parity);
    Packed packed;
    for (;;) {
      const int stage = kernel.queries.stage;
      differentiate(packed, *work, now, unmasked);
      const Work* const next = now.left > 1 ? work : join();
      if (!next) break;
      kernel.await_phase();
      accumulate(kernel.dk, packed, shared.q[stage]);
      hand_over_gradients();
      kernel.queries.advance();
      ptx::barrier_wait(&shared.q_full[kernel.queries.stage], kernel.queries.parity);
      multiply_scores();
      kernel.pass_phase();
      ptx::wgmma_wait<1>();
      ptx::hold(kernel.dk);
      ptx::barrier_arrive(&shared.queries_empty[stage]);
      ptx::wgmma_wait<0>();
      ptx::hold(scores);
      const bool ends = now.left == 1;
      if (ends) {
        work = next;
        now = walk_of(*work);
        unmasked = unmasked_queries(*work);
      } else {
        now.advance();
      }
      find_weights(*work, now, unmasked);
      if (ends) begin_joined();
    }
    kernel.await_phase();
    accumulate(kernel.dk, packed, shared.q[kernel.queries.stage]);
    hand_over_gradients();
    kernel.pass_phase();
    ptx::wgmma_wait<0>();
    ptx::hold(kernel.dk);
    ptx::barrier_arrive(&shared.queries_empty[kernel.queries.stage]);
    kernel.queries.advance();
    release(shared.keys_empty[kernel.keys.stage]);
    kernel.keys.advance();
  }

  // In the last step of a key tile: the next tile, whose keys have arrived; nullptr if there is a gap.
  __device__ __forceinline__ const Work* join() {
    release(shared.values_empty[kernel.values.stage]);
    kernel.values.advance();
    const Work* const next = receive(kernel.works.after());
    if (!next || uniform(next->tiles) == 0) return nullptr;
    kernel.keys.advance();
    await_keys();
    return next;
  }
  // Ends the tile before, after the first weights of the next one are computed.
  __device__ __forceinline__ void begin_joined() {
    release(shared.keys_empty[1 - kernel.keys.stage]);
    store();
    set_zero(kernel.dk);
    set_zero(kernel.dv);
    ptx::barrier_wait(&shared.v_full[kernel.values.stage], kernel.values.parity);
  }

  // A key tile; nullptr at the end of the kernel.
  __device__ __forceinline__ const Work* receive(const RingPosition<Kernel::kWorkStages>& at) const {
    ptx::barrier_wait(&shared.work_full[at.stage], at.parity);
    const Work* const work = &shared.work[at.stage];
    return uniform(work->exists()) ? work : nullptr;
  }
  // Writes dk and dv, which ends the key tile.
  __device__ __forceinline__ void store() {
    kernel.store(shared.work[kernel.works.stage]);
    kernel.works.advance();
  }
  // Queries that see all of this warpgroup's keys.
  __device__ __forceinline__ Limits unmasked_queries(const Work& work) const {
    const Limits queries =
        Kernel::Scores::unmasked_queries(kernel.p, work.mask(kernel.p), work.key0 + kernel.group * 64, 64);
    return {uniform(queries.begin), uniform(queries.end)};
  }
  __device__ __forceinline__ Walk walk_of(const Work& work) const {
    return Walk(work, static_cast<int>(kernel.p.group_size()));
  }
  __device__ __forceinline__ void await_keys() {
    ptx::barrier_wait(&shared.k_full[kernel.keys.stage], kernel.keys.parity);
  }
  __device__ __forceinline__ void multiply_scores() {
    score_product<Kernel::kColumns>(scores, shared.k[kernel.keys.stage], kernel.group * 64,
                                    shared.q[kernel.queries.stage]);
  }
  __device__ __forceinline__ void find_weights(const Work& work, const Walk& now, const Limits& unmasked) {
    Kernel::Scores::weigh(
        kernel.weights, scores, kernel.workspace.score, shared.lse[kernel.queries.stage], is_masked(now, unmasked),
        [&] { return work.mask(kernel.p); }, now.m * kQueries, work.key0 + kernel.warp_key);
  }
  // The phase of dP^T and dv. dv is complete before dS^T is packed: its operands, the weights, then free registers.
  __device__ __forceinline__ void differentiate(Packed& packed, const Work& work, const Walk& now,
                                                const Limits& unmasked) {
    float dscores[kQueries / 8][4];
    const int stage = kernel.queries.stage;
    ptx::barrier_wait(&shared.dout_full[stage], kernel.queries.parity);
    kernel.await_phase();
    score_product<Kernel::kValueColumns>(dscores, shared.v[kernel.values.stage], kernel.group * 64, shared.dout[stage]);
    accumulate(kernel.dv, kernel.weights, shared.dout[stage]);
    kernel.pass_phase();
    ptx::wgmma_wait<1>();
    ptx::hold(dscores);
    Kernel::Scores::differentiate(dscores, kernel.weights, kernel.workspace.score, shared.delta[stage],
                                  is_masked(now, unmasked));
    ptx::hold(dscores);
    ptx::wgmma_wait<0>();
    ptx::hold(kernel.dv);
    pack_scores<T>(packed, dscores);
    ptx::barrier_wait(&shared.dscores_empty[kernel.buffers.stage], kernel.buffers.parity ^ 1);
    store_panels(shared.dscores[kernel.buffers.stage], kernel.warp_key, packed);
  }
  __device__ __forceinline__ void hand_over_gradients() {
    ptx::fence_async_shared();
    ptx::barrier_arrive(&shared.dscores_full[kernel.buffers.stage]);
    kernel.buffers.advance();
  }
  static __device__ __forceinline__ bool is_masked(const Walk& now, const Limits& unmasked) {
    return Kernel::Scores::is_masked(unmasked, now.m * kQueries);
  }

  Kernel& kernel;
  typename Kernel::Shared& shared;
  float scores[kQueries / 8][4];
};

}  // namespace flashattn_ext::sm90
