// Forward mode on every GPU since Ampere: the tangents of out and lse (docs/derivatives.md). A thread block computes
// one tile of queries of one head and walks over the key tiles that it sees, as in forward.cuh. With the weights P
// known from lse, A the tangent of a logit, m = keep / p_keep, and any pivot c of a row:
//
//   tlse = sum_j P A + p_sink * tsink
//   tout = sum_j P m (A - c) v_j + (c - tlse) out + sum_j P m tv_j
//
// The pivot is the mean of A over the first tile in which the row has a weight (cpu/derivatives/tangent.h says why). In
// calls with tangents of biases, a separate first pass over all keys computes the part that comes from the biases. The
// rows of absent tangents are not copied, and their products are not computed.
#pragma once

#include "cuda/host/call.h"
#include "cuda/host/launch.cuh"
#include "cuda/score/tangent_policy.cuh"
#include "cuda/score/tangent_rows.cuh"
#include "cuda/sm80/shared/dropout_policy.cuh"
#include "cuda/sm80/shared/query_tile.cuh"
#include "cuda/sm80/shared/tiles.h"
#include "cuda/sm80/shared/visibility_policy.cuh"
#include "cuda/tile/products.cuh"

namespace flashattn_ext::sm80 {

// By the options of a row in the table of kernels: plain 16-bit calls, and all others.
template <Options kOptions>
struct JvpPolicies;
template <>
struct JvpPolicies<kPlain> {
  static constexpr bool kHasMask = false;
  template <class T, int kRowTiles, int kKeys>
  using Tangents = PlainTangents;
  using Dropping = NoDropout;
};
template <>
struct JvpPolicies<kGeneral> {
  static constexpr bool kHasMask = true;
  template <class T, int kRowTiles, int kKeys>
  using Tangents = GeneralTangents<T, kRowTiles, kKeys>;
  using Dropping = OptionalDropout;
};

template <class T, int kHeadDim, Options kOptions>
struct Jvp {
  using Core = TensorCore<T>;
  using Policies = JvpPolicies<kOptions>;
  using Visibility = VisibilityOf<Jvp, Policies::kHasMask>;
  using Dropping = typename Policies::Dropping;
  using Step = typename Visibility::Step;
  static constexpr ForwardTile kTile = tile_of<kernel_table::kSm80Jvp, T, kHeadDim, kOptions>();
  static constexpr int kThreads = kTile.warps * 32, kRowTiles = kTile.row_tiles;
  static constexpr int kQueries = kTile.queries(), kKeys = kTile.keys;
  using RowTile = InputTile<T, kHeadDim>;  // tiles of q, k, v and their tangents
  using ValueTile = RowTile;
  static constexpr int kQueryElements = kQueries * RowTile::kStride, kKeyElements = kKeys * RowTile::kStride;
  static constexpr int kTileElements = 2 * kQueryElements + 4 * kKeyElements;
  static constexpr int kScoreTiles = kKeys / 8, kOutTiles = kHeadDim / 8, kSteps = kKeys / Core::kK;
  using Tangents = typename Policies::template Tangents<T, kRowTiles, kKeys>;
  using Rule = typename Tangents::Rule;
  using Scores = float[kRowTiles][kScoreTiles][4];
  using Weights = typename Core::A[kRowTiles][kSteps];
  static_assert(!Visibility::kHasMask || kThreads >= kKeys);
  using Slots = TileSlots<RowTile, kTileElements, 4 + Visibility::template kSlots<kKeys>>;
  static constexpr int kSharedBytes = Slots::kSharedBytes;
  static_assert(kSharedBytes <= derivative_shared(sizeof(T), kHeadDim));

  const JvpParams& p;
  const Rule& score;
  Slots slots;
  T *q_tile, *tq_tile, *k_tile, *tk_tile, *v_tile, *tv_tile;
  typename RowTile::Places places;
  int row0;  // first query of the tile
  float out[kRowTiles][kOutTiles][4];
  TangentRows<kRowTiles, sizeof(T) == 4> rows;

  __device__ Jvp(const JvpParams& params, const Rule& score, T* shared)
      : p(params),
        score(score),
        slots{shared},
        q_tile(shared),
        tq_tile(q_tile + kQueryElements),
        k_tile(tq_tile + kQueryElements),
        tk_tile(k_tile + kKeyElements),
        v_tile(tk_tile + kKeyElements),
        tv_tile(v_tile + kKeyElements) {}

  // The first of the 16 rows of this warp's row tile i, within the query tile.
  static __device__ int tile_row(int i) { return (threadIdx.x / 32 * kRowTiles + i) * 16; }
  __device__ KeyPointers<T>* key_tangents() const { return slots.template at<KeyPointers<T>>(3); }
  __device__ int length_q() const { return slots.head()->length_q; }
  __device__ int length_k() const { return slots.head()->length_k; }
  __device__ auto mask() const { return typename Visibility::Mask(p, length_q(), length_k()); }
  // The rows of the query tile that exist.
  __device__ Limits tile_rows() const { return {row0, min(row0 + kQueries, length_q())}; }
  // The row of this lane's first score.
  __device__ int score_row() const { return ptx::opaque(row0) + tile_row(0) + quad(); }
  __device__ auto tile_coordinates(int n) const {
    return TileCoordinates{slots.head()->b, slots.head()->h, mask(), ptx::opaque(row0) + tile_row(0), n * kKeys};
  }

  __device__ bool has_product_tangents() const { return p.tangents.q.data || p.tangents.k.data; }
  // Whether the tangent of any logit can be other than 0.
  __device__ bool has_logit_tangents() const { return has_product_tangents() || Tangents::has_biases(p); }

  __device__ void start_head(int b, int h) {
    const Sequence queries = query_sequence(p, b), sequence = key_sequence(p, b);
    const int64_t hk = h / p.group_size();
    const auto first = [&](const TensorView& t) {
      return t.data ? row_pointer<const T>(t, b, hk, sequence.start) : nullptr;
    };
    if (threadIdx.x == 0) {
      *slots.head() = {b, h, static_cast<int>(queries.length), static_cast<int>(sequence.length)};
      *slots.pointers() = {first(p.k), first(p.v)};
      *key_tangents() = {first(p.tangents.k), first(p.tangents.v)};
      Dropping::start_head(p, b, slots.dropout());
      Visibility::start_head(*this, b, h, static_cast<int>(hk), static_cast<int>(sequence.start));
    }
    __syncthreads();
  }

  __device__ void start_tile() {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      set_zero(out[i]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        rows.start(i, r, words_of(tile_row(i) + quad() + 8 * r));
      }
    }
  }

  // The words of the lse of a row of the query tile.
  __device__ LseWords<float> words_of(int row) const {
    if (row0 + row >= length_q()) return LseWords<float>::of_no_key();
    const int b = slots.head()->b;
    return LseWords<float>::of(p, b, slots.head()->h, query_sequence(p, b).start + row0 + row);
  }

  // Starts copying the rows of key tile n of two tensors, of which the second may be absent.
  __device__ void load_rows(T* tile, const T* first, int64_t row_stride, int n, int columns) const {
    load_tile<RowTile, kKeys, kThreads>(tile, first + n * kKeys * row_stride, row_stride,
                                        min(kKeys, length_k() - n * kKeys), columns);
  }
  template <bool kBiasesAlone>
  __device__ void load_keys(int n) const {
    const int columns = static_cast<int>(p.head_dim);
    load_rows(k_tile, slots.pointers()->k, p.k.row_stride, n, columns);
    if (!kBiasesAlone && p.tangents.k.data) {
      load_rows(tk_tile, key_tangents()->k, p.tangents.k.row_stride, n, columns);
    }
    ptx::cp_async_commit();
  }
  template <bool kBiasesAlone>
  __device__ void load_values(int n) const {
    const int columns = static_cast<int>(p.head_dim_v);
    Visibility::load_pairs(*this, n);
    if (!kBiasesAlone) {
      if (has_logit_tangents()) load_rows(v_tile, slots.pointers()->v, p.v.row_stride, n, columns);
      if (p.tangents.v.data) load_rows(tv_tile, key_tangents()->v, p.tangents.v.row_stride, n, columns);
    }
    ptx::cp_async_commit();
  }
  __device__ void load_queries(const TensorView& t, T* tile, int b, int rows) const {
    const T* const from = row_pointer<const T>(t, b, slots.head()->h, query_sequence(p, b).start + row0);
    load_tile<RowTile, kQueries, kThreads>(tile, from, t.row_stride, rows, static_cast<int>(p.head_dim));
  }

  __device__ void walk_keys() {
    if (Tangents::has_biases(p)) {
      pass_over_keys<true>();
      rows.end_biases();
      __syncthreads();
    }
    if (has_logit_tangents() || p.tangents.v.data) pass_over_keys<false>();
  }

  // kBiasesAlone: the first pass, which sums the tangents of the biases and skips the products of tangents.
  template <bool kBiasesAlone>
  __device__ void pass_over_keys() {
    const int row_end = tile_rows().end;
    const Limits visible = mask().keys_of(row0, row_end), full = mask().keys_of_all(row0, row_end);
    const int first = visible.begin / kKeys, last = (visible.end - 1) / kKeys;
    const int first_full = (full.begin + kKeys - 1) / kKeys, end_full = full.end / kKeys;  // tiles that need no mask
    if (visible.end == visible.begin) return;
    typename Visibility::Walk walk(*this, last, first, first_full, end_full);
    int n = walk.tile(*this);
    if (walk.is_empty(n)) return;
    const int b = slots.head()->b;
    load_queries(p.q, q_tile, b, row_end - row0);
    if (!kBiasesAlone && p.tangents.q.data) load_queries(p.tangents.q, tq_tile, b, row_end - row0);
    load_keys<kBiasesAlone>(n);
    for (; n >= walk.end(); n = walk.tile(*this)) {
      ptx::cp_async_wait<0>();
      __syncthreads();
      const Step step = walk.step(*this, n, tile_row(0));
      const int next = walk.advance(*this);
      load_values<kBiasesAlone>(n);
      if (kHeadDim > 64) places.recompute();
      Scores scores, tangents;
      score_product<RowTile>(scores, places, q_tile, tile_row(0), k_tile, 0);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) set_zero(tangents[i]);
      if (!kBiasesAlone) multiply_tangents(tangents);
      ptx::cp_async_wait<0>();
      __syncthreads();
      if (next >= walk.end()) load_keys<kBiasesAlone>(next);
      compute_step<kBiasesAlone>(step, scores, tangents);
    }
  }

  // <tq, k> + <q, tk>
  __device__ void multiply_tangents(Scores& tangents) const {
    if (p.tangents.q.data) add_score_product<RowTile>(tangents, places, tq_tile, tile_row(0), k_tile, 0);
    if (p.tangents.k.data) add_score_product<RowTile>(tangents, places, q_tile, tile_row(0), tk_tile, 0);
  }

  template <bool kBiasesAlone>
  __device__ void compute_step(const Step& step, Scores& scores, Scores& tangents) {
    const auto coordinates = [&] { return tile_coordinates(step.n); };
    const auto& rule = Tangents::make_logits(p, score, scores, tangents, coordinates);
    if (step.masked) hide_keys<true, true>(scores, mask(), score_row(), step.n * kKeys + 2 * lane_in_quad());
    Visibility::hide(*this, step, scores);
    rows.subtract_words(scores, rule, [&](int i, int r) { return words_of(tile_row(i) + quad() + 8 * r); });
    if constexpr (kBiasesAlone) {
      Tangents::add_biases(p, tangents, coordinates);
      rows.hide(scores, tangents);
      rows.sum_biases(scores, tangents, rule);
    } else {
      rows.hide(scores, tangents);
      rows.find_pivots(scores, tangents, rule);
      if (Tangents::has_biases(p)) {
        Tangents::add_biases(p, tangents, coordinates);
        rows.hide(scores, tangents);
      }
      Weights tangent_weights, weights;
      weigh(tangent_weights, weights, scores, tangents, rule, step.n);
      if (has_logit_tangents()) add_values(step, tangent_weights, v_tile);
      if (p.tangents.v.data) add_values(step, weights, tv_tile);
    }
  }

  // tangent_weights: P m (A - pivot); weights: P m, if values have a tangent. Without the factor 1 / p_keep.
  template <class Rule>
  __device__ void weigh(Weights& tangent_weights, Weights& weights, Scores& scores, Scores& tangents, const Rule& rule,
                        int n) {
    rows.weigh(scores, tangents, rule);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        tangent_weights[i][k] = Core::from_accumulators(tangents[i], k);
        weights[i][k] = Core::from_accumulators(scores[i], k);
      }
      const int row = row0 + tile_row(i), key = n * kKeys;
      Dropping::template drop<Core>(p, slots.dropout(), slots.head()->h, tangent_weights[i], row, key);
      if (p.tangents.v.data) Dropping::template drop<Core>(p, slots.dropout(), slots.head()->h, weights[i], row, key);
    }
  }

  // out += weights * values
  __device__ void add_values(const Step& step, const Weights& weights, T* values) {
    const bool isolates = Visibility::isolate(*this, step, values);
    accumulate<ValueTile, kSteps>(out, places, [&](int i, int k) { return weights[i][k]; }, values, 0);
    if (isolates) Visibility::poison(*this, step.n);
  }

  __device__ void finish_tile() {
    const int b = slots.head()->b, h = slots.head()->h;
    const int count = length_q() - row0, columns = static_cast<int>(p.head_dim_v);
    const int64_t start = query_sequence(p, b).start + row0;
    const float keep_scale = Dropping::keep_scale(p);
    const SinkTangent sink(p, h);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = tile_row(i) + quad() + 8 * r;
        const RowTangent row_tangent = rows.finish(p, sink, i, r, words_of(row));
        if (row < count && lane_in_quad() == 0) *row_statistic(p.tangents.lse, b, h, start + row) = row_tangent.lse;
        const T* const primal = row_pointer<const T>(p.out, b, h, start + row);
        const auto tangent = [&](float sum, int column) {
          const float x = row < count && column < columns ? widen(primal[column]) : 0.f;
          return sum * (keep_scale * row_tangent.sums) + row_tangent.factor * x;
        };
        // Every warp overwrites only its own rows of the q tile.
#pragma unroll
        for (int n = 0; n < kOutTiles; ++n) {
          const int column = n * 8 + 2 * lane_in_quad();
          Core::store_pair(q_tile + RowTile::offset(row, column), tangent(out[i][n][2 * r], column),
                           tangent(out[i][n][2 * r + 1], column + 1));
        }
      }
    }
    __syncthreads();
    store_tile<RowTile, kQueries, kHeadDim, kThreads>(row_pointer<T>(p.tangents.out, b, h, start),
                                                      p.tangents.out.row_stride, q_tile, min(count, kQueries), columns);
  }
};

template <class T, int kHeadDim, Options kOptions>
__global__ void __launch_bounds__(Jvp<T, kHeadDim, kOptions>::kThreads, Jvp<T, kHeadDim, kOptions>::kTile.blocks)
    jvp_kernel(const __grid_constant__ JvpParams p, const __grid_constant__ TileOrder order,
               const __grid_constant__ typename Jvp<T, kHeadDim, kOptions>::Rule score) {
  extern __shared__ __align__(16) unsigned char shared[];
  compute_tiles(Jvp<T, kHeadDim, kOptions>(p, score, reinterpret_cast<T*>(shared)), order);
}

template <class T, int kHeadDim, Options kOptions>
void jvp(const JvpParams& p) {
  using Kernel = Jvp<T, kHeadDim, kOptions>;
  if (p.batch * p.heads_q == 0) return;
  const int64_t blocks = tile_count(p.seqlen_q, Kernel::kQueries);
  launch(jvp_kernel<T, kHeadDim, kOptions>, "jvp", p, blocks * p.batch * p.heads_q, Kernel::kThreads,
         Kernel::kSharedBytes, forward_order(p, blocks, 2 * sizeof(T)), Kernel::Rule::of(p));
}

}  // namespace flashattn_ext::sm80
