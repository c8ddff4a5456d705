// Common parts of the kernels for Hopper that walk over the queries of a tile of keys (backward.cuh, backward_wide.cuh,
// heads.cuh, second.cuh): the producer warp and the launch.
#pragma once

#include "cuda/host/launch.cuh"
#include "cuda/ptx/async.cuh"
#include "cuda/score/large_rows.cuh"
#include "cuda/score/scores.cuh"
#include "cuda/sm90/shared/backward_work.cuh"
#include "cuda/stages/tile_order.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/warp.cuh"

namespace flashattn_ext::sm90 {

// Barriers count threads, not warps (`release` in ring.cuh), where threads themselves read or write shared memory. An
// arrival of the warp's first lane alone would rely on warp synchronisation, which race checkers do not see. q_full
// counts kCopies, of queries and of what a policy loads with them, and the 32 lanes that store lse and delta of the
// rows.
template <int kCopies>
constexpr int kQueryArrivals = kCopies + 32;

// The queries that see any key of tile n of the sequence. All lanes of a warp call it together.
template <class Visibility, int kKeys>
__device__ __forceinline__ Limits queries_of_tile(const AttnParams& p, const BackwardWork& work, int n) {
  const int key = n * kKeys, end = min(key + kKeys, work.length_k);
  const Limits rows = work.mask(p).rows_of(key, end);
  return Visibility::clip(p, work, rows, key, end);
}

// Stores whether a lane has loaded the mark of a row (cuda/score/large_rows.cuh). more: other bits of the number.
__device__ __forceinline__ void publish_marks(int& has_marks, bool has_mark, int more = 0) {
  const bool any = __any_sync(~0u, has_mark) != 0;
  if (lane() == 0) has_marks = any | more;
}
// Whether causal, the window or a Mask hides pairs of a step; with a BlockMask Shared::has_marks says it.
template <class Visibility, class Packing, class Walk>
__device__ __forceinline__ bool is_masked_step(const Limits& unmasked, const Walk& now) {
  return !Visibility::kLists && Packing::is_masked(unmasked, now.m * Packing::kTiles * 8);
}

// What the arithmetic of a step reads besides its products.
template <class Shared, class Workspace>
struct BackwardStep {
  const AttnGradParams& p;
  const Workspace& workspace;
  Shared& shared;
  const int stage;  // the ring's stage of the queries
  // Whether rows of the stage have marks. A warpgroup reads it while products run: a later read would be waited for.
  const int has_marks;
  const int group, warp_key;  // the warpgroup; the first of this warp's 16 keys, within the tile

  __device__ __forceinline__ const auto& lse() const { return shared.lse[stage]; }
  __device__ __forceinline__ const auto& delta() const { return shared.delta[stage]; }
  // Whether the step needs more than the arithmetic of ordinary steps. Masks and marks share one branch, so that the
  // latter cost ordinary steps nothing.
  __device__ __forceinline__ bool is_masked_or_marked(bool masked) const {
    return (static_cast<int>(masked) | has_marks) != 0;
  }
  // Subtracts the words of marked rows, which few steps have, from products. b, h and row are those of the first query,
  // and query is its place in the step.
  template <class Score, int N>
  __device__ __forceinline__ void subtract_words(float (&products)[N][4], const Score& score, int b, int h, int row,
                                                 int query = 0) const {
    if (has_marks == 0) return;
    flashattn_ext::subtract_words<false, true>(reinterpret_cast<float (&)[1][N][4]>(products), score, lse() + query,
                                               workspace.words_of(p, b, h, row));
  }
  // dP of rows with one weight becomes 0 (cuda/score/large_rows.cuh).
  template <int N>
  __device__ __forceinline__ void clear_rows(float (&dp)[N][4], int query = 0) const {
    if (has_marks == 0) return;
    clear_rows_of_one_weight(reinterpret_cast<float (&)[1][N][4]>(dp), lse() + query);
  }
};

// --- the producer warp --------------------------------------------------------------------------------------------

template <class Kernel>
struct BackwardLoader {
  using Work = typename Kernel::Work;
  using Walk = typename Kernel::Walk;
  using Visibility = typename Kernel::Visibility;
  using Heads = typename Kernel::Heads;
  using Packing = typename Kernel::Packing;
  using Workspace = typename Kernel::Workspace;
  using Maps = typename Kernel::Maps;
  static constexpr int kQueries = Kernel::kQueries, kKeys = Kernel::kKeys;

  SharedOf<Kernel>& shared;
  const AttnGradParams& p;
  const Workspace& workspace;
  const Maps& maps;
  RingPosition<Kernel::kKeyStages> keys;
  RingPosition<Kernel::kStages> queries;
  RingPosition<Kernel::kDoutStages> douts;  // only with kDoutApart
  RingPosition<Kernel::kWorkStages> works;
  uint32_t next_parity = 0;  // parity of SharedTile's barrier
  int query_start = 0;
  typename Visibility::template Loads<Kernel::kStages> lists;

  // The producer warpgroup: the loads and, with a Mask or a BlockMask, the inspection.
  static __device__ __forceinline__ void load_or_inspect(SharedOf<Kernel>& shared, const AttnGradParams& p,
                                                         const Workspace& workspace, const Maps& maps,
                                                         const TileGrid& grid) {
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
    if (warp == 0) {
      BackwardLoader{shared, p, workspace, maps}.load_tiles(grid);
    } else {
      Visibility::template inspect<Kernel>(shared, p, warp);
    }
  }
  __device__ void load_tiles(const TileGrid& grid) {
    const int heads = static_cast<int>(Heads::count(p)), all_heads = heads * static_cast<int>(p.batch);
    // A thread block takes its next tile after it has loaded the one before. In a deterministic call thread blocks then
    // keep, through all tiles, the distances between each other at which they settled in the first ones. There they
    // take the first tile from the counter too: the tiles before it are under way even if other kernels occupy so many
    // multiprocessors that some thread blocks of this one have not started.
    const int first = p.deterministic ? next_tile(grid) : static_cast<int>(blockIdx.x) / Kernel::kBlocks;
    for (int tile = first; tile < grid.tiles; tile = next_tile(grid)) {
      // The first key tiles of causal heads have the most query tiles: they come first.
      const auto [head, block] = grid.index(tile, all_heads);
      // With a bias the batch entries of a head are adjacent, because they may read the same bias.
      const int batch = static_cast<int>(p.batch);
      BackwardWork work = Kernel::Gradients::kBatchesTogether ? start_head(head % batch, head / batch)
                                                              : start_head(head / heads, head % heads);
      // A sequence may be longer than the host was told. Then the last tile number stands for all later tiles too, in
      // the order in which a deterministic call adds to dq.
      for (start_tile(work, first_tile(grid, block, work)); work.exists(); start_tile(work, next_tile(work))) {
        find_queries(work);
        const Work& published = publish(work);
        if (uniform(published.tiles) > 0) load_tile(published);
        if (descends(published) ? published.n < grid.blocks : block != grid.blocks - 1) break;
        work = published;
      }
    }
    publish_end();
    if constexpr (Visibility::kLists) Visibility::end(*this);
  }

  __device__ __forceinline__ int next_tile(const TileGrid& grid) {
    auto take = [&] { return grid.take(p.deterministic ? 0 : static_cast<int>(gridDim.x) / Kernel::kBlocks); };
    if constexpr (Kernel::kPaired) {
      return uniform(lane() == 0 ? shared.next_tile[0].next(take, &next_parity) : 0);
    } else {
      return uniform(lane() == 0 ? take() : grid.tiles);
    }
  }
  // Whether the key tiles of a head are computed in descending order.
  static __device__ __forceinline__ bool descends(const BackwardWork& work) {
    return Visibility::key_tiles_descend(work);
  }
  static __device__ __forceinline__ int first_tile(const TileGrid& grid, int block, const BackwardWork& work) {
    if (!descends(work)) return block;
    return block == 0 ? max(grid.blocks, (work.length_k + kKeys - 1) / kKeys) - 1 : grid.blocks - 1 - block;
  }
  static __device__ __forceinline__ int next_tile(const BackwardWork& work) {
    return descends(work) ? work.n - 1 : work.n + 1;
  }
  static __device__ __forceinline__ int column() {
    return half_of_pair<Kernel::kPaired && !Kernel::kSharesKeys>() * Kernel::kColumns;
  }

  __device__ BackwardWork start_head(int b, int head) {
    const Sequence queries = query_sequence(p, b), keys = key_sequence(p, b);
    query_start = static_cast<int>(queries.start);
    BackwardWork work{b};
    Heads::describe(p, head, &work);
    work.key_start = static_cast<int>(keys.start);
    work.length_q = static_cast<int>(queries.length);
    work.length_k = static_cast<int>(keys.length);
    work.dq_tile = static_cast<int>(workspace.first_tile(p, b, queries));
    Visibility::choose_order(p, &work);
    return work;
  }
  static __device__ void start_tile(BackwardWork& work, int n) {
    work.n = n;
    work.key0 = n * kKeys;
  }
  __device__ void find_queries(BackwardWork& work) {
    const Limits rows = queries_of_tile<Visibility, kKeys>(p, work, work.n);
    if constexpr (Visibility::kLists) return Visibility::count_steps(*this, rows, &work);
    work.first = rows.begin / kQueries;
    work.tiles = rows.end > rows.begin && p.heads_q > 0 ? (rows.end - 1) / kQueries + 1 - work.first : 0;
  }
  // Returns the description in shared memory, which stays unchanged while it is in use: registers are scarce here too.
  __device__ const Work& publish(const BackwardWork& work) {
    ptx::barrier_wait(&shared.work_empty[works.stage], works.parity ^ 1);
    Work& to = shared.work[works.stage];
    Visibility::template describe<Packing, kKeys>(p, work, to);
    if (lane() == 0) {
      static_cast<BackwardWork&>(to) = work;
      ptx::barrier_arrive(&shared.work_full[works.stage]);
    }
    works.advance();
    __syncwarp();
    return to;
  }
  __device__ void publish_end() const {
    ptx::barrier_wait(&shared.work_empty[works.stage], works.parity ^ 1);
    if (lane() != 0) return;
    static_cast<BackwardWork&>(shared.work[works.stage]) = BackwardWork{};
    ptx::barrier_arrive(&shared.work_full[works.stage]);
  }

  __device__ void load_tile(const BackwardWork& work) {
    if constexpr (Visibility::kLists) return Visibility::load_tile(*this, work);
    const int batch = p.is_varlen() ? 0 : work.b, heads = Heads::in_walk(p);
    const int half = half_of_pair<Kernel::kSharesKeys>(), key = work.key_start + work.key0 + half * 64;
    ptx::barrier_wait(&shared.keys_empty[keys.stage], keys.parity ^ 1);
    if (lane() == 0) {
      load_panels(shared.k[keys.stage], shared.k_full[keys.stage], maps.k, key, work.hk, batch, column());
      if constexpr (Kernel::kSharesKeys) {  // the other block's keys, this block's columns of dq
        load_panels(shared.other_k[keys.stage], shared.k_full[keys.stage], maps.k, key + 64 - 128 * half, work.hk,
                    batch, half * Kernel::kColumns / 2);
      }
      load_panels(shared.v[keys.stage], shared.v_full[keys.stage], maps.v, key, work.hk, batch, column());
      Kernel::Gradients::load_keys(shared, keys.stage, maps, key, work.hk, batch);
    }
    keys.advance();
    for (Walk now(p, work, heads); now.left > 0; now.advance()) load_queries(work, now, batch);
  }

  // Loads lse and delta of the rows of query tile m, and returns whether this lane has loaded a mark. Rows after the
  // last of the sequence get an lse of +inf, which makes their weights 0 for any score.
  __device__ __forceinline__ bool load_statistics(const BackwardWork& work, int h, int m) {
    const int stage = queries.stage, row = query_start + m * kQueries, rows = work.length_q - m * kQueries;
    const int64_t index = h * workspace.rows + (p.is_varlen() ? 0 : work.b * p.seqlen_q) + row;
    float lse[kQueries / 32], delta[kQueries / 32];
    bool has_mark = false;
#pragma unroll
    for (int i = 0; i < kQueries / 32; ++i) {
      const bool exists = i * 32 + lane() < rows;
      lse[i] = exists ? workspace.lse[index + i * 32 + lane()] : infinity();
      delta[i] = exists ? workspace.delta[index + i * 32 + lane()] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < kQueries / 32; ++i) {
      shared.lse[stage][i * 32 + lane()] = lse[i];
      shared.delta[stage][i * 32 + lane()] = delta[i];
      has_mark = has_mark || is_mark(lse[i]);
    }
    return has_mark;
  }

  __device__ void load_queries(const BackwardWork& work, const Walk& now, int batch) {
    const int stage = queries.stage, row = query_start + now.m * kQueries;
    ptx::barrier_wait(&shared.queries_empty[stage], queries.parity ^ 1);
    if (lane() == 0) {
      load_panels(shared.q[stage], shared.q_full[stage], maps.q, row, now.h, batch, column());
      if (!Kernel::kDoutApart) load_panels(shared.dout[stage], shared.dout_full[stage], maps.dout, row, now.h, batch);
      Kernel::Gradients::load_queries(shared, stage, maps, row, now.h, batch, work.key0);
    }
    publish_marks(shared.has_marks[stage], load_statistics(work, now.h, now.m));
    const int rows = work.length_q - now.m * kQueries;
    Kernel::Gradients::load_rows(shared, stage, p, workspace, row, now.h, batch, rows);
    ptx::barrier_arrive(&shared.q_full[stage]);  // every lane, for its own writes
    queries.advance();
    if constexpr (Kernel::kDoutApart) {  // dout has stages of its own
      ptx::barrier_wait(&shared.dout_empty[douts.stage], douts.parity ^ 1);
      if (lane() == 0) {
        load_panels(shared.dout[douts.stage], shared.dout_full[douts.stage], maps.dout, row, now.h, batch, column());
      }
      douts.advance();
    }
  }
};

// The body of a kernel.
template <class Kernel, class Workspace, class Maps>
__device__ __forceinline__ void run_backward(const AttnGradParams& p, const Workspace& workspace, const Maps& maps,
                                             const TileGrid& grid) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char memory[];
  SharedOf<Kernel>& shared = *reinterpret_cast<SharedOf<Kernel>*>(memory);
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&maps.q, &maps.k, &maps.v, &maps.dout}) ptx::prefetch_tensor_map(map);
    Kernel::Gradients::prefetch_map(maps);
    if (Kernel::Dropping::kDrops) ptx::wait_for_previous_kernel();  // init reads the state of the generator
    Kernel::init(shared, p);
    ptx::fence_barrier_init();
  }
  ptx::wait_for_previous_kernel();
  sync_pair_or_block<Kernel::kPaired>();
  Kernel::run(shared, p, workspace, maps, grid);
  if (Kernel::kPaired) sync_pair_or_block<true>();
#endif
}
// Params: AttnGradParams, or SecondParams.
template <class Kernel, class Params, class Workspace, class Maps>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    backward_kernel(const __grid_constant__ Params p, const __grid_constant__ Workspace workspace,
                    const __grid_constant__ Maps maps, const __grid_constant__ TileGrid grid) {
  run_backward<Kernel>(p, workspace, maps, grid);
}
// The kernel launched in clusters of two thread blocks.
template <class Kernel, class Params, class Workspace, class Maps>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Kernel::kThreads, 1)
    paired_backward_kernel(const __grid_constant__ Params p, const __grid_constant__ Workspace workspace,
                           const __grid_constant__ Maps maps, const __grid_constant__ TileGrid grid) {
  run_backward<Kernel>(p, workspace, maps, grid);
}

// --- on the host --------------------------------------------------------------------------------------------------

// name: of the kernel, in errors.
template <class Kernel, class Params, class Workspace>
void launch_backward_main(const char* name, const Params& p, const Workspace& workspace) {
  Params walks = p;  // for the order of tiles each walk has a KV head of its own
  walks.heads_k = Kernel::Heads::count(p);
  const int64_t blocks = tile_count(p.seqlen_k, Kernel::kKeys), all = blocks * p.batch * walks.heads_k;
  if (all == 0) return;
  using Maps = typename Kernel::Maps;
  Maps maps;
  constexpr int kBlockKeys = Kernel::kKeys / (Kernel::kSharesKeys ? 2 : 1);
  static_cast<BackwardMaps&>(maps) = {
      query_map(p, p.q, p.head_dim, Kernel::kQueries), key_map(p, p.k, p.head_dim, kBlockKeys),
      key_map(p, p.v, p.head_dim_v, kBlockKeys), query_map(p, p.dout, p.head_dim_v, Kernel::kQueries)};
  Kernel::Gradients::set_more_maps(p, &maps, Kernel::kQueries, Kernel::kKeys);
  const int64_t at_once = multiprocessors() / Kernel::kBlocks, teams = std::min(all, at_once);
  const TileGrid grid{backward_order(walks, blocks, 2, at_once, Kernel::kSectionHeads), static_cast<int>(all),
                      workspace.key_tiles_taken};
  const auto launch = [&](auto kernel) {
    launch_early(kernel, name, p, row_of_blocks(teams * Kernel::kBlocks, name, p), Kernel::kThreads,
                 kSharedBytesOf<Kernel>, p, workspace, maps, grid);
  };
  if constexpr (Kernel::kPaired) {
    launch(paired_backward_kernel<Kernel, Params, Workspace, Maps>);
  } else {
    launch(backward_kernel<Kernel, Params, Workspace, Maps>);
  }
}

}  // namespace flashattn_ext::sm90
