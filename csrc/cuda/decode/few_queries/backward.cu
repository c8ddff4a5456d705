// The backward with few queries: how it divides a call, its launches, and the kernel that sums dq.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/decode/few_queries/backward.h"
#include "cuda/decode/few_queries/backward_plan.h"
#include "cuda/ptx/async.cuh"
#include "cuda/stages/backward_finish.cuh"
#include "cuda/stages/backward_workspace.h"

namespace flashattn_ext::decode {
namespace {

constexpr int kStepKeys = kBackwardWarps * 16;

// The workspace of the row statistics, without the dq accumulators that the other backward kernels need.
BackwardWorkspace rows_of(const AttnGradParams& p) { return BackwardWorkspace(p, 16, 0, 0); }

// Chooses the KV splits from the shapes of one sequence: its results are bit-identical in every batch, and one sequence
// alone keeps the GPU busy.
BackwardPlan plan_of(const AttnGradParams& p, const FewQueriesKernel& kernel, const BackwardWorkspace& workspace) {
  constexpr int64_t kReservedBytes = 1024;  // reserved by the driver per thread block
  const int64_t shared = shared_memory_of_multiprocessor();
  const int64_t blocks =
      kernel.shared_bytes > 0 ? std::min<int64_t>(2, shared / (kernel.shared_bytes + kReservedBytes)) : 1;
  const int64_t at_once = blocks * multiprocessors();
  const int64_t wanted = std::max<int64_t>(1, at_once / p.heads_k);
  // Long parts amortise prologue and epilogue, but at least half of the wanted parts must remain. On an H200, parts of
  // 1024 keys reach 0.81 of the bandwidth of a device copy in large batches, and parts of 512 keys 0.76. A kernel with
  // all of the shared memory loads a part while it computes another: there only the partial dq costs time.
  constexpr int64_t kLeastKeys = 256, kLongKeys = 1024, kKeysOfRow = 16;
  const int64_t rows = p.seqlen_q * p.group_size();
  const int64_t enough = kernel.shared_bytes > 0 ? kLongKeys : std::min(kLongKeys, kKeysOfRow * rows);
  const int64_t long_keys = std::max(kLeastKeys, std::min(enough, 2 * p.seqlen_k / wanted));
  const int64_t keys = std::max((p.seqlen_k + wanted - 1) / wanted, long_keys);
  const int64_t part_keys = (keys + kStepKeys - 1) / kStepKeys * kStepKeys;
  BackwardPlan plan{};
  plan.group = static_cast<int>(p.group_size());
  plan.rows = static_cast<int>(rows);
  plan.part_keys = static_cast<int>(part_keys);
  plan.parts = static_cast<int>((p.seqlen_k + part_keys - 1) / part_keys);
  plan.dq = reinterpret_cast<float*>(static_cast<char*>(p.workspace) + workspace.bytes);
  return plan;
}

constexpr int kSumThreads = 256, kSumsAtOnce = 8;

// The threads of a row: `groups` groups, each of which covers all columns and sums every groups-th part.
struct SumPlan {
  int columns, groups;
  __host__ __device__ int row_threads() const { return columns / 4; }
  __host__ __device__ int rows() const { return kSumThreads / (row_threads() * groups); }  // rows of a thread block
};

// Few parts need no second round of loads.
SumPlan sum_plan_of(const FewQueriesKernel& kernel, const BackwardPlan& plan) {
  SumPlan sums{kernel.columns, 1};
  while (plan.parts > 2 * kSumsAtOnce * sums.groups && sums.rows() > 1) sums.groups *= 2;
  return sums;
}

// Sums the partial dq of rows over the parts.
template <class T>
__global__ void __launch_bounds__(kSumThreads)
    sum_parts_kernel(const __grid_constant__ AttnGradParams p, const __grid_constant__ BackwardPlan plan,
                     const __grid_constant__ SumPlan sums, float scale) {
  __shared__ float4 partial[kSumThreads];
  const int thread = static_cast<int>(threadIdx.x), row_threads = sums.row_threads();
  const int vector = thread % row_threads, group = thread / row_threads % sums.groups;
  const int64_t index = int64_t{blockIdx.x} * sums.rows() + thread / (row_threads * sums.groups);
  const int64_t task = index / plan.rows;
  const int row = static_cast<int>(index % plan.rows);
  const bool exists = task < p.batch * p.heads_k;
  const float4* const from =
      reinterpret_cast<const float4*>(plan.dq + (task * plan.parts * plan.rows + row) * sums.columns) + vector;
  const int64_t stride = int64_t{plan.rows} * row_threads;
  float4 sum{};
  ptx::wait_for_previous_kernel();
  for (int first = group; first < plan.parts; first += kSumsAtOnce * sums.groups) {
    float4 x[kSumsAtOnce];
#pragma unroll
    for (int i = 0; i < kSumsAtOnce; ++i) {
      const int part = first + i * sums.groups;
      x[i] = exists && part < plan.parts ? from[part * stride] : float4{};
    }
#pragma unroll
    for (int i = 0; i < kSumsAtOnce; ++i) sum.x += x[i].x, sum.y += x[i].y, sum.z += x[i].z, sum.w += x[i].w;
  }
  partial[thread] = sum;
  __syncthreads();
  if (group > 0 || !exists) return;
  for (int i = 1; i < sums.groups; ++i) {
    const float4 x = partial[thread + i * row_threads];
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  const int query = row / plan.group;
  const int64_t b = task / p.heads_k, head = task % p.heads_k * plan.group + row % plan.group;
  T* const to = row_pointer<T>(p.dq, b, head, query);
  const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (vector * 4 + e < p.head_dim) narrow(values[e] * scale, to + vector * 4 + e);
  }
}

template <class T>
void run(const AttnGradParams& p, const FewQueriesKernel& kernel) {
  const BackwardWorkspace workspace = rows_of(p);
  const BackwardPlan plan = plan_of(p, kernel, workspace);
  launch_prepare<T>(p, workspace);
  kernel.run(p, workspace, plan);
  constexpr const char* kName = "few_queries_backward (dq)";
  const SumPlan sums = sum_plan_of(kernel, plan);
  const int64_t rows = p.batch * p.heads_k * plan.rows;
  launch_early(sum_parts_kernel<T>, kName, p, row_of_blocks((rows + sums.rows() - 1) / sums.rows(), kName, p),
               kSumThreads, 0, p, plan, sums, workspace.gradient_scale);
  launch_dsink(p, workspace);
}

}  // namespace

size_t few_queries_backward_bytes(const AttnGradParams& p, const FewQueriesKernel& kernel) {
  const BackwardWorkspace workspace = rows_of(p);
  const BackwardPlan plan = plan_of(p, kernel, workspace);
  const int64_t sums = p.batch * p.heads_k * plan.parts * plan.rows * kernel.columns * 4;
  return static_cast<size_t>(workspace.bytes + sums);
}

void run_few_queries_backward(const AttnGradParams& p, const FewQueriesKernel& kernel) {
  p.dtype == DType::kFloat16 ? run<__half>(p, kernel) : run<__nv_bfloat16>(p, kernel);
}

}  // namespace flashattn_ext::decode
