// Forward of short sequences on Hopper. A thread block is one warpgroup, which has all keys and values of a KV head in
// shared memory and walks over units of 64 queries. Up to four thread blocks are resident on a multiprocessor and know
// nothing of each other: the loads, the softmax and the stores of one overlap the products of the others, so that
// nothing is pipelined within one. Steps are those of the tiles of 256 queries of the other forward
// (forward/forward.cuh, kBrief), which run instead where they fill the GPU: a sequence has the same bits in both.
#pragma once

#include "cuda/host/launch.cuh"
#include "cuda/ptx/async.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/score/score_policy.cuh"
#include "cuda/score/scores.cuh"
#include "cuda/sm90/forward_short/plan.h"
#include "cuda/table/kernel_table.h"
#include "cuda/tile/panels.cuh"
#include "cuda/tile/store_row.cuh"

namespace flashattn_ext::sm90 {

// The maps of a call: boxes of a unit's queries, and of all keys and values of a sequence.
struct ShortForwardMaps {
  CUtensorMap q, k, v;
};

template <class T, int kHeadDim, Options kOptions>
struct ShortForward {
  static constexpr ShortForwardTile kTile = tile_of<kernel_table::kSm90ShortForward, T, kHeadDim, kOptions>();
  static constexpr int kKeys = kTile.keys, kLeastKeys = ShortForwardPlan::kLeastKeys;
  static_assert(kKeys == 2 * kLeastKeys);  // the keys at the end of a sequence are one step
  static constexpr int kThreads = 128, kPanels = panels(kHeadDim), kOutTiles = kHeadDim / 8;
  using Scoring = PlainScores;
  using Rule = Scoring::Rule;

  // The first query of a unit and its query head.
  struct Unit {
    int h, row;
  };
  // The barriers of keys and of values complete one phase each, the barrier of queries one for each unit.
  struct Barriers {
    ptx::Barrier q, k, v;
  };
  static_assert(sizeof(Barriers) <= ShortForwardPlan::kBarrierBytes);

  const AttnParams& p;
  const ShortForwardMaps& maps;
  const Rule& score;
  const ShortForwardPlan& plan;
  const int warp, b, hk, first, last;  // last: behind this thread block's units
  T *const k_tile, *const v_tile, *const q_tile;
  Barriers& arrived;
  uint32_t q_parity = 0;
  float out[kOutTiles][4];
  OnlineSoftmax<> softmax;
  Scoring scoring;
  Unit now;

  __device__ __forceinline__ ShortForward(const AttnParams& p, const ShortForwardMaps& maps, const Rule& score,
                                          const ShortForwardPlan& plan, T* shared, int head, int part)
      : p(p),
        maps(maps),
        score(score),
        plan(plan),
        warp(uniform(static_cast<int>(threadIdx.x) / 32)),
        b(head / static_cast<int>(p.heads_k)),
        hk(head % static_cast<int>(p.heads_k)),
        first(part * plan.share),
        last(min(first + plan.share, plan.units * plan.group)),
        k_tile(shared),
        v_tile(k_tile + plan.keys * kHeadDim),
        q_tile(v_tile + plan.keys * kHeadDim),
        arrived(*reinterpret_cast<Barriers*>(q_tile + kShortRows * kHeadDim)) {}

  __device__ __forceinline__ int length_q() const { return static_cast<int>(p.seqlen_q); }
  __device__ __forceinline__ int length_k() const { return static_cast<int>(p.seqlen_k); }
  __device__ __forceinline__ Mask32 mask() const { return Mask32(p, length_q(), length_k()); }
  __device__ __forceinline__ Unit unit(int number) const {
    const int head = plan.head_of(number, plan.units);
    return {hk * plan.group + head, (number - head * plan.units) * kShortRows};
  }

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      for (const CUtensorMap* map : {&maps.q, &maps.k, &maps.v}) ptx::prefetch_tensor_map(map);
      for (ptx::Barrier* barrier : {&arrived.q, &arrived.k, &arrived.v}) ptx::barrier_init(barrier, 1);
      ptx::fence_barrier_init();
    }
    ptx::wait_for_previous_kernel();
    __syncthreads();
    load_queries(first);
    if (threadIdx.x == 0) {
      load(k_tile, plan.keys, arrived.k, maps.k, 0, hk);
      load(v_tile, plan.keys, arrived.v, maps.v, 0, hk);
    }
#pragma unroll 1
    for (int number = first; number < last; ++number) compute_unit(number);
    // The copies have ended when the thread block does.
    ptx::barrier_wait(&arrived.k, 0);
    ptx::barrier_wait(&arrived.v, 0);
  }
  __device__ __forceinline__ void load_queries(int number) const {
    if (threadIdx.x != 0 || number >= last) return;
    const auto [h, row] = unit(number);
    load(q_tile, kShortRows, arrived.q, maps.q, row, h);
  }
  // Rows that do not exist become zeros.
  __device__ __forceinline__ void load(T* tile, int rows, ptx::Barrier& full, const CUtensorMap& map, int row,
                                       int head) const {
    ptx::barrier_arrive_expect(&full, rows * kPanels * kPanelColumns * static_cast<int>(sizeof(T)));
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      ptx::tma_load(tile + panel * rows * kPanelColumns, &map, &full, panel * kPanelColumns, row, head, b);
    }
  }

  __device__ __forceinline__ void compute_unit(int number) {
    now = unit(number);
    set_zero(out);
    softmax.start(-infinity());
    const Limits seen = mask().keys_of(now.row, min(now.row + kShortRows, length_q()));
    const int begin = seen.begin / kKeys * kKeys, end = min((seen.end + kKeys - 1) / kKeys * kKeys, plan.keys);
    const bool is_empty = seen.begin >= seen.end;
    ptx::barrier_wait(&arrived.q, q_parity);
    q_parity ^= 1;
    ptx::barrier_wait(&arrived.k, 0);
    if (is_empty) release_queries(number);
#pragma unroll 1
    for (int key = is_empty ? -1 : (end - 1) / kKeys * kKeys; key >= begin; key -= kKeys) {
      key + kKeys <= end ? step<kKeys>(number, key, key == begin) : step<kLeastKeys>(number, key, key == begin);
    }
    ptx::wgmma_wait<0>();
    ptx::hold(out);
    store();
  }
  // Starts the copy of the next unit's queries, over those that all warps have multiplied.
  __device__ __forceinline__ void release_queries(int number) const {
    __syncthreads();
    load_queries(number + 1);
  }

  // The product with values is in flight when it returns: the next scores come behind it. is_last: whether the unit has
  // no further step.
  template <int kCount>
  __device__ __forceinline__ void step(int number, int key, bool is_last) {
    float x[1][kCount / 8][4];
    multiply_keys(x[0], key);
    ptx::wgmma_wait<0>();
    ptx::hold(x[0]);
    ptx::hold(out);
    if (is_last) release_queries(number);
    const auto& rule = scoring.make_logits(p, score, x, Nothing(), Nothing());
    const int row = now.row + warp * 16;
    const Limits full = mask().keys_of_all(row, min(row + 16, length_q()));
    if (key < full.begin || key + kCount > full.end)
      hide_keys<true, true>(x, mask(), row + quad(), key + 2 * lane_in_quad());
    softmax.weigh(x[0], rule, kTolerance, [&](const float (&factors)[2]) { rescale(out, factors); });
    uint32_t weights[kCount / 16][4];
    pack_scores<T>(weights, x[0]);
    ptx::barrier_wait(&arrived.v, 0);
    add_values(weights, key);
  }
  template <int N>
  __device__ __forceinline__ void multiply_keys(float (&x)[N][4], int key) const {
    const uint64_t a = ptx::swizzled_descriptor(q_tile, 0),
                   c = ptx::swizzled_descriptor(k_tile + key * kPanelColumns, 0);
    ptx::hold(x);
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < kHeadDim; d += 16) {
      const int panel = d / kPanelColumns, within = d % kPanelColumns / 16;
      ptx::wgmma<ptx::kMajorK, ptx::kMajorK>(x, a + panel * kShortRows * 8 + within * 2,
                                             c + panel * plan.keys * 8 + within * 2, d > 0, T());
    }
    ptx::wgmma_commit();
  }
  template <int kSteps>
  __device__ __forceinline__ void add_values(const uint32_t (&weights)[kSteps][4], int key) {
    const uint64_t rows = ptx::swizzled_descriptor(v_tile + key * kPanelColumns, plan.keys * 128);
    ptx::hold(out);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) ptx::wgmma<ptx::kMajorMN>(out, weights[step], rows + step * 128, T());
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void store() {
    const int row = now.row + warp * 16 + quad();
    const bool exist[2] = {row < length_q(), row + 8 < length_q()};
    float shrink[2] = {1, 1};
    if (p.has_sink) softmax.end(head_sink(p, now.h), 1, shrink);
    const float totals[2] = {softmax.total(0), softmax.total(1)};
    const float factors[2] = {shrink[0] / totals[0], shrink[1] / totals[1]};
    const bool zero[2] = {totals[0] == 0, totals[1] == 0};
    softmax.store_statistics(p, b, now.h, row, totals, exist);
    store_rows(row_pointer<T>(p.out, b, now.h, row), 8 * p.out.row_stride, out, factors, zero, exist,
               static_cast<int>(p.head_dim_v));
  }
};

template <class T, int kHeadDim, Options kOptions>
__global__ void __launch_bounds__(ShortForward<T, kHeadDim, kOptions>::kThreads,
                                  ShortForward<T, kHeadDim, kOptions>::kTile.blocks)
    forward_short_kernel(const __grid_constant__ AttnParams p, const __grid_constant__ ShortForwardMaps maps,
                         const __grid_constant__ typename ShortForward<T, kHeadDim, kOptions>::Rule score,
                         const __grid_constant__ ShortForwardPlan plan) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(kPanelAlignment) unsigned char shared[];
  const int head = static_cast<int>(blockIdx.x) / plan.parts, part = static_cast<int>(blockIdx.x) - head * plan.parts;
  ShortForward<T, kHeadDim, kOptions>(p, maps, score, plan, reinterpret_cast<T*>(shared), head, part).run();
#endif
}

template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
void forward_short(const AttnParams& p) {
  static_assert(kHeadDim == kHeadDimV);
  using Kernel = ShortForward<T, kHeadDim, kOptions>;
  const ShortForwardPlan plan = ShortForwardPlan::of(p, Kernel::kTile, kHeadDim, multiprocessors());
  const ShortForwardMaps maps{query_map(p, p.q, p.head_dim, kShortRows), key_map(p, p.k, p.head_dim, plan.keys),
                              key_map(p, p.v, p.head_dim_v, plan.keys)};
  constexpr const char* kName = "forward of short sequences";
  launch_early(forward_short_kernel<T, kHeadDim, kOptions>, kName, p, row_of_blocks(plan.blocks(p), kName, p),
               Kernel::kThreads, static_cast<int>(plan.shared_bytes(kHeadDim)), p, maps, Kernel::Rule::of(p), plan);
}

}  // namespace flashattn_ext::sm90
