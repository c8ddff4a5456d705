// Backward of calls with few queries for many keys on Hopper (cuda/decode/few_queries/backward.h). As in
// cuda/decode/few_queries/backward.cuh a work is one part of the keys of a KV head, for the rows of all its query
// heads, which stay in shared memory; its partial dq stays in registers.
//
// A thread block walks over several works. Its producer warp fills a ring of stages with 64 keys and values each, and
// has the rows of the next work in shared memory before the present one ends. The two warpgroups take turns at the
// stages and need no barrier with each other until the end of a work, when they add their parts of dq. dk and dv
// overwrite the keys and values of their stage, from where TMA stores them: the fence before dS is read would wait for
// stores from registers.
//
// The scores are transposed, S^T = K Q^T, so that a warpgroup has all rows of its keys and computes whole rows of dk
// and dv. A tile has the queries of the first head of the group, then those of the second, and so on, as one TMA copy
// writes them.
#pragma once

#include "cuda/score/large_rows.cuh"
#include "cuda/sm90/few_queries/backward_together.cuh"
#include "cuda/sm90/few_queries/backward_work.cuh"

namespace flashattn_ext::sm90 {

template <class T, int kHeadDim>
constexpr FewQueriesTile kFewQueriesTile = tile_of<kernel_table::kSm90FewQueriesBackward, T, kHeadDim, kPlain>();

template <class T, int kHeadDim, int kRowTiles>
struct FewQueriesBackward : FewQueriesBase<T, kHeadDim, 64 * kRowTiles, 2, kFewQueriesTile<T, kHeadDim>.stages, 1> {
  using Base = FewQueriesBase<T, kHeadDim, 64 * kRowTiles, 2, kFewQueriesTile<T, kHeadDim>.stages, 1>;
  using Base::at, Base::rows_at, Base::p, Base::maps, Base::plan, Base::workspace, Base::queries, Base::mask,
      Base::whole;
  using Base::kRows, Base::kKeys, Base::kGroups, Base::kPanels, Base::kColumnTiles;
  using Base::thread, Base::group, Base::warp_row, Base::store_keys, Base::store_zeros;
  using typename Base::Rows, typename Base::Stage;
  // A warpgroup waits for the stages of its own key tiles only: it would miss a phase if it had a stage in every second
  // round.
  static_assert(kFewQueriesTile<T, kHeadDim>.stages % kGroups == 0);
  static_assert(kFewQueriesTile<T, kHeadDim>.keys == kKeys);
  static constexpr int kPanelTiles = 8, kGivenTiles = kPanelTiles / kGroups;  // tiles of 8 columns of a panel

  // The dq accumulators that a warpgroup gives the other one, of one panel of columns.
  using Given = float4[kRowTiles][kGivenTiles][kGroupThreads];
  union Exchange {
    T dscores[kRowTiles][kKeys][kPanelColumns];
    Given dq;
  };
  struct Shared : Base::Shared {
    alignas(1024) Exchange exchange[kGroups];
  };
  Shared& shared;

  __device__ FewQueriesBackward(Shared& shared, const AttnGradParams& params, const BackwardWorkspace& workspace,
                                const FewQueriesMaps& maps, const decode::BackwardPlan& plan)
      : Base(shared, params, workspace, maps, plan), shared(shared) {}

  using Sums = float[kRowTiles][kColumnTiles][4];

  __device__ void compute() {
    this->each_work([&](const FewQueriesWork& work) {
      Sums dq;
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) set_zero(dq[i]);
      store_zeros(work, {work.tiles.begin, work.sees_keys() ? work.visible.begin : work.tiles.end});
      if (work.sees_keys()) {
        ptx::barrier_wait(&shared.rows_full[rows_at.stage], rows_at.parity);
        const bool has_marks = has_mark<kRows>(shared.lse[rows_at.stage]);
#pragma unroll 1
        for (int tile = work.visible.begin; tile < work.visible.end; ++tile, at.advance()) {
          if ((tile - work.visible.begin) % kGroups == group()) compute_tile(dq, work, tile * kKeys, has_marks);
        }
        release(shared.rows_empty[rows_at.stage]);
        rows_at.advance();
        store_zeros(work, {work.visible.end, work.tiles.end});
      }
      add_up(dq, work);
    });
  }

  // has_marks: whether a row has the mark of large_rows.cuh.
  __device__ __forceinline__ void compute_tile(Sums& dq, const FewQueriesWork& work, int key, bool has_marks) {
    const Rows& rows = shared.rows[rows_at.stage];
    Stage& stage = shared.stages[at.stage];
    auto& dscores = shared.exchange[group()].dscores;
    float x[kRows / 8][4], dx[kRows / 8][4], sum[kColumnTiles][4];
    uint32_t packed[kRows / 16][4];
    ptx::barrier_wait(&shared.full[at.stage], at.parity);
    score_product<kHeadDim>(x, stage.k, 0, rows.q);
    score_product<kHeadDim>(dx, stage.v, 0, rows.dout);
    ptx::wgmma_wait<1>();
    ptx::hold(x);
    if (has_marks) {
      subtract_words(reinterpret_cast<float (&)[1][kRows / 8][4]>(x), workspace.score, shared.lse[rows_at.stage],
                     [&](int row) { return workspace.words[this->index_of_row(work, row)]; });
    }
    weigh(x, key);
    pack_scores<T>(packed, x);
    set_zero(sum);
    accumulate(sum, packed, rows.dout);
    ptx::wgmma_wait<1>();
    ptx::hold(dx);
    if (has_marks) {
      clear_rows_of_one_weight(reinterpret_cast<float (&)[1][kRows / 8][4]>(dx), shared.lse[rows_at.stage]);
    }
    differentiate(dx, packed, key);
    uint32_t packed_dscores[kRows / 16][4];
    pack_scores<T>(packed_dscores, dx);
    ptx::named_barrier_sync(kFewQueriesGroup + group(),
                            kGroupThreads);  // the product with the last dS is complete in all warps
    store_panels(dscores, warp_row(), packed_dscores);
    ptx::fence_async_shared();
    ptx::named_barrier_sync(kFewQueriesGroup + group(), kGroupThreads);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) ptx::hold(dq[i]);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      issue_transposed_product(dq[i], dscores[i], stage.k[0], sizeof(stage.k[0]), true);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    ptx::hold(packed);
    ptx::hold(sum);
    store_keys(maps.dv, stage.v, work, key, sum, 1.f);
    set_zero(sum);
    accumulate(sum, packed_dscores, rows.q);
    ptx::wgmma_wait<0>();
    ptx::hold(packed_dscores);
    ptx::hold(sum);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) ptx::hold(dq[i]);
    ptx::named_barrier_sync(kFewQueriesGroup + group(),
                            kGroupThreads);  // the products with the keys are complete in all warps
    store_keys(maps.dk, stage.k, work, key, sum, workspace.gradient_scale);
    this->release_stored(shared.empty[at.stage]);
  }

  // Whether some row does not see all keys of the tile that begins with `key`.
  __device__ __forceinline__ bool is_partial(int key) const { return key < whole.begin || key + kKeys > whole.end; }
  // Products become weights.
  __device__ __forceinline__ void weigh(float (&x)[kRows / 8][4], int key) const {
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      const int row = n * 8 + 2 * lane_in_quad();
      const float2 lse = *reinterpret_cast<const float2*>(&shared.lse[rows_at.stage][row]);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[n][e] = ptx::ex2(fmaf(x[n][e], workspace.score.factor, e % 2 ? -lse.y : -lse.x));
      if (is_partial(key)) hide(x[n], row, key + warp_row() + quad());
    }
  }
  // row, key: where the lane's first score is. Its other scores belong to the next row and to key + 8.
  __device__ __forceinline__ void hide(float (&x)[4], int row, int key) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int query = (row + e % 2) % queries;
      const Limits own = mask.keys_of(query, query + 1);
      if (key + e / 2 * 8 < own.begin || key + e / 2 * 8 >= own.end) x[e] = 0;
    }
  }
  // dP becomes dS, which is zero for hidden keys even if dP is not finite.
  __device__ __forceinline__ void differentiate(float (&dx)[kRows / 8][4], const uint32_t (&weights)[kRows / 16][4],
                                                int key) const {
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      const float2 delta = *reinterpret_cast<const float2*>(&shared.delta[rows_at.stage][n * 8 + 2 * lane_in_quad()]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 weight = TensorCore<T>::unpack(weights[n / 2][n % 2 * 2 + r]);
        dx[n][2 * r] = weight.x * (dx[n][2 * r] - delta.x);
        dx[n][2 * r + 1] = weight.y * (dx[n][2 * r + 1] - delta.y);
      }
      if (is_partial(key)) hide(dx[n], n * 8 + 2 * lane_in_quad(), key + warp_row() + quad());
    }
  }

  // Adds the dq of both warpgroups, panel after panel. Each stores half of the columns of a panel and gives the other
  // warpgroup the other half. The half is chosen at run time, so that both warpgroups wait at the same instructions:
  // synccheck reports threads that meet at one barrier from two places in the code.
  __device__ __forceinline__ void add_up(const Sums& dq, const FewQueriesWork& work) const {
    const int me = group();
    const bool is_first = me == 0;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      const int low = panel * kPanelTiles, high = low + kGivenTiles;
      const auto kept = [&](int i, int n, int e) { return is_first ? dq[i][low + n][e] : dq[i][high + n][e]; };
      const auto given = [&](int i, int n, int e) { return is_first ? dq[i][high + n][e] : dq[i][low + n][e]; };
      ptx::named_barrier_sync(kFewQueriesBoth, kGroups * kGroupThreads);  // the memory of `exchange` is free
      unrolled<kRowTiles, kGivenTiles>([&](int i, int n) {
        shared.exchange[me].dq[i][n][thread()] =
            make_float4(given(i, n, 0), given(i, n, 1), given(i, n, 2), given(i, n, 3));
      });
      ptx::named_barrier_sync(kFewQueriesBoth, kGroups * kGroupThreads);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = i * 64 + warp_row() + quad() + 8 * r;
          float* const to = this->partial_row(work, row) + (is_first ? low : high) * 8 + 2 * lane_in_quad();
#pragma unroll
          for (int n = 0; n < kGivenTiles; ++n) {
            const float2 other = *reinterpret_cast<const float2*>(
                &reinterpret_cast<const float (&)[4]>(shared.exchange[1 - me].dq[i][n][thread()])[2 * r]);
            if (row < plan.rows) {
              *reinterpret_cast<float2*>(to + n * 8) =
                  make_float2(kept(i, n, 2 * r) + other.x, kept(i, n, 2 * r + 1) + other.y);
            }
          }
        }
      }
    }
    ptx::named_barrier_sync(kFewQueriesBoth, kGroups * kGroupThreads);
  }
};

template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
void few_queries_backward(const AttnGradParams& p, const BackwardWorkspace& workspace,
                          const decode::BackwardPlan& plan) {
  static_assert(kHeadDim == kHeadDimV && kOptions == kPlain);
  if (plan.rows <= 64) return launch_few_queries_backward<T, FewQueriesBackward<T, kHeadDim, 1>>(p, workspace, plan);
  if constexpr (kHeadDim <= 64) {
    launch_few_queries_backward<T, FewQueriesBackward<T, kHeadDim, 2>>(p, workspace, plan);
  } else {
    launch_few_queries_backward<T, FewQueriesTogether<T, kHeadDim>>(p, workspace, plan);
  }
}

}  // namespace flashattn_ext::sm90
