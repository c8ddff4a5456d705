// Backward of calls with few queries for many keys (backward.h), on every GPU; on Hopper
// cuda/sm90/few_queries/backward.cuh serves most of them. It is bound by the memory bandwidth of reading k and v and of
// writing dk and dv. A thread block keeps the rows of a KV head, as in split.cuh, and iterates over one part (KV split,
// backward_plan.h) of the keys. It accumulates its partial dq in registers; backward.cu sums the parts in order.
//
// Each warp processes 16 keys of a step in its own multistage buffer (ring). The scores are transposed, S^T = K Q^T, so
// that a warp has all rows of its keys and computes whole rows of dk and dv. With up to 16 rows a warp also has its own
// dq accumulators and needs no barrier in the mainloop. With more rows these would not fit in registers: the warps
// exchange dS through shared memory, and each warp accumulates some rows and columns of dq over the keys of all warps.
#pragma once

#include "cuda/decode/few_queries/backward_plan.h"
#include "cuda/host/launch.cuh"
#include "cuda/score/large_rows.cuh"
#include "cuda/stages/backward_workspace.h"
#include "cuda/tile/operand_tile.cuh"
#include "cuda/tile/products.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/rows.cuh"
#include "cuda/tile/store_row.cuh"
#include "cuda/tile/warp.cuh"
#include "rules/mask.h"

namespace flashattn_ext::decode {

template <class T, int kHeadDim, int kRowTiles>
struct FewQueriesBackward {
  using Core = TensorCore<T>;
  using Tile = SwizzledTile<T, kHeadDim>;
  static constexpr int kRows = 16 * kRowTiles, kKeys = 16, kThreads = kBackwardWarps * 32;
  static constexpr bool kExchanges = kRowTiles > 1;
  static constexpr int kStages = kExchanges ? 2 : 3;
  static constexpr int kElements = kVectorBytes / static_cast<int>(sizeof(T)), kRowVectors = kHeadDim / kElements;
  static constexpr int kColumnTiles = kHeadDim / 8, kScoreTiles = kRows / 8;
  // With an exchange of dS, kColumnWarps warps divide the dq columns of a row tile: each has kSumTiles 8-column tiles.
  static constexpr int kColumnWarps = kExchanges ? kBackwardWarps / kRowTiles : 1;
  static constexpr int kSumTiles = kColumnTiles / kColumnWarps;

  struct Stage {
    T k[kKeys * kHeadDim], v[kKeys * kHeadDim];
  };
  // Without an exchange: the dq accumulators of a warp, four per lane for each 16 x 8 tile.
  using Sums = float4[kColumnTiles][32];
  struct Shared {
    T q[kRows * kHeadDim], dout[kRows * kHeadDim];
    Stage rings[kBackwardWarps][kStages];
    // dS as A fragments of the product dS K.
    MaybeArray<uint4[kRowTiles][32], kExchanges ? kBackwardWarps : 0> dscores;
    // lse in base 2, as one word or a mark and as two words; +inf for fully masked rows and padding rows.
    float lse[kRows], delta[kRows];
    LseWords<float> words[kRows];
  };
  static_assert(sizeof(Sums) <= sizeof(Stage[kStages]));

  const AttnGradParams& p;
  const BackwardWorkspace& workspace;
  const BackwardPlan& plan;
  Shared& shared;
  const int b, head_k;
  const Mask32 mask;
  const Limits seen, whole;  // keys visible to at least one row, and to every row
  typename Tile::Places places{};
  float dq[1][kSumTiles][4];

  __device__ FewQueriesBackward(const AttnGradParams& params, const BackwardWorkspace& workspace,
                                const BackwardPlan& plan, Shared& shared, int task)
      : p(params),
        workspace(workspace),
        plan(plan),
        shared(shared),
        b(task / static_cast<int>(params.heads_k)),
        head_k(task % static_cast<int>(params.heads_k)),
        mask(params, params.seqlen_q, params.seqlen_k),
        seen(mask.keys_of(0, static_cast<int>(params.seqlen_q))),
        whole(mask.keys_of_all(0, static_cast<int>(params.seqlen_q))) {}

  static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x) / 32; }
  // The row tile and the first column of the dq accumulators of this warp.
  static __device__ __forceinline__ int row_tile() { return kExchanges ? warp() / kColumnWarps : 0; }
  static __device__ __forceinline__ int first_column() { return warp() % kColumnWarps * kSumTiles * 8; }

  __device__ void run(int part) {
    const int begin = part * plan.part_keys, end = min(begin + plan.part_keys, static_cast<int>(p.seqlen_k));
    constexpr int kStep = kBackwardWarps * kKeys;
    const int own = warp() * kKeys;
    load_rows();
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      load_keys(i, begin + own + i * kStep, end);
      ptx::cp_async_commit();
    }
    set_zero(dq[0]);
    ptx::cp_async_wait<kStages - 2>();
    __syncthreads();  // q and dout have arrived
    int from = 0, to = kStages - 1;
#pragma unroll 1
    for (int step = begin; step < end; step += kStep) {
      ptx::cp_async_wait<kStages - 2>();
      if constexpr (kExchanges) {
        __syncthreads();  // all warps have read the keys and dS of the previous step
      } else {
        __syncwarp();
      }
      load_keys(to, step + own + (kStages - 1) * kStep, end);
      ptx::cp_async_commit();
      compute(from, step, step + own);
      from = from + 1 == kStages ? 0 : from + 1;
      to = to + 1 == kStages ? 0 : to + 1;
    }
    ptx::cp_async_wait<0>();
    if constexpr (kExchanges) {
      store_own_sums(part);
    } else {
      add_up_warps(part);
    }
  }

  // Starts copying the rows of q and dout; padding rows become zero. Reads lse and delta.
  __device__ __forceinline__ void load_rows() {
#pragma unroll 1
    for (int v = static_cast<int>(threadIdx.x); v < kRows * kRowVectors; v += kThreads) {
      const int row = v / kRowVectors, column = v % kRowVectors * kElements;
      const int query = row / plan.group, head = head_k * plan.group + row % plan.group;
      const bool exists = row < plan.rows;
      copy(shared.q, p.q, head, query, row, column, exists ? static_cast<int>(p.head_dim) : 0);
      copy(shared.dout, p.dout, head, query, row, column, exists ? static_cast<int>(p.head_dim_v) : 0);
    }
    for (int row = static_cast<int>(threadIdx.x); row < kRows; row += kThreads) {
      const int query = row / plan.group, head = head_k * plan.group + row % plan.group;
      const int64_t index = head * workspace.rows + b * p.seqlen_q + query;
      shared.lse[row] = row < plan.rows ? workspace.lse[index] : infinity();
      if (row < plan.rows) shared.words[row] = workspace.words[index];
      shared.delta[row] = row < plan.rows ? workspace.delta[index] : 0.f;
    }
  }
  // Starts copying a vector of a row to a tile. columns: length of the row; 0 if the row does not exist.
  __device__ __forceinline__ void copy(T* tile, const TensorView& from, int head, int64_t row, int tile_row, int column,
                                       int columns) const {
    const int elements = min(max(columns - column, 0), kElements);
    ptx::cp_async_part(tile + Tile::offset(tile_row, column), row_pointer<const T>(from, b, head, row) + column,
                       elements * static_cast<int>(sizeof(T)));
  }
  // Starts copying the warp's keys and values of a step. Keys masked for every row are not read and become zero.
  __device__ __forceinline__ void load_keys(int stage, int key, int end) {
    if (key >= end || is_hidden(key)) return;
    Stage& to = shared.rings[warp()][stage];
#pragma unroll
    for (int i = 0; i < kKeys * kRowVectors / 32; ++i) {
      const int v = lane() + 32 * i, row = v / kRowVectors, column = v % kRowVectors * kElements;
      const bool exists = key + row >= seen.begin && key + row < seen.end;
      copy(to.k, p.k, head_k, key + row, row, column, exists ? static_cast<int>(p.head_dim) : 0);
      copy(to.v, p.v, head_k, key + row, row, column, exists ? static_cast<int>(p.head_dim_v) : 0);
    }
  }
  // Whether the 16 keys from `key` on are masked for every row.
  __device__ __forceinline__ bool is_hidden(int key) const { return key >= seen.end || key + kKeys <= seen.begin; }

  // from: the stage. step: first key of the step. key: first key of this warp.
  __device__ __forceinline__ void compute(int from, int step, int key) {
    if constexpr (kRowTiles == kMostRowTiles) places.renew();  // reduces register pressure
    const Stage& stage = shared.rings[warp()][from];
    typename Core::A weights[kRowTiles], dscores[kRowTiles];
    const bool hidden = is_hidden(key);
    if (hidden) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) weights[i] = dscores[i] = {};
    } else {
      find_weights(stage, key, weights, dscores);
      if constexpr (kExchanges) give_dscores(dscores);
    }
    store_keys(p.dv, key, weights, shared.dout, hidden, 1.f, p.head_dim_v);
    store_keys(p.dk, key, dscores, shared.q, hidden, workspace.gradient_scale, p.head_dim);
    if constexpr (kExchanges) {
      __syncthreads();  // dS and the keys of all warps are visible
#pragma unroll
      for (int w = 0; w < kBackwardWarps; ++w) {
        if (is_hidden(step + w * kKeys)) continue;
        const uint4 x = shared.dscores[w][row_tile()][lane()];
        add_keys(shared.rings[w][from].k, {{x.x, x.y, x.z, x.w}});
      }
    } else if (!hidden) {
      add_keys(stage.k, transposed(dscores[0]));
    }
  }

  // Computes P^T and dS^T of a step, as A fragments.
  __device__ __forceinline__ void find_weights(const Stage& stage, int key, typename Core::A (&weights)[kRowTiles],
                                               typename Core::A (&dscores)[kRowTiles]) {
    float x[1][kScoreTiles][4], dx[1][kScoreTiles][4];
    multiply(x, stage.k, shared.q);
    multiply(dx, stage.v, shared.dout);
    if (has_mark<kRows>(shared.lse)) {
      subtract_words(x, workspace.score, shared.lse, [&](int row) { return shared.words[row]; });
      clear_rows_of_one_weight(dx, shared.lse);
    }
    const bool is_partial = key < whole.begin || key + kKeys > whole.end;
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
      const int row = n * 8 + 2 * lane_in_quad();
      const float2 lse = *reinterpret_cast<const float2*>(shared.lse + row);
      const float2 delta = *reinterpret_cast<const float2*>(shared.delta + row);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float weight = ptx::ex2(fmaf(x[0][n][e], workspace.score.factor, e % 2 ? -lse.y : -lse.x));
        x[0][n][e] = weight;
        dx[0][n][e] = weight * (dx[0][n][e] - (e % 2 ? delta.y : delta.x));
      }
      if (is_partial) hide(x[0][n], dx[0][n], row, key + quad());
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      weights[i] = Core::from_accumulators(x[0], i);
      dscores[i] = Core::from_accumulators(dx[0], i);
    }
  }
  // c = keys rows^T, for the warp's 16 keys and all rows.
  __device__ __forceinline__ void multiply(float (&c)[1][kScoreTiles][4], const T* keys, const T* rows) const {
    score_product<T, kHeadDim>(
        c, [&](int, int d) { return Tile::load_a(keys, Tile::moved(places.a, d)); },
        [&](typename Core::B(&pair)[2], int n, int d) {
          Tile::load_b(pair, rows + n * 8 * kHeadDim, Tile::moved(places.b, d));
        });
  }
  // row, key: coordinates of the lane's first score. Its other scores belong to the next row and to key + 8.
  __device__ __forceinline__ void hide(float (&x)[4], float (&dx)[4], int row, int key) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int query = (row + e % 2) / plan.group;
      const Limits own = mask.keys_of(query, query + 1);
      if (key + e / 2 * 8 < own.begin || key + e / 2 * 8 >= own.end) x[e] = dx[e] = 0;
    }
  }

  // Computes and stores the rows of dk or dv of the warp's keys: of_rows (P^T or dS^T) times `rows` (dout or q).
  __device__ __forceinline__ void store_keys(const TensorView& to, int key,
                                             const typename Core::A (&of_rows)[kRowTiles], const T* rows, bool zero,
                                             float factor, int64_t columns) const {
    float sum[1][kColumnTiles][4];
    set_zero(sum[0]);
    if (!zero) {
      accumulate<T, kRowTiles>(
          sum, [&](int, int step) { return of_rows[step]; },
          [&](typename Core::B(&pair)[2], int step, int c) {
            Tile::load_b_transposed(pair, rows + step * 16 * kHeadDim, Tile::moved(places.transposed, c * 8));
          });
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = key + quad() + 8 * r;
      store_row(row_pointer<T>(to, b, head_k, row), sum[0], r, factor, zero, row < p.seqlen_k,
                static_cast<int>(columns));
    }
  }

  // Transposes dS^T of 16 rows to dS: transposes each 8 x 8 block and swaps the off-diagonal blocks.
  static __device__ __forceinline__ typename Core::A transposed(const typename Core::A& a) {
    return {{ptx::transpose_8x8(a.x[0]), ptx::transpose_8x8(a.x[2]), ptx::transpose_8x8(a.x[1]),
             ptx::transpose_8x8(a.x[3])}};
  }
  __device__ __forceinline__ void give_dscores(const typename Core::A (&dscores)[kRowTiles]) const {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      const typename Core::A rows = transposed(dscores[i]);
      shared.dscores[warp()][i][lane()] = make_uint4(rows.x[0], rows.x[1], rows.x[2], rows.x[3]);
    }
  }

  // dq += dS K, for the 16 keys of any warp and the columns of this warp.
  __device__ __forceinline__ void add_keys(const T* keys, const typename Core::A& rows) {
    const int place = Tile::moved(places.transposed, first_column());
    accumulate<T, 1>(
        dq, [&](int, int) { return rows; },
        [&](typename Core::B(&pair)[2], int, int c) {
          Tile::load_b_transposed(pair, keys, Tile::moved(place, c * 8));
        });
  }

  // The partial dq of a part: [rows][kHeadDim].
  __device__ __forceinline__ float* part_sums(int part) const {
    const int64_t task = int64_t{b} * p.heads_k + head_k;
    return plan.dq + (task * plan.parts + part) * plan.rows * kHeadDim;
  }
  // x: the lane's accumulators of a 16 x 8 tile.
  __device__ __forceinline__ void store_tile(float* to, int tile_row, int tile_column, const float4& x) const {
    const int row = tile_row + quad(), column = tile_column + 2 * lane_in_quad();
    if (row < plan.rows) *reinterpret_cast<float2*>(to + row * kHeadDim + column) = make_float2(x.x, x.y);
    if (row + 8 < plan.rows) *reinterpret_cast<float2*>(to + (row + 8) * kHeadDim + column) = make_float2(x.z, x.w);
  }
  __device__ __forceinline__ float4 own_sums(int c) const {
    return make_float4(dq[0][c][0], dq[0][c][1], dq[0][c][2], dq[0][c][3]);
  }

  __device__ __forceinline__ void store_own_sums(int part) const {
#pragma unroll
    for (int c = 0; c < kSumTiles; ++c) {
      store_tile(part_sums(part), row_tile() * 16, first_column() + c * 8, own_sums(c));
    }
  }
  // Without an exchange: sums the dq accumulators of the warps in order, through the memory of the rings.
  __device__ __forceinline__ void add_up_warps(int part) const {
    const auto sums = [&](int warp) -> Sums& { return *reinterpret_cast<Sums*>(shared.rings[warp]); };
    __syncwarp();
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) sums(warp())[c][lane()] = own_sums(c);
    __syncthreads();
#pragma unroll 1
    for (int c = warp(); c < kColumnTiles; c += kBackwardWarps) {
      float4 x = sums(0)[c][lane()];
#pragma unroll
      for (int w = 1; w < kBackwardWarps; ++w) {
        const float4 y = sums(w)[c][lane()];
        x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
      }
      store_tile(part_sums(part), 0, c * 8, x);
    }
  }
};

template <class T, int kHeadDim, int kRowTiles>
__global__ void __launch_bounds__(kBackwardWarps * 32, 1)
    few_queries_backward_kernel(const __grid_constant__ AttnGradParams p,
                                const __grid_constant__ BackwardWorkspace workspace,
                                const __grid_constant__ BackwardPlan plan) {
  using Kernel = FewQueriesBackward<T, kHeadDim, kRowTiles>;
  extern __shared__ __align__(128) unsigned char memory[];
  const int block = static_cast<int>(blockIdx.x);
  Kernel(p, workspace, plan, *reinterpret_cast<typename Kernel::Shared*>(memory), block / plan.parts)
      .run(block % plan.parts);
}

template <class T, int kHeadDim, int kRowTiles>
void backward(const AttnGradParams& p, const BackwardWorkspace& workspace, const BackwardPlan& plan) {
  constexpr int kSharedBytes = static_cast<int>(sizeof(typename FewQueriesBackward<T, kHeadDim, kRowTiles>::Shared));
  static_assert(kSharedBytes == shared_bytes_of({kTypeOf<T>, kHeadDim, kRowTiles, 0}));
  launch(few_queries_backward_kernel<T, kHeadDim, kRowTiles>, "few_queries_backward", p,
         p.batch * p.heads_k * plan.parts, kBackwardWarps * 32, kSharedBytes, workspace, plan);
}

}  // namespace flashattn_ext::decode
