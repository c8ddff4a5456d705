// Second derivatives on Hopper for head dims up to 64. A thread block keeps 128 keys with their tangents. Each of its
// two warpgroups has 64 keys: their scores, dk and dv, and the part of dq that comes from them. Packed weights of dv
// (PlainSecond) are operands as they lie in registers; F and T go through shared memory. The warpgroups ping-pong:
// docs/sm90_derivatives.md has the phases.
#pragma once

#include "cuda/sm90/derivatives/second_step.cuh"
#include "cuda/sm90/shared/backward_policies.cuh"
#include "cuda/sm90/shared/backward_turns.cuh"

namespace flashattn_ext::sm90 {

// The layout of dq in the workspace, which backward_finish.cuh reads: tiles of 16 rows, to which both warpgroups add.
template <class T>
struct ApartDqLayout {
  using Element = T;
  static constexpr bool kPartsOverlap = true;
  static constexpr int kQueries = 64, kHeadDim = 64, kTileRows = 16, kThreads = kGroupThreads, kSplits = 1;
  static constexpr int kQueryRowTiles = 1, kQueryColumnTiles = kHeadDim / 8;
  static constexpr int64_t kTileFloats = kTileRows * kHeadDim;

  static __device__ __forceinline__ int row(int warp) { return warp % 4 * kTileRows; }
  static __device__ __forceinline__ float* fragment(const BackwardWorkspace& workspace, int64_t tile, int warp, int c) {
    return workspace.dq + (tile + warp % 4) * kTileFloats + c * 128;
  }
  static __device__ int query_row() { return row(threadIdx.x / 32); }
  static __device__ int query_column(int) { return 0; }
  static __device__ float* dq_fragment(const BackwardWorkspace& workspace, int64_t tile, int, int, int c) {
    return fragment(workspace, tile, threadIdx.x / 32, c);
  }
};

template <class T, int kHeadDim, Options kOptions, int kHeadDimV, class TangentsGiven>
struct SecondApart : PingPong, SecondConsumer<SecondApart<T, kHeadDim, kOptions, kHeadDimV, TangentsGiven>> {
  static_assert(kOptions == kPlain && kHeadDim == 64 && kHeadDimV == 64);
  using Element = T;
  using Given = TangentsGiven;
  using Visibility = ArithmeticQueries;
  using Work = BackwardWork;
  using Heads = WholeGroups;
  using Walk = QueryWalk<true>;
  using Gradients = SecondGradients<Given>;
  using Dropping = NoBackwardDropout;
  using Workspace = typename Gradients::Workspace;
  using Maps = SecondMaps;
  using Layout = ApartDqLayout<T>;
  static constexpr SecondTile kTile = tile_of<kernel_table::kSm90Second, T, kHeadDim, kOptions, kHeadDimV>();
  static_assert(kTile.keys == 128 && kTile.queries == Layout::kQueries);
  static constexpr int kKeys = 128, kQueries = 64, kStages = kTile.stages, kKeyStages = 1;
  static constexpr bool kPaired = false, kDoutApart = false, kLateDq = false;
  static constexpr int kBlocks = 1, kColumns = kHeadDim, kDoutStages = kStages, kDqParts = 2;
  static constexpr int kWorkStages = kSecondWorkStages, kThreads = 3 * kGroupThreads, kWarps = 8, kSectionHeads = 16;
  static constexpr int kPanels = 1, kTiles = 8, kSteps = 4, kDqTiles = 8;
  using Packing = PackedScores<T, kQueries, false>;
  using Scores = float[kTiles][4];
  using Dq = float[kDqTiles][4];
  struct Products {
    Scores x, tangents, dp, b;  // in the order of PlainSecond
  };
  using Packed = uint32_t[kSteps][4];
  using ScoreTile = T[1][64][kPanelColumns];  // transposed
  static_assert(kStages >= 2);                // the next scores are computed before these queries are released

  struct ScoreTiles {
    ScoreTile t[2], f[2];  // T and F, one of each for a warpgroup
  };
  using Shared = SecondShared<T, kHeadDim, kKeys, kQueries, kStages, kDqTiles, ScoreTiles>;
  static_assert(sizeof(Shared) <= kSharedLimit);

  Shared& shared;
  const AttnGradParams& p;
  const Workspace& workspace;
  const int warp_key;  // first of this warp's 16 keys, within those of its warpgroup
  RingPosition<kWorkStages> works;
  uint32_t key_parity = 0;
  RingPosition<kStages> queries;  // the stage whose scores were computed last
  int has_marks = 0;              // BackwardStep
  float dk[kTiles][4], dv[kTiles][4];
  Packed of_values;  // the weights of dv

  __device__ __forceinline__ SecondApart(Shared& shared, const AttnGradParams& params, const Workspace& workspace,
                                         int group)
      : PingPong{group},
        shared(shared),
        p(params),
        workspace(workspace),
        warp_key(uniform(static_cast<int>(threadIdx.x) / 32 % 4) * 16) {}

  __device__ __forceinline__ void compute_tiles() {
    if (group == 1) pass_phase();
    SecondConsumer<SecondApart>::compute_tiles();
  }
  __device__ __forceinline__ auto this_step() const {
    return BackwardStep<Shared, Workspace>{p, workspace, shared, queries.stage, has_marks, group, warp_key};
  }
  __device__ __forceinline__ void store_key_gradients(const Work& work) const {
    const int key = work.key0 + group * 64 + warp_key;
    store_keys<T>(p.dk, work, key, dk, workspace.gradient_scale, p.head_dim);
    store_keys<T>(p.dv, work, key, dv, workspace.keep_scale, p.head_dim_v);
  }

  // The first and the last step are peeled, so that no product is in flight when the loop exits.
  //
  // A warpgroup needs no barrier of its own for its T and F in shared memory. await_phase comes between writing and
  // reading them, and the barrier in stage_dq between reading and overwriting them.
  __device__ __forceinline__ void walk_queries(const Work& work) {
    const Limits unmasked = uniform(Packing::unmasked_queries(p, work.mask(p), work.key0 + group * 64, 64));
    ptx::barrier_wait(&shared.k_full[0], key_parity);
    ptx::barrier_wait(&shared.v_full[0], key_parity);
    key_parity ^= 1;
    this->clear_tail_of_keys(work);
    Walk now(p, work, static_cast<int>(p.group_size()));
    this->await_queries(work, now);
    await_phase();
    begin(work, now, unmasked);
    while (now.left > 1) {
      const int stage = queries.stage;
      queries.advance();
      now.advance();
      this->await_queries(work, now);
      await_phase();
      step(stage, work, now, unmasked);
    }
    await_phase();
    Dq dq;
    multiply_gradients(dq, queries.stage);
    pass_phase();
    ptx::wgmma_wait<0>();
    release(shared.keys_empty[0]);
    end_gradients(dq, queries.stage);
    pass_dq(group);
    queries.advance();
  }
  // The arrays of products are local to each step: their values of the step before need no registers.
  __device__ __forceinline__ void begin(const Work& work, const Walk& now, const Limits& unmasked) {
    Products products;
    multiply_logits(products);
    multiply_values(products);
    pass_phase();
    differentiate(products, work, now, unmasked);
  }
  // stage: of the queries of the step before, whose gradients are computed.
  __device__ __forceinline__ void step(int stage, const Work& work, const Walk& now, const Limits& unmasked) {
    Products products;
    Dq& dq = products.dp;  // computed when dq is written; in registers of its own ptxas runs out of them
    multiply_gradients(dq, stage);
    multiply_logits(products);
    ptx::wgmma_wait<1>();
    end_gradients(dq, stage);
    multiply_values(products);
    pass_phase();
    pass_dq(group);
    differentiate(products, work, now, unmasked);
  }

  // The products of scores: one group for logits and their tangents, and one for dP and B.
  __device__ __forceinline__ void multiply_logits(Products& products) {
    Scores &x = products.x, &tangents = products.tangents;
    const int stage = queries.stage;
    ptx::hold(x);
    ptx::hold(tangents);
    ptx::wgmma_fence();
    issue_score_product<kHeadDim>(x, shared.k[0], group * 64, shared.q[stage]);
    if constexpr (Given::kQ) issue_score_product<kHeadDim>(tangents, shared.k[0], group * 64, shared.tq[stage]);
    if constexpr (Given::kK) {
      issue_score_product<kHeadDim>(tangents, shared.tk[0], group * 64, shared.q[stage], Given::kQ);
    }
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void multiply_values(Products& products) {
    Scores &dp = products.dp, &b = products.b;
    const int stage = queries.stage;
    ptx::hold(dp);
    ptx::hold(b);
    ptx::wgmma_fence();
    issue_score_product<kHeadDim>(dp, shared.v[0], group * 64, shared.dout[stage]);
    if constexpr (Given::kV) issue_score_product<kHeadDim>(b, shared.tv[0], group * 64, shared.dout[stage]);
    ptx::wgmma_commit();
    has_marks = shared.has_marks[queries.stage];
  }
  // The products of the gradients, of the step whose scores `differentiate` has left: one group.
  __device__ __forceinline__ void multiply_gradients(Dq& dq, int stage) {
    ptx::hold(dv);
    ptx::hold(dk);
    ptx::hold(dq);
    ptx::wgmma_fence();
    issue_accumulate(dv, of_values, shared.dout[stage]);
    issue_accumulate(dk, shared.scores.f[group], shared.q[stage][0], 0);
    if constexpr (Given::kQ) issue_accumulate(dk, shared.scores.t[group], shared.tq[stage][0], 0);
    issue_transposed_product(dq, shared.scores.f[group][0], own_keys(shared.k[0]), 0);
    if constexpr (Given::kK) issue_transposed_product(dq, shared.scores.t[group][0], own_keys(shared.tk[0]), 0, true);
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ const T (&own_keys(const typename Shared::KeyTile& tile) const)[64][kPanelColumns] {
    return reinterpret_cast<const T(&)[64][kPanelColumns]>(tile[0][group * 64]);
  }
  // After these products are complete.
  __device__ __forceinline__ void end_gradients(Dq& dq, int stage) {
    ptx::hold(dv);
    ptx::hold(dk);
    ptx::hold(dq);
    ptx::barrier_arrive(&shared.queries_empty[stage]);
    stage_dq(shared.part_of(group), dq, group);
  }

  // Turns the products of scores into packed weights of dv, and F and T in shared memory.
  __device__ __forceinline__ void differentiate(Products& products, const Work& work, const Walk& now,
                                                const Limits& unmasked) {
    auto& [x, tangents, dp, b] = products;
    ptx::wgmma_wait<0>();
    for (Scores* scores : {&x, &tangents, &dp, &b}) ptx::hold(*scores);
    const int row0 = now.m * kQueries;
    this_step().subtract_words(x, workspace.score, work.b, now.h, row0);
    this_step().clear_rows(dp);
    SecondStep<Given, kTiles, Workspace>(workspace, shared, queries.stage, 0)
        .run(x, tangents, dp, b, Packing::is_masked(unmasked, row0), work.mask(p), row0,
             work.key0 + group * 64 + warp_key + quad());
    clear_moved_rows(this_step(), x, dp, 0);
    pack_scores<T>(of_values, x);
    Packed packed;
    if constexpr (Given::kLogits) {
      pack_scores<T>(packed, tangents);
      store_panels(shared.scores.t[group], warp_key, packed);
    }
    pack_scores<T>(packed, dp);
    store_panels(shared.scores.f[group], warp_key, packed);
    ptx::fence_async_shared();
  }
};

}  // namespace flashattn_ext::sm90
