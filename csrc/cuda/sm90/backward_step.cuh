// What the two backward kernels for Hopper (backward.cuh, backward_wide.cuh) share: the warp that loads, and what a
// warp does with 16 keys and a step's queries. Scores are transposed, S^T = K Q^T: P^T and dS^T, packed where they
// stand in registers, are operands of the products for dv and dk.
#pragma once

#include "../common/backward_finish.cuh"
#include "../common/dq_order.cuh"
#include "../common/ring.cuh"
#include "../common/scores.cuh"
#include "../common/store_row.cuh"
#include "../common/tensor_map.h"
#include "../common/tile_order.cuh"
#include "products.cuh"
#include "tiles.h"

namespace flashattn_ext::sm90 {

struct BackwardMaps {
  CUtensorMap q, k, v, dout;
};

// One tile of keys, as the loading warp hands it to those that compute. They read it in shared memory, where it stays
// until the tile is done: registers are scarce.
struct alignas(16) BackwardWork {
  int b, hk, n, key0;  // n: of the key tile, that starts at key0
  int first, tiles;    // query tiles that see it, for every head of the group
  int key_start, length_q, length_k;
  int first_tile;  // of the sequence, in BackwardWorkspace
  int unused[2];

  __device__ __forceinline__ bool exists() const { return key0 < length_k; }
  __device__ __forceinline__ TileMask mask(const AttnParams& p) const { return TileMask(p, length_q, length_k); }
};

// The query tiles of a key tile, head after head of the group; at one of them.
struct QueryWalk {
  int h, m, first, end, left;

  __device__ __forceinline__ QueryWalk(const BackwardWork& work, int heads)
      : h(uniform(work.hk) * heads),
        m(uniform(work.first)),
        first(m),
        end(m + uniform(work.tiles)),
        left((end - first) * heads) {}
  __device__ __forceinline__ void advance() {
    --left;
    if (++m == end) {
      m = first;
      ++h;
    }
  }
};

// Threads that read and write shared memory themselves arrive each for itself: a warp's first lane would have to wait
// for the others first, which tools that look for races do not see. (Tensor cores and TMA: release in pipeline.cuh.)
constexpr int kLoaderArrivals = 1 + 32;  // for queries: the copy, and the lanes that bring the rows' statistics

// --- the warp that loads ------------------------------------------------------------------------------------------

template <class Kernel>
struct BackwardLoader {
  static constexpr int kM = Kernel::kM, kN = Kernel::kN;

  typename Kernel::Shared& shared;
  const AttnGradParams& p;
  const BackwardWorkspace& workspace;
  const BackwardMaps& maps;
  RingPosition<Kernel::kKeyStages> keys;
  RingPosition<Kernel::kStages> queries;
  RingPosition<Kernel::kWorkStages> works;
  int query_start = 0;

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

  __device__ void load_tiles(const TileGrid& grid) {
    const int heads = static_cast<int>(p.heads_k), all_heads = heads * static_cast<int>(p.batch);
    for (int tile = blockIdx.x; tile < grid.tiles;) {
      const int next = uniform(lane() == 0 ? grid.take() : 0);
      // The first keys of causal heads have the longest walk: they come first.
      const auto [head, block] = grid.index(tile, all_heads);
      BackwardWork work = start_head(head / heads, head % heads);
      // A sequence may be longer than the host was told: then the last tile stands for all that follow, in their
      // order: dq is summed up in that order when it has to be deterministic.
      for (look(work, block); work.exists(); look(work, work.n + 1)) {
        publish(work);
        if (work.tiles > 0) load_tile(work);
        if (block != grid.blocks - 1) break;
      }
      tile = next;
    }
    publish(BackwardWork{});
  }

  __device__ BackwardWork start_head(int b, int hk) {
    const Sequence rows = query_sequence(p, b), columns = key_sequence(p, b);
    query_start = static_cast<int>(rows.start);
    BackwardWork work{b, hk};
    work.key_start = static_cast<int>(columns.start);
    work.length_q = static_cast<int>(rows.length);
    work.length_k = static_cast<int>(columns.length);
    work.first_tile = static_cast<int>(workspace.first_tile(p, b, rows));
    return work;
  }
  __device__ void look(BackwardWork& work, int n) const {
    work.n = n;
    work.key0 = n * kN;
    const Limits rows = work.mask(p).rows_of(work.key0, min(work.key0 + kN, work.length_k));
    work.first = rows.begin / kM;
    work.tiles = rows.end > rows.begin && p.heads_q > 0 ? (rows.end - 1) / kM + 1 - work.first : 0;
  }
  __device__ void publish(const BackwardWork& work) {
    ptx::barrier_wait(&shared.work_empty[works.stage], works.parity ^ 1);
    if (lane() == 0) {
      shared.work[works.stage] = work;
      ptx::barrier_arrive(&shared.work_full[works.stage]);
    }
    works.advance();
  }

  __device__ void load_tile(const BackwardWork& work) {
    const int batch = p.is_varlen() ? 0 : work.b, group = static_cast<int>(p.group_size());
    const int key = work.key_start + work.key0;
    ptx::barrier_wait(&shared.keys_empty[keys.stage], keys.parity ^ 1);
    if (lane() == 0) {
      load_panels(shared.k[keys.stage], shared.k_full[keys.stage], maps.k, key, work.hk, batch);
      load_panels(shared.v[keys.stage], shared.v_full[keys.stage], maps.v, key, work.hk, batch);
    }
    keys.advance();
    for (QueryWalk now(work, group); now.left > 0; now.advance()) load_queries(work, now, batch);
  }

  // Rows beyond the sequence's last have weights of 0 whatever their scores are.
  __device__ void load_queries(const BackwardWork& work, const QueryWalk& now, int batch) {
    const int stage = queries.stage, row = query_start + now.m * kM;
    ptx::barrier_wait(&shared.queries_empty[stage], queries.parity ^ 1);
    if (lane() == 0) {
      load_panels(shared.q[stage], shared.q_full[stage], maps.q, row, now.h, batch);
      load_panels(shared.dout[stage], shared.dout_full[stage], maps.dout, row, now.h, batch);
    }
    const int rows = work.length_q - now.m * kM;
    const int64_t index = now.h * workspace.rows + (p.is_varlen() ? 0 : work.b * p.seqlen_q) + row;
    float lse[kM / 32], delta[kM / 32];
#pragma unroll
    for (int i = 0; i < kM / 32; ++i) {
      const bool exists = i * 32 + lane() < rows;
      lse[i] = exists ? workspace.lse[index + i * 32 + lane()] : infinity();
      delta[i] = exists ? workspace.delta[index + i * 32 + lane()] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < kM / 32; ++i) {
      shared.lse[stage][i * 32 + lane()] = lse[i];
      shared.delta[stage][i * 32 + lane()] = delta[i];
    }
    ptx::barrier_arrive(&shared.q_full[stage]);  // every lane, for what it has written
    queries.advance();
  }
};

// This warp's 16 rows of dk or dv.
template <class T, int N>
__device__ __forceinline__ void store_keys(const TensorView& to, const BackwardWork& work, int key,
                                           const float (&sum)[N][4], float factor, int64_t columns) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = key + ptx::opaque(threadIdx.x) % 32 / 4 + 8 * r;  // not kept in a register during the steps
    store_row(row_pointer<T>(to, work.b, work.hk, int64_t{work.key_start} + row), sum, r, factor, false,
              row < work.length_k, static_cast<int>(columns));
  }
}

// --- on the host --------------------------------------------------------------------------------------------------

template <class Kernel, class Entry>
void launch_backward_main(Entry kernel, const AttnGradParams& p, const BackwardWorkspace& workspace) {
  const int64_t blocks = tiles(p.seqlen_k, Kernel::kN), all = blocks * p.batch * p.heads_k;
  if (all == 0) return;
  const BackwardMaps maps{query_map(p, p.q, p.head_dim, Kernel::kM), key_map(p, p.k, p.head_dim, Kernel::kN),
                          key_map(p, p.v, p.head_dim_v, Kernel::kN), query_map(p, p.dout, p.head_dim_v, Kernel::kM)};
  const TileGrid grid{backward_order(p, blocks, 2, Kernel::kSectionHeads), static_cast<int>(all),
                      workspace.key_tiles_taken};
  launch(kernel, "sm90 backward", p, std::min<int64_t>(all, multiprocessors()), Kernel::kThreads,
         static_cast<int>(sizeof(typename Kernel::Shared)), workspace, maps, grid);
}

}  // namespace flashattn_ext::sm90
