// The backward of backward.cuh for 65 to 128 rows of a KV head and head dims above 64, whose gradients do not fit in
// the registers of one warpgroup. Both warpgroups compute the same key tile, each for 64 rows: it has the scores S = Q
// K^T of its rows and adds to their dq. dk and dv need the scores of all rows. These go to shared memory, where one
// warpgroup reads P for dv and the other one dS for dk.
#pragma once

#include "cuda/score/large_rows.cuh"
#include "cuda/sm90/few_queries/backward_work.cuh"

namespace flashattn_ext::sm90 {

template <class T, int kHeadDim>
struct FewQueriesTogether : FewQueriesBase<T, kHeadDim, 128, 1, 3, 2> {
  using Base = FewQueriesBase<T, kHeadDim, 128, 1, 3, 2>;
  using Base::at, Base::rows_at, Base::maps, Base::plan, Base::workspace, Base::queries, Base::mask, Base::whole;
  using Base::group, Base::warp_row, Base::store_keys, Base::store_zeros;
  using Base::kRows, Base::kKeys, Base::kGroups, Base::kColumnTiles;
  using typename Base::Rows, typename Base::Stage;

  // P and dS of all rows. A warpgroup writes those of a tile while the other one may still read those of the tile
  // before.
  struct SharedScores {
    T weights[1][kRows][kKeys], dscores[1][kRows][kKeys];
  };
  struct Shared : Base::Shared {
    alignas(1024) SharedScores scores[2];
  };
  Shared& shared;
  int buffer = 0;  // buffer of `scores`

  __device__ FewQueriesTogether(Shared& shared, const AttnGradParams& params, const BackwardWorkspace& workspace,
                                const FewQueriesMaps& maps, const decode::BackwardPlan& plan)
      : Base(shared, params, workspace, maps, plan), shared(shared) {}

  // The first of the lane's two rows; the other one is 8 rows below.
  static __device__ __forceinline__ int first_row() { return group() * 64 + warp_row() + quad(); }

  __device__ void compute() {
    this->each_work([&](const FewQueriesWork& work) {
      float dq[kColumnTiles][4];
      set_zero(dq);
      store_zeros(work, {work.tiles.begin, work.sees_keys() ? work.visible.begin : work.tiles.end});
      if (work.sees_keys()) {
        ptx::barrier_wait(&shared.rows_full[rows_at.stage], rows_at.parity);
        float lse[1][2], delta[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          lse[0][r] = shared.lse[rows_at.stage][first_row() + 8 * r];
          delta[r] = shared.delta[rows_at.stage][first_row() + 8 * r];
        }
#pragma unroll 1
        for (int tile = work.visible.begin; tile < work.visible.end; ++tile, at.advance()) {
          compute_tile(dq, lse, delta, work, tile * kKeys);
        }
        release(shared.rows_empty[rows_at.stage]);
        rows_at.advance();
        store_zeros(work, {work.visible.end, work.tiles.end});
      }
      store_queries(dq, work);
    });
  }

  __device__ __forceinline__ void compute_tile(float (&dq)[kColumnTiles][4], const float (&lse)[1][2],
                                               const float (&delta)[2], const FewQueriesWork& work, int key) {
    const Rows& rows = shared.rows[rows_at.stage];
    Stage& stage = shared.stages[at.stage];
    SharedScores& scores = shared.scores[buffer];
    buffer ^= 1;
    float x[kKeys / 8][4], dx[kKeys / 8][4], sum[kColumnTiles][4];
    uint32_t packed[kKeys / 16][4];
    ptx::barrier_wait(&shared.full[at.stage], at.parity);
    score_product<kHeadDim>(x, rows.q, group() * 64, stage.k);
    score_product<kHeadDim>(dx, rows.dout, group() * 64, stage.v);
    ptx::wgmma_wait<1>();
    ptx::hold(x);
    if (is_mark(lse[0][0]) || is_mark(lse[0][1])) {
      subtract_words_of_rows(reinterpret_cast<float (&)[1][kKeys / 8][4]>(x), workspace.score, lse, [&](int, int r) {
        return workspace.words[this->index_of_row(work, min(first_row() + 8 * r, plan.rows - 1))];
      });
    }
    weigh(x, lse[0], key);
    pack_scores<T>(packed, x);
    store_panels(scores.weights, group() * 64 + warp_row(), packed);
    ptx::wgmma_wait<0>();
    ptx::hold(dx);
    if (is_mark(lse[0][0]) || is_mark(lse[0][1])) {
      unrolled<kKeys / 8, 4>([&](int n, int e) { dx[n][e] = is_mark_of_one_weight(lse[0][e / 2]) ? 0.f : dx[n][e]; });
    }
    unrolled<kKeys / 8, 4>([&](int n, int e) { dx[n][e] = x[n][e] * (dx[n][e] - delta[e / 2]); });
    hide(dx, key);  // dS is zero there even if dP is not finite
    pack_scores<T>(packed, dx);
    store_panels(scores.dscores, group() * 64 + warp_row(), packed);
    ptx::fence_async_shared();
    ptx::named_barrier_sync(kFewQueriesBoth, kGroups * kGroupThreads);  // the scores of all rows are written
    accumulate(dq, packed, stage.k);
    const bool is_dv = group() == 0;
    transposed_product(sum, *(is_dv ? scores.weights : scores.dscores), *(is_dv ? rows.dout : rows.q));
    ptx::wgmma_wait<0>();
    ptx::hold(packed);
    ptx::hold(dq);
    ptx::hold(sum);
    if (is_dv) {
      ptx::named_barrier_arrive(kFewQueriesKeysRead, kGroups * kGroupThreads);
    } else {
      ptx::named_barrier_sync(kFewQueriesKeysRead, kGroups * kGroupThreads);
    }
    store_keys(is_dv ? maps.dv : maps.dk, is_dv ? stage.v : stage.k, work, key, sum,
               is_dv ? 1.f : workspace.gradient_scale);
    this->release_stored(shared.empty[at.stage]);
  }

  // Products become weights.
  __device__ __forceinline__ void weigh(float (&x)[kKeys / 8][4], const float (&lse)[2], int key) const {
    unrolled<kKeys / 8, 4>(
        [&](int n, int e) { x[n][e] = ptx::ex2(fmaf(x[n][e], workspace.score.factor, -lse[e / 2])); });
    hide(x, key);
  }
  // Zeros for the keys of the tile that a row does not see.
  __device__ __forceinline__ void hide(float (&x)[kKeys / 8][4], int key) const {
    if (key >= whole.begin && key + kKeys <= whole.end) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = (first_row() + 8 * r) % queries;
      const Limits own = mask.keys_of(query, query + 1);
      unrolled<kKeys / 8, 2>([&](int n, int c) {
        const int at = key + n * 8 + 2 * lane_in_quad() + c;
        if (at < own.begin || at >= own.end) x[n][2 * r + c] = 0;
      });
    }
  }

  // The partial dq of the work.
  __device__ __forceinline__ void store_queries(const float (&dq)[kColumnTiles][4], const FewQueriesWork& work) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row() + 8 * r;
      float* const to = this->partial_row(work, row) + 2 * lane_in_quad();
      if (row >= plan.rows) continue;
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        *reinterpret_cast<float2*>(to + n * 8) = make_float2(dq[n][2 * r], dq[n][2 * r + 1]);
      }
    }
  }
};

}  // namespace flashattn_ext::sm90
