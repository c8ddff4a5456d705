// What the consumer warpgroups of forward.cuh and jvp.cuh share: their turns to issue products, and the steps of the
// queries and of the rings of keys and values. ForwardConsumer is a base class of the kernel's object, which has
// `shared`, `p`, `group`, q_parity, tail_parity and its places `k` and `v` in the rings, and
//   kGroups, kKeys            of its tile
//   ping_pong()               the first of kGroups named barriers
//   kClearsTail               whether the rows behind a packed sequence have to be zeroed in tiles of values
//   kTailsOfCaches            whether other sequences have such rows too
//   clear_values(rows, thread, threads)
//                             zeroes the rows from `rows` on of the current stage of values
//   skip_more()               advances the other rings of a key tile that is skipped
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/shared/forward_work.cuh"
#include "cuda/sm90/shared/named_barriers.h"
#include "cuda/sm90/shared/tiles.h"
#include "cuda/tile/ring.cuh"

namespace flashattn_ext::sm90 {

template <class Kernel>
struct ForwardConsumer {
  // Ping-pong: warpgroups issue products one after another, and each one then signals the next.
  __device__ __forceinline__ void await_phase() const {
    ptx::named_barrier_sync(self().ping_pong() + self().group, 2 * kGroupThreads);
  }
  __device__ __forceinline__ void pass_phase(int from) const {
    ptx::named_barrier_arrive(self().ping_pong() + (from + 1) % Kernel::kGroups, 2 * kGroupThreads);
  }

  // The key tiles of a query tile.
  template <class Work, class Generator>
  __device__ __forceinline__ void compute_tile(const Work& work, const Generator& generator) {
    Kernel& kernel = self();
    Kernel::Visibility::template compute_tile<Kernel::kKeys>(
        kernel.shared, kernel.p, kernel.k, kernel.group, kernel.q_parity, work, [&](int n) { skip_step(work, n); },
        [&](auto& walk) { kernel.compute_steps(work, walk, generator); }, [&] { end_queries(); });
  }
  __device__ __forceinline__ void end_keys(bool last_of_tile) {
    Kernel& kernel = self();
    release(kernel.shared.k_empty[kernel.k.stage]);
    kernel.k.advance();
    if (last_of_tile) end_queries();
  }
  __device__ __forceinline__ void end_queries() {
    Kernel& kernel = self();
    release(kernel.shared.q_empty);
    kernel.q_parity ^= 1;
  }

  // Skips a key tile that only other warpgroups see.
  __device__ __forceinline__ void skip_step(const ForwardWork& work, int n) {
    Kernel& kernel = self();
    await_phase();
    pass_phase(kernel.group);
    if (n == work.last) clear_tail_of_values(work);
    ptx::barrier_wait(&kernel.shared.k_full[kernel.k.stage], kernel.k.parity);
    ptx::barrier_wait(&kernel.shared.v_full[kernel.v.stage], kernel.v.parity);
    release(kernel.shared.k_empty[kernel.k.stage]);
    release(kernel.shared.v_empty[kernel.v.stage]);
    kernel.k.advance();
    kernel.v.advance();
    kernel.skip_more();
  }

  // The rows behind a packed sequence hold values of another one, and those behind the keys of a cache any values: even
  // with weights of 0 they would propagate a NaN.
  // The warpgroups zero these rows together.
  __device__ __forceinline__ void clear_tail_of_values(const ForwardWork& work) {
    Kernel& kernel = self();
    const int rows = work.length_k - work.last * Kernel::kKeys;
    if (!Kernel::kClearsTail || rows >= Kernel::kKeys) return;
    if (!Kernel::kTailsOfCaches && !kernel.p.is_varlen()) return;
    ptx::barrier_wait(&kernel.shared.v_full[kernel.v.stage], kernel.v.parity);
    kernel.clear_values(rows, static_cast<int>(threadIdx.x) - kGroupThreads, Kernel::kGroups * kGroupThreads);
    ptx::fence_async_shared();
    __syncwarp();
    release(kernel.shared.tail_cleared);
    ptx::barrier_wait(&kernel.shared.tail_cleared, kernel.tail_parity);
    kernel.tail_parity ^= 1;
  }

 private:
  __device__ __forceinline__ Kernel& self() { return static_cast<Kernel&>(*this); }
  __device__ __forceinline__ const Kernel& self() const { return static_cast<const Kernel&>(*this); }
};

}  // namespace flashattn_ext::sm90
