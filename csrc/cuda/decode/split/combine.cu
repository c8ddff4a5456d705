// Combines the partial results of split tasks (plan.h), in the order of their keys. A partial result is a normalised
// output with the maximum and the sum of the weights of its keys.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/decode/split/kernels.h"
#include "cuda/host/call.h"
#include "cuda/host/launch.cuh"
#include "cuda/ptx/async.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/rows.cuh"
#include "cuda/tile/tile.cuh"
#include "cuda/tile/warp.cuh"

namespace flashattn_ext::decode {
namespace {

constexpr int kColumns = 4;        // per thread
constexpr int kMostThreads = 512;  // threads for a row, and threads of a thread block
constexpr int kAtOnce = 4;         // parts that a thread loads before it accumulates them

// One thread's columns of kAtOnce parts of a row, and the sums of these parts; 0 past the last part.
struct PartColumns {
  float4 x[kAtOnce];
  RowSum sums[kAtOnce];
};

// blockIdx.x: the task; blockIdx.y: `rows_at_once` of its rows, each with an equal number of the thread block's warps.
// The threads of a row form n groups: a group covers all columns and accumulates every n-th part. The kernel is bound
// by latency, so a thread loads its first parts in advance, and every warp computes the maximum and the sum over all
// parts redundantly instead of exchanging them.
// kHeads: KV heads of the task, whose rows alternate.
template <class T, int kHeads>
__global__ void __launch_bounds__(kMostThreads)
    combine_kernel(const __grid_constant__ DecodeParams p, const __grid_constant__ Plan plan, int rows, int columns,
                   int rows_at_once) {
  extern __shared__ __align__(16) unsigned char shared[];
  ptx::wait_for_previous_kernel();
  ptx::let_next_kernel_start();
  const SplitTask task = plan.split_tasks[blockIdx.x];
  if (task.parts == 0) return;
  const Sequence queries = query_sequence(p, task.b);
  const int threads = static_cast<int>(blockDim.x) / rows_at_once, row = static_cast<int>(threadIdx.x) / threads;
  const int thread = static_cast<int>(threadIdx.x) % threads, lane = thread % 32;
  const int group = plan.group, i = static_cast<int>(blockIdx.y) * rows_at_once + row;
  const int key_head = task.head_k * kHeads + i % kHeads, head_row = task.row_tile * (rows / kHeads) + i / kHeads;
  const bool row_exists = i < rows && head_row < static_cast<int>(queries.length) * group;
  const int count = row_exists ? task.parts : 0;

  const int row_threads = columns / kColumns, groups = threads / row_threads, own_group = thread / row_threads;
  float* const sums = reinterpret_cast<float*>(shared) + row * groups * columns;  // [groups][columns]
  const int column = thread % row_threads * kColumns;
  auto slot_row = [&](int n) { return static_cast<int64_t>(n == 0 ? task.first : task.next + n) * rows + i; };
  PartColumns parts;
  auto load = [&](int first) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int n = first + k * groups;
      const bool exists = own_group < groups && n < count;
      const int64_t row = slot_row(exists ? n : 0);
      parts.sums[k] = exists ? plan.partial_sums[row] : RowSum{-infinity(), 0};
      parts.x[k] = exists && column < static_cast<int>(p.head_dim_v)
                       ? *reinterpret_cast<const float4*>(plan.partial_out + row * columns + column)
                       : float4{};
    }
  };
  load(own_group);

  float max = -infinity(), sum = 0;
  for (int n = lane; n < count; n += 32) max = fmaxf(max, plan.partial_sums[slot_row(n)].max);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, distance));
  auto weight_of = [&](const RowSum& part) { return part.sum * ptx::ex2(part.max - finite_max(max)); };
  for (int n = lane; n < count; n += 32) sum += weight_of(plan.partial_sums[slot_row(n)]);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);

  float4 x{};
  for (int first = own_group;;) {
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const float weight = weight_of(parts.sums[k]);
      x.x += parts.x[k].x * weight, x.y += parts.x[k].y * weight;
      x.z += parts.x[k].z * weight, x.w += parts.x[k].w * weight;
    }
    first += kAtOnce * groups;
    if (first >= count) break;
    load(first);
  }
  if (own_group < groups) *reinterpret_cast<float4*>(sums + own_group * columns + column) = x;
  __syncthreads();
  if (!row_exists) return;
  const int64_t query = queries.start + head_row / group, head = key_head * group + head_row % group;
  const float factor = sum == 0 ? 0.f : 1 / sum;
  for (int c = thread; c < static_cast<int>(p.head_dim_v); c += threads) {
    float total = 0;
    for (int n = 0; n < groups; ++n) total += sums[n * columns + c];
    narrow(total * factor, row_pointer<T>(p.out, task.b, head, query) + c);
  }
  if (thread == 0) {
    store_lse(p, task.b, head, query, max, sum);
    if (p.row_maxima.data == nullptr) return;
    float largest = -infinity();
    for (int n = 0; n < count; ++n) largest = fmaxf(largest, plan.partial_largest[slot_row(n)]);
    store_largest(p, task.b, head, query, largest);
  }
}

}  // namespace

template <class T>
void combine(const DecodeParams& p, const Plan& plan, int64_t tasks, int rows, int columns) {
  // A row has the threads that load all of its parts at once, but where so many rows fill the GPU one or a few warps.
  // The sums of a row depend on that, so the choice does not depend on the batch where parts do not.
  constexpr int64_t kManyRows = 64, kLeastThreads = 128;
  const int64_t parts = plan.most_parts > 0 ? plan.most_parts : (plan.blocks + tasks - 1) / tasks + 1;
  const int64_t groups = rows >= kManyRows ? 1 : (parts + kAtOnce - 1) / kAtOnce;
  const int64_t of_row = std::min<int64_t>((groups * (columns / kColumns) + 31) / 32 * 32, kMostThreads);
  const int rows_at_once = static_cast<int>(std::max<int64_t>(1, kLeastThreads / of_row));
  const int threads = rows_at_once * static_cast<int>(of_row);
  const int64_t used = std::max<int64_t>(1, std::min<int64_t>(rows, query_rows(p) * p.group_size()));
  const dim3 grid(static_cast<unsigned>(tasks), static_cast<unsigned>((used + rows_at_once - 1) / rows_at_once));
  // in_groups has made one KV head of two.
  const auto kernel = p.group_size() == 2 * plan.group ? combine_kernel<T, 2> : combine_kernel<T, 1>;
  launch_early(kernel, "decode_combine", p, grid, threads, threads * kColumns * static_cast<int>(sizeof(float)), p,
               plan, rows, columns, rows_at_once);
}

template void combine<float>(const DecodeParams&, const Plan&, int64_t, int, int);
template void combine<__half>(const DecodeParams&, const Plan&, int64_t, int, int);
template void combine<__nv_bfloat16>(const DecodeParams&, const Plan&, int64_t, int, int);

}  // namespace flashattn_ext::decode
