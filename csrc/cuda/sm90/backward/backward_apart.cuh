// The mainloop of backward.cuh with dq in a warpgroup of its own. The two warpgroups of dk and dv ping-pong, write dS^T
// to shared memory and go on. A third warpgroup multiplies it by the keys, half of a step's dq at a time, because it
// has few registers, and writes dq for the adder (dq_adder.cuh). So no warpgroup of scores waits until dq is written,
// which takes long while products read shared memory. A step has one or two turns of each warpgroup (BackwardOrder);
// docs/sm90_backward.md has both orders.
#pragma once

#include "cuda/sm90/shared/backward_turns.cuh"
#include "cuda/sm90/shared/dq_adder.cuh"

namespace flashattn_ext::sm90 {

// The loop of one warpgroup over the queries of a key tile. Kernel: Backward.
template <class Kernel>
class ApartWalk : KeyGradientTurns<Kernel> {
  using Turns = KeyGradientTurns<Kernel>;
  using Turns::kernel, Turns::shared, Turns::scores;
  using typename Turns::Packed, typename Turns::Products, typename Turns::Walk;

 public:
  __device__ __forceinline__ ApartWalk(Kernel& kernel, const BackwardWork& work)
      : Turns(kernel),
        work(work),
        now(kernel.p, work, Kernel::Heads::in_walk(kernel.p)),
        unmasked(this->unmasked_queries(work)) {}

  __device__ __forceinline__ void run() {
    ptx::barrier_wait(&shared.k_full[kernel.keys.stage], kernel.keys.parity);
    kernel.clear_tail_of_keys(work);
    ptx::barrier_wait(&shared.q_full[kernel.queries.stage], kernel.queries.parity);
    if constexpr (Kernel::kOrder == BackwardOrder::kApartOnce) {
      walk_in_one_turn();
    } else {
      walk_in_two_turns();
    }
    this->end_walk();
  }

 private:
  // Both walks peel the last step, so that no product is in flight when the loop exits: otherwise the compiler
  // serialises all products.
  __device__ __forceinline__ void walk_in_two_turns() {
    kernel.draw(work, now);
    kernel.publish_drawn();
    kernel.await_phase();
    this->multiply_scores();
    kernel.pass_phase();
    begin_step();
    find_weights();
    ptx::barrier_wait(&shared.v_full[kernel.keys.stage], kernel.keys.parity);
    Packed packed;
    while (now.left > 1) {
      const int stage = kernel.queries.stage;
      await_dout();
      this->add_to_dv(packed, now, unmasked);
      kernel.publish_drawn();
      this->start_dk(packed);
      kernel.queries.advance();
      now.advance();
      this->start_next_scores(stage, [&] { begin_step(); });
      find_weights();
    }
    await_dout();
    this->add_to_dv(packed, now, unmasked);
    this->finish_dk(packed);
  }

  // The turn of a step: dv, dk, the next S^T and the next dP^T. The exponentials run under dP^T. It is issued when dk
  // is complete: with all four products in flight, head dims above 80 have too few registers (C7512).
  __device__ __forceinline__ void walk_in_one_turn() {
    ptx::barrier_wait(&shared.v_full[kernel.keys.stage], kernel.keys.parity);
    await_dout();
    Products dscores;
    Packed packed;
    kernel.draw(work, now);
    publish_drawn();
    kernel.await_phase();
    this->multiply_scores();
    this->multiply_dscores(dscores);
    kernel.pass_phase();
    begin_step();
    find_weights<1>();
    find_dscores(packed, dscores);
    while (now.left > 1) {
      const int stage = kernel.queries.stage;
      kernel.queries.advance();
      now.advance();
      ptx::barrier_wait(&shared.q_full[kernel.queries.stage], kernel.queries.parity);
      await_dout();
      publish_drawn();
      kernel.await_phase();
      accumulate(kernel.dv, kernel.weights, shared.dout[stage]);
      accumulate(kernel.dk, packed, shared.q[stage]);
      this->multiply_scores();
      this->pass_dscores();
      ptx::wgmma_wait<1>();
      ptx::hold(kernel.dv);
      ptx::hold(kernel.dk);
      this->multiply_dscores(dscores);
      kernel.pass_phase();
      ptx::barrier_arrive(&shared.queries_empty[stage]);
      begin_step();
      find_weights<1>();
      find_dscores(packed, dscores);
    }
    kernel.await_phase();
    accumulate(kernel.dv, kernel.weights, shared.dout[kernel.queries.stage]);
    accumulate(kernel.dk, packed, shared.q[kernel.queries.stage]);
    this->pass_dscores();
    kernel.pass_phase();
    ptx::wgmma_wait<0>();
    ptx::hold(kernel.dv);
    ptx::hold(kernel.dk);
  }

  // While S^T is computed.
  __device__ __forceinline__ void begin_step() {
    kernel.draw_next(work, now);
    Turns::begin_step(work, now);
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
    Turns::find_weights(work, now, unmasked);
    kernel.drop_weights();
  }
  // dP^T, the only product in flight, becomes dS^T, in `packed` and in shared memory. Afterwards the weights are those
  // that dropout keeps.
  __device__ __forceinline__ void find_dscores(Packed& packed, Products& dscores) {
    ptx::wgmma_wait<0>();
    this->differentiate(dscores, now, unmasked);
    if constexpr (Kernel::Dropping::kDrops) Kernel::Packing::keep(kernel.weights, kernel.weights);
    this->store_dscores(packed, dscores);
  }
  // In one turn a step has a single phase, so that the warps of the warpgroup meet here after their last use of
  // shared.kept.
  __device__ __forceinline__ void publish_drawn() {
    if constexpr (Kernel::Dropping::kDrops) {
      ptx::named_barrier_sync(kGroupCleared + kernel.group, kGroupThreads);
      kernel.publish_drawn();
    }
  }

  const BackwardWork& work;
  Walk now;
  Limits unmasked;
};

// The warpgroup of dq.
template <class Kernel>
struct QueryGradients {
  static constexpr bool kOwnRows = Kernel::kQueries == 128;  // the halves of dq: rows of a step, otherwise columns
  // Tiles of 8 columns of the second half, which has columns from 64 on.
  static constexpr int kSecondTiles = kOwnRows || Kernel::kColumns > 96 ? 8 : 4;

  SharedOf<Kernel>& shared;
  const AttnGradParams& p;
  RingPosition<Kernel::kWorkStages> works;
  RingPosition<Kernel::kKeyStages> keys;
  RingPosition<Kernel::kDscoreBuffers> buffers;

  __device__ __forceinline__ void compute_tiles() {
    for_each_work(shared, works, [&](const BackwardWork& work) {
      const int steps = Kernel::Walk::steps(work, Kernel::Heads::in_walk(p));
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
    stage_dq(shared.part_of(half), dq, half);
    pass_dq(half);
  }
};

}  // namespace flashattn_ext::sm90
