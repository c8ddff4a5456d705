#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/host/call.h"
#include "cuda/host/launch.cuh"
#include "cuda/score/large_rows.cuh"
#include "cuda/stages/backward_workspace.h"
#include "cuda/tile/rows.cuh"
#include "cuda/tile/tile.cuh"

namespace flashattn_ext {

constexpr int kPrepareThreads = 256;

// How many neighbouring lanes read a row together: enough for one vector each, or half as many where more than a
// quarter of the lanes would be idle.
template <class T>
int prepare_lanes(int64_t columns) {
  const int64_t vectors = (columns * static_cast<int64_t>(sizeof(T)) + kVectorBytes - 1) / kVectorBytes;
  int lanes = 1;
  while (lanes < 32 && lanes < vectors) lanes *= 2;
  return lanes > 1 && 4 * vectors < 3 * lanes ? lanes / 2 : lanes;
}

// kWhole: the rows of `out` are whole aligned vectors; otherwise nothing is read beyond out_end.
template <class T, bool kWhole>
__global__ void __launch_bounds__(kPrepareThreads)
    backward_prepare_kernel(const __grid_constant__ AttnGradParams p,
                            const __grid_constant__ BackwardWorkspace workspace, int lanes, const void* out_end) {
  constexpr int kElements = kVectorBytes / sizeof(T);
  const int64_t thread = blockIdx.x * int64_t{kPrepareThreads} + threadIdx.x, index = thread / lanes;
  uint4* const zeroed = reinterpret_cast<uint4*>(workspace.dq);
  for (int64_t i = thread; i < workspace.zeroed_bytes / kVectorBytes; i += gridDim.x * int64_t{kPrepareThreads}) {
    zeroed[i] = make_uint4(0, 0, 0, 0);
  }
  const bool valid = index < p.heads_q * workspace.rows;
  const int64_t h = index / workspace.rows, flat = index % workspace.rows;
  const int64_t b = p.is_varlen() ? 0 : flat / p.seqlen_q, row = p.is_varlen() ? flat : flat % p.seqlen_q;
  const int lane = threadIdx.x % lanes, columns = valid ? static_cast<int>(p.head_dim_v) : 0;
  const T *dout = row_pointer<const T>(p.dout, b, h, row), *out = row_pointer<const T>(p.out, b, h, row);
  float delta = 0;
  for (int c = lane * kElements; c < columns; c += lanes * kElements) {
    const uint4 x = *reinterpret_cast<const uint4*>(dout + c);
    uint4 y;
    if constexpr (kWhole) {
      y = *reinterpret_cast<const uint4*>(out + c);
    } else {
      UnalignedVector<T> vector;
      vector.load(out + c, columns - c, out_end);
      y = vector.get();
    }
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      delta += widen(reinterpret_cast<const T*>(&x)[e]) * widen(reinterpret_cast<const T*>(&y)[e]);
    }
  }
  for (int distance = lanes / 2; distance > 0; distance /= 2) delta += __shfl_xor_sync(~0u, delta, distance);
  if (!valid || lane != 0) return;
  const LseWords<float> words = words_of_backward(p, b, h, row);
  const float dlse = p.dlse.data ? *row_statistic(p.dlse, b, h, row) : 0.f;
  const bool one_weight = has_one_weight(words);
  workspace.delta[index] = ((one_weight ? 0.f : delta) - dlse) / workspace.keep_scale;
  workspace.lse[index] = one_weight ? mark_of_one_weight() : one_word(words.sum());
  workspace.words[index] = words;
}

template <class T>
void launch_prepare(const AttnGradParams& p, const BackwardWorkspace& workspace) {
  const int lanes = prepare_lanes<T>(p.head_dim_v);
  const bool whole = rows_are_aligned(p.out, p.head_dim_v, sizeof(T));
  const auto kernel = whole ? backward_prepare_kernel<T, true> : backward_prepare_kernel<T, false>;
  const void* const out_end = end_of(p.out, batch_entries(p), p.heads_q, query_rows(p), p.head_dim_v, sizeof(T));
  const int64_t blocks = (p.heads_q * workspace.rows * lanes + kPrepareThreads - 1) / kPrepareThreads;
  // Without rows there may still be sums to zero.
  launch(kernel, "backward_prepare", p, std::max<int64_t>(blocks, 1), kPrepareThreads, 0, workspace, lanes, out_end);
}

template void launch_prepare<__half>(const AttnGradParams&, const BackwardWorkspace&);
template void launch_prepare<__nv_bfloat16>(const AttnGradParams&, const BackwardWorkspace&);
template void launch_prepare<float>(const AttnGradParams&, const BackwardWorkspace&);

}  // namespace flashattn_ext
