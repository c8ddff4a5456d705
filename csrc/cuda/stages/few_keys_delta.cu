#include "cuda/host/launch.cuh"
#include "cuda/score/large_rows.cuh"
#include "cuda/stages/backward_workspace.h"
#include "cuda/table/options.h"
#include "cuda/tile/rows.cuh"
#include "cuda/tile/tile.cuh"
#include "cuda/tile/warp.cuh"
#include "rules/bias.h"

namespace flashattn_ext {
namespace {

constexpr int kFewKeysThreads = 256, kWarps = kFewKeysThreads / 32;

template <class T>
__device__ float dot(const T* a, const T* b, int columns) {
  float sum = 0;
  for (int c = 0; c < columns; ++c) sum += widen(a[c]) * widen(b[c]);
  return sum;
}

__device__ float sum_of_keys(float x) {
#pragma unroll
  for (int distance = kFewKeys / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}

// A warp computes a row: lane j the product of q and key j, lane kFewKeys + j that of dout and value j.
template <class T>
__global__ void __launch_bounds__(kFewKeysThreads)
    few_keys_kernel(const __grid_constant__ AttnGradParams p, const __grid_constant__ GeneralWorkspace workspace,
                    int blocks) {
  const int head = static_cast<int>(blockIdx.x) / blocks, heads = static_cast<int>(p.heads_q);
  const int b = head / heads, h = head % heads, lane = threadIdx.x % 32, key = lane % kFewKeys;
  const bool of_values = lane >= kFewKeys;
  const Sequence queries = query_sequence(p, b), keys = key_sequence(p, b);
  if (keys.length > kFewKeys) return;  // more keys than the host was told
  const Mask32 mask(p, queries.length, keys.length);
  const auto bias = HeadBias<float>::of(p, b, h);
  const int hk = h / static_cast<int>(p.group_size()), length = static_cast<int>(queries.length);
  const int first = static_cast<int>(blockIdx.x) % blocks * kWarps + static_cast<int>(threadIdx.x) / 32;
  for (int i = first; i < length; i += blocks * kWarps) {
    const Limits seen = mask.keys_of(i, i + 1);
    const bool sees = key >= seen.begin && key < seen.end;
    const int64_t row = queries.start + i, column = keys.start + (sees ? key : 0);
    float product = 0;
    if (sees && !of_values) {
      product = dot(row_pointer<const T>(p.q, b, h, row), row_pointer<const T>(p.k, b, hk, column),
                    static_cast<int>(p.head_dim));
    } else if (sees) {
      product = dot(row_pointer<const T>(p.dout, b, h, row), row_pointer<const T>(p.v, b, hk, column),
                    static_cast<int>(p.head_dim_v));
    }
    const float dp = __shfl_down_sync(~0u, product, kFewKeys);
    float logit[1][1][4] = {{{product}}};
    make_logits<T>(workspace.score, logit);
    const int64_t distance = key - i - mask.first_position();
    float added = -bias.slope * fabsf(static_cast<float>(distance)) * kLog2E<float>;
    if (bias.relative && sees) added += in_log2_units(bias.relative[bias.entry(distance)]);
    const int64_t index = h * workspace.rows + (p.is_varlen() ? row : b * p.seqlen_q + row);
    const LseWords<float> words = workspace.words[index];
    const float exponent = (logit[0][0][0] + added - words.top) - words.log2_sum;
    const float weight = sees ? exp2f(exponent) : 0.f;
    const float weights = sum_of_keys(weight), delta = sum_of_keys(sees ? weight * dp : 0.f);
    if (lane != 0) continue;
    const float sink = p.sink ? static_cast<const float*>(p.sink)[h] : 0.f;
    const float all = p.has_sink ? 1 - exp2f(words.sink_log2_weight(sink)) : 1.f;
    const float dlse = p.dlse.data ? *row_statistic(p.dlse, b, h, row) : 0.f;
    if (!(fabsf(weights - all) < weight_error(words.top)) || weights == 0 || has_one_weight(words)) continue;
    // As if the weights added up to `all` without their rounding errors.
    workspace.delta[index] = delta * (all / weights) - dlse;
  }
}

}  // namespace

void find_delta_of_few_keys(const AttnGradParams& p, const GeneralWorkspace& workspace) {
  const bool has_others = p.has_dropout() || p.has_mask() || p.bias.data || p.dtype == DType::kFloat32;
  if (has_others || !sums_rows_of_few_keys(p)) return;
  const int64_t blocks = tile_count(p.seqlen_q, kWarps);
  launch(p.dtype == DType::kFloat16 ? few_keys_kernel<__half> : few_keys_kernel<__nv_bfloat16>,
         "backward_prepare (few keys)", p, blocks * p.batch * p.heads_q, kFewKeysThreads, 0, workspace,
         static_cast<int>(blocks));
}

}  // namespace flashattn_ext
