// Adds up the parts of tasks that are split (plan.h), in the order of their keys: each part is a normalised result with
// the log-sum-exp of its keys.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../common/launch.cuh"
#include "../common/rows.cuh"
#include "../common/tensor_core.cuh"
#include "../common/tile.cuh"
#include "../common/tile_order.cuh"
#include "../ptx/math.cuh"
#include "kernels.h"

namespace flashattn_ext::decode {
namespace {

constexpr int kThreads = 256, kMostColumns = 512, kColumns = 4;  // kColumns: of a thread

// The largest, or the sum in a fixed order, of a number of each thread.
template <class Merge>
__device__ float over_block(float x, float* shared, const Merge& merge) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x = merge(x, __shfl_xor_sync(~0u, x, distance));
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  x = shared[0];
  for (int warp = 1; warp < kThreads / 32; ++warp) x = merge(x, shared[warp]);
  return x;
}

// blockIdx.x: the task; its rows are divided among the blocks of blockIdx.y. Groups of threads have a row's columns,
// and take one part after another.
template <class T>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ DecodeParams p, const __grid_constant__ Plan plan, int rows, int columns) {
  __shared__ float sums[kThreads * kColumns], of_warps[kThreads / 32];
  const SplitTask task = plan.split_tasks[blockIdx.x];
  if (task.parts == 0) return;
  const Sequence queries = query_sequence(p, task.b);
  const int group = plan.group, row0 = task.row_tile * rows;
  const int count = min(rows, static_cast<int>(queries.length) * group - row0);
  const int row_threads = columns / kColumns, groups = kThreads / row_threads;
  const int own_group = threadIdx.x / row_threads, column = threadIdx.x % row_threads * kColumns;
  for (int i = blockIdx.y; i < count; i += gridDim.y) {
    auto slot_row = [&](int n) { return static_cast<int64_t>(n == 0 ? task.first : task.next + n) * rows + i; };
    float max = -infinity();
    for (int n = threadIdx.x; n < task.parts; n += kThreads) max = fmaxf(max, plan.partial_lse[slot_row(n)]);
    max = over_block(max, of_warps, [](float a, float b) { return fmaxf(a, b); });
    auto weight_of = [&](int n) { return ptx::ex2(plan.partial_lse[slot_row(n)] - finite_max(max)); };
    float sum = 0;
    for (int n = threadIdx.x; n < task.parts; n += kThreads) sum += weight_of(n);
    sum = over_block(sum, of_warps, [](float a, float b) { return a + b; });
    float4 x{};
    if (own_group < groups) {
#pragma unroll 4
      for (int n = own_group; n < task.parts; n += groups) {
        if (plan.partial_lse[slot_row(n)] == -infinity()) continue;  // it has seen nothing
        const float weight = weight_of(n);
        const float4 y = *reinterpret_cast<const float4*>(plan.partial_out + slot_row(n) * columns + column);
        x.x += y.x * weight, x.y += y.y * weight, x.z += y.z * weight, x.w += y.w * weight;
      }
      *reinterpret_cast<float4*>(sums + own_group * columns + column) = x;
    }
    __syncthreads();
    const int64_t query = queries.start + (row0 + i) / group, head = task.head_k * group + (row0 + i) % group;
    const float factor = sum == 0 ? 0.f : 1 / sum;
    for (int c = threadIdx.x; c < static_cast<int>(p.head_dim_v); c += kThreads) {
      float total = 0;
      for (int n = 0; n < groups; ++n) total += sums[n * columns + c];
      narrow(total * factor, row_pointer<T>(p.out, task.b, head, query) + c);
    }
    if (threadIdx.x == 0) {
      *row_statistic(p.lse, task.b, head, query) = sum == 0 ? -infinity() : row_lse(finite_max(max), log2f(sum));
    }
    __syncthreads();
  }
}

}  // namespace

template <class T>
void combine(const DecodeParams& p, const Plan& plan, int64_t tasks, int rows, int columns) {
  // Few tasks have many parts each: then a block has one row.
  constexpr int64_t kFewTasks = 256;
  static_assert(kThreads * kColumns >= kMostColumns);
  const int64_t all = p.batch * p.heads_k * tile_count(p.seqlen_q * p.group_size(), rows);
  const int64_t used = std::min<int64_t>(rows, p.seqlen_q * p.group_size());
  const dim3 grid(static_cast<unsigned>(tasks),
                  static_cast<unsigned>(all < kFewTasks ? std::max<int64_t>(1, used) : 1));
  combine_kernel<T><<<grid, kThreads, 0, static_cast<cudaStream_t>(p.stream)>>>(p, plan, rows, columns);
  check_launch(cudaGetLastError(), "decode_combine", p);
}

template void combine<float>(const DecodeParams&, const Plan&, int64_t, int, int);
template void combine<__half>(const DecodeParams&, const Plan&, int64_t, int, int);
template void combine<__nv_bfloat16>(const DecodeParams&, const Plan&, int64_t, int, int);

}  // namespace flashattn_ext::decode
