// The loading warps of the Hopper forward of head dims above 256 (forward_large.cuh).
#pragma once

#include "cuda/host/launch.cuh"
#include "cuda/ptx/async.cuh"
#include "cuda/sm90/shared/forward_work.cuh"
#include "cuda/tile/panels.cuh"
#include "cuda/tile/ring.cuh"
#include "rules/mask.h"

namespace flashattn_ext::sm90 {

struct LargeForwardMaps {
  CUtensorMap q, k, v;
};

// Where a thread loads from: a head of a batch entry, from a first key on.
struct LargeSource {
  int key_start, head, batch;
  __device__ LargeSource(const AttnParams& p, const ForwardWork& work, int key_start)
      : key_start(key_start), head(work.h / static_cast<int>(p.group_size())), batch(p.is_varlen() ? 0 : work.b) {}
};

// One thread: it takes the next tile, and loads queries and keys.
template <class Kernel>
struct LargeKeyLoader {
  static constexpr int kBlocks = Kernel::kBlocks, kAllRows = Kernel::kAllRows, kKeys = Kernel::kKeys,
                       kKeyParts = Kernel::kKeyParts, kKeyPanels = Kernel::kKeyPanels, kKeyBytes = Kernel::kKeyBytes,
                       kKeyStages = Kernel::kKeyStages;
  static constexpr uint16_t kAllBlocks = Kernel::kAllBlocks;

  SharedOf<Kernel>& shared;
  const AttnParams& p;
  const LargeForwardMaps& maps;
  RingPosition<kKeyStages> k;
  uint32_t q_parity = 0, work_parity = 0, next_parity = 0;

  __device__ void load_all(const TileGrid& grid) {
    auto take = [&] { return grid.take(static_cast<int>(gridDim.x) / kBlocks); };
    each_forward_work<kAllRows, kKeys, false, false>(
        p, grid, static_cast<int>(blockIdx.x) / kBlocks, [&](int) { return shared.next_tile.next(take, &next_parity); },
        [&](const ForwardWork& work, int key_start) {
          publish_work(shared, work, &work_parity);
          if (work.sees_keys()) load_tile(work, LargeSource(p, work, key_start));
        });
    publish_work(shared, ForwardWork{}, &work_parity);
  }
  // The first keys are loaded before the queries: their stages are free while the last scores of the previous tile
  // are computed.
  __device__ void load_tile(const ForwardWork& work, const LargeSource& source) {
    constexpr int kAhead = (kKeyStages < kKeyParts ? kKeyStages : kKeyParts) - 1;
    for (int n = work.last; n >= work.first; --n) {
#pragma unroll 1
      for (int part = 0; part < kKeyParts; ++part) {
        if (n == work.last && part == kAhead) load_queries(work, source.batch);
        load_part(n, part, source);
      }
    }
  }
  __device__ __forceinline__ void load_queries(const ForwardWork& work, int batch) {
    ptx::barrier_wait(&shared.q_empty, q_parity ^ 1);
    load_panels(shared.q, shared.q_full, maps.q, work.query_start + Kernel::first_row(work), work.h, batch);
    q_parity ^= 1;
  }
  __device__ __forceinline__ void load_part(int n, int part, const LargeSource& source) {
    const int first = static_cast<int>(ptx::cluster_rank()) * (kKeys / kBlocks);  // first key of this block's half
    ptx::barrier_wait(&shared.k_empty[k.stage], k.parity ^ 1);
    ptx::barrier_arrive_expect(&shared.k_full[k.stage], kKeyBytes);
#pragma unroll
    for (int panel = 0; panel < kKeyPanels; ++panel) {
      ptx::tma_load_to_cluster(shared.k[k.stage][panel][first], &maps.k, &shared.k_full[k.stage],
                               (part * kKeyPanels + panel) * kPanelColumns, source.key_start + n * kKeys + first,
                               source.head, source.batch, kAllBlocks);
    }
    k.advance();
  }
};

// One warp, whose first lane loads.
template <class Kernel>
struct LargeValueLoader {
  static constexpr int kKeys = Kernel::kKeys, kValueStages = Kernel::kValueStages, kValueParts = Kernel::kValueParts,
                       kHalfPanels = Kernel::kHalfPanels, kValueRows = Kernel::kValueRows,
                       kValueBytes = Kernel::kValueBytes;
  static constexpr uint16_t kAllBlocks = Kernel::kAllBlocks;

  SharedOf<Kernel>& shared;
  const AttnParams& p;
  const LargeForwardMaps& maps;
  RingPosition<kValueStages> v;
  uint32_t work_parity = 0;

  __device__ void load_all() {
    for (;;) {
      const ForwardWork work = receive_work(shared, &work_parity);
      if (!work.exists()) return;
      if (threadIdx.x % 32 == 0) load_tile(work);
      __syncwarp();
    }
  }
  __device__ void load_tile(const ForwardWork& work) {
    const LargeSource source(p, work, static_cast<int>(key_sequence(p, work.b).start));
    for (int n = work.last; n >= work.first; --n) {
#pragma unroll 1
      for (int part = 0; part < kValueParts; ++part) load_part(n * kKeys + part * kValueRows, source);
    }
  }
  __device__ __forceinline__ void load_part(int key, const LargeSource& source) {
    const int first = static_cast<int>(ptx::cluster_rank()) * kHalfPanels;  // first panel of this block's half
    ptx::barrier_wait(&shared.v_empty[v.stage], v.parity ^ 1);
    ptx::barrier_arrive_expect(&shared.v_full[v.stage], kValueBytes);
#pragma unroll
    for (int panel = 0; panel < kHalfPanels; ++panel) {
      ptx::tma_load_to_cluster(shared.v[v.stage][first + panel], &maps.v, &shared.v_full[v.stage],
                               (first + panel) * kPanelColumns, source.key_start + key, source.head, source.batch,
                               kAllBlocks);
    }
    v.advance();
  }
};

}  // namespace flashattn_ext::sm90
