// Forward on Hopper for head dims above 256. The accumulators of 64 rows take the registers of two warpgroups, each of
// which has one half of the columns. A third warpgroup computes the scores of these rows and passes the weights on
// through shared memory, so that no score is computed or exchanged twice. A cluster of two thread blocks computes 128
// rows: keys and values are read from global memory once, half by each block, and multicast to both.
//
// Key tiles come in descending order. The weights of tile n are published when the product for the scores of n - 1 is
// nearly done: then the product of the values of n overlaps the softmax of n - 1. lab/logs/sm90_forward.md has the
// arithmetic and what was measured.
#pragma once

#include <type_traits>

#include "cuda/host/launch.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/score/scores.cuh"
#include "cuda/sm90/forward/dropout_policy.cuh"
#include "cuda/sm90/forward_large/forward_large_loaders.cuh"
#include "cuda/sm90/shared/forward_work.cuh"
#include "cuda/sm90/shared/pair.cuh"
#include "cuda/sm90/shared/products.cuh"
#include "cuda/sm90/shared/tiles.h"
#include "cuda/stages/tile_order.cuh"
#include "cuda/tile/panels.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/store_row.cuh"

namespace flashattn_ext::sm90 {

template <class T, int kHeadDim, Options kOptions>
struct LargeForward {
  using Score = ScoreRule<float, PlainProducts<true>>;
  static constexpr ForwardTile kTile = tile_of<kernel_table::kSm90Forward, T, kHeadDim, kOptions>();
  static constexpr int kRows = 64, kKeys = kTile.keys;  // rows of a thread block, keys of a step
  static constexpr int kBlocks = 2, kAllRows = kBlocks * kRows;
  static constexpr int kThreads = 4 * kGroupThreads;
  static constexpr int kPanels = panels(kHeadDim), kHalfPanels = kPanels / 2, kHalfColumns = kHeadDim / 2;
  static_assert(kHeadDim % (2 * kPanelColumns) == 0);

  // Keys are loaded in parts of some columns, values in parts of 16 rows. Parts are small, so that a stage is refilled
  // soon.
  static constexpr int kKeyPanels = kKeys > 64 ? 1 : 2, kKeyParts = kPanels / kKeyPanels;
  static constexpr int kValueRows = 16, kValueParts = kKeys / kValueRows;
  static constexpr int kPartsAtOnce = kValueParts % 4 == 0 ? 4 : 3;  // whose weights are in registers
  static_assert(kValueParts % kPartsAtOnce == 0);
  static_assert(kKeyParts * kKeyPanels == kPanels);
  static constexpr int kKeyStages = kTile.stages, kWeightStages = 2;
  static constexpr int kKeyBytes = kKeyPanels * kKeys * 128, kValueBytes = kValueRows * kHeadDim * 2;
  static constexpr int kOtherBytes =  // queries, weights, barriers and the rest
      kRows * kHeadDim * 2 + kWeightStages * kKeys * kRows * 2 + 2048;
  static constexpr int kValueStages = (kSharedLimit - kOtherBytes - kKeyStages * kKeyBytes) / kValueBytes;
  static_assert(kKeyStages >= 2 && kValueStages >= 2);

  static constexpr int kScoreTiles = kKeys / 8, kOutTiles = kHalfColumns / 8, kSteps = kKeys / 16;
  static constexpr int kScoreWarps = 4, kSumWarps = 8;
  static_assert(kOptions == kPlain || kOptions == kDropout);
  using Dropping = std::conditional_t<kOptions == kDropout, CounterDropout<kSteps>, NoDropout<kSteps>>;

  // Tiles are as in cuda/tile/panels.cuh. A barrier `full` says that a stage has arrived, `empty` that it may be
  // overwritten; the `empty` barriers of keys and values count the warps of both thread blocks.
  struct Shared {
    T q[kPanels][kRows][kPanelColumns];
    T k[kKeyStages][kKeyPanels][kKeys][kPanelColumns];
    T v[kValueStages][kPanels][kValueRows][kPanelColumns];
    uint4 weights[kWeightStages][kSteps][kGroupThreads];  // weights of 16 keys: a fragment per thread of a warpgroup
    // The factor for each row's accumulators before the products with these weights are added; in the stage after the
    // last weights of a tile, the sum of the row's weights.
    float factors[kWeightStages][kRows];
    ptx::Barrier q_full, q_empty;
    ptx::Barrier k_full[kKeyStages], k_empty[kKeyStages], v_full[kValueStages], v_empty[kValueStages];
    ptx::Barrier weights_full[kWeightStages], weights_empty[kWeightStages];
    ptx::Barrier work_full, work_empty;
    ForwardWork work;
    SharedTile next_tile;

    __device__ void init() {
      ptx::barrier_init(&q_full, 1);
      ptx::barrier_init(&q_empty, kScoreWarps);
      for (int i = 0; i < kKeyStages; ++i) {
        ptx::barrier_init(&k_full[i], 1);
        ptx::barrier_init(&k_empty[i], kBlocks * kScoreWarps);
      }
      for (int i = 0; i < kValueStages; ++i) {
        ptx::barrier_init(&v_full[i], 1);
        ptx::barrier_init(&v_empty[i], kBlocks * kSumWarps);
      }
      for (int i = 0; i < kWeightStages; ++i) {
        ptx::barrier_init(&weights_full[i], kScoreWarps);
        ptx::barrier_init(&weights_empty[i], kSumWarps);
      }
      ptx::barrier_init(&work_full, 1);
      ptx::barrier_init(&work_empty, kScoreWarps + kSumWarps + 1);  // and the warp that loads values
      next_tile.init();
    }
  };
  static_assert(sizeof(Shared) <= kSharedLimit);

  using Address = ptx::UniformDescriptor;  // otherwise stages are not in uniform registers

  // The first of a warp's 16 rows, within those of its thread block; all lanes call it.
  static __device__ __forceinline__ int first_of_warp() { return uniform(static_cast<int>(threadIdx.x) / 32 % 4) * 16; }
  // The first row of this thread block, within the sequence.
  static __device__ __forceinline__ int first_row(const ForwardWork& work) {
    return work.row0 + static_cast<int>(ptx::cluster_rank()) * kRows;
  }
  // Signals in both thread blocks that this warp is done with a stage.
  static __device__ __forceinline__ void release_in_both(ptx::Barrier& empty) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    ptx::barrier_arrive_in_if(lane < kBlocks, ptx::address_in(lane % kBlocks, &empty));
  }

  static constexpr uint16_t kAllBlocks = (1 << kBlocks) - 1;

  // --- the warpgroup of scores --------------------------------------------------------------------------------------

  struct ScoreGroup {
    Shared& shared;
    const AttnParams& p;
    const Score& score;
    const int warp_row;
    uint32_t work_parity = 0, q_parity = 0;
    RingPosition<kKeyStages> k;
    RingPosition<kWeightStages> at;
    float scores[kScoreTiles][4];
    Dropping dropping;
    typename Dropping::Generator generator{p};
    OnlineSoftmax<> softmax;
    float shrink[2];  // the factors for the earlier sums
    float tolerance;  // argument of OnlineSoftmax::weigh

    __device__ __forceinline__ void compute_tiles() {
      for (;;) {
        const ForwardWork work = receive_work(shared, &work_parity);
        if (!work.exists()) return;
        generator.start_tile(p, work.b);
        const float sink = head_sink(p, work.h);
        softmax.start(sink);
        // Above a sink as the first maximum, weights near 1 would not be exact in 16 bits, and dS would lose digits.
        tolerance = sink_counts(sink) ? 0.f : kTolerance;
        if (work.sees_keys()) compute_tile(work);
        finish_tile(work);
      }
    }

    // The other thread block may see key tiles that this one does not see.
    __device__ __forceinline__ void compute_tile(const ForwardWork& work) {
      const Limits own = work.tiles_of<kKeys>(p, first_row(work));
      int n = work.last;
      for (; n >= own.end; --n) skip_keys();
      ptx::barrier_wait(&shared.q_full, q_parity);
      if (n >= own.begin) compute_steps(work, own);
      release(shared.q_empty);
      q_parity ^= 1;
      for (n = min(n, own.begin - 1); n >= work.first; --n) skip_keys();
    }
    __device__ __forceinline__ void skip_keys() {
#pragma unroll 1
      for (int part = 0; part < kKeyParts; ++part) {
        ptx::barrier_wait(&shared.k_full[k.stage], k.parity);
        release_in_both(shared.k_empty[k.stage]);
        k.advance();
      }
    }

    __device__ __forceinline__ void compute_steps(const ForwardWork& work, const Limits& own) {
      const Mask32 mask = work.mask(p);
      const int row = first_row(work) + warp_row;
      // Keys that every row of the warp sees; tiles with other keys are masked.
      const Limits unmasked{mask.keys_of(row + 15, row + 16).begin, mask.keys_of(row, row + 1).end};
      int n = own.end - 1;
      multiply([&] { draw_signs(work, n); });
      for (;; --n) {
        weigh(work, n, unmasked);
        store_weights();
        if (n == own.begin) break;
        multiply([&] {
          announce();
          draw_signs(work, n - 1);
        });
      }
      announce();
    }

    // The product of the scores of one key tile. before_last() is called when every part is in flight and all but the
    // last one are done.
    template <class Before>
    __device__ __forceinline__ void multiply(const Before& before_last) {
      ptx::hold(scores);
      int before = 0;
#pragma unroll
      for (int part = 0; part < kKeyParts; ++part) {
        ptx::barrier_wait(&shared.k_full[k.stage], k.parity);
        ptx::wgmma_fence();
        const Address a = ptx::swizzled_descriptor(shared.q[part * kKeyPanels], 0);
        const Address b = ptx::swizzled_descriptor(shared.k[k.stage], 0);
#pragma unroll
        for (int i = 0; i < kKeyPanels * 4; ++i) {
          const int panel = i / 4, step = i % 4;
          ptx::wgmma<ptx::kMajorK, ptx::kMajorK>(scores, a + panel * kRows * 8 + step * 2,
                                                 b + panel * kKeys * 8 + step * 2, part + i > 0, T());
        }
        ptx::wgmma_commit();
        if (part > 0) {
          ptx::wgmma_wait<1>();
          release_in_both(shared.k_empty[before]);
        }
        before = k.stage;
        k.advance();
      }
      before_last();
      ptx::wgmma_wait<0>();
      ptx::hold(scores);
      release_in_both(shared.k_empty[before]);
    }

    __device__ __forceinline__ void weigh(const ForwardWork& work, int n, const Limits& unmasked) {
      auto& x = reinterpret_cast<float (&)[1][kScoreTiles][4]>(scores);
      const int row = first_row(work) + warp_row + quad(), key0 = n * kKeys, key = key0 + 2 * lane_in_quad();
      store_scores(x, score);
      if (key0 < unmasked.begin) hide_keys<true, false>(x, work.mask(p), row, key);
      if (key0 + kKeys > unmasked.end) hide_keys<false, true>(x, work.mask(p), row, key);
      softmax.weigh(scores, score, tolerance, [&](const float (&factors)[2]) {
        shrink[0] = factors[0];
        shrink[1] = factors[1];
      });
    }

    __device__ __forceinline__ void draw_signs(const ForwardWork& work, int n) {
      dropping.draw(p, generator, work.h, first_row(work) + warp_row, n * kKeys);
    }

    __device__ __forceinline__ void store_weights() {
      uint32_t packed[kSteps][4];
      pack_scores<T>(packed, scores);
      dropping.drop(p, packed);
      ptx::barrier_wait(&shared.weights_empty[at.stage], at.parity ^ 1);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const auto& x = packed[step];
        shared.weights[at.stage][step][threadIdx.x % kGroupThreads] = make_uint4(x[0], x[1], x[2], x[3]);
      }
      store_factors(shrink);
    }
    __device__ __forceinline__ void store_factors(const float (&factors)[2]) {
      if (lane_in_quad() != 0) return;
      shared.factors[at.stage][warp_row + quad()] = factors[0];
      shared.factors[at.stage][warp_row + quad() + 8] = factors[1];
    }
    // Publishes the weights and factors that were stored last.
    __device__ __forceinline__ void announce() {
      __syncwarp();
      release(shared.weights_full[at.stage]);
      at.advance();
    }

    __device__ __forceinline__ void finish_tile(const ForwardWork& work) {
      const float sums[2] = {softmax.total(0), softmax.total(1)};
      ptx::barrier_wait(&shared.weights_empty[at.stage], at.parity ^ 1);
      store_factors(sums);
      announce();
      const int row = first_row(work) + warp_row + quad();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (row + 8 * r >= work.length_q) continue;
        const int64_t at = int64_t{work.query_start} + row + 8 * r;
        softmax.store_statistics(p, work.b, work.h, at, r, sums[r]);
      }
    }
  };

  // --- the warpgroups that accumulate `out` -------------------------------------------------------------------------

  struct SumGroup {
    Shared& shared;
    const AttnParams& p;
    const int half;  // which half of the columns
    const int warp_row;
    uint32_t work_parity = 0;
    RingPosition<kValueStages> v;
    RingPosition<kWeightStages> at;
    float out[kOutTiles][4];

    __device__ __forceinline__ void compute_tiles() {
      for (;;) {
        const ForwardWork work = receive_work(shared, &work_parity);
        if (!work.exists()) return;
        set_zero(out);
        if (work.sees_keys()) compute_tile(work);
        finish_tile(work);
      }
    }

    __device__ __forceinline__ void compute_tile(const ForwardWork& work) {
      const Limits own = work.tiles_of<kKeys>(p, first_row(work));
      // The rows behind a packed sequence hold values of another one: even with weights of 0 they would propagate a
      // NaN.
      const bool has_tail = p.is_varlen() && (work.last + 1) * kKeys > work.length_k;
      int n = work.last;
      for (; n >= own.end; --n) skip_values();
      if (has_tail && n == work.last && n >= own.begin) add_step<true>(work.length_k - n-- * kKeys);
      for (; n >= own.begin; --n) add_step<false>(0);
      for (; n >= work.first; --n) skip_values();
    }
    __device__ __forceinline__ void skip_values() {
#pragma unroll 1
      for (int part = 0; part < kValueParts; ++part) {
        ptx::barrier_wait(&shared.v_full[v.stage], v.parity);
        release_in_both(shared.v_empty[v.stage]);
        v.advance();
      }
    }

    // Adds weights times values of a key tile; with a tail, of its first `keys` rows.
    template <bool kTail>
    __device__ __forceinline__ void add_step(int keys) {
      ptx::barrier_wait(&shared.weights_full[at.stage], at.parity);
      float shrink[2];
      load_factors(shrink);
      rescale(out, shrink);
#pragma unroll 1
      for (int first = 0; first < kValueParts; first += kPartsAtOnce) {
        uint32_t weights[kPartsAtOnce][4];
#pragma unroll
        for (int i = 0; i < kPartsAtOnce; ++i) {
          const uint4 x = shared.weights[at.stage][first + i][threadIdx.x % kGroupThreads];
          weights[i][0] = x.x, weights[i][1] = x.y, weights[i][2] = x.z, weights[i][3] = x.w;
        }
        if (first + kPartsAtOnce == kValueParts) end_weights();
        multiply<kTail>(weights, keys - first * kValueRows);
      }
    }
    __device__ __forceinline__ void load_factors(float (&factors)[2]) {
      factors[0] = shared.factors[at.stage][warp_row + quad()];
      factors[1] = shared.factors[at.stage][warp_row + quad() + 8];
    }
    __device__ __forceinline__ void end_weights() {
      __syncwarp();
      release(shared.weights_empty[at.stage]);
      at.advance();
    }
    // Adds the products of some parts of the values.
    template <bool kTail>
    __device__ __forceinline__ void multiply(uint32_t (&weights)[kPartsAtOnce][4], int keys) {
      // The accumulators of an instruction have to fit the registers that a thread has at the launch.
      constexpr int kProducts = kOutTiles > 24 ? 2 : 1, kTiles = kOutTiles / kProducts;
      ptx::hold(out);
      int before = 0;
#pragma unroll
      for (int part = 0; part < kPartsAtOnce; ++part) {
        ptx::barrier_wait(&shared.v_full[v.stage], v.parity);
        if (kTail) clear_tail(keys - part * kValueRows);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kProducts; ++i) {
          const int panel = half * kHalfPanels + i * kTiles / 8;
          const Address values = ptx::swizzled_descriptor(shared.v[v.stage][panel], kValueRows * 128);
          auto& columns = reinterpret_cast<float (&)[kTiles][4]>(out[i * kTiles]);
          ptx::wgmma<ptx::kMajorMN>(columns, weights[part], values, T());
        }
        ptx::wgmma_commit();
        if (part > 0) {
          ptx::wgmma_wait<1>();
          release_in_both(shared.v_empty[before]);
        }
        before = v.stage;
        v.advance();
      }
      ptx::wgmma_wait<0>();
      ptx::hold(out);
      ptx::hold(weights);
      release_in_both(shared.v_empty[before]);
    }
    // Zeroes rows of this warpgroup's half from `first` on.
    __device__ __forceinline__ void clear_tail(int first) {
      if (first >= kValueRows) return;
      const int thread = static_cast<int>(threadIdx.x) % kGroupThreads;
      auto& columns =
          reinterpret_cast<T(&)[kHalfPanels][kValueRows][kPanelColumns]>(shared.v[v.stage][half * kHalfPanels]);
      clear_rows(columns, max(first, 0), thread, kGroupThreads);
      ptx::fence_async_shared();
      ptx::named_barrier_sync(kHalfCleared + half, kGroupThreads);
    }
    __device__ __forceinline__ void finish_tile(const ForwardWork& work) {
      ptx::barrier_wait(&shared.weights_full[at.stage], at.parity);
      float sums[2];
      load_factors(sums);
      end_weights();
      const int row = first_row(work) + warp_row + quad(), first_column = half * kHalfColumns;
      const int columns = static_cast<int>(p.head_dim_v) - first_column;
      const float keep_scale = 256.f / p.dropout_threshold;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const bool exists = row + 8 * r < work.length_q;
        T* const to = row_pointer<T>(p.out, work.b, work.h, int64_t{work.query_start} + row + 8 * r) + first_column;
        store_row(to, out, r, keep_scale / sums[r], sums[r] == 0, exists, columns);
      }
    }
  };
};

template <class T, int kHeadDim, Options kOptions>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(LargeForward<T, kHeadDim, kOptions>::kThreads, 1)
    large_forward_kernel(const __grid_constant__ AttnParams p, const __grid_constant__ LargeForwardMaps maps,
                         const __grid_constant__ TileGrid grid,
                         const __grid_constant__ typename LargeForward<T, kHeadDim, kOptions>::Score score) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Kernel = LargeForward<T, kHeadDim, kOptions>;
  extern __shared__ __align__(1024) unsigned char memory[];
  SharedOf<Kernel>& shared = *reinterpret_cast<SharedOf<Kernel>*>(memory);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&maps.q);
    ptx::prefetch_tensor_map(&maps.k);
    ptx::prefetch_tensor_map(&maps.v);
    shared.init();
    ptx::fence_barrier_init();
  }
  // The other block copies to this one and arrives at its barriers, so both synchronise here and before they exit.
  ptx::cluster_sync();
  const int group = uniform(static_cast<int>(threadIdx.x) / kGroupThreads);
  if (group == 0) {
    ptx::give_registers<kLargeRegisters.loader>();
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
    if (threadIdx.x == 0) LargeKeyLoader<Kernel>{shared, p, maps}.load_all(grid);
    if (warp == 1) LargeValueLoader<Kernel>{shared, p, maps}.load_all();
  } else if (group == 1) {
    ptx::give_registers<kLargeRegisters.scores>();
    typename Kernel::ScoreGroup{shared, p, score, Kernel::first_of_warp()}.compute_tiles();
  } else {
    ptx::take_registers<kLargeRegisters.sums>();
    typename Kernel::SumGroup{shared, p, group - 2, Kernel::first_of_warp()}.compute_tiles();
  }
  ptx::cluster_sync();
#endif
}

template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
void forward(const AttnParams& p, bool) {
  static_assert(kHeadDim > 256 && kHeadDimV == kHeadDim);
  using Kernel = LargeForward<T, kHeadDim, kOptions>;
  if (p.batch * p.heads_q == 0) return;
  const LargeForwardMaps maps{query_map(p, p.q, p.head_dim, Kernel::kRows),
                              key_map(p, p.k, p.head_dim, Kernel::kKeys / Kernel::kBlocks),
                              key_map(p, p.v, p.head_dim_v, Kernel::kValueRows)};
  const int64_t tiles = tile_count(p.seqlen_q, Kernel::kAllRows), all = tiles * p.batch * p.heads_q;
  int* const taken = static_cast<int*>(p.workspace);
  const TileGrid grid{forward_order(p, tiles, sizeof(T)), static_cast<int>(all), taken};
  const int64_t clusters = multiprocessors() / Kernel::kBlocks;
  if (all > clusters) {
    zero_taken(p, taken);
  }
  launch(large_forward_kernel<T, kHeadDim, kOptions>, "sm90 forward", p, std::min(all, clusters) * Kernel::kBlocks,
         Kernel::kThreads, kSharedBytesOf<Kernel>, maps, grid, Kernel::Score::of(p));
}

}  // namespace flashattn_ext::sm90
