// Second derivatives on Hopper, by the formulas of cuda/sm80/derivatives/second.cuh, for head dims above 64. A thread
// block keeps 64 keys with their tangents. Each of its two warpgroups computes the scores of all keys and half of the
// queries of a step, and then half of the columns of dk, dv and dq; F, T and the weights of dv (PlainSecond) go through
// shared memory. docs/sm90_derivatives.md draws a step.
#pragma once

#include "cuda/sm90/derivatives/second_apart.cuh"
#include "cuda/stages/backward_finish.cuh"

namespace flashattn_ext::sm90 {

template <class T, int kHeadDim, Options kOptions, int kHeadDimV, class TangentsGiven>
struct Second : SecondConsumer<Second<T, kHeadDim, kOptions, kHeadDimV, TangentsGiven>> {
  static_assert(kOptions == kPlain && kHeadDimV == kHeadDim);
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
  static constexpr SecondTile kTile = tile_of<kernel_table::kSm90Second, T, kHeadDim, kOptions, kHeadDimV>();
  using Layout = DqLayout<T, kHeadDim, kTile.queries, false>;
  static_assert(kTile.keys == 64);
  static constexpr int kKeys = 64, kQueries = kTile.queries, kStages = kTile.stages, kKeyStages = 1;
  static constexpr bool kPaired = false, kDoutApart = false, kLateDq = false;
  static constexpr int kBlocks = 1, kColumns = kHeadDim, kDoutStages = kStages, kDqParts = 2;
  static constexpr int kWorkStages = kSecondWorkStages, kThreads = 3 * kGroupThreads, kWarps = 8, kSectionHeads = 16;
  static constexpr int kPanels = panels(kHeadDim), kDqTiles = Layout::kQueryColumnTiles;
  // The queries whose scores a warpgroup computes, and its columns of dk and dv.
  static constexpr int kOwnQueries = kQueries / 2, kOwnColumns = kHeadDim / 2;
  static constexpr int kScoreTiles = kOwnQueries / 8, kSteps = kOwnQueries / 16, kColumnTiles = kOwnColumns / 8;
  using Packing = PackedScores<T, kOwnQueries, false>;
  using Scores = float[kScoreTiles][4];
  using ScoreTile = T[1][kKeys][kPanelColumns];  // transposed
  static_assert(kHeadDim == 128 && kQueries == 64 && kDqTiles == 8);
  static_assert(kStages >= 2);  // the next scores are computed before these queries are released

  struct ScoreTiles {
    ScoreTile of_values, t, f;  // the weights of dv, T and F
  };
  using Shared = SecondShared<T, kHeadDim, kKeys, kQueries, kStages, kDqTiles, ScoreTiles>;
  static_assert(sizeof(Shared) <= kSharedLimit);

  Shared& shared;
  const AttnGradParams& p;
  const Workspace& workspace;
  const int group, warp_key;  // first of this warp's 16 keys
  RingPosition<kWorkStages> works;
  uint32_t key_parity = 0;
  RingPosition<kStages> queries;  // the stage whose scores were computed last
  int has_marks = 0;              // BackwardStep
  float dk[kColumnTiles][4], dv[kColumnTiles][4], dq[kDqTiles][4];
  uint32_t k_fragments[kHeadDim / 16][4];
  Scores x, tangents, dp, b;                                                // in the order of PlainSecond
  uint32_t of_values[kSteps][4], t_scores[kSteps][4], f_scores[kSteps][4];  // what it makes of them, packed

  __device__ __forceinline__ Second(Shared& shared, const AttnGradParams& params, const Workspace& workspace, int group)
      : shared(shared),
        p(params),
        workspace(workspace),
        group(group),
        warp_key(uniform(static_cast<int>(threadIdx.x) / 32 % 4) * 16) {}

  __device__ __forceinline__ auto this_step() const {
    return BackwardStep<Shared, Workspace>{p, workspace, shared, queries.stage, has_marks, group, warp_key};
  }
  __device__ __forceinline__ void store_key_gradients(const Work& work) const {
    const int column = group * kOwnColumns;
    store_keys<T>(p.dk, work, work.key0 + warp_key, dk, workspace.gradient_scale, p.head_dim, column);
    store_keys<T>(p.dv, work, work.key0 + warp_key, dv, workspace.keep_scale, p.head_dim_v, column);
  }

  // The first and the last step are peeled, so that no product is in flight when the loop exits.
  __device__ __forceinline__ void walk_queries(const Work& work) {
    const Limits unmasked = uniform(Packing::unmasked_queries(p, work.mask(p), work.key0, kKeys));
    ptx::barrier_wait(&shared.k_full[0], key_parity);
    ptx::barrier_wait(&shared.v_full[0], key_parity);
    key_parity ^= 1;
    this->clear_tail_of_keys(work);
    load_fragments(k_fragments, shared.k[0], warp_key);
    ptx::hold(k_fragments);
    Walk now(p, work, static_cast<int>(p.group_size()));
    this->await_queries(work, now);
    multiply_scores();
    ptx::wgmma_wait<0>();
    differentiate(work, now, unmasked);
    store();
    while (now.left > 1) {
      const int stage = queries.stage;
      multiply_gradients_of_keys(stage);
      queries.advance();
      now.advance();
      this->await_queries(work, now);
      multiply_scores();
      multiply_dq();
      ptx::wgmma_wait<2>();
      release_queries(stage);
      ptx::wgmma_wait<1>();
      differentiate(work, now, unmasked);
      ptx::wgmma_wait<0>();
      end_dq();
      ptx::named_barrier_sync(kScoresRead, 2 * kGroupThreads);
      store();
      pass_dq(group);
    }
    multiply_gradients_of_keys(queries.stage);
    multiply_dq();
    ptx::wgmma_wait<0>();
    release(shared.keys_empty[0]);
    release_queries(queries.stage);
    end_dq();
    ptx::named_barrier_sync(kScoresRead, 2 * kGroupThreads);
    pass_dq(group);
    queries.advance();
  }

  // The products that form the scores of a step: one group.
  __device__ __forceinline__ void multiply_scores() {
    const int stage = queries.stage, query = group * kOwnQueries;
    // Products with K in registers add to these zeros. dp and b are overwritten, and no instruction writes their zeros:
    // without them ptxas keeps the values of the step before alive, and serialises the products for lack of registers.
    for (Scores* scores : {&x, &tangents, &dp, &b}) set_zero(*scores);
    hold_scores();
    ptx::wgmma_fence();
    issue_score_product(x, k_fragments, shared.q[stage], query);
    if constexpr (Given::kQ) issue_score_product(tangents, k_fragments, shared.tq[stage], query);
    if constexpr (Given::kK) {
      issue_score_product<kHeadDim>(tangents, shared.tk[0], 0, shared.q[stage], Given::kQ, query);
    }
    issue_score_product<kHeadDim>(dp, shared.v[0], 0, shared.dout[stage], false, query);
    if constexpr (Given::kV) issue_score_product<kHeadDim>(b, shared.tv[0], 0, shared.dout[stage], false, query);
    ptx::wgmma_commit();
    has_marks = shared.has_marks[queries.stage];
  }
  __device__ __forceinline__ void hold_scores() {
    ptx::hold(x);
    ptx::hold(tangents);
    ptx::hold(dp);
    ptx::hold(b);
  }
  // The products of the gradients, of the step whose F, T and weights are in shared memory: a group for the own
  // columns of dv and dk, after which the queries of that step may be overwritten, and one for those of dq. Each
  // warpgroup has one panel of columns.
  __device__ __forceinline__ void multiply_gradients_of_keys(int stage) {
    ptx::hold(dv);
    ptx::hold(dk);
    ptx::wgmma_fence();
    issue_accumulate(dv, shared.scores.of_values, shared.dout[stage][group], 0);
    issue_accumulate(dk, shared.scores.f, shared.q[stage][group], 0);
    if constexpr (Given::kQ) issue_accumulate(dk, shared.scores.t, shared.tq[stage][group], 0);
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void release_queries(int stage) {
    ptx::hold(dv);
    ptx::hold(dk);
    ptx::barrier_arrive(&shared.queries_empty[stage]);
  }
  __device__ __forceinline__ void multiply_dq() {
    ptx::hold(dq);
    ptx::wgmma_fence();
    issue_transposed_product(dq, shared.scores.f[0], shared.k[0][group], 0);
    if constexpr (Given::kK) issue_transposed_product(dq, shared.scores.t[0], shared.tk[0][group], 0, true);
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void end_dq() {
    ptx::hold(dq);
    stage_dq(shared.part_of(group), dq, group);
  }

  // Turns the products of scores into packed F, T and weights of dv.
  __device__ __forceinline__ void differentiate(const Work& work, const Walk& now, const Limits& unmasked) {
    hold_scores();
    const int query = group * kOwnQueries, row0 = now.m * kQueries + query;
    this_step().subtract_words(x, workspace.score, work.b, now.h, row0, query);
    this_step().clear_rows(dp, query);
    SecondStep<Given, kScoreTiles, Workspace>(workspace, shared, queries.stage, query)
        .run(x, tangents, dp, b, Packing::is_masked(unmasked, row0), work.mask(p), row0, work.key0 + warp_key + quad());
    clear_moved_rows(this_step(), x, dp, query);
    pack_scores<T>(of_values, x);
    pack_scores<T>(t_scores, tangents);
    pack_scores<T>(f_scores, dp);
  }
  // Writes them to shared memory, and waits for the other warpgroup.
  __device__ __forceinline__ void store() {
    store_panels(shared.scores.of_values, warp_key, of_values, group * kSteps);
    store_panels(shared.scores.t, warp_key, t_scores, group * kSteps);
    store_panels(shared.scores.f, warp_key, f_scores, group * kSteps);
    ptx::fence_async_shared();
    ptx::named_barrier_sync(kScoresWritten, 2 * kGroupThreads);
  }
};

// The kernel for a class of head dims.
template <class T, int kHeadDim, Options kOptions, int kHeadDimV, class Given>
using SecondOf = std::conditional_t<tile_of<kernel_table::kSm90Second, T, kHeadDim, kOptions, kHeadDimV>().keys == 128,
                                    SecondApart<T, kHeadDim, kOptions, kHeadDimV, Given>,
                                    Second<T, kHeadDim, kOptions, kHeadDimV, Given>>;

template <class Layout>
SecondWorkspace<BackwardWorkspace> second_workspace(const SecondParams& p) {
  return {p, BackwardWorkspace(p, Layout::kTileRows, Layout::kTileFloats, 1)};
}

// Runs a call that has these tangents.
template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
struct SecondRun {
  template <class Given>
  static void run(const SecondParams& p) {
    using Kernel = SecondOf<T, kHeadDim, kOptions, kHeadDimV, Given>;
    using Layout = typename Kernel::Layout;
    const auto workspace = second_workspace<Layout>(p);
    prepare_second<T>(p, workspace);
    launch_backward_main<Kernel>("sm90 second", p, workspace);
    launch_dq_finish<Layout>(p, workspace);
    launch_dsink(p, workspace, "second (sink)", SecondOfRow{workspace.r});
  }
};

template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
size_t second_bytes(const SecondParams& p) {
  using Layout = typename SecondOf<T, kHeadDim, kOptions, kHeadDimV, GivenTangents<true, true, true>>::Layout;
  return static_cast<size_t>(second_workspace<Layout>(p).bytes);
}

template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
void second(const SecondParams& p) {
  run_with_tangents<SecondRun<T, kHeadDim, kOptions, kHeadDimV>>(p);
}

}  // namespace flashattn_ext::sm90
