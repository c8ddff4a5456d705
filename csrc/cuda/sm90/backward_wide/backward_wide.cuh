// Backward on Hopper for other head dims above 128. dk and dv of 64 keys each fill the registers of a warpgroup. So the
// first warpgroup computes P^T and dv, the second dS^T and dk, and the third dq. P^T and dS^T go from one warpgroup to
// the next through shared memory, double-buffered, and every warpgroup runs ahead of the next one as far as the buffers
// allow. Plain calls above 192 run in clusters of two thread blocks. docs/sm90_backward.md.
#pragma once

#include <type_traits>

#include "cuda/sm90/shared/backward_policies.cuh"
#include "cuda/sm90/shared/backward_step.cuh"
#include "cuda/sm90/shared/backward_visibility.cuh"
#include "cuda/sm90/shared/packed_scores.cuh"

namespace flashattn_ext::sm90 {

template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
struct WideBackward {
  static_assert(kOptions == kPlain || kOptions == kDropout || kOptions == kIntervals);
  using Visibility = std::conditional_t<kOptions == kIntervals, IntervalQueries, ArithmeticQueries>;
  using Dropping = std::conditional_t<kOptions == kDropout, CounterBackwardDropout, NoBackwardDropout>;
  using Work = typename Visibility::Work;
  using Heads = WholeGroups;
  using Walk = QueryWalk<false, Visibility>;
  static constexpr bool kMasks = Visibility::kHasIntervals;
  static constexpr BackwardTile kTile = tile_of<kernel_table::kSm90Backward, T, kHeadDim, kOptions, kHeadDimV>();
  using Layout = DqLayout<T, kHeadDim, kTile.queries, true>;
  static constexpr WideRegisterBudget kRegisters = wide_register_budget(kHeadDim, kTile.order == BackwardOrder::kPairs);
  static constexpr int kQueries = kTile.queries, kKeys = kTile.keys, kStages = kTile.stages,
                       kKeyStages = kTile.key_stages;
  static constexpr int kWorkStages = 2, kBuffers = 2;  // kBuffers: of P^T and of dS^T
  static constexpr int kThreads = 4 * kGroupThreads, kGroupWarps = 4;
  static constexpr int kInspectors = kMasks ? 3 : 0;
  // Clusters of two thread blocks either have one half of the columns of the same 64 keys each (pair.cuh), or one
  // half of the keys of a tile of 128. Then they exchange dS^T, and each computes one half of the columns of dq from
  // all 128 keys: so a block adds half as much to dq.
  static constexpr bool kSharesKeys = kTile.order == BackwardOrder::kPairs, kSplitsColumns = is_paired(kHeadDim),
                        kPaired = kSharesKeys || kSplitsColumns;
  static constexpr bool kDoutApart = kPaired;  // dout has stages of its own
  static constexpr int kOwnKeys = 64;
  static constexpr int kBlocks = kPaired ? 2 : 1;
  static constexpr int kColumns = kHeadDim / (kSplitsColumns ? 2 : 1),
                       kValueColumns = kHeadDimV / (kSplitsColumns ? 2 : 1);  // columns of a thread block
  // Stages of dout. In pairs dout has its own stages, because shared memory has no room for two at head_dim 512 and
  // beside the other block's keys.
  static constexpr int kDoutStages = kHeadDim > 384 || kSharesKeys ? 1 : kStages;
  static constexpr int kPanels = panels(kColumns), kColumnTiles = kColumns / 8;
  static constexpr int kQueryPanels = kSharesKeys ? kPanels / 2 : kPanels;  // panels of dq
  static constexpr int kValuePanels = panels(kValueColumns);
  // As in backward.cuh: no more heads than have as many tiles as run at a time, because blocks would read too much at
  // once.
  static constexpr int kSectionHeads = 1;
  // A thread block of 512 threads starts with 128 registers per thread, and the compiler requires the operands of one
  // instruction to fit in them.
  static constexpr int kMostTiles = 24;
  using Packing = PackedScores<T, kQueries, Dropping::kDrops>;
  using Gradients = PlainGradients<Packing>;
  using Workspace = typename Gradients::Workspace;
  using Maps = typename Gradients::Maps;

  // Tiles have the layout of cuda/tile/panels.cuh. A `full` barrier signals that a stage has arrived, an `empty`
  // barrier that it may be overwritten.
  struct Shared {
    alignas(kPanelAlignment) T k[kKeyStages][kPanels][kOwnKeys][kPanelColumns];
    alignas(kPanelAlignment) T v[kKeyStages][kValuePanels][kOwnKeys][kPanelColumns];
    alignas(kPanelAlignment) T q[kStages][kPanels][kQueries][kPanelColumns];
    alignas(kPanelAlignment) T dout[kDoutStages][kValuePanels][kQueries][kPanelColumns];
    alignas(kPanelAlignment) T dscores[kBuffers][1][kOwnKeys][kPanelColumns];  // dS^T: [keys][queries]
    // The other block's, with this block's columns of dq of its keys.
    alignas(panel_alignment(kSharesKeys))
        MaybeArray<T[1][kOwnKeys][kPanelColumns], kSharesKeys ? kBuffers : 0> other_dscores;
    alignas(panel_alignment(kSharesKeys))
        MaybeArray<T[kQueryPanels][kOwnKeys][kPanelColumns], kSharesKeys ? kKeyStages : 0> other_k;
    uint4 weights[kBuffers][kQueries / 16][kGroupThreads];  // P^T, as each thread's registers
    float lse[kStages][kQueries], delta[kStages][kQueries];
    int has_marks[kStages];  // in lse
    MaybeArray<typename Packing::Kept, Dropping::kDrops ? kBuffers : 0> kept;
    Work work[kWorkStages];
    MaybeArray<int, kMasks ? kStepsKept : 0> added_before;
    MaybeArray<EarlierKeyTile, kMasks ? 1 : 0> before;  // for the inspector warps
    ptx::Barrier k_full[kKeyStages], v_full[kKeyStages], keys_empty[kKeyStages];
    ptx::Barrier q_full[kStages], dout_full[kDoutStages], queries_empty[kStages];
    ptx::Barrier weights_full[kBuffers], weights_empty[kBuffers], dscores_full[kBuffers], dscores_empty[kBuffers];
    ptx::Barrier work_full[kWorkStages], work_empty[kWorkStages];
    MaybeArray<ptx::Barrier, kMasks ? kKeyStages : 0> keys_inspected;
    MaybeArray<ptx::Barrier, kMasks ? kStages : 0> queries_inspected;
    MaybeArray<ptx::Barrier, kPaired ? kDoutStages : 0> dout_empty;
    MaybeArray<OtherPart<kQueries / 8>, kSplitsColumns ? 1 : 0> score_parts, dscore_parts;
    MaybeArray<ptx::Barrier, kSharesKeys ? kBuffers : 0> other_dscores_full;
    MaybeArray<SharedTile, kPaired ? 1 : 0> next_tile;
  };
  static_assert(sizeof(Shared) <= kSharedLimit);
  static_assert(!kSplitsColumns || kColumns == kValueColumns);
  static_assert(!kSharesKeys || (kOptions == kPlain && kPanels % 2 == 0));
  static_assert(!kMasks || kPanels == kValuePanels);  // BackwardInspector

  static __device__ void init(Shared& shared, const AttnGradParams& p) {
    for (int i = 0; i < kKeyStages; ++i) {
      ptx::barrier_init(&shared.k_full[i], kSharesKeys ? 2 : 1);
      ptx::barrier_init(&shared.v_full[i], 1);
      ptx::barrier_init(&shared.keys_empty[i], 3 * kGroupWarps);
    }
    for (int i = 0; i < kStages; ++i) {
      ptx::barrier_init(&shared.q_full[i], kQueryArrivals<Gradients::kCopies>);
      if (i < kDoutStages) ptx::barrier_init(&shared.dout_full[i], 1);
      ptx::barrier_init(&shared.queries_empty[i], 2 * kGroupThreads + kInspectors);
    }
    if constexpr (kPaired) {
      for (ptx::Barrier& barrier : shared.dout_empty) ptx::barrier_init(&barrier, 2 * kGroupThreads);
      shared.next_tile[0].init();
    }
    if constexpr (kSplitsColumns) {
      shared.score_parts[0].init();
      shared.dscore_parts[0].init();
    }
    for (ptx::Barrier& barrier : shared.other_dscores_full) ptx::barrier_init(&barrier, 1);
    for (int i = 0; i < kBuffers; ++i) {
      for (ptx::Barrier* barrier : {&shared.weights_full[i], &shared.weights_empty[i], &shared.dscores_full[i]}) {
        ptx::barrier_init(barrier, kGroupThreads);
      }
      // The other block releases the buffer too, from which its own is copied.
      ptx::barrier_init(&shared.dscores_empty[i], kGroupThreads + (kSharesKeys ? kGroupWarps : 0));
    }
    for (int i = 0; i < kWorkStages; ++i) {
      ptx::barrier_init(&shared.work_full[i], 1);
      ptx::barrier_init(&shared.work_empty[i], 3 * kGroupThreads + kInspectors);
    }
    Visibility::template init<kInspectors>(shared);
  }

  static __device__ void run(Shared& shared, const AttnGradParams& p, const BackwardWorkspace& workspace,
                             const BackwardMaps& maps, const TileGrid& grid) {
    const int group = uniform(static_cast<int>(threadIdx.x) / kGroupThreads);
    if (group == 0) {
      ptx::give_registers<kRegisters.loader>();
      BackwardLoader<WideBackward>::load_or_inspect(shared, p, workspace, maps, grid);
    } else if (group == 1) {
      ptx::take_registers<kRegisters.keys>();
      ValueGradient(shared, p, workspace, group).compute_tiles();
    } else if (group == 2) {
      ptx::take_registers<kRegisters.keys>();
      KeyGradient(shared, p, workspace, group).compute_tiles();
    } else {
      ptx::give_registers<kRegisters.queries>();
      QueryGradient(shared, p, workspace, group).compute_tiles();
    }
  }

  // The common state of the three warpgroups.
  struct Group {
    Shared& shared;
    const AttnGradParams& p;
    const BackwardWorkspace& workspace;
    const int group, warp_key;  // warp_key: first of this warp's 16 keys (in the third: queries), within the tile
    RingPosition<kWorkStages> works;
    RingPosition<kKeyStages> keys;
    RingPosition<kStages> queries;
    int has_marks = 0;  // BackwardStep
    std::conditional_t<kPaired, RingPosition<kDoutStages>, Nothing> own_douts;
    RingPosition<kBuffers> weights_at, dscores_at;
    uint32_t parts_parity = 0;  // parity of OtherPart's barrier

    __device__ __forceinline__ Group(Shared& shared, const AttnGradParams& params, const BackwardWorkspace& workspace,
                                     int group)
        : shared(shared),
          p(params),
          workspace(workspace),
          group(group),
          warp_key(uniform(static_cast<int>(threadIdx.x) / 32 % kGroupWarps) * 16) {}

    static __device__ __forceinline__ int thread() { return threadIdx.x % kGroupThreads; }
    __device__ __forceinline__ auto this_step() const {
      return BackwardStep<Shared, BackwardWorkspace>{p, workspace, shared, queries.stage, has_marks, group, warp_key};
    }
    __device__ __forceinline__ const Work* receive() { return receive_work(shared, works); }
    __device__ __forceinline__ void end_work() {
      ptx::barrier_arrive(&shared.work_empty[works.stage]);
      works.advance();
    }
    __device__ __forceinline__ Limits unmasked_queries(const Work& work) const {
      return uniform(Visibility::unmasked(work, 0, [&] { return Gradients::unmasked(p, work, own_key(work)); }));
    }
    // The ring position of dout of the current queries: the stage of the queries, or in pairs its own.
    __device__ __forceinline__ const auto& douts() const {
      if constexpr (kPaired) {
        return own_douts;
      } else {
        return queries;
      }
    }
    __device__ __forceinline__ void end_queries(int stage) { ptx::barrier_arrive(&shared.queries_empty[stage]); }
    // Releases dout, which this warpgroup has read. Without pairs end_queries releases it.
    __device__ __forceinline__ void end_dout() {
      if constexpr (kPaired) {
        ptx::barrier_arrive(&shared.dout_empty[own_douts.stage]);
        own_douts.advance();
      }
    }
    // The first column of this block, the same in v as in q and k: in pairs they have the same number of columns.
    static __device__ __forceinline__ int column() { return half_of_pair<kSplitsColumns>() * kColumns; }
    // The first key of this block.
    static __device__ __forceinline__ int own_key(const Work& work) {
      return work.key0 + half_of_pair<kSharesKeys>() * kOwnKeys;
    }
    __device__ __forceinline__ void end_keys() {
      release(shared.keys_empty[keys.stage]);
      keys.advance();
    }
    // Walks over the queries of a key tile: prepare(now) computes the scores of a step, start(now) issues the product
    // that adds to `sum`, and end() comes when that is complete.
    template <int N, class Prepare, class Start, class End>
    __device__ __forceinline__ void walk(const Work& work, float (&sum)[N][4], const Prepare& prepare,
                                         const Start& start, const End& end) {
      Walk now(p, work, static_cast<int>(p.group_size()));
      const auto add = [&](int stage) {
        start(now);
        ptx::wgmma_wait<0>();
        ptx::hold(sum);
        end();
        end_queries(stage);
        queries.advance();
      };
      prepare(now);
      while (now.left > 1) {
        add(queries.stage);
        now.advance();
        prepare(now);
      }
      add(queries.stage);
      end_keys();
    }
    // Zeroes the rows from `rows` on. They follow the end of a packed sequence and belong to another sequence, whose
    // NaNs weights of 0 would still propagate. Only one warpgroup uses each tile in such a product.
    template <int kTilePanels, int kRows>
    __device__ __forceinline__ void clear_tail(T (&tile)[kTilePanels][kRows][kPanelColumns], int rows) const {
      if (!p.is_varlen() || rows >= kRows) return;
      clear_rows(tile, kSharesKeys ? max(rows, 0) : rows, thread(), kGroupThreads);
      ptx::fence_async_shared();
      ptx::named_barrier_sync(kWideGroup + group - 1, kGroupThreads);
    }
  };

  // The first warpgroup: P^T, and dv = P^T dO.
  struct ValueGradient : Group {
    using Group::shared, Group::p, Group::workspace, Group::keys, Group::queries, Group::weights_at, Group::warp_key;
    PhiloxKey philox;
    int kept_buffer = 0;  // index of the next buffer in shared.kept
    float dv[kValueColumns / 8][4];
    typename Packing::Packed weights;

    __device__ __forceinline__ ValueGradient(Shared& shared, const AttnGradParams& params,
                                             const BackwardWorkspace& workspace, int group)
        : Group(shared, params, workspace, group), philox(Dropping::key(params)) {}

    __device__ __forceinline__ void compute_tiles() {
      while (const Work* const work = this->receive()) {
        set_zero(dv);
        if (uniform(work->tiles) > 0) walk_queries(*work);
        store_keys<T>(p.dv, *work, this->own_key(*work) + warp_key, dv, workspace.keep_scale, p.head_dim_v,
                      this->column());
        this->end_work();
      }
    }

    __device__ __forceinline__ void walk_queries(const Work& work) {
      const Limits unmasked = this->unmasked_queries(work);
      Visibility::await(shared.k_full, shared.keys_inspected, keys);
      this->walk(
          work, dv, [&](const Walk& now) { weigh_next(work, now, unmasked); },
          [&](const Walk& now) { start_values(work, now); }, [&] { this->end_dout(); });
    }

    __device__ __forceinline__ void weigh_next(const Work& work, const Walk& now, const Limits& unmasked) {
      float scores[kQueries / 8][4];
      Visibility::await(shared.q_full, shared.queries_inspected, queries);
      score_product<kColumns>(scores, shared.k[keys.stage], 0, shared.q[queries.stage]);
      this->has_marks = shared.has_marks[queries.stage];
      const int row0 = now.m * kQueries, key = this->own_key(work) + warp_key;
      Dropping::template draw<Packing>(shared.kept, kept_buffer, philox, p, work.b, now.h, work.key0, row0);
      ptx::wgmma_wait<0>();
      ptx::hold(scores);
      if constexpr (kSplitsColumns) shared.score_parts[0].exchange(scores, &this->parts_parity);
      const auto prepare = [&] {
        this->this_step().subtract_words(scores, workspace.score, work.b, now.h, row0);
        return visible(p, work, now.h);
      };
      Packing::weigh(weights, scores, workspace.score, shared.lse[queries.stage],
                     this->this_step().is_masked_or_marked(Packing::is_masked(unmasked, row0)), prepare, row0, key);
      if (Dropping::kDrops) {
        // The other buffer is free for the next step: all warps have passed this barrier since they read it.
        ptx::named_barrier_sync(kWideGroup + this->group - 1, kGroupThreads);
        Dropping::template drop<Packing>(weights, shared.kept, kept_buffer, warp_key / 16);
        kept_buffer ^= 1;
      }
    }

    // Hands P^T to the second warpgroup, and issues dv += P^T dO.
    __device__ __forceinline__ void start_values(const Work& work, const Walk& now) {
      ptx::barrier_wait(&shared.weights_empty[weights_at.stage], weights_at.parity ^ 1);
#pragma unroll
      for (int step = 0; step < kQueries / 16; ++step) {
        shared.weights[weights_at.stage][step][this->thread()] =
            make_uint4(weights[step][0], weights[step][1], weights[step][2], weights[step][3]);
      }
      ptx::barrier_arrive(&shared.weights_full[weights_at.stage]);
      weights_at.advance();
      Visibility::await(shared.dout_full, shared.queries_inspected, this->douts());
      this->clear_tail(shared.dout[this->douts().stage], work.length_q - now.m * kQueries);
      typename Packing::Packed space;
      auto& kept = Dropping::template kept<Packing>(weights, &space);
      accumulate<kMostTiles>(dv, kept, shared.dout[this->douts().stage]);
    }
  };

  // The second warpgroup: dS^T = P^T (dP^T - delta), and dk = dS^T Q.
  struct KeyGradient : Group {
    using Group::shared, Group::p, Group::workspace, Group::keys, Group::queries, Group::weights_at, Group::dscores_at,
        Group::warp_key;
    float dk[kColumnTiles][4];

    using Group::Group;

    __device__ __forceinline__ void compute_tiles() {
      while (const Work* const work = this->receive()) {
        set_zero(dk);
        if (uniform(work->tiles) > 0) walk_queries(*work);
        store_keys<T>(p.dk, *work, this->own_key(*work) + warp_key, dk, workspace.gradient_scale, p.head_dim,
                      this->column());
        this->end_work();
      }
    }

    __device__ __forceinline__ void walk_queries(const Work& work) {
      const Limits unmasked = this->unmasked_queries(work);
      float dscores[kQueries / 8][4];
      Visibility::await(shared.v_full, shared.keys_inspected, keys);
      const auto multiply = [&](const Walk&) {
        start_scores(dscores);
        finish_scores(dscores);
      };
      this->walk(work, dk, multiply, [&](const Walk& now) { start_keys(dscores, work, now, unmasked); }, [] {});
    }

    __device__ __forceinline__ void start_scores(float (&dscores)[kQueries / 8][4]) {
      Visibility::await(shared.dout_full, shared.queries_inspected, this->douts());
      score_product<kValueColumns>(dscores, shared.v[keys.stage], 0, shared.dout[this->douts().stage]);
    }

    __device__ __forceinline__ void finish_scores(float (&dscores)[kQueries / 8][4]) {
      ptx::wgmma_wait<0>();
      ptx::hold(dscores);
      this->end_dout();
      if constexpr (kSplitsColumns) shared.dscore_parts[0].exchange(dscores, &this->parts_parity);
    }

    // Hands dS^T to the third warpgroup, and issues dk += dS^T Q.
    __device__ __forceinline__ void start_keys(float (&dscores)[kQueries / 8][4], const Work& work, const Walk& now,
                                               const Limits& unmasked) {
      typename Packing::Packed weights;
      ptx::barrier_wait(&shared.weights_full[weights_at.stage], weights_at.parity);
      // The first warpgroup has waited for the queries, with which they come.
      this->has_marks = shared.has_marks[queries.stage];
#pragma unroll
      for (int step = 0; step < kQueries / 16; ++step) {
        const uint4 x = shared.weights[weights_at.stage][step][this->thread()];
        weights[step][0] = x.x, weights[step][1] = x.y, weights[step][2] = x.z, weights[step][3] = x.w;
      }
      ptx::barrier_arrive(&shared.weights_empty[weights_at.stage]);
      weights_at.advance();
      Visibility::await(shared.q_full, shared.queries_inspected, queries);
      Packing::differentiate(dscores, weights, workspace.score, shared.delta[queries.stage],
                             this->this_step().is_masked_or_marked(Packing::is_masked(unmasked, now.m * kQueries)),
                             [&] { this->this_step().clear_rows(dscores); });
      pack_scores<T>(weights, dscores);
      ptx::barrier_wait(&shared.dscores_empty[dscores_at.stage], dscores_at.parity ^ 1);
      store_panels(shared.dscores[dscores_at.stage], warp_key, weights);
      ptx::fence_async_shared();
      if constexpr (kSharesKeys) send_dscores();
      ptx::barrier_arrive(&shared.dscores_full[dscores_at.stage]);
      dscores_at.advance();
      this->clear_tail(shared.q[queries.stage], work.length_q - now.m * kQueries);
      accumulate<kMostTiles>(dk, weights, shared.q[queries.stage]);
    }
    // Copies this warp's rows of dS^T to the other block, whose buffer is free when this block's is.
    __device__ __forceinline__ void send_dscores() const {
      __syncwarp();
      if (threadIdx.x % 32 != 0) return;
      const int stage = dscores_at.stage;
      const uint32_t other = ptx::cluster_rank() ^ 1;
      ptx::bulk_send(ptx::address_in(other, shared.other_dscores[stage][0][warp_key]),
                     shared.dscores[stage][0][warp_key], sizeof(shared.dscores[stage][0]) / kGroupWarps,
                     ptx::address_in(other, &shared.other_dscores_full[stage]));
    }
  };

  // The third warpgroup: dq = dS K, 64 columns at a time.
  struct QueryGradient : Group {
    using Group::Group;
    using Group::shared, Group::p, Group::workspace, Group::keys, Group::dscores_at, Group::warp_key;
    static constexpr int kQueries = WideBackward::kQueries, kKeys = WideBackward::kKeys;
    int step = 0;  // steps of this thread block so far

    __device__ __forceinline__ void compute_tiles() {
      while (const Work* const work = this->receive()) {
        if (uniform(work->tiles) > 0) walk_queries(*work);
        this->end_work();
      }
    }

    __device__ __forceinline__ void walk_queries(const Work& work) {
      Visibility::await(shared.k_full, shared.keys_inspected, keys);
      this->clear_tail(shared.k[keys.stage], work.length_k - this->own_key(work));
      if constexpr (kSharesKeys) {
        this->clear_tail(shared.other_k[keys.stage], work.length_k - work.key0 - (1 - half_of_pair<true>()) * kOwnKeys);
      }
      for (Walk now(p, work, static_cast<int>(p.group_size())); now.left > 0; now.advance()) {
        const int64_t tile = now.h * workspace.tiles + work.dq_tile + now.m * (kQueries / Layout::kTileRows);
        // Rows after the last of the sequence have no tile in the workspace.
        const bool exists = now.m * kQueries + warp_key < work.length_q;
        const int part = half_of_pair<kPaired>();
        float* const to = Layout::fragment(workspace, tile, warp_key / 16, part * kQueryPanels * 8);
        ptx::barrier_wait(&shared.dscores_full[dscores_at.stage], dscores_at.parity);
        const DqOrder order{
            workspace.dq_added + tile * kBlocks + part, this->thread() == 0,
            [&] { return Visibility::template added_before<kKeys, kQueries>(p, shared, work, now.m, step); },
            [&] { return Visibility::template added_after<kKeys, kQueries>(p, shared, work, now.m, step); },
            [&] { ptx::named_barrier_sync(kWideGroup + this->group - 1, kGroupThreads); }};
        if constexpr (kSharesKeys) await_other_dscores();
        if (p.deterministic) order.await_earlier_keys();
#pragma unroll
        for (int panel = 0; panel < kQueryPanels; ++panel) add_panel(panel, exists ? to : nullptr);
        if (p.deterministic) order.admit_later_keys();
        ++step;
        dscores_at.advance();
      }
      this->end_keys();
    }

    __device__ __forceinline__ void add_panel(int panel, float* to) {
      float dq[8][4];
      multiply(dq, panel);
      ptx::wgmma_wait<0>();
      ptx::hold(dq);
      if (panel == kQueryPanels - 1) end_dscores();
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const int column = panel * 8 + c;
        if (column < kColumnTiles) ptx::add_fragment_if(to != nullptr, to + column * 128, dq[c]);
      }
    }
    // 64 columns of dq; `panel` counts among those of this block.
    __device__ __forceinline__ void multiply(float (&dq)[8][4], int panel) const {
      const int stage = dscores_at.stage;
      const auto& k = shared.k[keys.stage][half_of_pair<kSharesKeys>() * kQueryPanels + panel];
      if constexpr (kSharesKeys) {
        constexpr int kPanelBytes = sizeof(k);
        ptx::hold(dq);
        ptx::wgmma_fence();
        issue_transposed_product(dq, shared.dscores[stage][0], k, kPanelBytes);
        issue_transposed_product(dq, shared.other_dscores[stage][0], shared.other_k[keys.stage][panel], kPanelBytes,
                                 true);
        ptx::wgmma_commit();
      } else {
        transposed_product(dq, shared.dscores[stage][0], k);
      }
    }
    __device__ __forceinline__ void await_other_dscores() const {
      ptx::Barrier* const full = &shared.other_dscores_full[dscores_at.stage];
      if (this->thread() == 0) ptx::barrier_arrive_expect(full, sizeof(shared.other_dscores[0]));
      ptx::barrier_wait_for_cluster(full, dscores_at.parity);
    }
    // Releases dS^T, and the other block's from which this block's copy was made.
    __device__ __forceinline__ void end_dscores() const {
      ptx::barrier_arrive(&shared.dscores_empty[dscores_at.stage]);
      if constexpr (kSharesKeys) {
        __syncwarp();
        if (threadIdx.x % 32 != 0) return;
        ptx::barrier_arrive_in(ptx::address_in(ptx::cluster_rank() ^ 1, &shared.dscores_empty[dscores_at.stage]));
      }
    }
  };
};

}  // namespace flashattn_ext::sm90
