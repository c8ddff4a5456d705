// Second derivatives on every GPU since Ampere: the gradients of <dout, tout> + <dlse, tlse>, where tout and tlse are
// the tangents that jvp.cuh computes, and dout, dlse and the tangents of the inputs are constants
// (docs/derivatives.md). It walks as backward.cuh does, with `r` = <dout, tout> and tlse as further statistics of each
// row. With F, T, A and P of cuda/stages/second.cuh:
//
//   dq = F k + T tk      dk = F^T q + T^T tq      dv = (P m (A - tlse))^T dout
//
// up to the factors softmax_scale (of dq and dk) and 1 / p_keep, which multiply the finished sums. F, T and the
// weights of dv go through shared memory. The rows of absent tangents are not copied, and their products are not
// computed.
#pragma once

#include "cuda/score/large_rows.cuh"
#include "cuda/sm80/derivatives/second_policy.cuh"
#include "cuda/sm80/shared/backward_visibility.cuh"
#include "cuda/sm80/shared/dropout_policy.cuh"
#include "cuda/sm80/shared/key_tile.cuh"
#include "cuda/stages/backward_finish.cuh"
#include "cuda/stages/backward_workspace.h"
#include "cuda/stages/second.cuh"

namespace flashattn_ext::sm80 {

// By the options of a row in the table of kernels: plain 16-bit calls, and all others.
template <Options kOptions>
struct SecondPolicies;
template <>
struct SecondPolicies<kPlain> {
  static constexpr bool kHasMask = false;
  template <class T, int kKeyTiles, int kQueryTiles>
  using Gradients = PlainSecond;
  using Dropping = NoDropout;
};
template <>
struct SecondPolicies<kGeneral> {
  static constexpr bool kHasMask = true;
  template <class T, int kKeyTiles, int kQueryTiles>
  using Gradients = GeneralSecond<T, kKeyTiles, kQueryTiles>;
  using Dropping = OptionalDropout;
};

template <class T, int kHeadDim, bool kLarge>
struct SecondSizes {
  static constexpr BackwardTile kTile = second_tile<T, kHeadDim, kLarge>();
};

template <class T, int kHeadDim, Options kOptions, bool kLarge>
struct Second;

// The types that a kernel consists of.
template <class T, int kHeadDim, Options kOptions, bool kLarge>
struct SecondTypes {
  using Policies = SecondPolicies<kOptions>;
  using Visibility = QueriesOf<Second<T, kHeadDim, kOptions, kLarge>, Policies::kHasMask>;
  using Dropping = typename Policies::Dropping;
  using Shape = KeyTileShape<T, kHeadDim, SecondSizes<T, kHeadDim, kLarge>>;
  using Gradients = typename Policies::template Gradients<T, Shape::kKeyTiles, Shape::kScoreTiles>;
  using BaseWorkspace = typename Gradients::Workspace;
  using Workspace = SecondWorkspace<BaseWorkspace>;
};

template <class T, int kHeadDim, Options kOptions, bool kLarge,
          class Types = SecondTypes<T, kHeadDim, kOptions, kLarge>>
using SecondBase = KeyTileKernel<Second<T, kHeadDim, kOptions, kLarge>, typename Types::Shape, SecondParams,
                                 typename Types::Workspace, typename Types::Visibility>;

template <class T, int kHeadDimension, Options kOptions, bool kLarge>
struct Second : SecondBase<T, kHeadDimension, kOptions, kLarge> {
  using Types = SecondTypes<T, kHeadDimension, kOptions, kLarge>;
  using Base = SecondBase<T, kHeadDimension, kOptions, kLarge>;
  using Visibility = typename Types::Visibility;
  using Dropping = typename Types::Dropping;
  using Gradients = typename Types::Gradients;
  using Workspace = typename Types::Workspace;
  using Base::accumulate_keys, Base::extent, Base::first_score_key, Base::score_key, Base::score_query, Base::starts;
  using Base::kHeadDim, Base::kKeys, Base::kQueries, Base::kStages, Base::kThreads, Base::kScoreStride;
  using Base::kKeyTiles, Base::kScoreTiles;
  using Base::multiply_keys, Base::store_scores;
  using Base::p, Base::workspace, Base::k_tile, Base::places, Base::b, Base::hk, Base::dk, Base::dv;
  using typename Base::QuerySums, typename Base::QueryTile, typename Base::RowTile, typename Base::Scores;
  using typename Base::Walk;
  static_assert(kStages == 1);
  static constexpr bool kTwoWords = Gradients::kTwoWords;
  static_assert(kTwoWords || sizeof(T) == 2);
  // Shared memory has k, v, tk and tv [kKeys][kHeadDim]; q, dout and tq [kQueries][kHeadDim] with lse (with kTwoWords
  // as two arrays), delta, r and tlse [kQueries]; F^T, T^T and the weights of dv [kKeys][kScoreStride]; and Notes.
  static constexpr int kBytes = sizeof(T), kScoreBytes = kKeys * kScoreStride * kBytes;
  static constexpr int kKeyElements = kKeys * RowTile::kStride, kQueryElements = kQueries * RowTile::kStride;
  static constexpr int kTileBytes =
      (4 * kKeyElements + 3 * kQueryElements) * kBytes + (kTwoWords ? 5 : 4) * kQueries * 4 + 3 * kScoreBytes;
  static constexpr int kSharedBytes = kTileBytes + static_cast<int>(sizeof(typename Base::Notes));
  static_assert(kSharedBytes <= (kLarge ? kLargeShared : derivative_shared(kBytes, kHeadDim)));

  T *v_tile, *tk_tile, *tv_tile, *q_tile, *dout_tile, *tq_tile;
  float *lse, *log2_sum, *delta, *r, *tlse;  // log2_sum: only with kTwoWords
  T *f_tile, *t_tile, *weight_tile;
  Gradients gradients;

  __device__ Second(const SecondParams& params, const Workspace& workspace, T* shared)
      : Base(params, workspace, shared),
        v_tile(k_tile + kKeyElements),
        tk_tile(v_tile + kKeyElements),
        tv_tile(tk_tile + kKeyElements),
        q_tile(tv_tile + kKeyElements),
        dout_tile(q_tile + kQueryElements),
        tq_tile(dout_tile + kQueryElements),
        lse(reinterpret_cast<float*>(tq_tile + kQueryElements)),
        log2_sum(kTwoWords ? lse + kQueries : lse),
        delta(log2_sum + kQueries),
        r(delta + kQueries),
        tlse(r + kQueries),
        f_tile(reinterpret_cast<T*>(tlse + kQueries)),
        t_tile(f_tile + kKeys * kScoreStride),
        weight_tile(t_tile + kKeys * kScoreStride) {}

  // Starts copying `count` rows of a tensor that may be absent.
  template <int kRows>
  __device__ void load_rows(T* tile, const TensorView& t, int64_t head, int64_t row, int count, int64_t columns) const {
    if (!t.data) return;
    load_tile<RowTile, kRows, kThreads>(tile, row_pointer<const T>(t, b, head, row), t.row_stride, count,
                                        static_cast<int>(columns));
  }
  __device__ void load_keys(int64_t row, int count) const {
    load_rows<kKeys>(k_tile, p.k, hk, row, count, p.head_dim);
    load_rows<kKeys>(v_tile, p.v, hk, row, count, p.head_dim_v);
    load_rows<kKeys>(tk_tile, p.tangents.k, hk, row, count, p.head_dim);
    load_rows<kKeys>(tv_tile, p.tangents.v, hk, row, count, p.head_dim_v);
  }
  __device__ void load_queries(int, const QueryTile& tile) const {
    const int h = tile.h, m = tile.m;
    const int64_t row = starts()->query + m * kQueries;
    const int rows = min(kQueries, extent()->length_q - m * kQueries);
    load_rows<kQueries>(q_tile, p.q, h, row, rows, p.head_dim);
    load_rows<kQueries>(dout_tile, p.dout, h, row, rows, p.head_dim_v);
    load_rows<kQueries>(tq_tile, p.tangents.q, h, row, rows, p.head_dim);
    ptx::cp_async_commit();
    const int64_t index = h * workspace.rows + (p.is_varlen() ? row : b * p.seqlen_q + row);
    for (int i = threadIdx.x; i < kQueries; i += kThreads) {
      const bool exists = i < rows;
      if constexpr (kTwoWords) {
        const LseWords<float> words = exists ? workspace.words[index + i] : LseWords<float>::of_no_key();
        lse[i] = words.top;
        log2_sum[i] = second_word(words);
      } else {
        lse[i] = exists ? workspace.lse[index + i] : infinity();
      }
      delta[i] = exists ? workspace.delta[index + i] : 0.f;
      r[i] = exists ? workspace.r[index + i] : 0.f;
      tlse[i] = exists ? *row_statistic(p.tangents.lse, b, h, row + i) : 0.f;
    }
  }
  __device__ void end_head(int h) { Base::end_head(gradients, h); }

  __device__ void compute_step(int step, const QueryTile& now, bool more, const Walk& walk) {
    if (kHeadDim > 64) this->recompute_places();
    isolate_queries(now);
    const int row0 = now.m * kQueries;
    const bool unmasked =
        Visibility::is_whole(now) && row0 >= extent()->unmasked_begin && row0 + kQueries <= extent()->unmasked_end;
    unmasked && !Gradients::kMasksAlways ? compute_scores<false>(now) : compute_scores<true>(now);
    __syncthreads();
    accumulate_keys(dv, weight_tile, dout_tile);
    accumulate_keys(dk, f_tile, q_tile);
    if (p.tangents.q.data) accumulate_keys(dk, t_tile, tq_tile);
    // dq += F k + T tk
    this->add_query_gradient(now, [&](QuerySums& sum) {
      multiply_keys(sum, f_tile, k_tile);
      if (p.tangents.k.data) multiply_keys(sum, t_tile, tk_tile);
    });
    __syncthreads();
    if (more) load_queries(0, walk.next(*this, step + 1));
  }

  // Keep inputs that are not finite out of results that do not see them.
  __device__ void isolate_keys() const {
    Visibility::isolate_keys(*this);
    if (p.has_mask() && p.tangents.k.data) Visibility::isolate_key_rows(*this, tk_tile);
  }
  __device__ void isolate_queries(const QueryTile& now) const {
    Visibility::isolate_queries(*this, now);
    if (p.tangents.q.data) Visibility::template isolate_query_rows<kQueries>(*this, now, tq_tile);
  }

  // Computes the products of a step, and from them F, T and the weights of dv, which it stores in shared memory.
  template <bool kMasked>
  __device__ void compute_scores(const QueryTile& now) {
    const int h = now.h, row0 = now.m * kQueries;
    Scores x, tangents, dp, of_values;
    score_product<RowTile, true>(x, places, k_tile, score_key(0), q_tile, score_query());
    score_product<RowTile>(dp, places, v_tile, score_key(0), dout_tile, score_query());
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
      set_zero(tangents[i]);
      set_zero(of_values[i]);
    }
    if (p.tangents.q.data) add_score_product<RowTile>(tangents, places, k_tile, score_key(0), tq_tile, score_query());
    if (p.tangents.k.data) add_score_product<RowTile>(tangents, places, tk_tile, score_key(0), q_tile, score_query());
    if (p.tangents.v.data) {
      add_score_product<RowTile>(of_values, places, tv_tile, score_key(0), dout_tile, score_query());
    }
    const auto step = this->step_of(h, row0, lse, log2_sum, delta);
    if constexpr (!kTwoWords) subtract_words_of_marked<false>(step, x, workspace.score);
    const int key = first_score_key(), row = row0 + score_query();
    typename Dropping::template Columns<kKeyTiles> dropping(p, b, h, key, row);
    typename Visibility::template SeenBy<kKeyTiles, kScoreTiles> seen_by;
    if constexpr (kMasked) {
      seen_by = Visibility::template seen_by<kKeyTiles, kScoreTiles>(*this, now, row, key);
    }
    const float* const marks = (kTwoWords ? log2_sum : lse) + score_query();
    clear_rows_of_marked(marks, dp);
    clear_rows_of_marked(marks, of_values);
    const SecondRows rows{lse, log2_sum, delta, r, tlse};
    gradients.template differentiate_twice<kMasked>(step, rows, x, tangents, dp, of_values, seen_by, dropping);
    // The tangent of a row's only logit is that of lse.
    clear_rows_of_marked(marks, x);
    clear_rows_of_marked(marks, dp);
    store_scores(weight_tile, x);
    store_scores(t_tile, tangents);
    store_scores(f_tile, dp);
  }
};

template <class T, int kHeadDim, Options kOptions, bool kLarge>
using SecondWorkspaceOf = typename SecondTypes<T, kHeadDim, kOptions, kLarge>::Workspace;

template <class T, int kHeadDim, Options kOptions, bool kLarge>
__global__ void __launch_bounds__(Second<T, kHeadDim, kOptions, kLarge>::kThreads)
    second_kernel(const __grid_constant__ SecondParams p,
                  const __grid_constant__ SecondWorkspaceOf<T, kHeadDim, kOptions, kLarge> workspace,
                  const __grid_constant__ TileOrder order) {
  if constexpr (kRunsHere<(kLarge ? kLargeShared : kSmallShared)>) {
    extern __shared__ __align__(16) unsigned char shared[];
    using Kernel = Second<T, kHeadDim, kOptions, kLarge>;
    Kernel kernel(p, workspace, reinterpret_cast<T*>(shared));
    const int heads = static_cast<int>(p.heads_k);
    const auto [head, block] = order.index(blockIdx.x, heads * static_cast<int>(p.batch));
    kernel.run(head / heads, head % heads, block, order.blocks);
  } else {
    __trap();
  }
}

template <class T, int kHeadDim, Options kOptions, bool kLarge>
SecondWorkspaceOf<T, kHeadDim, kOptions, kLarge> second_workspace(const SecondParams& p) {
  using Base = typename SecondTypes<T, kHeadDim, kOptions, kLarge>::BaseWorkspace;
  constexpr BackwardTile kTile = second_tile<T, kHeadDim, kLarge>();
  const BackwardWorkspace base(p, kTile.queries, int64_t{kTile.queries} * kHeadDim, kTile.splits);
  return {p, Base::complete(p, base, kTile.keys, kTile.warps)};
}

template <class T, int kHeadDim, Options kOptions, bool kLarge>
void launch_second(const SecondParams& p) {
  using Kernel = Second<T, kHeadDim, kOptions, kLarge>;
  const auto workspace = second_workspace<T, kHeadDim, kOptions, kLarge>(p);
  prepare_second<T>(p, workspace);
  const int64_t blocks = tile_count(p.seqlen_k, Kernel::kKeys), all = blocks * p.batch * p.heads_k;
  if (all > 0) {
    launch(second_kernel<T, kHeadDim, kOptions, kLarge>, "second", p, all, Kernel::kThreads, Kernel::kSharedBytes,
           workspace, backward_order(p, blocks, 2 * sizeof(T), multiprocessors()));
  }
  launch_dq_finish<Kernel>(p, workspace);
  launch_dsink(p, workspace, "second (sink)", SecondOfRow{workspace.r});
  finish_biases(p, workspace);
}

template <class T, int kHeadDim, Options kOptions>
size_t second_bytes(const SecondParams& p) {
  return static_cast<size_t>(has_large_shared_memory() ? second_workspace<T, kHeadDim, kOptions, true>(p).bytes
                                                       : second_workspace<T, kHeadDim, kOptions, false>(p).bytes);
}

template <class T, int kHeadDim, Options kOptions>
void second(const SecondParams& p) {
  has_large_shared_memory() ? launch_second<T, kHeadDim, kOptions, true>(p)
                            : launch_second<T, kHeadDim, kOptions, false>(p);
}

}  // namespace flashattn_ext::sm80
