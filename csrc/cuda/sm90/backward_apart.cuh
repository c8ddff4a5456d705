// The mainloop of backward.cuh with dq in a warpgroup of its own. The two warpgroups of dk and dv ping-pong, write dS^T
// to shared memory and go on. A third warpgroup multiplies it by the keys, half of a step's dq at a time, because it
// has few registers, and writes dq for the adder (dq_adder.cuh). So no warpgroup of scores waits until dq is written,
// which takes long while products read shared memory. A step has one or two turns of each warpgroup (BackwardOrder);
// docs/sm90_backward.md has both orders.
#pragma once

#include "../common/scores.cuh"
#include "dq_adder.cuh"
#include "products.cuh"

namespace flashattn_ext::sm90 {

// The loop of one warpgroup over the queries of a key tile. Kernel: Backward.
template <class Kernel>
class ApartWalk {
  using T = typename Kernel::Element;
  using Packed = typename Kernel::Scores::Packed;
  static constexpr int kQueries = Kernel::kQueries;

 public:
  __device__ __forceinline__ ApartWalk(Kernel& kernel, const BackwardWork& work)
      : kernel(kernel),
        shared(kernel.shared),
        work(work),
        now(kernel.p, work, static_cast<int>(kernel.p.group_size())) {
    unmasked = Kernel::Scores::unmasked_queries(kernel.p, work.mask(kernel.p), work.key0 + kernel.group * 64, 64);
    unmasked = {uniform(unmasked.begin), uniform(unmasked.end)};
  }

  __device__ __forceinline__ void run() {
    ptx::barrier_wait(&shared.k_full[kernel.keys.stage], kernel.keys.parity);
    kernel.clear_tail_of_keys(work);
    ptx::barrier_wait(&shared.q_full[kernel.queries.stage], kernel.queries.parity);
    if constexpr (Kernel::kOrder == BackwardOrder::kApartOnce) {
      walk_in_one_turn();
    } else {
      walk_in_two_turns();
    }
    ptx::barrier_arrive(&shared.queries_empty[kernel.queries.stage]);
    kernel.queries.advance();
    release(shared.keys_empty[kernel.keys.stage]);
    kernel.keys.advance();
  }

 private:
  // Both walks peel the last step, so that no product is in flight when the loop exits: otherwise the compiler
  // serialises all products.
  //
  // The turns of a step: dP^T and dv; dk and the next S^T.
  __device__ __forceinline__ void walk_in_two_turns() {
    kernel.await_phase();
    multiply_scores();
    kernel.pass_phase();
    find_weights();
    ptx::barrier_wait(&shared.v_full[kernel.keys.stage], kernel.keys.parity);
    Packed packed;
    while (now.left > 1) {
      const int stage = kernel.queries.stage;
      differentiate(packed);
      kernel.await_phase();
      accumulate(kernel.dk, packed, shared.q[stage]);
      hand_over_gradients();
      kernel.queries.advance();
      now.advance();
      ptx::barrier_wait(&shared.q_full[kernel.queries.stage], kernel.queries.parity);
      multiply_scores();
      kernel.pass_phase();
      ptx::wgmma_wait<1>();
      ptx::hold(kernel.dk);
      ptx::barrier_arrive(&shared.queries_empty[stage]);
      find_weights();
    }
    differentiate(packed);
    kernel.await_phase();
    accumulate(kernel.dk, packed, shared.q[kernel.queries.stage]);
    hand_over_gradients();
    kernel.pass_phase();
    ptx::wgmma_wait<0>();
    ptx::hold(kernel.dk);
  }

  // The turn of a step: dv, dk, the next S^T and the next dP^T. The exponentials run under dP^T. It is issued when dk
  // is complete: with all four products in flight, head dims above 80 have too few registers (C7512).
  __device__ __forceinline__ void walk_in_one_turn() {
    ptx::barrier_wait(&shared.v_full[kernel.keys.stage], kernel.keys.parity);
    await_dout();
    float dscores[kQueries / 8][4];
    Packed packed;
    kernel.await_phase();
    multiply_scores();
    multiply_dscores(dscores);
    kernel.pass_phase();
    find_weights<1>();
    find_dscores(packed, dscores);
    while (now.left > 1) {
      const int stage = kernel.queries.stage;
      kernel.queries.advance();
      now.advance();
      ptx::barrier_wait(&shared.q_full[kernel.queries.stage], kernel.queries.parity);
      await_dout();
      kernel.await_phase();
      accumulate(kernel.dv, kernel.weights, shared.dout[stage]);
      accumulate(kernel.dk, packed, shared.q[stage]);
      multiply_scores();
      hand_over_gradients();
      ptx::wgmma_wait<1>();
      ptx::hold(kernel.dv);
      ptx::hold(kernel.dk);
      multiply_dscores(dscores);
      kernel.pass_phase();
      ptx::barrier_arrive(&shared.queries_empty[stage]);
      find_weights<1>();
      find_dscores(packed, dscores);
    }
    kernel.await_phase();
    accumulate(kernel.dv, kernel.weights, shared.dout[kernel.queries.stage]);
    accumulate(kernel.dk, packed, shared.q[kernel.queries.stage]);
    hand_over_gradients();
    kernel.pass_phase();
    ptx::wgmma_wait<0>();
    ptx::hold(kernel.dv);
    ptx::hold(kernel.dk);
  }

  __device__ __forceinline__ void multiply_scores() {
    score_product<Kernel::kColumns>(scores, shared.k[kernel.keys.stage], kernel.group * 64,
                                    shared.q[kernel.queries.stage]);
  }
  __device__ __forceinline__ void multiply_dscores(float (&dscores)[kQueries / 8][4]) {
    score_product<Kernel::kValueColumns>(dscores, shared.v[kernel.keys.stage], kernel.group * 64,
                                         shared.dout[kernel.queries.stage]);
  }
  __device__ __forceinline__ void await_dout() {
    ptx::barrier_wait(&shared.dout_full[kernel.queries.stage], kernel.queries.parity);
    kernel.clear_tail_of_queries(work, now);
  }
  // kLater: products that were issued after S^T and may be in flight.
  template <int kLater = 0>
  __device__ __forceinline__ void find_weights() {
    ptx::wgmma_wait<kLater>();
    ptx::hold(scores);
    Kernel::Scores::weigh(
        kernel.weights, scores, kernel.workspace.score, shared.lse[kernel.queries.stage], is_masked(),
        [&] { return work.mask(kernel.p); }, now.m * kQueries, work.key0 + kernel.warp_key);
  }
  // The phase of dP^T and dv. dv is complete before dS^T is packed: its operands, the weights, then free registers.
  __device__ __forceinline__ void differentiate(Packed& packed) {
    float dscores[kQueries / 8][4];
    await_dout();
    kernel.await_phase();
    multiply_dscores(dscores);
    accumulate(kernel.dv, kernel.weights, shared.dout[kernel.queries.stage]);
    kernel.pass_phase();
    ptx::wgmma_wait<1>();
    differentiate(dscores);
    ptx::hold(dscores);
    ptx::wgmma_wait<0>();
    ptx::hold(kernel.dv);
    store(packed, dscores);
  }
  // dP^T, the only product in flight, becomes dS^T, in `packed` and in shared memory.
  __device__ __forceinline__ void find_dscores(Packed& packed, float (&dscores)[kQueries / 8][4]) {
    ptx::wgmma_wait<0>();
    differentiate(dscores);
    store(packed, dscores);
  }
  __device__ __forceinline__ void differentiate(float (&dscores)[kQueries / 8][4]) {
    ptx::hold(dscores);
    Kernel::Scores::differentiate(dscores, kernel.weights, kernel.workspace.score, shared.delta[kernel.queries.stage],
                                  is_masked());
  }
  __device__ __forceinline__ void store(Packed& packed, const float (&dscores)[kQueries / 8][4]) {
    pack_scores<T>(packed, dscores);
    ptx::barrier_wait(&shared.dscores_empty[kernel.buffers.stage], kernel.buffers.parity ^ 1);
    store_panels(shared.dscores[kernel.buffers.stage], kernel.warp_key, packed);
  }
  __device__ __forceinline__ void hand_over_gradients() {
    ptx::fence_async_shared();
    ptx::barrier_arrive(&shared.dscores_full[kernel.buffers.stage]);
    kernel.buffers.advance();
  }
  __device__ __forceinline__ bool is_masked() const { return Kernel::Scores::is_masked(unmasked, now.m * kQueries); }

  Kernel& kernel;
  typename Kernel::Shared& shared;
  const BackwardWork& work;
  typename Kernel::Walk now;
  Limits unmasked;  // queries that see all of this warpgroup's keys
  float scores[kQueries / 8][4];
};

// The warpgroup of dq.
template <class Kernel>
struct QueryGradients {
  static constexpr bool kOwnRows = Kernel::kQueries == 128;  // the halves of dq: rows of a step, otherwise columns
  // Tiles of 8 columns of the second half, which has columns from 64 on.
  static constexpr int kSecondTiles = kOwnRows || Kernel::kColumns > 96 ? 8 : 4;

  typename Kernel::Shared& shared;
  const AttnGradParams& p;
  RingPosition<Kernel::kWorkStages> works;
  RingPosition<Kernel::kKeyStages> keys;
  RingPosition<Kernel::kDscoreBuffers> buffers;

  __device__ __forceinline__ void compute_tiles() {
    for_each_work(shared, works, [&](const BackwardWork& work) {
      const int steps = uniform(work.tiles) * static_cast<int>(p.group_size());
      if (steps > 0) compute_tile(steps);
      ptx::barrier_arrive(&shared.work_empty[works.stage]);
    });
  }

 private:
  __device__ __forceinline__ void compute_tile(int steps) {
    ptx::barrier_wait(&shared.k_full[keys.stage], keys.parity);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      ptx::barrier_wait(&shared.dscores_full[buffers.stage], buffers.parity);
      const bool is_last = step == steps - 1;
      if constexpr (kSecondTiles == 8) {
#pragma unroll 1
        for (int half = 0; half < 2; ++half) compute_half<8>(half, is_last);
      } else {
        compute_half<8>(0, is_last);
        compute_half<kSecondTiles>(1, is_last);
      }
      buffers.advance();
    }
    keys.advance();
  }
  template <int kTiles>
  __device__ __forceinline__ void compute_half(int half, bool is_last) {
    float dq[kTiles][4];
    transposed_product(dq, shared.dscores[buffers.stage][kOwnRows ? half : 0],
                       shared.k[keys.stage][kOwnRows ? 0 : half]);
    ptx::wgmma_wait<0>();
    ptx::hold(dq);
    if (half == 1) {
      ptx::barrier_arrive(&shared.dscores_empty[buffers.stage]);
      if (is_last) release(shared.keys_empty[keys.stage]);
    }
    write(shared.part_of(half), dq, half);
    hand_over(half);
  }
};

}  // namespace flashattn_ext::sm90
