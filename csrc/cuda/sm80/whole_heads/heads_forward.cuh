// Forward of short sequences on every GPU since Ampere. All keys and values of a KV head lie in shared memory. A warp
// owns 16 rows of queries, holds them and their scores in registers, and walks over the keys that they see without a
// barrier: a thread block has one, when its keys have arrived, and waits for its values where it first needs them.
// Thread blocks are small, so that several are resident on a multiprocessor, and the copies of one overlap the products
// of others.
//
// Lengths cost their own rows: keys come in steps of the tile's keys, and at the end in smaller ones down to 16.
//
// The plan of a packed call has the lengths of max_seqlen, and a sequence may be longer. The last thread block of a KV
// head takes all further units. Where shared memory does not hold all keys, the warps of a thread block walk together
// over chunks of them.
#pragma once

#include "cuda/host/launch.cuh"
#include "cuda/ptx/async.cuh"
#include "cuda/score/scores.cuh"
#include "cuda/sm80/whole_heads/head_rows.cuh"
#include "cuda/sm80/whole_heads/heads_masks.cuh"
#include "cuda/sm80/whole_heads/heads_policies.cuh"
#include "cuda/sm80/whole_heads/plan.h"
#include "cuda/table/kernel_table.h"
#include "cuda/tile/products.cuh"
#include "cuda/tile/store_row.cuh"

namespace flashattn_ext::sm80 {

// kPacked: whether the kernel runs packed calls.
template <class T, int kHeadDim, Options kOptions, bool kPacked>
struct HeadsForward {
  using Core = TensorCore<T>;
  using Tile = SwizzledTile<T, kHeadDim>;
  using Policies = HeadsPolicies<kOptions>;
  using Dropping = typename Policies::Dropping;
  using Mask = typename Policies::Mask;
  static constexpr HeadsForwardTile kTile = tile_of<kernel_table::kSm80HeadsForward, T, kHeadDim, kOptions>();
  static constexpr int kKeys = kTile.keys;  // of a step
  static constexpr int kLeastKeys = Policies::kLeastKeys;
  static constexpr bool kHoldsBias = holds_bias(kOptions);  // of each warp's unit, in shared memory
  static constexpr bool kTakesMask = takes_mask(kOptions);
  using Scoring = typename Policies::template Scoring<T, kKeys>;
  using Rule = typename Scoring::Rule;
  static constexpr int kSteps = kHeadDim / Core::kK, kOutTiles = kHeadDim / 8;

  // What the thread block computes: units of one KV head, from `first` on.
  struct Work {
    int b, hk, first;
  };
  // The query head and the first row of a unit.
  struct Unit {
    int h, row;
  };

  const AttnParams& p;
  const Rule& score;
  const HeadsForwardPlan& plan;
  const typename Tile::Places places;
  const int warp;
  const Work work;
  const HeadSequence<kPacked> sequence;
  T *const k_tile, *const v_tile, *const q_tile;  // q_tile: the queries of this warp's unit
  bool has_values = false;
  typename Core::A queries[kSteps];
  float out[1][kOutTiles][4];
  OnlineSoftmax<false> softmax;  // without tolerance the maximum is the largest logit
  Scoring scoring;
  Unit now;
  Limits full;  // keys that all rows of the unit see

  __device__ __forceinline__ HeadsForward(const AttnParams& p, const Rule& score, const HeadsForwardPlan& plan,
                                          T* shared)
      : p(p),
        score(score),
        plan(plan),
        warp(uniform(static_cast<int>(threadIdx.x) / 32)),
        work(work_of_block()),
        sequence(p, work.b),
        k_tile(shared),
        v_tile(k_tile + plan.keys * Tile::kStride),
        q_tile(v_tile + (plan.keys + warp * kRowStep) * Tile::kStride) {}

  __device__ __forceinline__ Work work_of_block() const {
    const unsigned head = blockIdx.x / static_cast<unsigned>(plan.parts), heads = static_cast<unsigned>(p.heads_k);
    const int part = static_cast<int>(blockIdx.x) - static_cast<int>(head) * plan.parts;
    return {static_cast<int>(head / heads), static_cast<int>(head % heads), part * plan.share};
  }
  // Units of a query head of this sequence.
  __device__ __forceinline__ int units() const { return kPacked ? (length_q() + kRowStep - 1) / kRowStep : plan.units; }
  __device__ __forceinline__ Unit unit(int number) const {
    if (in_chunks()) number = min(number, end_of_units() - 1);
    const int head = plan.head_of(number, units());
    return {work.hk * plan.group + head, (number - head * units()) * kRowStep};
  }
  __device__ __forceinline__ int end_of_units() const {
    if (kPacked && work.first + plan.share >= plan.units * plan.group) return units() * plan.group;
    return min(work.first + plan.share, units() * plan.group);
  }
  // The end of the warp's numbers. With chunks every warp computes a unit in the last round: the last one, if it has no
  // other.
  __device__ __forceinline__ int end_of_numbers() const { return end_of_units() + (in_chunks() ? warp : 0); }
  // Whether shared memory does not hold all keys of the sequence.
  __device__ __forceinline__ bool in_chunks() const { return kPacked && length_k() > plan.keys; }
  __device__ __forceinline__ KeyChunk first_chunk() const { return {0, !in_chunks()}; }
  // The generator of dropout has 16 bytes of shared memory.
  __device__ __forceinline__ Dropout* dropout() const {
    static_assert(sizeof(Dropout) <= kVectorBytes);
    return reinterpret_cast<Dropout*>(end_of_tiles());
  }
  __device__ __forceinline__ T* end_of_tiles() const {
    return v_tile + (plan.keys + plan.warps * kRowStep) * Tile::kStride;
  }
  // Completes its first phase when the copies of values by all threads have arrived.
  __device__ __forceinline__ ptx::Barrier* values_arrived() const {
    return reinterpret_cast<ptx::Barrier*>(end_of_tiles() + kVectorBytes / sizeof(T));
  }
  // The part of shared memory for the bias of this warp's unit, behind the barrier.
  __device__ __forceinline__ unsigned char* bias_stage() const {
    return reinterpret_cast<unsigned char*>(values_arrived()) + kVectorBytes + warp * plan.bias.tile_bytes(kRowStep);
  }
  // The marks of isolated keys, in calls with a Mask, lie behind the barrier.
  __device__ __forceinline__ IsolatedKeys* isolated_keys() const {
    return reinterpret_cast<IsolatedKeys*>(reinterpret_cast<unsigned char*>(values_arrived()) + kVectorBytes);
  }
  __device__ __forceinline__ int length_q() const { return sequence.length_q(p); }
  __device__ __forceinline__ int length_k() const { return sequence.length_k(p); }

  __device__ __forceinline__ void run() {
    if (kPacked && work.first >= end_of_units()) return;
    load();
    if (threadIdx.x == 0) {
      ptx::barrier_init(values_arrived(), static_cast<int>(blockDim.x));
      Dropping::start_head(p, work.b, dropout());
      if constexpr (kTakesMask) isolated_keys()->start();
    }
    ptx::cp_async_wait<1>();
    __syncthreads();
    arrive_with_values();
#pragma unroll 1
    for (int number = work.first + warp; number < end_of_numbers(); number += plan.warps) compute_unit(number);
    ptx::cp_async_wait<0>();  // also of a warp that has no unit
  }

  // Rows of a tile of keys.
  __device__ __forceinline__ int padded_keys(const KeyChunk& chunk) const {
    return (chunk.keys(length_k(), plan.keys) + kLeastKeys - 1) / kLeastKeys * kLeastKeys;
  }

  // Starts copying keys and the queries of the first unit of each warp, and then values.
  __device__ __forceinline__ void load() {
    const KeyChunk chunk = first_chunk();
    const int padded = padded_keys(chunk);
    load_queries(work.first + warp);
    load_bias(work.first + warp);
    load_keys(block_team(), chunk, k_tile, p.k, p.head_dim, padded);
    ptx::cp_async_commit();
    load_keys(block_team(), chunk, v_tile, p.v, p.head_dim_v, padded);
    ptx::cp_async_commit();
  }
  // Starts copying the rows of keys or values. padded: the rows of their tile.
  __device__ __forceinline__ void load_keys(const Team& team, const KeyChunk& chunk, T* tile, const TensorView& from,
                                            int64_t columns, int padded) const {
    const T* const first = row_pointer<const T>(from, work.b, work.hk, sequence.key_start + chunk.first);
    load_rows<Tile>(team, tile, first, from.row_stride, chunk.keys(length_k(), plan.keys), padded,
                    static_cast<int>(columns));
  }
  // Waits for all warps, and replaces the keys and values in shared memory.
  __device__ __forceinline__ void replace_keys(const KeyChunk& chunk) const {
    const int padded = padded_keys(chunk);
    ptx::cp_async_wait<0>();  // values that no warp may have waited for
    __syncthreads();
    if (kTakesMask && threadIdx.x == 0) isolated_keys()->start();
    // With an opaque number the addresses are computed here, and not before the loop over units. That spills less, but
    // for the plain kernel with 64 columns.
    constexpr bool kEarly = kHeadDim == 64 && kOptions == kPlain;
    const Team all = block_team(), team{kEarly ? all.thread : ptx::opaque(all.thread), all.threads};
    load_keys(team, chunk, k_tile, p.k, p.head_dim, padded);
    load_keys(team, chunk, v_tile, p.v, p.head_dim_v, padded);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
    if constexpr (kTakesMask) {
      if (!p.has_intervals()) return;
      isolated_keys()->template isolate<Tile>(v_tile, padded);
      __syncthreads();
    }
  }
  __device__ __forceinline__ void load_queries(int number) const {
    if (number >= end_of_numbers()) return;
    const auto [h, row] = unit(number);
    load_rows<Tile>(warp_team(), q_tile, row_pointer<const T>(p.q, work.b, h, sequence.query_start + row),
                    p.q.row_stride, min(kRowStep, length_q() - row), kRowStep, static_cast<int>(p.head_dim));
  }
  // Starts copying the bias of a unit over that of the unit before, which all lanes must have read.
  __device__ __forceinline__ void load_bias(int number) {
    if constexpr (kHoldsBias) {
      if (number >= end_of_units()) return;
      const auto [h, row] = unit(number);
      const T* const from = bias_row<const T>(p.bias, work.b, h, row);
      T* const to = first_in_stage<T>(plan.bias, bias_stage(), from);
      scoring.hold(plan.bias, to);
      sm80::load_bias(warp_team(), plan.bias, to, from, p.bias.row_stride, min(kRowStep, length_q() - row), length_k());
    }
  }
  // Arrives at the barrier for values when those that this thread has copied are there. With a Mask it looks at them
  // first.
  __device__ __forceinline__ void arrive_with_values() const {
    if constexpr (kTakesMask) {
      if (p.has_intervals()) {
        ptx::cp_async_wait<0>();
        isolated_keys()->template isolate<Tile>(v_tile, padded_keys(first_chunk()));
        return ptx::barrier_arrive(values_arrived());
      }
    }
    ptx::barrier_arrive_copied(values_arrived());
  }
  // Waits for the values before a warp's first product with them.
  __device__ __forceinline__ void await_values() {
    if (!has_values) ptx::barrier_wait(values_arrived(), 0);
    has_values = true;
  }

  // The queries of the warp's next unit are copied during this one, and its bias at the end.
  __device__ __forceinline__ void compute_unit(int number) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      queries[step] = Tile::load_a(q_tile, Tile::moved(places.a, step * Core::kK));
    }
    __syncwarp();
    load_queries(number + plan.warps);
    ptx::cp_async_commit();
    now = unit(number);
    compute(number);
    ptx::cp_async_wait<0>();
    __syncwarp();
  }

  // Registers are scarce: what a step needs beside its tiles is computed where it is used, but for the limits of keys,
  // which are uniform numbers. walk_keys computes them once for each unit and chunk.
  __device__ __forceinline__ Mask mask() const { return Mask(p, length_q(), length_k()); }

  __device__ __forceinline__ void compute(int number) {
    set_zero(out[0]);
    softmax.start(-infinity());
    scoring.start_tile(p, work.b, now.h);
    if (in_chunks()) {
      KeyChunk chunk{0, false};
#pragma unroll 1
      for (; chunk.first < length_k(); chunk.first += plan.keys) {
        if (chunk.first > 0 || number - warp > work.first) replace_keys(chunk);
        walk_keys(chunk, number);
      }
    } else {
      walk_keys(KeyChunk{0, true}, number);
    }
    store();
  }
  __device__ __forceinline__ void walk_keys(const KeyChunk& chunk, int number) {
    full = mask().keys_of_all(now.row, min(now.row + kRowStep, length_q()));
    const Limits seen = chunk.of(mask().keys_of(now.row, min(now.row + kRowStep, length_q())), plan.keys);
    const int end = (seen.end + kLeastKeys - 1) / kLeastKeys * kLeastKeys;
    int key = seen.begin / kLeastKeys * kLeastKeys;
#pragma unroll 1
    for (; key + kKeys <= end; key += kKeys) step<kKeys>(chunk, key);
    take_step<64>(chunk, key, end);
    take_step<32>(chunk, key, end);
    take_step<16>(chunk, key, end);
    if constexpr (kHoldsBias) {
      __syncwarp();
      load_bias(number + plan.warps);
      ptx::cp_async_commit();
    }
    if constexpr (kTakesMask) {
      if (p.has_intervals() && has_values) {
        isolated_keys()->poison(out[0], IntervalMask(mask(), pairs()), now.row + quad(), chunk.first);
      }
    }
  }
  // The intervals of keys for the rows of the unit, from key 0 on.
  __device__ __forceinline__ const int2* pairs() const {
    return IntervalPairs(p, ptx::opaque(work.b), ptx::opaque(work.hk), sequence.key_start).head(ptx::opaque(now.h));
  }
  // A step with fewer keys than the others, if as many are left.
  template <int kCount>
  __device__ __forceinline__ void take_step(const KeyChunk& chunk, int& key, int end) {
    if constexpr (kCount < kKeys && kCount >= kLeastKeys) {
      if (key + kCount > end) return;
      step<kCount>(chunk, key);
      key += kCount;
    }
  }

  template <int kCount>
  __device__ __forceinline__ void step(const KeyChunk& chunk, int key) {
    float x[1][kCount / 8][4];
    if constexpr (kTakesMask) {
      if (p.has_intervals() && seen_rows(key).is_none()) return;
    }
    const auto coordinates = [&] { return TileCoordinates{work.b, now.h, mask(), ptx::opaque(now.row), key}; };
    const auto begun = scoring.begin(p, coordinates);
    const int held = (key - chunk.first) * Tile::kStride;
    const T* const keys = k_tile + held;
    score_product<T, kHeadDim>(
        x, [&](int, int d) { return queries[d / Core::kK]; },
        [&](typename Core::B(&pair)[2], int n, int d) {
          Tile::load_b(pair, keys + n * 8 * Tile::kStride, Tile::moved(places.b, d));
        });
    const auto& rule = scoring.make_logits(p, score, x, coordinates, begun);
    if (key < full.begin || key + kCount > full.end)
      hide_keys<true, true>(x, mask(), now.row + quad(), key + 2 * lane_in_quad());
    if constexpr (kTakesMask) {
      if (p.has_intervals()) seen_rows(key).hide(x);
    }
    // Without tolerance the maximum is the largest logit, for which plain kernels have no register left.
    float shrink[2], sums[2];
    softmax.weigh(
        x[0], rule, 0.f,
        [&](const float (&factors)[2]) {
          rescale(out[0], factors);
          shrink[0] = factors[0], shrink[1] = factors[1];
        },
        [&](int r, float sum) { sums[r] = sum; });
    scoring.add_centres(p, coordinates, 0, x[0], sums, shrink);
    typename Core::A weights[kCount / Core::kK];
#pragma unroll
    for (int k = 0; k < kCount / Core::kK; ++k) weights[k] = Core::from_accumulators(x[0], k);
    Dropping::template drop<Core>(p, dropout(), now.h, weights, now.row, key);
    await_values();
    accumulate<Tile, kCount / Core::kK>(out, places, [&](int, int k) { return weights[k]; }, v_tile + held, 0);
  }

  __device__ __forceinline__ SeenRows seen_rows(int key) const {
    return SeenRows(pairs(), ptx::opaque(now.row), key, length_k() - key);
  }

  __device__ __forceinline__ void store() {
    const int b = work.b, row = now.row + quad(), at = sequence.query_start + row;
    const bool exist[2] = {row < length_q(), row + 8 < length_q()};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (p.row_maxima.data && lane_in_quad() == r && exist[r]) store_largest(p, b, now.h, at + 8 * r, softmax.max[r]);
    }
    float shrink[2] = {1, 1};
    if (p.has_sink) softmax.end(head_sink(p, now.h), 1, shrink);
    float totals[2], factors[2];
    bool empty[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      totals[r] = softmax.total(r);
      empty[r] = totals[r] == 0;
      factors[r] = Dropping::keep_scale(p) * shrink[r] * ptx::rcp(totals[r]);
      scoring.store_centres(p, work.b, now.h, at + 8 * r, 0, r, totals[r] / shrink[r], exist[r]);
    }
    softmax.store_statistics(p, b, now.h, at, totals, exist);
    store_rows(row_pointer<T>(p.out, b, now.h, at), 8 * p.out.row_stride, out[0], factors, empty, exist,
               static_cast<int>(p.head_dim_v));
  }
};

template <class T, int kHeadDim, Options kOptions, bool kPacked>
__global__ void __launch_bounds__(HeadsForward<T, kHeadDim, kOptions, kPacked>::kTile.warps * 32,
                                  HeadsForward<T, kHeadDim, kOptions, kPacked>::kTile.blocks)
    heads_forward_kernel(const __grid_constant__ AttnParams p,
                         const __grid_constant__ typename HeadsForward<T, kHeadDim, kOptions, kPacked>::Rule score,
                         const __grid_constant__ HeadsForwardPlan plan) {
  extern __shared__ __align__(128) unsigned char shared[];
  ptx::wait_for_previous_kernel();
  HeadsForward<T, kHeadDim, kOptions, kPacked>(p, score, plan, reinterpret_cast<T*>(shared)).run();
}

template <class T, int kHeadDim, Options kOptions, bool kPacked>
void launch_heads_forward(const AttnParams& p) {
  using Kernel = HeadsForward<T, kHeadDim, kOptions, kPacked>;
  const HeadsForwardPlan plan = HeadsForwardPlan::of(p, Kernel::kTile, multiprocessors(), kOptions);
  constexpr const char* kName = "forward of heads";
  launch_early(heads_forward_kernel<T, kHeadDim, kOptions, kPacked>, kName, p, row_of_blocks(plan.blocks(p), kName, p),
               plan.warps * 32, static_cast<int>(plan.shared_bytes(kHeadDim)), p, Kernel::Rule::of(p), plan);
}

template <class T, int kHeadDim, Options kOptions>
void heads_forward(const AttnParams& p) {
  if constexpr (takes_packed(kOptions)) {
    if (p.is_varlen()) return launch_heads_forward<T, kHeadDim, kOptions, true>(p);
  }
  launch_heads_forward<T, kHeadDim, kOptions, false>(p);
}

}  // namespace flashattn_ext::sm80
