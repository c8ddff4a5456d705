// The kernels of the last stage of the backward that depend on no tile: gradients of sinks and of biases. Each source
// of a backward would compile them again.
#include "cuda/host/launch.cuh"
#include "cuda/stages/backward_finish.cuh"
#include "cuda/stages/backward_workspace.h"
#include "cuda/tile/rows.cuh"
#include "cuda/tile/tile.cuh"

namespace flashattn_ext {

void launch_dsink(const AttnGradParams& p, const BackwardWorkspace& workspace) {
  launch_dsink(p, workspace, "backward_finish (sink)", DeltaOfRow());
}

constexpr int kBiasFinishThreads = 256;

// This thread's partial sum over rows [begin, end) of a head, in the order of the workspace: a centre of the row times
// the sum of the gradients of the row's logits.
static __device__ __forceinline__ double sum_of_centres(const AttnGradParams& p, const GeneralWorkspace& workspace,
                                                        int h, int which, int64_t begin, int64_t end) {
  if (!p.centres.data || !(p.has_sink || p.dlse.data)) return 0;
  const float sink = p.sink ? static_cast<const float*>(p.sink)[h] : 0.f;
  double sum = 0;
  for (int64_t i = begin + threadIdx.x; i < end; i += kBiasFinishThreads) {
    const int64_t b = p.is_varlen() ? 0 : i / p.seqlen_q, row = p.is_varlen() ? i : i % p.seqlen_q;
    const auto words = LseWords<float>::of(p, b, h, row);
    if (words.is_of_no_key()) continue;
    float gradient = p.dlse.data ? *row_statistic(p.dlse, b, h, row) : 0.f;
    if (p.has_sink && sink_counts(sink)) {
      gradient += exp2f(words.sink_log2_weight(sink)) * workspace.delta[h * workspace.rows + i] * workspace.keep_scale;
    }
    sum += static_cast<double>(row_pointer<const float>(p.centres, b, h, row)[which]) * gradient;
  }
  return sum;
}

// Adds up the sums that warps have written. A thread block handles one head and, where slopes differ between batch
// entries, one entry.
static __global__ void __launch_bounds__(kBiasFinishThreads)
    bias_finish_kernel(const __grid_constant__ AttnGradParams p, const __grid_constant__ GeneralWorkspace workspace,
                       int entries) {
  __shared__ double part[kBiasFinishThreads];
  const int h = static_cast<int>(blockIdx.x % p.heads_q), entry = static_cast<int>(blockIdx.x / p.heads_q);
  const float* const from = workspace.sums + h * workspace.key_tiles * workspace.parts * GeneralWorkspace::kSums;
#pragma unroll 1
  for (int which = 0; which < GeneralWorkspace::kSums; ++which) {
    int64_t begin = 0, end = workspace.key_tiles, first_row = 0, last_row = workspace.rows;
    if (which == 0 && entries > 1) {
      begin = workspace.first_key_tile(p, entry, key_sequence(p, entry));
      if (entry + 1 < entries) end = workspace.first_key_tile(p, entry + 1, key_sequence(p, entry + 1));
      const Sequence queries = query_sequence(p, entry);
      first_row = p.is_varlen() ? queries.start : entry * p.seqlen_q;
      last_row = first_row + queries.length;
    } else if (which > 0 && entry > 0) {
      return;  // all entries share the relative bias; the first thread block of the head adds them up
    }
    double sum = 0;
    for (int64_t i = begin * workspace.parts + threadIdx.x; i < end * workspace.parts; i += kBiasFinishThreads) {
      sum += from[i * GeneralWorkspace::kSums + which];
    }
    part[threadIdx.x] = sum * workspace.keep_scale + sum_of_centres(p, workspace, h, which, first_row, last_row);
    for (int half = kBiasFinishThreads / 2; half > 0; half /= 2) {
      __syncthreads();
      if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    if (threadIdx.x == 0) {  // thread 0 has written part[0]; other threads may not read it without a barrier
      const float total = static_cast<float>(part[0]);
      if (which == 0 && p.dalibi_slopes) {
        static_cast<float*>(p.dalibi_slopes)[entry * p.alibi_batch_stride + h] = -total;
      }
      if (which > 0 && p.drelative_bias) {
        float* const row = static_cast<float*>(p.drelative_bias) + h * (2 * p.relative_reach + 1);
        row[which == 1 ? 0 : 2 * p.relative_reach] += total;
      }
    }
    __syncthreads();
  }
}

// Deterministic calls: adds the exact sums to the gradient of the relative bias, one entry per thread.
static __global__ void __launch_bounds__(kBiasFinishThreads)
    relative_finish_kernel(const __grid_constant__ AttnGradParams p, const __grid_constant__ GeneralWorkspace workspace,
                           int64_t entries) {
  const int64_t i = blockIdx.x * int64_t{kBiasFinishThreads} + threadIdx.x;
  if (i >= entries) return;
  static_cast<float*>(p.drelative_bias)[i] +=
      static_cast<float>(workspace.relative_sums[i].total() * workspace.keep_scale);
}

void finish_biases(const AttnGradParams& p, const GeneralWorkspace& workspace) {
  if (!workspace.sums) return;
  const int entries = p.alibi_slopes && p.alibi_batch_stride != 0 ? static_cast<int>(p.batch) : 1;
  launch(bias_finish_kernel, "backward_finish (biases)", p, p.heads_q * entries, kBiasFinishThreads, 0, workspace,
         entries);
  if (!workspace.relative_sums) return;
  const int64_t elements = p.heads_q * (2 * p.relative_reach + 1);
  launch(relative_finish_kernel, "backward_finish (relative bias)", p,
         (elements + kBiasFinishThreads - 1) / kBiasFinishThreads, kBiasFinishThreads, 0, workspace, elements);
}

}  // namespace flashattn_ext
