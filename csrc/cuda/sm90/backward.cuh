// Backward on Hopper for head dims up to 128: a thread block keeps a tile of keys, 64 in each of two warpgroups, and
// walks over the queries that see it, which one more warp brings by TMA (Shah et al. 2024, "FlashAttention-3"). Only
// dS^T goes through shared memory, for dq. The products of a step overlap with the next one's: docs/sm90_backward.md.
#pragma once

#include <type_traits>

#include "backward_step.cuh"
#include "backward_wide.cuh"

namespace flashattn_ext::sm90 {

// How the sums of dq lie in the workspace: a warpgroup computes 64 rows and 64 columns of a step, the two of a thread
// block either different rows or different columns. Tiles of 16 rows, one warp's, so that short sequences take little.
template <class T, int kHeadDimension>
struct QuerySums {
  using Element = T;
  static constexpr int kM = backward_tile<kHeadDimension, false>().queries, kTileRows = 16;
  static constexpr int kThreads = 2 * kGroupThreads, kSplits = 1;
  static constexpr int kHeadDim = 2 * 64 * 64 / kM;  // columns, some of them beyond the head dim
  static constexpr int kStride = kTileStride<T, kHeadDim>;
  static constexpr int kQueryRowTiles = 1, kQueryColumnTiles = 8;
  static constexpr int64_t kTileFloats = kTileRows * kHeadDim;

  // Scores and columns of a warp, of the eight that compute.
  static __device__ __forceinline__ int row(int warp) { return (kM == 64 ? warp % 4 : warp) * 16; }
  static __device__ __forceinline__ int column(int warp) { return kM == 64 ? warp / 4 * 64 : 0; }
  // Its accumulator tile c; `tile`: the first of the step.
  static __device__ __forceinline__ float* fragment(const BackwardWorkspace& workspace, int64_t tile, int warp, int c) {
    return workspace.dq + (tile + row(warp) / 16) * kTileFloats + (column(warp) / 8 + c) * 128;
  }

  // For dq_finish_kernel, which has these eight warps alone.
  static __device__ int query_row() { return row(threadIdx.x / 32); }
  static __device__ int query_column(int) { return column(threadIdx.x / 32); }
  static __device__ float* dq_fragment(const BackwardWorkspace& workspace, int64_t tile, int, int, int c) {
    return fragment(workspace, tile, threadIdx.x / 32, c);
  }
};

template <class T, int kHeadDim, bool kDropout>
struct Backward {
  using Work = BackwardWork;
  using Scores = PackedScores<T, backward_tile<kHeadDim, kDropout>().queries, kDropout>;
  using Sums = QuerySums<T, kHeadDim>;
  static constexpr BackwardTile kTile = backward_tile<kHeadDim, kDropout>();
  static constexpr RegisterBudget kRegisters = kBackwardRegisters;
  static constexpr int kM = kTile.queries, kN = kTile.keys, kStages = kTile.stages, kKeyStages = kTile.key_stages;
  static constexpr int kWorkStages = 2, kThreads = 3 * kGroupThreads, kWarps = 8, kDqParts = 2;
  static constexpr int kPanels = (kHeadDim + kPanelColumns - 1) / kPanelColumns, kScorePanels = kM / kPanelColumns;
  static constexpr int kColumnTiles = kHeadDim / 8;
  // Where long sequences do not fit the cache, blocks that walk over the same head together share what they read; too
  // few heads leave long tiles for the end.
  static constexpr int kSectionHeads = 16;
  // So many of the eight additions to dq of a warp go under the weights of a step; the others under dS^T.
  static constexpr int kEarly = 4;
  static_assert(Sums::kHeadDim >= kHeadDim && Sums::kM == kM);

  // 128-byte rows, swizzled by TMA, in panels of 64 columns.
  struct Shared {
    T k[kKeyStages][kPanels][kN][kPanelColumns];
    T v[kKeyStages][kPanels][kN][kPanelColumns];
    T q[kStages][kPanels][kM][kPanelColumns];
    T dout[kStages][kPanels][kM][kPanelColumns];
    T dscores[3][kScorePanels][kN][kPanelColumns];  // dS^T: [keys][queries]
    float lse[kStages][kM], delta[kStages][kM];
    PhiloxKey philox;
    typename Scores::Kept kept[kDropout ? 2 : 0];  // of each warpgroup
    Work work[kWorkStages];
    ptx::Barrier k_full[kKeyStages], v_full[kKeyStages], keys_empty[kKeyStages];
    ptx::Barrier q_full[kStages], dout_full[kStages], queries_empty[kStages];
    ptx::Barrier work_full[kWorkStages], work_empty[kWorkStages];
  };
  static_assert(sizeof(Shared) <= kSharedLimit);
  static_assert(kStages >= 2);  // the next scores are computed before these queries are released

  static __device__ void init(Shared& shared, const AttnGradParams& p) {
    if (kDropout) shared.philox = Dropout(p, 0).key;
    for (int i = 0; i < kKeyStages; ++i) {
      ptx::barrier_init(&shared.k_full[i], 1);
      ptx::barrier_init(&shared.v_full[i], 1);
      ptx::barrier_init(&shared.keys_empty[i], kWarps);
    }
    for (int i = 0; i < kStages; ++i) {
      ptx::barrier_init(&shared.q_full[i], kLoaderArrivals);
      ptx::barrier_init(&shared.dout_full[i], 1);
      ptx::barrier_init(&shared.queries_empty[i], kWarps * 32);
    }
    for (int i = 0; i < kWorkStages; ++i) {
      ptx::barrier_init(&shared.work_full[i], 1);
      ptx::barrier_init(&shared.work_empty[i], kWarps * 32);
    }
  }

  // One warpgroup loads; it gives its registers to those that compute.
  static __device__ void run(Shared& shared, const AttnGradParams& p, const BackwardWorkspace& workspace,
                             const BackwardMaps& maps, const TileGrid& grid) {
    if (threadIdx.x < kGroupThreads) {
      ptx::give_registers<kRegisters.producer>();
      if (threadIdx.x < 32) BackwardLoader<Backward>{shared, p, workspace, maps}.load_tiles(grid);
    } else {
      ptx::take_registers<kRegisters.consumer>();
      Backward(shared, p, workspace, uniform(static_cast<int>(threadIdx.x) / kGroupThreads) - 1).compute_tiles();
    }
  }

  // Named barriers, one of each for each warpgroup: for its turn, and of itself.
  static constexpr int kTurnBarrier = 1, kGroupBarrier = 3;

  // A query tile whose dq is still to be added: its number in BackwardWorkspace (none: negative), and in its sequence.
  struct Lagging {
    int64_t tile = -1;
    int m = 0;
  };

  Shared& shared;
  const AttnGradParams& p;
  const BackwardWorkspace& workspace;
  const int group, warp_key;  // first of this warp's 16 keys, within the tile
  RingPosition<kWorkStages> works;
  RingPosition<kKeyStages> keys;
  RingPosition<kStages> queries;  // of the step whose scores have been computed last
  int buffer = 0;                 // of dscores
  float dk[kColumnTiles][4], dv[kColumnTiles][4];
  typename Scores::Packed weights;

  __device__ __forceinline__ Backward(Shared& shared, const AttnGradParams& params, const BackwardWorkspace& workspace,
                                      int group)
      : shared(shared),
        p(params),
        workspace(workspace),
        group(group),
        warp_key(uniform(static_cast<int>(threadIdx.x) / 32 - 4) * 16) {}

  static __device__ __forceinline__ int thread() { return threadIdx.x - kGroupThreads; }
  __device__ __forceinline__ void compute_tiles() {
    if (group == 1) give_turn();
    for (;; works.advance()) {
      ptx::barrier_wait(&shared.work_full[works.stage], works.parity);
      const Work& work = shared.work[works.stage];
      if (!uniform(work.exists())) return;
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c) {
#pragma unroll
        for (int e = 0; e < 4; ++e) dk[c][e] = dv[c][e] = 0;
      }
      if (uniform(work.tiles) > 0) walk_queries(work);
      const int key = work.key0 + warp_key;
      store_keys<T>(p.dk, work, key, dk, workspace.gradient_scale, p.head_dim);
      store_keys<T>(p.dv, work, key, dv, workspace.keep_scale, p.head_dim_v);
      ptx::barrier_arrive(&shared.work_empty[works.stage]);
    }
  }

  // The two warpgroups take turns at issuing products, so that one computes while the tensor cores work for the other.
  // A step takes two turns; dq lags a step behind, by when dS^T of both is there.
  __device__ __forceinline__ void walk_queries(const Work& work) {
    Limits unmasked = Scores::unmasked_queries(p, work.mask(p), work.key0 + group * 64, 64);
    unmasked = {uniform(unmasked.begin), uniform(unmasked.end)};
    QueryWalk now(work, static_cast<int>(p.group_size()));
    Lagging before, ended;  // whose dq is being added, and is still to be computed
    float scores[kM / 8][4], dq[8][4];
    ptx::barrier_wait(&shared.k_full[keys.stage], keys.parity);
    clear_keys(work);
    ptx::barrier_wait(&shared.q_full[queries.stage], queries.parity);
    draw(work, now);
    take_turn();
    score_product<kHeadDim>(scores, shared.k[keys.stage], group * 64, shared.q[queries.stage]);
    give_turn();
    ptx::wgmma_wait<0>();
    ptx::hold(scores);
    weigh(scores, work, now, unmasked, dq, before);
    ptx::barrier_wait(&shared.v_full[keys.stage], keys.parity);
    typename Scores::Packed packed;
    while (now.left > 1) {
      const int stage = queries.stage;
      differentiate(packed, work, now, unmasked, dq, before);
      queries.advance();
      ptx::barrier_wait(&shared.q_full[queries.stage], queries.parity);
      QueryWalk next = now;
      next.advance();
      draw(work, next);
      take_turn();
      accumulate(dk, packed, shared.q[stage]);
      score_product<kHeadDim>(scores, shared.k[keys.stage], group * 64, shared.q[queries.stage]);
      ptx::wgmma_wait<1>();  // the registers of dS^T are free
      query_product(dq, 1);
      give_turn();
      ptx::wgmma_wait<0>();
      ptx::hold(scores);
      ptx::hold(dq);
      ptx::barrier_arrive(&shared.queries_empty[stage]);
      before = ended;
      ended = {query_tile(work, now), now.m};
      now.advance();
      weigh(scores, work, now, unmasked, dq, before);
    }
    differentiate(packed, work, now, unmasked, dq, before);
    take_turn();
    query_product(dq, 1);
    accumulate(dk, packed, shared.q[queries.stage]);
    give_turn();
    ptx::wgmma_wait<0>();
    ptx::hold(dq);
    ptx::barrier_arrive(&shared.queries_empty[queries.stage]);
    add_query_gradient(dq, work, ended);
    take_turn();
    query_product(dq, 0);
    give_turn();
    ptx::wgmma_wait<0>();
    ptx::hold(dq);
    release(shared.keys_empty[keys.stage]);
    add_query_gradient(dq, work, {query_tile(work, now), now.m});
    queries.advance();
    keys.advance();
  }

  // A turn: dP^T and dv += P^T dO. Then dS^T, packed and in shared memory.
  // Meanwhile it adds the second half of what an earlier step contributes to dq.
  __device__ __forceinline__ void differentiate(typename Scores::Packed& packed, const Work& work, const QueryWalk& now,
                                                const Limits& unmasked, const float (&dq)[8][4],
                                                const Lagging& before) {
    const int stage = queries.stage;
    float dscores[kM / 8][4];
    ptx::barrier_wait(&shared.dout_full[stage], queries.parity);
    clear_queries(work, now);
    take_turn();
    score_product<kHeadDim>(dscores, shared.v[keys.stage], group * 64, shared.dout[stage]);
    if constexpr (kDropout) {
      typename Scores::Packed kept;
      Scores::keep(kept, weights);
      accumulate(dv, kept, shared.dout[stage]);
    } else {
      accumulate(dv, weights, shared.dout[stage]);
    }
    give_turn();
    // With dropout the operand of dv is a copy, whose registers are needed.
    ptx::wgmma_wait<kDropout && kM == 128 ? 0 : 1>();
    ptx::hold(dscores);
    float* const to = fragments(work, before);
    Scores::differentiate(dscores, weights, shared.delta[stage], Scores::is_masked(unmasked, now.m * kM), [&](int n) {
      constexpr int kSpread = kM / 8 / (8 - kEarly);
      if (n % kSpread == 0) add_fragment(to, dq, kEarly + n / kSpread);
    });
    if (is_ordered(before)) order(work, before).admit_later_keys();
    pack_scores<T>(packed, dscores);
    buffer = buffer == 2 ? 0 : buffer + 1;
    store_panels(shared.dscores[buffer], warp_key, packed);
    ptx::fence_async_shared();
  }

  // dq = dS K of this step or the one before.
  __device__ __forceinline__ void query_product(float (&dq)[8][4], int lag) {
    constexpr bool kOwnRows = kM == 128;  // or own columns
    const int at = buffer < lag ? buffer + 3 - lag : buffer - lag;
    transposed_product(dq, shared.dscores[at][kOwnRows ? group : 0], shared.k[keys.stage][kOwnRows ? 0 : group]);
  }

  __device__ __forceinline__ void take_turn() const {
    ptx::named_barrier_sync(kTurnBarrier + group, 2 * kGroupThreads);
  }
  __device__ __forceinline__ void give_turn() const {
    ptx::named_barrier_arrive(kTurnBarrier + 1 - group, 2 * kGroupThreads);
  }

  // Meanwhile it adds the first half of what the step before contributes to dq: the additions come one by one, for a
  // processor takes them slowly.
  __device__ __forceinline__ void weigh(const float (&scores)[kM / 8][4], const Work& work, const QueryWalk& now,
                                        const Limits& unmasked, const float (&dq)[8][4], const Lagging& before) {
    const int row0 = now.m * kM, key = work.key0 + warp_key;
    if (is_ordered(before)) order(work, before).await_earlier_keys();
    float* const to = fragments(work, before);
    Scores::weigh(
        weights, scores, workspace.score, shared.lse[queries.stage], Scores::is_masked(unmasked, row0),
        [&] { return work.mask(p); }, row0, key,
        [&](int n) {
          constexpr int kSpread = kM / 8 / kEarly;
          if (n % kSpread == 0) add_fragment(to, dq, n / kSpread);
        });
    if constexpr (kDropout) Scores::drop(weights, shared.kept[group], warp_key / 16 % 4);
  }
  // What dropout keeps of the next weights, for all warps of the warpgroup; a turn lies between this and both the last
  // and the next use of it.
  __device__ __forceinline__ void draw(const Work& work, const QueryWalk& next) {
    if constexpr (kDropout) {
      Scores::draw(shared.kept[group], Dropout(shared.philox, p, work.b), next.h, work.key0 + group * 64, next.m * kM);
    }
  }

  // Each warpgroup clears for itself what both read.
  __device__ __forceinline__ void clear_keys(const Work& work) const {
    const int from = work.length_k - work.key0;
    if (from >= kN || !p.is_varlen()) return;
    clear_rows(shared.k[keys.stage], from, thread(), kGroupThreads);
    ptx::fence_async_shared();
    ptx::named_barrier_sync(kGroupBarrier + group, kGroupThreads);
  }
  __device__ __forceinline__ void clear_queries(const Work& work, const QueryWalk& now) const {
    const int from = work.length_q - now.m * kM;
    if (from >= kM || !p.is_varlen()) return;
    clear_rows(shared.q[queries.stage], from, thread(), kGroupThreads);
    clear_rows(shared.dout[queries.stage], from, thread(), kGroupThreads);
    ptx::fence_async_shared();
    ptx::named_barrier_sync(kGroupBarrier + group, kGroupThreads);
  }

  __device__ __forceinline__ int64_t query_tile(const Work& work, const QueryWalk& now) const {
    return now.h * workspace.tiles + work.first_tile + now.m * (kM / Sums::kTileRows);
  }
  // Where this warp's part is added up; null when there is none.
  __device__ __forceinline__ float* fragments(const Work& work, const Lagging& of) const {
    const int warp = warp_key / 16;
    const bool exists = of.tile >= 0 && of.m * kM + Sums::row(warp) < work.length_q;
    return exists ? Sums::fragment(workspace, of.tile, warp, 0) : nullptr;
  }
  __device__ __forceinline__ void add_fragment(float* to, const float (&dq)[8][4], int c) const {
    const bool exists = kM == 128 || 64 + c * 8 < kHeadDim || group == 0;
    if (exists) ptx::add_fragment_if(to != nullptr, to + c * 128, dq[c]);
  }
  __device__ __forceinline__ void add_query_gradient(const float (&dq)[8][4], const Work& work,
                                                     const Lagging& of) const {
    if (is_ordered(of)) order(work, of).await_earlier_keys();
    float* const to = fragments(work, of);
#pragma unroll
    for (int c = 0; c < 8; ++c) add_fragment(to, dq, c);
    if (is_ordered(of)) order(work, of).admit_later_keys();
  }

  // The order of additions of this warpgroup's part of dq.
  __device__ __forceinline__ bool is_ordered(const Lagging& lagging) const {
    return p.deterministic && lagging.tile >= 0;
  }
  __device__ __forceinline__ auto order(const Work& work, const Lagging& lagging) const {
    return DqOrder{workspace.dq_added + lagging.tile * 2 + group, thread() % kGroupThreads == 0,
                   [&] { return key_tiles_before(work.mask(p), work.n, kN, lagging.m * kM, kM); },
                   [&] { ptx::named_barrier_sync(kGroupBarrier + group, kGroupThreads); }};
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    backward_kernel(const __grid_constant__ AttnGradParams p, const __grid_constant__ BackwardWorkspace workspace,
                    const __grid_constant__ BackwardMaps maps, const __grid_constant__ TileGrid grid) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char memory[];
  typename Kernel::Shared& shared = *reinterpret_cast<typename Kernel::Shared*>(memory);
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&maps.q, &maps.k, &maps.v, &maps.dout}) ptx::prefetch_tensor_map(map);
    Kernel::init(shared, p);
    ptx::fence_barrier_init();
  }
  __syncthreads();
  Kernel::run(shared, p, workspace, maps, grid);
#endif
}

template <class T, int kHeadDim, bool kDropout>
using BackwardOf =
    std::conditional_t<kHeadDim <= 128, Backward<T, kHeadDim, kDropout>, WideBackward<T, kHeadDim, kDropout>>;

template <class T, int kHeadDim>
BackwardWorkspace backward_workspace(const AttnGradParams& p) {
  using Kernel = BackwardOf<T, kHeadDim, false>;
  return BackwardWorkspace(p, Kernel::Sums::kTileRows, Kernel::Sums::kTileFloats, Kernel::kDqParts);
}

template <class T, int kHeadDim, bool kDropout>
void launch_main(const AttnGradParams& p, const BackwardWorkspace& workspace) {
  using Kernel = BackwardOf<T, kHeadDim, kDropout>;
  launch_backward_main<Kernel>(backward_kernel<Kernel>, p, workspace);
}

template <class T, int kHeadDim>
size_t backward_bytes(const AttnGradParams& p) {
  return static_cast<size_t>(backward_workspace<T, kHeadDim>(p).bytes);
}

template <class T, int kHeadDim>
void backward(const AttnGradParams& p) {
  const BackwardWorkspace workspace = backward_workspace<T, kHeadDim>(p);
  launch_prepare<T>(p, workspace);
  p.has_dropout() ? launch_main<T, kHeadDim, true>(p, workspace) : launch_main<T, kHeadDim, false>(p, workspace);
  launch_finish<typename BackwardOf<T, kHeadDim, false>::Sums>(p, workspace);
}

}  // namespace flashattn_ext::sm90
