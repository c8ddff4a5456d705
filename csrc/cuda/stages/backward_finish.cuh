// Last stage of the backward: dq from its fp32 sums, and the gradient of the sink, minus the sum of its weights times
// delta over all rows of a head in a fixed order.
#pragma once

#include "cuda/host/launch.cuh"
#include "cuda/ptx/async.cuh"
#include "cuda/stages/backward_workspace.h"
#include "cuda/tile/operand_tile.cuh"
#include "cuda/tile/warp.cuh"

namespace flashattn_ext {

// Layout: the order of the sums in the workspace, which is the fragment order of the main stage's accumulators
// (backward.cuh of either architecture). A thread block converts kQueries rows, which are kQueries / kTileRows tiles of
// dq.
template <class Layout>
__global__ void __launch_bounds__(Layout::kThreads)
    dq_finish_kernel(const __grid_constant__ AttnGradParams p, const __grid_constant__ BackwardWorkspace workspace,
                     int blocks) {
  using T = typename Layout::Element;
  constexpr int kStride = kTileStride<T, Layout::kHeadDim>;
  extern __shared__ __align__(16) unsigned char memory[];
  T* const tile = reinterpret_cast<T*>(memory);
  ptx::wait_for_previous_kernel();
  const int head = blockIdx.x / blocks, heads = static_cast<int>(p.heads_q), b = head / heads, h = head % heads;
  const Sequence queries = query_sequence(p, b);
  for (int64_t m = blockIdx.x % blocks; m * Layout::kQueries < queries.length; m += blocks) {
    const int64_t index =
        h * workspace.tiles + workspace.first_tile(p, b, queries) + m * (Layout::kQueries / Layout::kTileRows);
#pragma unroll
    for (int split = 0; split < Layout::kSplits; ++split) {
#pragma unroll
      for (int i = 0; i < Layout::kQueryRowTiles; ++i) {
#pragma unroll
        for (int c = 0; c < Layout::kQueryColumnTiles; ++c) {
          float x[4] = {};
          if (m * Layout::kQueries + Layout::query_row() + i * 16 < queries.length) {
            ptx::load_fragment(x, Layout::dq_fragment(workspace, index, split, i, c));
          }
          T* to = tile + (Layout::query_row() + i * 16 + quad()) * kStride + Layout::query_column(split) + c * 8 +
                  2 * lane_in_quad();
          TensorCore<T>::store_pair(to, x[0] * workspace.gradient_scale, x[1] * workspace.gradient_scale);
          TensorCore<T>::store_pair(to + 8 * kStride, x[2] * workspace.gradient_scale, x[3] * workspace.gradient_scale);
        }
      }
    }
    __syncthreads();
    store_tile<PaddedTile<T, Layout::kHeadDim>, Layout::kQueries, Layout::kHeadDim, Layout::kThreads>(
        row_pointer<T>(p.dq, b, h, queries.start + m * Layout::kQueries), p.dq.row_stride, tile,
        static_cast<int>(min(int64_t{Layout::kQueries}, queries.length - m * Layout::kQueries)),
        static_cast<int>(p.head_dim));
    __syncthreads();
  }
}

constexpr int kSinkThreads = 512;

// What the gradient of a sink sums up beside the weight of the sink: delta of row `at` of the workspace.
struct DeltaOfRow {
  __device__ __forceinline__ double operator()(const AttnGradParams&, const BackwardWorkspace& workspace, int64_t,
                                               int64_t, int64_t, int64_t at) const {
    return workspace.delta[at];
  }
};

// The gradient of the sink of a head: minus the sum of the weight of the sink times `term`, over its rows in a fixed
// order.
template <class Params, class Term>
__global__ void __launch_bounds__(kSinkThreads)
    dsink_kernel(const __grid_constant__ Params p, const __grid_constant__ BackwardWorkspace workspace, Term term) {
  __shared__ double part[kSinkThreads];
  const int64_t h = blockIdx.x;
  const float sink = static_cast<const float*>(p.sink)[h];
  double sum = 0;
  for (int64_t i = threadIdx.x; sink_counts(sink) && i < workspace.rows; i += kSinkThreads) {
    const int64_t b = p.is_varlen() ? 0 : i / p.seqlen_q, row = p.is_varlen() ? i : i % p.seqlen_q;
    const auto words = LseWords<float>::of(p, b, h, row);
    if (words.is_of_no_key()) continue;  // a packed row that belongs to no sequence
    sum -= static_cast<double>(exp2f(words.sink_log2_weight(sink))) *
           term(p, workspace, b, h, row, h * workspace.rows + i);
  }
  part[threadIdx.x] = sum;
  for (int half = kSinkThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
  }
  if (threadIdx.x == 0) static_cast<float*>(p.dsink)[h] = static_cast<float>(part[0] * workspace.keep_scale);
}

// The function templates that launch kernels of this header are static, as the stubs of the kernels are: a source calls
// the kernels that it has compiled. Of a function with external linkage the linker would keep one of all sources, some
// of which are compiled for other architectures alone, where sums have another order (ptx/memory.cuh).
template <class Params, class Term>
static void launch_dsink(const Params& p, const BackwardWorkspace& workspace, const char* stage, Term term) {
  if (!p.dsink) return;
  launch(dsink_kernel<Params, Term>, stage, p, p.heads_q, kSinkThreads, 0, workspace, term);
}
// The gradients of the sinks of the ordinary backward.
void launch_dsink(const AttnGradParams& p, const BackwardWorkspace& workspace);

// dq alone.
template <class Layout>
static void launch_dq_finish(const AttnGradParams& p, const BackwardWorkspace& workspace) {
  const int64_t blocks = tile_count(p.seqlen_q, Layout::kQueries);
  launch_early(dq_finish_kernel<Layout>, "backward_finish", p,
               row_of_blocks(blocks * p.batch * p.heads_q, "backward_finish", p), Layout::kThreads,
               Layout::kQueries * kTileStride<typename Layout::Element, Layout::kHeadDim> *
                   static_cast<int>(sizeof(typename Layout::Element)),
               p, workspace, static_cast<int>(blocks));
}

template <class Layout>
static void launch_finish(const AttnGradParams& p, const BackwardWorkspace& workspace) {
  launch_dq_finish<Layout>(p, workspace);
  launch_dsink(p, workspace);
}

}  // namespace flashattn_ext
