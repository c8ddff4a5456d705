// Backward on Hopper for head dims up to 128: a thread block keeps a tile of keys, 64 in each of two warpgroups, and
// walks over the tiles of queries that see it, which one more warp loads by TMA (Shah et al. 2024, "FlashAttention-3").
// Scores are transposed, S^T = K Q^T: P^T and dS^T, packed, are operands of the products for dv and dk as they are in
// registers. Only dS^T goes through shared memory, for dq. Products of one step run under the arithmetic of another:
// docs/sm90_backward.md.
#pragma once

#include <type_traits>

#include "backward_scores.cuh"
#include "backward_step.cuh"
#include "backward_wide.cuh"

namespace flashattn_ext::sm90 {

template <class T, int kHeadDim, Kind kKind>
struct Backward {
  using Work = BackwardWorkOf<kKind>;
  using Workspace = WorkspaceOf<kKind>;
  static constexpr bool kScored = can_score(kKind);
  static constexpr bool kDropout = can_drop(kKind), kMasks = can_mask(kKind);
  using Scores = PackedScores<T, backward_tile<kHeadDim, kKind>().queries, kKind>;
  using DistanceScores = PackedDistanceScores<T, Scores::kTiles * 8>;
  using Layout = DqLayout<T, kHeadDim>;
  static constexpr BackwardTile kTile = backward_tile<kHeadDim, kKind>();
  static constexpr RegisterBudget kRegisters = kBackwardRegisters;
  static constexpr int kQueries = kTile.queries, kKeys = kTile.keys, kStages = kTile.stages,
                       kKeyStages = kTile.key_stages;
  static constexpr bool kPaired = false;
  static constexpr int kBlocks = 1, kColumns = kHeadDim, kDoutStages = kStages;
  static constexpr int kWorkStages = 2, kThreads = 3 * kGroupThreads, kWarps = 8;
  static constexpr int kPanels = (kHeadDim + kPanelColumns - 1) / kPanelColumns,
                       kScorePanels = kQueries / kPanelColumns;
  static constexpr int kColumnTiles = kHeadDim / 8;
  static constexpr int kDscoreBuffers = 3;  // with three, turns alone order what the warpgroups exchange
  // At least this many heads in a section (tile_order.cuh). Blocks that walk over the same head at the same time share
  // what they read where long sequences do not fit the cache; too few heads leave long tiles for the end.
  static constexpr int kSectionHeads = 16;
  // How many of a warp's eight additions to dq are spread over `weigh`, the others over `differentiate`: a
  // multiprocessor takes them slowly.
  static constexpr int kEarly = 4;
  static_assert(Layout::kHeadDim >= kHeadDim && Layout::kQueries == kQueries);

  // Tiles are as in common/panels.cuh. A barrier `full` says that a stage has arrived, `empty` that it may be
  // overwritten.
  struct Shared {
    T k[kKeyStages][kPanels][kKeys][kPanelColumns];
    T v[kKeyStages][kPanels][kKeys][kPanelColumns];
    T q[kStages][kPanels][kQueries][kPanelColumns];
    T dout[kStages][kPanels][kQueries][kPanelColumns];
    T dscores[kDscoreBuffers][kScorePanels][kKeys][kPanelColumns];  // dS^T: [keys][queries]
    float lse[kStages][kQueries], delta[kStages][kQueries];
    float centres[kScored ? kStages : 0][kCentres][kQueries];  // of the rows, for the gradients of biases
    PhiloxKey philox;
    typename Scores::Kept kept[kDropout ? 2 : 0];  // one for each warpgroup
    Work work[kWorkStages];
    int added_before[kMasks ? kStepsKept : 0];
    ptx::Barrier k_full[kKeyStages], v_full[kKeyStages], keys_empty[kKeyStages];
    ptx::Barrier q_full[kStages], dout_full[kStages], queries_empty[kStages];
    ptx::Barrier work_full[kWorkStages], work_empty[kWorkStages];
    ptx::Barrier keys_inspected[kMasks ? kKeyStages : 0], queries_inspected[kMasks ? kStages : 0];
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
      ptx::barrier_init(&shared.q_full[i], kQueryArrivals);
      ptx::barrier_init(&shared.dout_full[i], 1);
      ptx::barrier_init(&shared.queries_empty[i], kWarps * 32);
    }
    for (int i = 0; i < kWorkStages; ++i) {
      ptx::barrier_init(&shared.work_full[i], 1);
      ptx::barrier_init(&shared.work_empty[i], kWarps * 32 + (inspects<Backward>(p) ? kInspectors : 0));
    }
    init_inspections<Backward>(shared);
  }

  // One warpgroup loads; it gives its registers to those that compute.
  static __device__ void run(Shared& shared, const AttnGradParams& p, const Workspace& workspace,
                             const BackwardMaps& maps, const TileGrid& grid) {
    if (threadIdx.x < kGroupThreads) {
      ptx::give_registers<kRegisters.producer>();
      load_or_inspect<Backward>(shared, p, workspace, maps, grid);
    } else {
      ptx::take_registers<kRegisters.consumer>();
      Backward(shared, p, workspace, uniform(static_cast<int>(threadIdx.x) / kGroupThreads) - 1).compute_tiles();
    }
  }

  // Named barriers: one for each warpgroup to wait at for its turn, and one for each to synchronise itself.
  static constexpr int kTurnBarrier = 1, kGroupBarrier = 3;

  // A query tile to whose dq this key tile has still to add.
  struct Pending {
    int64_t tile = -1;  // its first tile in the workspace's dq; negative when there is none
    int m = 0;          // its number in its sequence
    int step = 0;       // in which its scores were computed
  };

  Shared& shared;
  const AttnGradParams& p;
  const Workspace& workspace;
  const int group, warp_key;  // first of this warp's 16 keys, within the tile
  RingPosition<kWorkStages> works;
  RingPosition<kKeyStages> keys;
  RingPosition<kStages> queries;  // those whose scores have been computed last
  int buffer = 0;                 // of shared.dscores: the one written last
  int step = 0;                   // of this thread block so far
  float dk[kColumnTiles][4], dv[kColumnTiles][4];
  typename Scores::Packed weights;
  std::conditional_t<kScored, typename Scores::Packed, Nothing> slopes;  // with softcap: of the same scores
  std::conditional_t<kScored, BiasSums<1, false>, Nothing> bias_sums;

  __device__ __forceinline__ Backward(Shared& shared, const AttnGradParams& params, const Workspace& workspace,
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
      set_zero(dk);
      set_zero(dv);
      if (uniform(work.tiles) > 0) walk_queries(work);
      const int key = work.key0 + warp_key;
      store_keys<T>(p.dk, work, key, dk, workspace.gradient_scale, p.head_dim);
      store_keys<T>(p.dv, work, key, dv, workspace.keep_scale, p.head_dim_v);
      ptx::barrier_arrive(&shared.work_empty[works.stage]);
    }
  }

  // The two warpgroups take turns at issuing products, so that one computes while the tensor cores work for the other.
  // A step takes two turns. dq of a step is computed in the next one, when dS^T of both warpgroups is in shared memory,
  // and added to the workspace in the one after that.
  __device__ __forceinline__ void walk_queries(const Work& work) {
    Limits unmasked;
    if constexpr (kMasks) {
      unmasked = work.unmasked[group];
    } else if constexpr (kScored) {
      // Also zeros after the last query have biases.
      unmasked = row_mask(work).rows_of_all(work.key0 + group * 64, work.key0 + group * 64 + 64);
    } else {
      unmasked = Scores::unmasked_queries(p, work.mask(p), work.key0 + group * 64, 64);
    }
    unmasked = {uniform(unmasked.begin), uniform(unmasked.end)};
    QueryWalk now(work, static_cast<int>(p.group_size()));
    Pending adding, next_to_add;  // the tile whose dq is in registers, and the one whose dq is computed next
    float scores[kQueries / 8][4], dq[8][4];
    await<Backward>(p, shared.k_full, shared.keys_inspected, keys);
    clear_tail_of_keys(work);
    await<Backward>(p, shared.q_full, shared.queries_inspected, queries);
    draw(work, now);
    take_turn();
    score_product<kHeadDim>(scores, shared.k[keys.stage], group * 64, shared.q[queries.stage]);
    give_turn();
    const auto biases = begin_biases(work, now);
    ptx::wgmma_wait<0>();
    ptx::hold(scores);
    weigh(scores, work, now, unmasked, biases, dq, adding);
    ptx::barrier_wait(&shared.v_full[keys.stage], keys.parity);
    typename Scores::Packed packed;
    while (now.left > 1) {
      const int stage = queries.stage;
      differentiate(packed, work, now, unmasked, dq, adding);
      queries.advance();
      await<Backward>(p, shared.q_full, shared.queries_inspected, queries);
      QueryWalk next = now;
      next.advance();
      draw(work, next);
      take_turn();
      accumulate(dk, packed, shared.q[stage]);
      score_product<kHeadDim>(scores, shared.k[keys.stage], group * 64, shared.q[queries.stage]);
      ptx::wgmma_wait<1>();  // then the registers of dS^T are free
      query_product(dq, 1);
      give_turn();
      const auto biases = begin_biases(work, next);
      ptx::wgmma_wait<0>();
      ptx::hold(scores);
      ptx::hold(dq);
      ptx::barrier_arrive(&shared.queries_empty[stage]);
      adding = next_to_add;
      next_to_add = {dq_tile(work, now), now.m, step++};
      now.advance();
      weigh(scores, work, now, unmasked, biases, dq, adding);
    }
    differentiate(packed, work, now, unmasked, dq, adding);
    take_turn();
    query_product(dq, 1);
    accumulate(dk, packed, shared.q[queries.stage]);
    give_turn();
    ptx::wgmma_wait<0>();
    ptx::hold(dq);
    ptx::barrier_arrive(&shared.queries_empty[queries.stage]);
    add_query_gradient(dq, work, next_to_add);
    take_turn();
    query_product(dq, 0);
    give_turn();
    ptx::wgmma_wait<0>();
    ptx::hold(dq);
    release(shared.keys_empty[keys.stage]);
    add_query_gradient(dq, work, {dq_tile(work, now), now.m, step++});
    queries.advance();
    keys.advance();
  }

  // A turn with the products for dP^T and dv += P^T dO. Then dP^T becomes dS^T, in `packed` and in shared memory, and
  // between its tiles the second half of `dq` is added to the workspace.
  __device__ __forceinline__ void differentiate(typename Scores::Packed& packed, const Work& work, const QueryWalk& now,
                                                const Limits& unmasked, const float (&dq)[8][4],
                                                const Pending& adding) {
    const int stage = queries.stage;
    float dscores[kQueries / 8][4];
    ptx::barrier_wait(&shared.dout_full[stage], queries.parity);
    clear_tail_of_queries(work, now);
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
    // With dropout the operand of dv is a copy of the weights; where registers are scarce they have to be free first.
    ptx::wgmma_wait<kDropout && kQueries == 128 ? 0 : 1>();
    ptx::hold(dscores);
    float* const to = fragments(work, adding);
    auto between = [&](int n) {
      constexpr int kSpread = kQueries / 8 / (8 - kEarly);
      if (n % kSpread == 0) add_fragment(to, dq, kEarly + n / kSpread);
    };
    if constexpr (kScored) {
      const auto biases = bias(work, now);
      const bool hides = Scores::is_masked(unmasked, now.m * kQueries) || biases.range != Reached::kNone;
      typename DistanceScores::BiasGradient gradient{p,      biases, workspace, {shared.centres[stage]},
                                                     work.b, now.h,  true,      bias_sums};
      DistanceScores::differentiate(dscores, weights, slopes, workspace.score, gradient, shared.delta[stage], hides,
                                    between);
      if (uniform(static_cast<int>(now.m == now.end - 1))) end_head(work, now.h);
    } else {
      Scores::differentiate(dscores, weights, workspace.score, shared.delta[stage],
                            Scores::is_masked(unmasked, now.m * kQueries), between);
    }
    if (is_ordered(adding)) order(work, adding).admit_later_keys();
    pack_scores<T>(packed, dscores);
    buffer = buffer == kDscoreBuffers - 1 ? 0 : buffer + 1;
    store_panels(shared.dscores[buffer], warp_key, packed);
    ptx::fence_async_shared();
  }

  // dq = dS K of this step (lag 0) or the one before (lag 1): this warpgroup's part.
  __device__ __forceinline__ void query_product(float (&dq)[8][4], int lag) {
    constexpr bool kOwnRows = kQueries == 128;  // otherwise own columns
    const int at = buffer < lag ? buffer + kDscoreBuffers - lag : buffer - lag;
    transposed_product(dq, shared.dscores[at][kOwnRows ? group : 0], shared.k[keys.stage][kOwnRows ? 0 : group]);
  }

  __device__ __forceinline__ void take_turn() const {
    ptx::named_barrier_sync(kTurnBarrier + group, 2 * kGroupThreads);
  }
  __device__ __forceinline__ void give_turn() const {
    ptx::named_barrier_arrive(kTurnBarrier + 1 - group, 2 * kGroupThreads);
  }

  // Scores become packed weights, and between their tiles the first half of `dq` is added to the workspace.
  template <class Biases>
  __device__ __forceinline__ void weigh(float (&scores)[kQueries / 8][4], const Work& work, const QueryWalk& now,
                                        const Limits& unmasked, [[maybe_unused]] const Biases& biases,
                                        const float (&dq)[8][4], const Pending& adding) {
    const int row0 = now.m * kQueries, key = work.key0 + warp_key;
    if (is_ordered(adding)) order(work, adding).await_earlier_keys();
    float* const to = fragments(work, adding);
    auto between = [&](int n) {
      constexpr int kSpread = kQueries / 8 / kEarly;
      if (n % kSpread == 0) add_fragment(to, dq, n / kSpread);
    };
    if constexpr (kScored) {
      DistanceScores::weigh(
          weights, slopes, scores, workspace.score, biases, shared.lse[queries.stage],
          Scores::is_masked(unmasked, row0), [&] { return row_mask(work); }, row0, key, between);
    } else {
      Scores::weigh(
          weights, scores, workspace.score, shared.lse[queries.stage], Scores::is_masked(unmasked, row0),
          [&] { return visible(p, work, now.h); }, row0, key, between);
    }
    if constexpr (kDropout) Scores::drop(weights, shared.kept[group], warp_key / 16 % 4);
  }
  // Draws what dropout keeps of the next weights, for all warps of the warpgroup. Turns come between the last use of
  // shared.kept and this, and between this and the next use.
  __device__ __forceinline__ void draw(const Work& work, const QueryWalk& next) {
    if constexpr (kDropout) {
      Scores::draw(shared.kept[group], Dropout(shared.philox, p, work.b), p.origin, next.h, work.key0 + group * 64,
                   next.m * kQueries);
    }
  }

  // What is added to this warp's scores of a step; found again rather than kept in registers.
  __device__ __forceinline__ typename DistanceScores::Bias bias(const Work& work, const QueryWalk& now) const {
    return {p, uniform(work.b), now.h, row_mask(work), now.m * kQueries, uniform(work.key0) + warp_key};
  }
  // Reads what is to be added to the scores before their product is waited for.
  __device__ __forceinline__ auto begin_biases(const Work& work, const QueryWalk& now) const {
    if constexpr (kScored) {
      return bias(work, now);
    } else {
      return Nothing{};
    }
  }
  // Calls whose rows an origin places have no scores here: kind.h.
  __device__ __forceinline__ UnplacedMask32 row_mask(const Work& work) const {
    return {p, uniform(work.length_q), uniform(work.length_k)};
  }
  // This warp's sums over the scores of a head, for the gradients of biases.
  __device__ __forceinline__ void end_head(const Work& work, int h) {
    const int64_t tile = workspace.first_key_tile(p, work.b, key_sequence(p, work.b)) + work.n;
    flashattn_ext::end_head(bias_sums, p, workspace, work.b, h, tile, warp_key / 16,
                            work.key0 + warp_key + static_cast<int>(threadIdx.x) % 32 / 4, work.length_k);
  }

  // Rows after the end of a packed sequence are those of another one: weights of 0 would still carry over a NaN. Each
  // warpgroup zeroes all of them, so that it need not wait for the other.
  __device__ __forceinline__ void clear_tail_of_keys(const Work& work) const {
    const int rows = work.length_k - work.key0;
    if (rows >= kKeys || !p.is_varlen()) return;
    clear_rows(shared.k[keys.stage], rows, thread(), kGroupThreads);
    ptx::fence_async_shared();
    ptx::named_barrier_sync(kGroupBarrier + group, kGroupThreads);
  }
  __device__ __forceinline__ void clear_tail_of_queries(const Work& work, const QueryWalk& now) const {
    const int rows = work.length_q - now.m * kQueries;
    if (rows >= kQueries || !p.is_varlen()) return;
    clear_rows(shared.q[queries.stage], rows, thread(), kGroupThreads);
    clear_rows(shared.dout[queries.stage], rows, thread(), kGroupThreads);
    ptx::fence_async_shared();
    ptx::named_barrier_sync(kGroupBarrier + group, kGroupThreads);
  }

  __device__ __forceinline__ int64_t dq_tile(const Work& work, const QueryWalk& now) const {
    return now.h * workspace.tiles + work.dq_tile + now.m * (kQueries / Layout::kTileRows);
  }
  // Where this warp's part of a tile of dq is summed up; null when there is nothing to add.
  __device__ __forceinline__ float* fragments(const Work& work, const Pending& pending) const {
    const int warp = warp_key / 16;
    const bool exists = pending.tile >= 0 && pending.m * kQueries + Layout::row(warp) < work.length_q;
    return exists ? Layout::fragment(workspace, pending.tile, warp, 0) : nullptr;
  }
  __device__ __forceinline__ void add_fragment(float* to, const float (&dq)[8][4], int c) const {
    const bool exists = kQueries == 128 || 64 + c * 8 < kHeadDim || group == 0;
    if (exists) ptx::add_fragment_if(to != nullptr, to + c * 128, dq[c]);
  }
  __device__ __forceinline__ void add_query_gradient(const float (&dq)[8][4], const Work& work,
                                                     const Pending& pending) const {
    if (is_ordered(pending)) order(work, pending).await_earlier_keys();
    float* const to = fragments(work, pending);
#pragma unroll
    for (int c = 0; c < 8; ++c) add_fragment(to, dq, c);
    if (is_ordered(pending)) order(work, pending).admit_later_keys();
  }

  // The order of additions of this warpgroup's part of dq.
  __device__ __forceinline__ bool is_ordered(const Pending& pending) const {
    return p.deterministic && pending.tile >= 0;
  }
  __device__ __forceinline__ auto order(const Work& work, const Pending& pending) const {
    return DqOrder{workspace.dq_added + pending.tile * Layout::kParts + group, thread() % kGroupThreads == 0,
                   [&] { return added_before(*this, work, pending.m, pending.step); },
                   [&] { return added_after(*this, work, pending.m, pending.step); },
                   [&] { ptx::named_barrier_sync(kGroupBarrier + group, kGroupThreads); }};
  }
};

template <class Kernel>
__device__ __forceinline__ void run_backward(const AttnGradParams& p, const typename Kernel::Workspace& workspace,
                                             const BackwardMaps& maps, const TileGrid& grid) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char memory[];
  typename Kernel::Shared& shared = *reinterpret_cast<typename Kernel::Shared*>(memory);
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&maps.q, &maps.k, &maps.v, &maps.dout}) ptx::prefetch_tensor_map(map);
    Kernel::init(shared, p);
    ptx::fence_barrier_init();
  }
  sync_pair_or_block<Kernel::kPaired>();
  Kernel::run(shared, p, workspace, maps, grid);
  if (Kernel::kPaired) sync_pair_or_block<true>();
#endif
}

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    backward_kernel(const __grid_constant__ AttnGradParams p,
                    const __grid_constant__ typename Kernel::Workspace workspace,
                    const __grid_constant__ BackwardMaps maps, const __grid_constant__ TileGrid grid) {
  run_backward<Kernel>(p, workspace, maps, grid);
}
// The same in clusters of two thread blocks.
template <class Kernel>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Kernel::kThreads, 1)
    paired_backward_kernel(const __grid_constant__ AttnGradParams p,
                           const __grid_constant__ typename Kernel::Workspace workspace,
                           const __grid_constant__ BackwardMaps maps, const __grid_constant__ TileGrid grid) {
  run_backward<Kernel>(p, workspace, maps, grid);
}

// The kernel of a class of head dims.
template <class T, int kHeadDim, Kind kKind>
using BackwardOf =
    std::conditional_t<is_wide(kHeadDim), WideBackward<T, kHeadDim, kKind>, Backward<T, kHeadDim, kKind>>;

template <class T, int kHeadDim, Kind kKind>
WorkspaceOf<kKind> backward_workspace(const AttnGradParams& p) {
  using Layout = DqLayout<T, kHeadDim>;
  const BackwardWorkspace base(p, Layout::kTileRows, Layout::kTileFloats, Layout::kOrderedParts);
  return complete<kKind>(p, base, backward_tile<kHeadDim, kKind>().keys, 8);
}

template <class T, int kHeadDim, Kind kKind>
size_t backward_bytes(const AttnGradParams& p) {
  return static_cast<size_t>(backward_workspace<T, kHeadDim, kKind>(p).bytes);
}

template <class T, int kHeadDim, Kind kKind>
void backward(const AttnGradParams& p) {
  const WorkspaceOf<kKind> workspace = backward_workspace<T, kHeadDim, kKind>(p);
  launch_prepare<T>(p, workspace);
  using Kernel = BackwardOf<T, kHeadDim, kKind>;
  if constexpr (Kernel::kPaired) {
    launch_backward_main<Kernel>(paired_backward_kernel<Kernel>, p, workspace);
  } else {
    launch_backward_main<Kernel>(backward_kernel<Kernel>, p, workspace);
  }
  launch_finish<DqLayout<T, kHeadDim>>(p, workspace);
  if constexpr (can_score(kKind)) finish_biases(p, workspace);
}

}  // namespace flashattn_ext::sm90
