#include "cuda/host/launch.cuh"
#include "cuda/passes/passes.h"
#include "rules/mask.h"

namespace flashattn_ext {
namespace {

// A thread block makes the extremes of one super of one head, and of its granules. A thread has this many keys.
constexpr int kThreadKeys = 4, kSuperKeys = static_cast<int>(kMaskGranule * kMaskSuper);
constexpr int kThreads = kSuperKeys / kThreadKeys, kGranuleLanes = static_cast<int>(kMaskGranule) / kThreadKeys;

// Merges the extremes of groups of `from` lanes into extremes of groups of `to` lanes.
__device__ __forceinline__ void join_lanes(IntervalExtremes& x, int from, int to) {
#pragma unroll
  for (int distance = from; distance < to; distance *= 2) {
    x.add({__shfl_xor_sync(~0u, x.any_first, distance), __shfl_xor_sync(~0u, x.any_last, distance),
           __shfl_xor_sync(~0u, x.all_first, distance), __shfl_xor_sync(~0u, x.all_last, distance)});
  }
}

// intervals: [heads][keys] pairs. extremes: for each head its granules, and then its supers.
__global__ void __launch_bounds__(kThreads)
    mask_extremes_kernel(const int32_t* intervals, int64_t keys, int supers, IntervalExtremes* extremes) {
  const int64_t granules = (keys + kMaskGranule - 1) / kMaskGranule;
  const int64_t head = blockIdx.x / supers, super = blockIdx.x % supers;
  const int64_t first_key = super * kSuperKeys + int64_t{threadIdx.x} * kThreadKeys;
  IntervalExtremes* const to = extremes + head * (granules + supers);
  IntervalExtremes own = IntervalExtremes::none();
#pragma unroll
  for (int i = 0; i < kThreadKeys; ++i) {
    const int64_t key = first_key + i;
    if (key >= keys) break;
    const int32_t* const pair = intervals + 2 * (head * keys + key);
    const int first = max(pair[0], 0), last = max(pair[1], 0);
    // If a key is masked for every row, no row sees all keys.
    own.add(first < last ? IntervalExtremes{first, last, first, last} : IntervalExtremes{INT32_MAX, 0, INT32_MAX, 0});
  }
  join_lanes(own, 1, kGranuleLanes);
  if (threadIdx.x % kGranuleLanes == 0 && first_key < keys) to[first_key / kMaskGranule] = own;

  __shared__ IntervalExtremes of_warps[kThreads / 32];
  join_lanes(own, kGranuleLanes, 32);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = own;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kThreads / 32; ++warp) own.add(of_warps[warp]);
  to[granules + super] = own;
}

}  // namespace

void cuda_mask_extremes(const AttnParams& p, int32_t* extremes) {
  const int64_t supers = (p.seqlen_k + kSuperKeys - 1) / kSuperKeys, blocks = p.intervals.heads * supers;
  if (blocks == 0) return;
  if (blocks > INT32_MAX) check_launch(cudaErrorInvalidConfiguration, "mask_extremes", p);
  mask_extremes_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(p.stream)>>>(
      p.intervals.data, p.seqlen_k, static_cast<int>(supers), reinterpret_cast<IntervalExtremes*>(extremes));
  check_launch(cudaGetLastError(), "mask_extremes", p);
}

}  // namespace flashattn_ext
