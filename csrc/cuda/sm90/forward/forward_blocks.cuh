// The producer warpgroup of the forward (forward.cuh) with a BlockMask (rules/block_mask.h). A query tile has the rows
// of one block, and a key tile the keys of one: its key tiles are the entries of a run, the last one first. One warp
// reads the run and loads, and two inspect the values of partial blocks.
#pragma once

#include "cuda/host/tensor_map.h"
#include "cuda/sm90/forward/forward_mask.cuh"
#include "cuda/sm90/shared/block_runs.cuh"
#include "cuda/stages/tile_order.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/warp.cuh"

namespace flashattn_ext::sm90 {

// The description of a partial block for the inspecting warps, in a ring with as many slots as there are stages of
// values.
struct PartialValues {
  int stage;        // of the values; negative: there are no more
  int bits;         // MaskBlock::bits
  int key0, row0;   // its first key; of the query tile: Work
  int work_parity;  // of the query tile, an index into Shared::poisoned
};

// What a lane sees of a key tile: rows g and g + 8 of its warp.
struct SeenKeys {
  int bits = kWholeBlock;  // MaskBlock::bits, the same in all lanes
  RowBits<kBlockSide> rows[2];

  __device__ __forceinline__ bool is_whole() const { return bits == kWholeBlock; }
  // row: of the lane's row g in the block. The loads overlap with what follows.
  __device__ __forceinline__ void load(const AttnParams& p, int row) {
    const PartialBlock block(p, bits);
#pragma unroll
    for (int r = 0; r < 2; ++r) rows[r] = block.of_row<kBlockSide>(row + 8 * r, 0);
  }
  // Scores become -inf where the row does not see the key, and NaN where the bits do not exist (PartialBlock).
  template <int N>
  __device__ __forceinline__ void hide(const AttnParams& p, float (&x)[N][4]) const {
    static_assert(8 * N == kBlockSide);
    const bool exists = PartialBlock(p, bits).exists();
    const float hidden = exists ? -infinity() : not_a_number();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const uint32_t pair = (exists ? rows[r].words[n / 4] : 0) >> (2 * t());
        if (!(pair & (1u << n % 4 * 8))) x[n][2 * r] = hidden;
        if (!(pair & (2u << n % 4 * 8))) x[n][2 * r + 1] = hidden;
      }
    }
  }
};

// Loads the tiles of runs of blocks. All lanes of the warp call it; one starts the copies.
template <class Kernel, class Maps>
struct ListedKeyLoader {
  using Work = typename Kernel::Work;
  static constexpr int kKeys = Kernel::kKeys;
  static_assert(kKeys == kBlockSide && Kernel::kQueries == kBlockSide);

  typename Kernel::Shared& shared;
  const AttnParams& p;
  const Maps& maps;
  const TileGrid& grid;
  RingPosition<Kernel::kStages> k, v, partial;
  uint32_t q_parity = 0, work_parity = 0;
  int following = 0;  // in lane 0: the number of the tile to load next

  __device__ void load_all() {
    Kernel::each_work(p, grid, [&](int) { return uniform(following); }, [&](Work& work, int) { load_tile(work); });
    publish(Work{});
    ptx::barrier_wait(&shared.v_empty[v.stage], v.parity ^ 1);
    if (lane() != 0) return;
    shared.partial_tiles[partial.stage].stage = -1;
    ptx::barrier_arrive(&shared.v_arrived[partial.stage]);
  }

 private:
  // work.first and work.last, blocks of keys that causal and window leave, become entries.
  __device__ __forceinline__ void load_tile(Work& work) {
    BlockRun run = HeadBlocks(p, work.b, work.h).of_rows(work.row0 / kBlockSide);
    if (is_bounded(p)) run = clipped(run, work.first, work.last + 1);
    work.first = run.begin;
    work.last = run.end - 1;
    publish(work);
    if (work.sees_keys()) {
      load_run(work, run);
    } else if (lane() == 0) {
      following = grid.take();
    }
  }
  __device__ __forceinline__ void load_run(const Work& work, const BlockRun& run) {
    const int hk = work.h / (static_cast<int>(p.heads_q) / static_cast<int>(p.heads_k));
    MaskBlock block = run.at(run.end - 1), before{};
#pragma unroll 1
    for (int i = run.end - 1; i >= run.begin; --i) {
      const MaskBlock next = run.at(max(i - 1, run.begin));
      // The atomic addition is under way while the last tiles are loaded.
      if (i - run.begin == min(kKeyTilesAhead, run.end - run.begin) - 1 && lane() == 0) following = grid.take();
      load_keys(work, block, hk);
      if (i == run.end - 1) {
        load_queries(work);
      } else {
        load_values(work, before, hk);
      }
      before = block;
      block = next;
    }
    load_values(work, before, hk);
  }
  __device__ __forceinline__ void publish(const Work& work) {
    ptx::barrier_wait(&shared.work_empty, work_parity ^ 1);
    if (lane() == 0) {
      shared.work = work;
      ptx::barrier_arrive(&shared.work_full);
    }
    work_parity ^= 1;
  }
  __device__ __forceinline__ void load_queries(const Work& work) {
    ptx::barrier_wait(&shared.q_empty, q_parity ^ 1);
    if (lane() == 0) load_panels(shared.q, shared.q_full, maps.q, work.row0, work.h, work.b);
    q_parity ^= 1;
  }
  __device__ __forceinline__ void load_keys(const Work& work, const MaskBlock& block, int hk) {
    ptx::barrier_wait(&shared.k_empty[k.stage], k.parity ^ 1);
    if (lane() == 0) {
      shared.key_tiles[k.stage] = block;
      load_panels(shared.k[k.stage], shared.k_full[k.stage], maps.k, block.block * kKeys, hk, work.b);
    }
    k.advance();
  }
  __device__ __forceinline__ void load_values(const Work& work, const MaskBlock& block, int hk) {
    ptx::barrier_wait(&shared.v_empty[v.stage], v.parity ^ 1);
    const bool whole = block.is_whole();
    if (lane() == 0) {
      if (!whole) {
        // The values of the partial block that had this slot before were released before those of this one.
        shared.partial_tiles[partial.stage] = {v.stage, block.bits, block.block * kKeys, work.row0,
                                               static_cast<int>(work_parity ^ 1)};
      }
      // The values of a whole block are not inspected: this warp arrives in place of the inspecting warps.
      load_panels(shared.v[v.stage], whole ? shared.v_full[v.stage] : shared.v_arrived[partial.stage], maps.v,
                  block.block * kKeys, hk, work.b);
      if (whole) ptx::barrier_arrive(&shared.v_full[v.stage], kValueInspectors - 1);
    }
    v.advance();
    if (!whole) partial.advance();
  }
};

// The inspecting warps.
template <class Kernel>
__device__ __forceinline__ void inspect_listed_values(typename Kernel::Shared& shared, const AttnParams& p, int warp) {
  inspect_values<Kernel>(shared, warp, [&](const PartialValues& tile, const auto&, int i, const auto& visit) {
    const PartialBlock block(p, tile.bits);
    const int key = tile.key0 + i;
    const Limits rows = Mask32(p, p.seqlen_q, p.seqlen_k).rows_of(key, key + 1);
    const int end = min(rows.end - tile.row0, kBlockSide);
#pragma unroll 1
    for (int row = max(rows.begin - tile.row0, 0); row < end; ++row) {
      if (block.sees(row, i)) visit(row);
    }
  });
}

}  // namespace flashattn_ext::sm90
