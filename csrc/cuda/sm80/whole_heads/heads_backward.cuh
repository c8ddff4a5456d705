// Backward of short sequences on every GPU since Ampere. A thread block makes dq, dk and dv of a KV head: keys and
// values lie in shared memory, and queries, dout and out come in tiles. A warp owns 16 keys, whose dk and dv it sums up
// in registers. dS of a tile is exchanged in shared memory, and each sum of dq is then made by one warp over all keys.
// Without gradients of sinks, slopes and relative biases there is no other launch, and the workspace of a dense call is
// empty. The order of every sum is fixed, except that the gradients of a bias that several scores share and of a
// relative bias are summed by atomic additions. The gradient of a sink takes two more launches: the first stage of
// other backwards, whose delta it sums up, and its own.
//
// The plan of a packed call has the lengths of max_seqlen, and a sequence may be longer. Where shared memory does not
// hold all keys, the thread block walks over chunks of them, and sums of dq wait in the workspace (add_chunks).
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

// kPacked: whether the kernel runs packed calls.
template <class T, int kHeadDim, Options kOptions, bool kPacked>
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
  const HeadSequence<kPacked> sequence;
  KeyChunk chunk;  // constant where it is whole, so that the code for usual sequences has no register for it
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
        sequence(p, b),
        k_tile(shared),
        v_tile(k_tile + plan.keys * Tile::kStride),
        dscore_tile(v_tile + plan.keys * Tile::kStride) {}

  __device__ __forceinline__ int length_q() const { return sequence.length_q(p); }
  __device__ __forceinline__ int length_k() const { return sequence.length_k(p); }
  __device__ __forceinline__ Mask mask() const { return Mask(p, length_q(), length_k()); }
  __device__ __forceinline__ bool in_chunks() const { return kPacked && length_k() > plan.keys; }
  // The first key of this warp among those in shared memory, and in the sequence.
  __device__ __forceinline__ int held_key() const { return warp * kRowStep; }
  __device__ __forceinline__ int key() const { return chunk.first + held_key(); }

  __device__ __forceinline__ Stage stage(int number) const {
    unsigned char* const first = reinterpret_cast<unsigned char*>(dscore_tile + plan.keys * plan.score_stride());
    const int place = stages() == 1 ? 0 : number % 2;
    T* const q = reinterpret_cast<T*>(first + place * plan.stage_bytes(kHeadDim));
    const int elements = plan.rows * Tile::kStride;
    float* const lse = reinterpret_cast<float*>(q + 3 * elements);
    Stage all{q, q + elements, q + 2 * elements, lse, lse + plan.rows, lse + 2 * plan.rows, nullptr};
    if constexpr (kHoldsBias) {
      unsigned char* const biases = first + plan.stages * plan.stage_bytes(kHeadDim);
      const QueryTile tile = query_tile(number);
      all.bias = first_in_stage<T>(plan.bias, biases + place * plan.bias.tile_bytes(plan.rows),
                                   bias_row<const T>(p.bias, b, tile.h, tile.row));
    }
    return all;
  }
  __device__ __forceinline__ QueryTile query_tile(int number) const {
    const int head = static_cast<int>(static_cast<unsigned>(number) / static_cast<unsigned>(head_tiles()));
    const int row = (number - head * head_tiles()) * queries();
    return {hk * plan.group + head, row, min(queries(), length_q() - row)};
  }
  // Queries of a tile at most, tiles of a query head, and tiles that shared memory has room for. Of a packed sequence
  // with more queries than the plan a tile has as many as shared memory, which may have room for one tile.
  __device__ __forceinline__ int queries() const { return kPacked ? plan.rows : kQueries; }
  __device__ __forceinline__ int head_tiles() const {
    return kPacked ? max(1, (length_q() + plan.rows - 1) / plan.rows) : plan.tiles;
  }
  __device__ __forceinline__ int tiles() const { return head_tiles() * plan.group; }
  __device__ __forceinline__ int stages() const { return kPacked ? plan.stages : 2; }
  // Rows of a tile with those of its last step that do not exist: they are zeros, of an lse without weights.
  static __device__ __forceinline__ int padded(int rows) { return (rows + kStep - 1) / kStep * kStep; }

  __device__ __forceinline__ void run() {
    if (in_chunks()) {
#pragma unroll 1
      for (int first = 0; first < length_k(); first += plan.keys) {
        chunk = {first, false};
        walk_queries();
        __syncthreads();
      }
    } else {
      chunk = {0, true};
      walk_queries();
    }
  }
  __device__ __forceinline__ void walk_queries() {
    load_keys();
    load_queries(0);
    ptx::cp_async_commit();
    if (tiles() > 1 && stages() > 1) load_queries(1);
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
      if (number + stages() < tiles()) load_queries(number + stages());
      ptx::cp_async_commit();
      if (stages() == 1) ptx::cp_async_wait<0>();
    }
    store(p.dk, hk, sequence.key_start, key(), 0, length_k(), dk[0], rule.gradient_scale(), p.head_dim);
    store(p.dv, hk, sequence.key_start, key(), 0, length_k(), dv[0], rule.keep_scale(), p.head_dim_v);
  }

  __device__ __forceinline__ int held_keys() const { return chunk.keys(length_k(), plan.keys); }
  __device__ __forceinline__ void load_keys() const {
    const int first = sequence.key_start + chunk.first, rows = held_keys(), end = whole_steps(rows);
    load_rows<Tile>(block_team(), k_tile, row_pointer<const T>(p.k, b, hk, first), p.k.row_stride, rows, end,
                    static_cast<int>(p.head_dim));
    load_rows<Tile>(block_team(), v_tile, row_pointer<const T>(p.v, b, hk, first), p.v.row_stride, rows, end,
                    static_cast<int>(p.head_dim_v));
  }
  __device__ __forceinline__ void load_queries(int number) const {
    const QueryTile tile = query_tile(number);
    const Stage to = stage(number);
    const int h = tile.h, row = sequence.query_start + tile.row, end = padded(tile.rows),
              columns_v = static_cast<int>(p.head_dim_v);
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
    zero_unfinite_rows<Tile>(k_tile, whole_steps(held_keys()), [&](int row, int column) {
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
      return LseWords<float>::of(p, b, tile.h, sequence.query_start + tile.row + row);
    } else {
      return words_of_backward<Dropping::kDrops>(p, b, tile.h, sequence.query_start + tile.row + row);
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
    Limits rows = mask().rows_of(key(), min(key() + kRowStep, length_k()));
    if (kPacked && key() >= length_k()) rows = {0, 0};
    const int begin = max(rows.begin - tile.row, 0) / kStep * kStep, end = min(rows.end - tile.row, tile.rows);
    Gradients gradients(*this, tile);
#pragma unroll 1
    for (int query = begin; query < end; query += kStep) {
      if (gradients.sees_some(tile.row + query, kStep)) {
        step(tile, now, query, gradients);
      } else {
        store_dscores({}, query);
      }
    }
    gradients.finish(*this, tile);
    if constexpr (kHoldsBias) HeldBiasGradient<HeadsBackward>{*this, tile, now.bias}.clear(begin, end);
  }

  __device__ __forceinline__ void step(const QueryTile& tile, const Stage& now, int query, Gradients& gradients) {
    const T *const q = now.q + query * Tile::kStride, *const dout = now.dout + query * Tile::kStride;
    Scores weights, dscores;
    const auto begun = gradients.begin(*this, tile, query);
    score_product<Tile, true>(weights, places, k_tile, held_key(), q, 0);
    score_product<Tile>(dscores, places, v_tile, held_key(), dout, 0);
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
    T* const first = dscore_tile + (held_key() + quad()) * stride + query + 2 * lane_in_quad();
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
      const Limits keys = chunk.of(mask().keys_of(first, min(first + kRowStep, length_q())), plan.keys);
      float dq[1][kQueryColumns / 8][4];
      set_zero(dq[0]);
#pragma unroll 2
      for (int key = keys.begin / kRowStep * kRowStep; key < keys.end; key += kRowStep) {
        const int held = key - chunk.first;
        accumulate<T, 1>(
            dq, [&](int, int) { return Core::load_a_transposed(dscore_tile, plan.score_stride(), held, row); },
            [&](typename Core::B(&pair)[2], int, int c) {
              Tile::load_b_transposed(pair, k_tile + held * Tile::kStride,
                                      Tile::moved(places.transposed, column + c * 8));
            });
      }
      if (!chunk.is_whole && !add_chunks(dq[0], tile.h, first, column)) continue;
      store(p.dq, tile.h, sequence.query_start, first, column, length_q(), dq[0], rule.gradient_scale(), p.head_dim);
    }
  }
  // Adds the sums of the chunks before to those of 16 rows from `first` on, and keeps them unless the chunk is the last
  // one. A lane has the same elements in every chunk. Returns whether it is the last one.
  template <int N>
  __device__ __forceinline__ bool add_chunks(float (&x)[N][4], int h, int first, int column) const {
    const bool is_last = chunk.first + plan.keys >= length_k();
    const int64_t row = h * p.total_q + sequence.query_start + first + quad();
    float* const sums = static_cast<float*>(p.workspace) + row * kHeadDim + column + 2 * lane_in_quad();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (first + quad() + 8 * r >= length_q()) continue;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        float2& own = *reinterpret_cast<float2*>(sums + 8 * r * kHeadDim + 8 * n);
        if (chunk.first > 0) x[n][2 * r] += own.x, x[n][2 * r + 1] += own.y;
        if (!is_last) own = make_float2(x[n][2 * r], x[n][2 * r + 1]);
      }
    }
    return is_last;
  }
  // Writes 16 rows from `first` on, of the `length` rows of a sequence that begins at row `start` of a tensor, and the
  // columns of x from `column` on.
  template <int N>
  __device__ __forceinline__ void store(const TensorView& to, int h, int start, int first, int column, int length,
                                        const float (&x)[N][4], float factor, int64_t columns) const {
    const int row = first + quad();
    const float factors[2] = {factor, factor};
    const bool zero[2] = {false, false}, exist[2] = {row < length, row + 8 < length};
    store_rows(row_pointer<T>(to, b, h, start + row) + column, 8 * to.row_stride, x, factors, zero, exist,
               static_cast<int>(columns) - column);
  }
};

template <class T, int kHeadDim, Options kOptions, bool kPacked>
__global__ void __launch_bounds__(HeadsBackward<T, kHeadDim, kOptions, kPacked>::kTile.warps * 32,
                                  HeadsBackward<T, kHeadDim, kOptions, kPacked>::kTile.blocks)
    heads_backward_kernel(const __grid_constant__ AttnGradParams p,
                          const __grid_constant__ typename HeadsBackward<T, kHeadDim, kOptions, kPacked>::Rule rule,
                          const __grid_constant__ HeadsBackwardPlan plan) {
  extern __shared__ __align__(128) unsigned char shared[];
  ptx::wait_for_previous_kernel();
  HeadsBackward<T, kHeadDim, kOptions, kPacked>(p, rule, plan, reinterpret_cast<T*>(shared)).run();
}

// Bytes of the sums of dq of packed sequences with more keys than the plan (add_chunks): [Hq][total_q][kHeadDim].
template <int kHeadDim>
int64_t chunk_bytes(const AttnGradParams& p) {
  return p.is_varlen() ? p.heads_q * p.total_q * kHeadDim * static_cast<int64_t>(sizeof(float)) : 0;
}
// The call, whose workspace begins behind those sums.
template <int kHeadDim>
AttnGradParams behind_chunks(AttnGradParams p) {
  p.workspace = static_cast<char*>(p.workspace) + chunk_bytes<kHeadDim>(p);
  return p;
}

template <class T, int kHeadDim, Options kOptions>
size_t heads_backward_bytes(const AttnGradParams& p) {
  int64_t bytes = chunk_bytes<kHeadDim>(p);
  if (p.dsink || p.dalibi_slopes || p.drelative_bias) {
    using Kernel = HeadsBackward<T, kHeadDim, kOptions, false>;
    bytes += heads_workspace(p, HeadsBackwardPlan::of(p, Kernel::kTile, kOptions)).bytes;
  }
  return static_cast<size_t>(bytes);
}

template <class T, int kHeadDim, Options kOptions, bool kPacked>
void launch_heads_backward(const AttnGradParams& p) {
  using Kernel = HeadsBackward<T, kHeadDim, kOptions, kPacked>;
  const HeadsBackwardPlan plan = HeadsBackwardPlan::of(p, Kernel::kTile, kOptions);
  constexpr const char* kName = "backward of heads";
  const AttnGradParams others = behind_chunks<kHeadDim>(p);
  launch_early(heads_backward_kernel<T, kHeadDim, kOptions, kPacked>, kName, p,
               row_of_blocks(p.batch * p.heads_k, kName, p), plan.warps() * 32,
               static_cast<int>(plan.shared_bytes(kHeadDim)), p, Kernel::Rule::of(others, plan), plan);
  const bool sums_biases = p.dalibi_slopes || p.drelative_bias;
  if (p.dsink || (sums_biases && p.has_sink)) launch_prepare<T>(p, delta_workspace(others));
  if (p.dsink) launch_dsink(p, delta_workspace(others));
  if (sums_biases) finish_biases(p, heads_workspace(others, plan));
}

template <class T, int kHeadDim, Options kOptions>
void heads_backward(const AttnGradParams& p) {
  if constexpr (takes_packed(kOptions)) {
    if (p.is_varlen()) return launch_heads_backward<T, kHeadDim, kOptions, true>(p);
  }
  launch_heads_backward<T, kHeadDim, kOptions, false>(p);
}

}  // namespace flashattn_ext::sm80
