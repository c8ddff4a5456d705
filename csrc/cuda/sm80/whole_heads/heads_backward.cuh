// Backward of short sequences on every GPU since Ampere. A thread block makes dq, dk and dv of a KV head: keys and
// values lie in shared memory, and queries, dout and out come in tiles. A warp owns 16 keys, whose dk and dv it sums up
// in registers. dS of a tile is exchanged in shared memory, and each sum of dq is then made by one warp over all keys.
// Without gradients of sinks, slopes and relative biases there is no workspace and no other launch. The order of every
// sum is fixed, except that the gradients of a bias that several scores share and of a relative bias are summed by
// atomic additions. The gradient of a sink takes two more launches: the first stage of other backwards, whose delta it
// sums up, and its own.
#pragma once

#include "cuda/host/launch.cuh"
#include "cuda/ptx/async.cuh"
#include "cuda/sm80/whole_heads/head_rows.cuh"
#include "cuda/sm80/whole_heads/heads_policies.cuh"
#include "cuda/sm80/whole_heads/plan.h"
#include "cuda/stages/backward_finish.cuh"
#include "cuda/stages/backward_workspace.h"
#include "cuda/table/kernel_table.h"
#include "cuda/tile/products.cuh"
#include "cuda/tile/store_row.cuh"

namespace flashattn_ext::sm80 {

template <class T, int kHeadDim, Options kOptions>
struct HeadsBackward {
  using Core = TensorCore<T>;
  using Tile = SwizzledTile<T, kHeadDim>;
  using Element = T;
  using Policies = HeadsPolicies<kOptions>;
  using Gradients = typename Policies::Gradients;
  static constexpr bool kHoldsBias = holds_bias(kOptions);  // of a tile of queries, in shared memory
  static constexpr bool kTakesMask = takes_mask(kOptions);
  using Rule = typename Gradients::Rule;
  using Mask = typename Policies::Mask;
  using Dropping = typename Policies::Dropping;
  static constexpr HeadsBackwardTile kTile = tile_of<kernel_table::kSm80HeadsBackward, T, kHeadDim, kOptions>();
  static constexpr int kQueries = kTile.queries, kStep = kTile.step, kOutTiles = kHeadDim / 8;
  static constexpr int kQueryColumns = kTile.columns, kColumnParts = kHeadDim / kQueryColumns;
  using Scores = float[1][kStep / 8][4];
  static_assert(kQueries % kStep == 0 && kStep % 16 == 0 && kHeadDim % kQueryColumns == 0);

  // A tile of queries: its head, its first row and how many rows it has.
  struct QueryTile {
    int h, row, rows;
  };
  // Its rows and statistics in shared memory. lse and delta are those of the tensors until add_statistics changes them;
  // log2_sum is what Gradients::statistics gives besides. bias: where the kernel holds it, the element of the first row
  // and key.
  struct Stage {
    T *q, *dout, *out;
    float *lse, *delta, *log2_sum;
    T* bias;
  };

  const AttnGradParams& p;
  const Rule& rule;
  const HeadsBackwardPlan& plan;
  const typename Tile::Places places;
  const int warp, b, hk;
  T *const k_tile, *const v_tile, *const dscore_tile;
  float dk[1][kOutTiles][4], dv[1][kOutTiles][4];

  __device__ __forceinline__ HeadsBackward(const AttnGradParams& p, const Rule& rule, const HeadsBackwardPlan& plan,
                                           T* shared)
      : p(p),
        rule(rule),
        plan(plan),
        warp(uniform(static_cast<int>(threadIdx.x) / 32)),
        b(static_cast<int>(blockIdx.x / static_cast<unsigned>(p.heads_k))),
        hk(static_cast<int>(blockIdx.x % static_cast<unsigned>(p.heads_k))),
        k_tile(shared),
        v_tile(k_tile + plan.keys * Tile::kStride),
        dscore_tile(v_tile + plan.keys * Tile::kStride) {}

  __device__ __forceinline__ int length_q() const { return static_cast<int>(p.seqlen_q); }
  __device__ __forceinline__ int length_k() const { return static_cast<int>(p.seqlen_k); }
  __device__ __forceinline__ Mask mask() const { return Mask(p, p.seqlen_q, p.seqlen_k); }
  __device__ __forceinline__ int key() const { return warp * kRowStep; }  // the first of this warp
  __device__ __forceinline__ int tiles() const { return plan.tiles * plan.group; }

  __device__ __forceinline__ Stage stage(int number) const {
    unsigned char* const first = reinterpret_cast<unsigned char*>(dscore_tile + plan.keys * plan.score_stride());
    T* const q = reinterpret_cast<T*>(first + number % 2 * plan.stage_bytes(kHeadDim));
    const int elements = plan.rows * Tile::kStride;
    float* const lse = reinterpret_cast<float*>(q + 3 * elements);
    Stage all{q, q + elements, q + 2 * elements, lse, lse + plan.rows, lse + 2 * plan.rows, nullptr};
    if constexpr (kHoldsBias) {
      unsigned char* const biases = first + plan.stages * plan.stage_bytes(kHeadDim);
      const QueryTile tile = query_tile(number);
      all.bias = first_in_stage<T>(plan.bias, biases + number % 2 * plan.bias.tile_bytes(plan.rows),
                                   bias_row<const T>(p.bias, b, tile.h, tile.row));
    }
    return all;
  }
  __device__ __forceinline__ QueryTile query_tile(int number) const {
    const int head = static_cast<int>(static_cast<unsigned>(number) / static_cast<unsigned>(plan.tiles));
    const int row = (number - head * plan.tiles) * kQueries;
    return {hk * plan.group + head, row, min(kQueries, length_q() - row)};
  }
  // Rows of a tile with those of its last step that do not exist: they are zeros, of an lse without weights.
  static __device__ __forceinline__ int padded(int rows) { return (rows + kStep - 1) / kStep * kStep; }

  __device__ __forceinline__ void run() {
    load_keys();
    load_queries(0);
    ptx::cp_async_commit();
    if (tiles() > 1) load_queries(1);
    ptx::cp_async_commit();
    set_zero(dk[0]);
    set_zero(dv[0]);
#pragma unroll 1
    for (int number = 0;; ++number) {
      const QueryTile tile = query_tile(number);
      const Stage now = stage(number);
      ptx::cp_async_wait<1>();
      if (kTakesMask && p.has_intervals() && number == 0) isolate_keys();
      add_statistics(tile, now);
      __syncthreads();
      sum_keys(tile, now);
      __syncthreads();
      if constexpr (kHoldsBias) HeldBiasGradient<HeadsBackward>{*this, tile, now.bias}.store();
      store_queries(tile);
      if (number + 1 == tiles()) break;
      __syncthreads();
      if (number + 2 < tiles()) load_queries(number + 2);
      ptx::cp_async_commit();
    }
    store(p.dk, hk, key(), 0, length_k(), dk[0], rule.gradient_scale(), p.head_dim);
    store(p.dv, hk, key(), 0, length_k(), dv[0], rule.keep_scale(), p.head_dim_v);
  }

  __device__ __forceinline__ void load_keys() const {
    const int end = whole_steps(length_k());
    load_rows<Tile>(block_team(), k_tile, row_pointer<const T>(p.k, b, hk, 0), p.k.row_stride, length_k(), end,
                    static_cast<int>(p.head_dim));
    load_rows<Tile>(block_team(), v_tile, row_pointer<const T>(p.v, b, hk, 0), p.v.row_stride, length_k(), end,
                    static_cast<int>(p.head_dim_v));
  }
  __device__ __forceinline__ void load_queries(int number) const {
    const QueryTile tile = query_tile(number);
    const Stage to = stage(number);
    const int h = tile.h, row = tile.row, end = padded(tile.rows), columns_v = static_cast<int>(p.head_dim_v);
    load_rows<Tile>(block_team(), to.q, row_pointer<const T>(p.q, b, h, row), p.q.row_stride, tile.rows, end,
                    static_cast<int>(p.head_dim));
    load_rows<Tile>(block_team(), to.dout, row_pointer<const T>(p.dout, b, h, row), p.dout.row_stride, tile.rows, end,
                    columns_v);
    load_rows<Tile>(block_team(), to.out, row_pointer<const T>(p.out, b, h, row), p.out.row_stride, tile.rows, end,
                    columns_v);
    for_own_vectors<Tile>(block_team(), end, [&](int i, int column) {
      if (column != 0) return;
      const bool exists = i < tile.rows;
      ptx::cp_async_4(to.lse + i, row_statistic(p.lse, b, h, row + i), exists);
      if (p.dlse.data) ptx::cp_async_4(to.delta + i, row_statistic(p.dlse, b, h, row + i), exists);
    });
    if constexpr (kHoldsBias) HeldBiasGradient<HeadsBackward>{*this, tile, to.bias}.load();
  }

  // In calls with a Mask: keys that this thread has copied and that are not finite become zeros, and their values NaN,
  // which makes the dS of the queries that see them NaN.
  __device__ __forceinline__ void isolate_keys() const {
    zero_unfinite_rows<Tile>(k_tile, whole_steps(length_k()), [&](int row, int column) {
      *reinterpret_cast<uint4*>(v_tile + Tile::offset(row, column)) = make_uint4(~0u, ~0u, ~0u, ~0u);
    });
  }
  // With a Mask. The vectors at `at` of a row of queries that is not finite, or whose dout is not, become zeros.
  // Returns whether the row is finite: if not, a log-sum-exp of NaN makes its weights of the keys that it sees NaN.
  __device__ __forceinline__ bool isolate_query(const Stage& now, int at) const {
    uint4 &q = *reinterpret_cast<uint4*>(now.q + at), &dout = *reinterpret_cast<uint4*>(now.dout + at);
    const bool finite_q = has_finite_row<Tile>(q), finite_dout = has_finite_row<Tile>(dout);
    if (!finite_q || !finite_dout) q = dout = make_uint4(0, 0, 0, 0);
    return finite_q && finite_dout;
  }

  // lse and delta of a tile, as the first stage of other backwards computes them (stages/backward_prepare.cu). A
  // thread reads what it has copied itself, so that no barrier comes before.
  __device__ __forceinline__ void add_statistics(const QueryTile& tile, const Stage& now) const {
    for_own_vectors<Tile>(block_team(), padded(tile.rows), [&](int row, int column) {
      constexpr int kVectors = Tile::kColumns / Tile::kVector;
      const int at = Tile::offset(row, column);
      const bool finite = !kTakesMask || !p.has_intervals() || isolate_query(now, at);
      float delta = dot(*reinterpret_cast<const uint4*>(now.dout + at), *reinterpret_cast<const uint4*>(now.out + at));
#pragma unroll
      for (int distance = kVectors / 2; distance > 0; distance /= 2) delta += __shfl_xor_sync(~0u, delta, distance);
      if (column == 0) add_statistics(tile, now, row, delta);
      if (column == 0 && !finite) now.lse[row] = not_a_number();
    });
  }
  // Completes the statistics of one row. delta: <dout, out>.
  __device__ __forceinline__ void add_statistics(const QueryTile& tile, const Stage& now, int row, float delta) const {
    auto words = LseWords<float>::of_no_key();
    float dlse = 0;
    if (row < tile.rows) {
      const float lse = now.lse[row];
      const bool has_one_word = fabsf(lse) < LseWords<float>::kOneWord && !(Dropping::kDrops && p.has_dropout());
      words = has_one_word ? LseWords<float>::of_lse(lse) : words_of(tile, row);
      if (p.dlse.data) dlse = now.delta[row];
    }
    const float2 statistics = Gradients::statistics(words);
    now.lse[row] = statistics.x;
    now.log2_sum[row] = statistics.y;
    const bool is_marked = is_mark_of_one_weight(statistics.x) || is_mark_of_one_weight(statistics.y);
    now.delta[row] = ((is_marked ? 0.f : delta) - dlse) / rule.keep_scale();
  }
  __device__ __forceinline__ LseWords<float> words_of(const QueryTile& tile, int row) const {
    if constexpr (kOptions == kPlain) {  // whose statistics look at the size of a row (heads_gradients.cuh)
      return LseWords<float>::of(p, b, tile.h, tile.row + row);
    } else {
      return words_of_backward<Dropping::kDrops>(p, b, tile.h, tile.row + row);
    }
  }
  static __device__ __forceinline__ float dot(const uint4& x, const uint4& y) {
    const uint32_t a[4] = {x.x, x.y, x.z, x.w}, b[4] = {y.x, y.y, y.z, y.w};
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 u = Core::unpack(a[i]), v = Core::unpack(b[i]);
      sum = fmaf(u.x, v.x, fmaf(u.y, v.y, sum));
    }
    return sum;
  }

  // --- dk and dv of this warp's keys ---------------------------------------------------------------------------------

  __device__ __forceinline__ void sum_keys(const QueryTile& tile, const Stage& now) {
    const Limits rows = mask().rows_of(key(), min(key() + kRowStep, length_k()));
    const int begin = max(rows.begin - tile.row, 0) / kStep * kStep, end = min(rows.end - tile.row, tile.rows);
    Gradients gradients(p, mask(), b, hk, tile.h, key());
#pragma unroll 1
    for (int query = begin; query < end; query += kStep) {
      if (gradients.sees_some(tile.row + query, kStep)) {
        step(tile, now, query, gradients);
      } else {
        store_dscores({}, query);
      }
    }
    gradients.finish(p, rule, b, tile.h, tile.row / kQueries * plan.warps() + warp, key() + quad());
    if constexpr (kHoldsBias) HeldBiasGradient<HeadsBackward>{*this, tile, now.bias}.clear(begin, end);
  }

  __device__ __forceinline__ void step(const QueryTile& tile, const Stage& now, int query, Gradients& gradients) {
    const T *const q = now.q + query * Tile::kStride, *const dout = now.dout + query * Tile::kStride;
    Scores weights, dscores;
    const auto begun = gradients.begin(*this, tile, query);
    score_product<Tile, true>(weights, places, k_tile, key(), q, 0);
    score_product<Tile>(dscores, places, v_tile, key(), dout, 0);
    gradients.weigh_and_differentiate(*this, tile, now, query, begun, weights, dscores);
    accumulate<Tile, kStep / 16>(
        dv, places, [&](int, int k) { return Core::from_accumulators(weights[0], k); }, dout, 0);
    typename Core::A packed[kStep / 16];
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k) packed[k] = Core::from_accumulators(dscores[0], k);
    store_dscores(packed, query);
    if constexpr (kHoldsBias) HeldBiasGradient<HeadsBackward>{*this, tile, now.bias}.replace(packed, query);
    accumulate<Tile, kStep / 16>(dk, places, [&](int, int k) { return packed[k]; }, q, 0);
  }
  // Writes dS of a step for dq.
  __device__ __forceinline__ void store_dscores(const typename Core::A (&packed)[kStep / 16], int query) const {
    const int stride = plan.score_stride();
    T* const first = dscore_tile + (key() + quad()) * stride + query + 2 * lane_in_quad();
#pragma unroll
    for (int k = 0; k < kStep / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        *reinterpret_cast<uint32_t*>(first + i % 2 * 8 * stride + 16 * k + i / 2 * 8) = packed[k].x[i];
      }
    }
  }

  // --- dq of a tile --------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void store_queries(const QueryTile& tile) const {
    const int units = (tile.rows + kRowStep - 1) / kRowStep * kColumnParts;
#pragma unroll 1
    for (int unit = warp; unit < units; unit += plan.warps()) {
      const int row = unit / kColumnParts * kRowStep, column = unit % kColumnParts * kQueryColumns;
      const int first = tile.row + row;
      const Limits keys = mask().keys_of(first, min(first + kRowStep, length_q()));
      float dq[1][kQueryColumns / 8][4];
      set_zero(dq[0]);
#pragma unroll 2
      for (int key = keys.begin / kRowStep * kRowStep; key < keys.end; key += kRowStep) {
        accumulate<T, 1>(
            dq, [&](int, int) { return Core::load_a_transposed(dscore_tile, plan.score_stride(), key, row); },
            [&](typename Core::B(&pair)[2], int, int c) {
              Tile::load_b_transposed(pair, k_tile + key * Tile::kStride,
                                      Tile::moved(places.transposed, column + c * 8));
            });
      }
      store(p.dq, tile.h, first, column, length_q(), dq[0], rule.gradient_scale(), p.head_dim);
    }
  }
  // Writes 16 rows from `first` on, of `length`, and the columns of x from `column` on.
  template <int N>
  __device__ __forceinline__ void store(const TensorView& to, int h, int first, int column, int length,
                                        const float (&x)[N][4], float factor, int64_t columns) const {
    const int row = first + quad();
    const float factors[2] = {factor, factor};
    const bool zero[2] = {false, false}, exist[2] = {row < length, row + 8 < length};
    store_rows(row_pointer<T>(to, b, h, row) + column, 8 * to.row_stride, x, factors, zero, exist,
               static_cast<int>(columns) - column);
  }
};

template <class T, int kHeadDim, Options kOptions>
__global__ void __launch_bounds__(HeadsBackward<T, kHeadDim, kOptions>::kTile.warps * 32,
                                  HeadsBackward<T, kHeadDim, kOptions>::kTile.blocks)
    heads_backward_kernel(const __grid_constant__ AttnGradParams p,
                          const __grid_constant__ typename HeadsBackward<T, kHeadDim, kOptions>::Rule rule,
                          const __grid_constant__ HeadsBackwardPlan plan) {
  extern __shared__ __align__(128) unsigned char shared[];
  ptx::wait_for_previous_kernel();
  HeadsBackward<T, kHeadDim, kOptions>(p, rule, plan, reinterpret_cast<T*>(shared)).run();
}

template <class T, int kHeadDim, Options kOptions>
size_t heads_backward_bytes(const AttnGradParams& p) {
  if (!p.dsink && !p.dalibi_slopes && !p.drelative_bias) return 0;
  const auto plan = HeadsBackwardPlan::of(p, HeadsBackward<T, kHeadDim, kOptions>::kTile, kOptions);
  return static_cast<size_t>(heads_workspace(p, plan).bytes);
}

template <class T, int kHeadDim, Options kOptions>
void heads_backward(const AttnGradParams& p) {
  using Kernel = HeadsBackward<T, kHeadDim, kOptions>;
  const HeadsBackwardPlan plan = HeadsBackwardPlan::of(p, Kernel::kTile, kOptions);
  constexpr const char* kName = "backward of heads";
  launch_early(heads_backward_kernel<T, kHeadDim, kOptions>, kName, p, row_of_blocks(p.batch * p.heads_k, kName, p),
               plan.warps() * 32, static_cast<int>(plan.shared_bytes(kHeadDim)), p, Kernel::Rule::of(p, plan), plan);
  const bool sums_biases = p.dalibi_slopes || p.drelative_bias;
  if (p.dsink || (sums_biases && p.has_sink)) launch_prepare<T>(p, delta_workspace(p));
  if (p.dsink) launch_dsink(p, delta_workspace(p));
  if (sums_biases) finish_biases(p, heads_workspace(p, plan));
}

}  // namespace flashattn_ext::sm80
