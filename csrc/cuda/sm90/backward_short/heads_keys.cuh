// The warpgroups of dk and dv in heads.cuh, with the two turns a step of backward_turns.cuh. The next S^T may be
// that of the next key tile: a thread block with whole heads has short walks, one after the other, and would otherwise
// stop between any two of them.
#pragma once

#include "cuda/sm90/backward_short/heads_producer.cuh"
#include "cuda/sm90/shared/backward_turns.cuh"

namespace flashattn_ext::sm90 {

// One of the two warpgroups of dk and dv. Kernel: HeadBackward.
template <class Kernel>
class HeadKeyGradients : KeyGradientTurns<Kernel> {
  using Turns = KeyGradientTurns<Kernel>;
  using Turns::kernel, Turns::shared, Turns::scores;
  using typename Turns::Packed, typename Turns::Walk, typename Turns::Work;
  static_assert(Kernel::kKeyStages == 2);  // two key tiles are joined

 public:
  __device__ __forceinline__ explicit HeadKeyGradients(Kernel& kernel) : Turns(kernel) {}

  __device__ __forceinline__ void compute_tiles() {
    if (kernel.group == 1) kernel.pass_phase();
    while (const Work* const work = receive_work(shared, kernel.works)) {
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
    Limits unmasked = this->unmasked_queries(*work);
    Walk now = walk_of(*work);
    await_keys();
    ptx::barrier_wait(&shared.q_full[kernel.queries.stage], kernel.queries.parity);
    kernel.await_phase();
    this->multiply_scores();
    kernel.pass_phase();
    ptx::wgmma_wait<0>();
    ptx::hold(scores);
    this->find_weights(*work, now, unmasked);
    ptx::barrier_wait(&shared.v_full[kernel.values.stage], kernel.values.parity);
    Packed packed;
    for (;;) {
      const int stage = kernel.queries.stage;
      ptx::barrier_wait(&shared.dout_full[stage], kernel.queries.parity);
      this->add_to_dv(packed, now, unmasked);
      const Work* const next = now.left > 1 ? work : join();
      if (!next) break;
      this->start_dk(packed);
      kernel.queries.advance();
      this->start_next_scores(stage, [] {});
      ptx::wgmma_wait<0>();
      ptx::hold(scores);
      const bool ends = now.left == 1;
      if (ends) {
        work = next;
        now = walk_of(*work);
        unmasked = this->unmasked_queries(*work);
      } else {
        now.advance();
      }
      this->find_weights(*work, now, unmasked);
      if (ends) begin_joined();
    }
    this->finish_dk(packed);
    this->end_walk();
  }

  // In the last step of a key tile: the next tile, whose keys have arrived; nullptr if there is a gap.
  __device__ __forceinline__ const Work* join() {
    release(shared.values_empty[kernel.values.stage]);
    kernel.values.advance();
    const Work* const next = receive_work(shared, kernel.works.after());
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

  // Writes dk and dv, which ends the key tile.
  __device__ __forceinline__ void store() {
    kernel.store(shared.work[kernel.works.stage]);
    kernel.works.advance();
  }
  __device__ __forceinline__ Walk walk_of(const Work& work) const {
    return Walk(work, static_cast<int>(kernel.p.group_size()));
  }
  __device__ __forceinline__ void await_keys() {
    ptx::barrier_wait(&shared.k_full[kernel.keys.stage], kernel.keys.parity);
  }
};

}  // namespace flashattn_ext::sm90
