// The backward with few queries: which calls it supports, its launches, and the kernel that sums dq.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <array>
#include <utility>

#include "../common/backward_finish.cuh"
#include "../common/backward_prepare.cuh"
#include "../table/kernel_table.h"
#include "backward_plan.h"
#include "few_rows.h"

namespace flashattn_ext::decode {
namespace {

constexpr int kStepKeys = kBackwardWarps * 16;

struct BackwardKernel {
  int columns = 0;
  int (*shared_bytes)() = nullptr;
  void (*run)(const AttnGradParams&, const BackwardWorkspace&, const BackwardPlan&) = nullptr;
};

// The entry points of one row of the table of kernels for one element type.
template <class T, size_t kRow>
constexpr BackwardKernel of_row() {
  constexpr FewRowsRow row = kernel_table::kFewRowsBackward[kRow];
  if constexpr (row.types & kTypeOf<T>) {
    return {row.head_dim, backward_shared_bytes<T, row.head_dim, row.row_tiles>,
            backward<T, row.head_dim, row.row_tiles>};
  } else {
    return {};
  }
}
template <class T, size_t... kRow>
constexpr std::array<BackwardKernel, sizeof...(kRow)> of_rows(std::index_sequence<kRow...>) {
  return {of_row<T, kRow>()...};
}

// The kernel of the first row that serves the call; without a kernel if no row does.
BackwardKernel kernel_of(const AttnGradParams& p) {
  using Rows = std::make_index_sequence<std::size(kernel_table::kFewRowsBackward)>;
  static constexpr auto kHalf = of_rows<__half>(Rows()), kBfloat = of_rows<__nv_bfloat16>(Rows());
  const int64_t rows = p.seqlen_q * p.group_size();
  for (size_t i = 0; i < kHalf.size(); ++i) {
    const FewRowsRow& row = kernel_table::kFewRowsBackward[i];
    if (!(row.types & type_bit(p.dtype)) || std::max(p.head_dim, p.head_dim_v) > row.head_dim) continue;
    if (rows <= 16 * row.row_tiles) return (p.dtype == DType::kFloat16 ? kHalf : kBfloat)[i];
  }
  return {};
}

// The workspace of the row statistics, without the dq accumulators that the other backward kernels need.
BackwardWorkspace rows_of(const AttnGradParams& p) { return BackwardWorkspace(p, 16, 0, 0); }

// Chooses the KV splits from the shapes of one sequence: its results are bit-identical in every batch, and one sequence
// alone keeps the GPU busy.
BackwardPlan plan_of(const AttnGradParams& p, const BackwardKernel& kernel, const BackwardWorkspace& workspace) {
  constexpr int64_t kReservedBytes = 1024;  // reserved by the driver per thread block
  const int64_t shared = device_attribute<cudaDevAttrMaxSharedMemoryPerMultiprocessor>();
  const int64_t at_once = std::min<int64_t>(2, shared / (kernel.shared_bytes() + kReservedBytes)) * multiprocessors();
  const int64_t wanted = std::max<int64_t>(1, at_once / p.heads_k);
  // Long parts amortise prologue and epilogue, but at least half of the wanted parts must remain. On an H200, parts of
  // 1024 keys reach 0.81 of the bandwidth of a device copy in large batches, and parts of 512 keys 0.76.
  constexpr int64_t kLeastKeys = 256, kLongKeys = 1024;
  const int64_t long_keys = std::max(kLeastKeys, std::min(kLongKeys, 2 * p.seqlen_k / wanted));
  const int64_t keys = std::max((p.seqlen_k + wanted - 1) / wanted, long_keys);
  const int64_t part_keys = (keys + kStepKeys - 1) / kStepKeys * kStepKeys;
  BackwardPlan plan{};
  plan.group = static_cast<int>(p.group_size());
  plan.rows = static_cast<int>(p.seqlen_q * p.group_size());
  plan.part_keys = static_cast<int>(part_keys);
  plan.parts = static_cast<int>((p.seqlen_k + part_keys - 1) / part_keys);
  plan.dq = reinterpret_cast<float*>(static_cast<char*>(p.workspace) + workspace.bytes);
  return plan;
}

constexpr int kSumThreads = 256, kSumsAtOnce = 8;

// Sums the partial dq of packed row blockIdx.x over the parts. The threads form n groups: a group covers all columns
// and sums every n-th part.
template <class T>
__global__ void __launch_bounds__(kSumThreads)
    sum_parts_kernel(const __grid_constant__ AttnGradParams p, const __grid_constant__ BackwardPlan plan, int columns,
                     float scale) {
  __shared__ float4 sums[kSumThreads];
  const int64_t task = blockIdx.x / plan.rows;
  const int row = static_cast<int>(blockIdx.x % plan.rows), thread = static_cast<int>(threadIdx.x);
  const int row_threads = columns / 4, groups = kSumThreads / row_threads;
  const float4* const from = reinterpret_cast<const float4*>(plan.dq + (task * plan.parts * plan.rows + row) * columns);
  const int64_t stride = int64_t{plan.rows} * row_threads;
  float4 sum{};
  for (int first = thread / row_threads; first < plan.parts; first += kSumsAtOnce * groups) {
    float4 x[kSumsAtOnce];
#pragma unroll
    for (int i = 0; i < kSumsAtOnce; ++i) {
      const int part = first + i * groups;
      x[i] = part < plan.parts ? from[part * stride + thread % row_threads] : float4{};
    }
#pragma unroll
    for (int i = 0; i < kSumsAtOnce; ++i) sum.x += x[i].x, sum.y += x[i].y, sum.z += x[i].z, sum.w += x[i].w;
  }
  sums[thread] = sum;
  __syncthreads();
  const int query = row / plan.group;
  const int64_t b = task / p.heads_k, head = task % p.heads_k * plan.group + row % plan.group;
  for (int column = thread; column < p.head_dim; column += kSumThreads) {
    float total = 0;
    for (int i = 0; i < groups; ++i) total += reinterpret_cast<const float*>(sums + i * row_threads)[column];
    narrow(total * scale, row_pointer<T>(p.dq, b, head, query) + column);
  }
}

template <class T>
void run(const AttnGradParams& p) {
  const BackwardKernel kernel = kernel_of(p);
  const BackwardWorkspace workspace = rows_of(p);
  const BackwardPlan plan = plan_of(p, kernel, workspace);
  launch_prepare<T>(p, workspace);
  kernel.run(p, workspace, plan);
  launch(sum_parts_kernel<T>, "few_rows_backward (dq)", p, p.batch * p.heads_k * plan.rows, kSumThreads, 0, plan,
         kernel.columns, workspace.gradient_scale);
  launch_dsink(p, workspace);
}

}  // namespace

bool is_few_rows(const AttnGradParams& p) {
  constexpr int64_t kLeastKeys = 512;
  if (p.softcap > 0 || p.has_bias() || p.has_intervals() || p.has_dropout()) return false;
  // The packed rows of a KV head must fit in a tile, but a varlen sequence may have more queries than max_seqlen_q.
  if (p.is_varlen() || p.seqlen_q == 0 || p.seqlen_k < kLeastKeys) return false;
  // On an H200 the kernels for many queries reach 0.70 of the bandwidth of a copy with 64 queries of heads of 128 that
  // have their own keys, and these 0.57; with 32 queries 0.72 and 0.81.
  const bool fills_tiles = p.group_size() == 1 && p.seqlen_q > 32 && std::max(p.head_dim, p.head_dim_v) > 64;
  if (fills_tiles && compute_capability() == 90) return false;
  const BackwardKernel kernel = kernel_of(p);
  return kernel.run && kernel.shared_bytes() <= most_shared_memory();
}

size_t few_rows_bytes(const AttnGradParams& p) {
  const BackwardKernel kernel = kernel_of(p);
  const BackwardWorkspace workspace = rows_of(p);
  const BackwardPlan plan = plan_of(p, kernel, workspace);
  const int64_t sums = p.batch * p.heads_k * plan.parts * plan.rows * kernel.columns * 4;
  return static_cast<size_t>(workspace.bytes + sums);
}

void run_few_rows(const AttnGradParams& p) { p.dtype == DType::kFloat16 ? run<__half>(p) : run<__nv_bfloat16>(p); }

}  // namespace flashattn_ext::decode
