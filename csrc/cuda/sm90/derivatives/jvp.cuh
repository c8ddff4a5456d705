// Forward mode on Hopper: the tangents of out and lse, by the formulas of cuda/sm80/derivatives/jvp.cuh, in the
// schedule of forward.cuh. A warpgroup has 64 queries. The step of key tile n issues the products for its scores and
// for the tangents of its logits, then those for the values of n + 1 and their tangents, which both add to `out`:
//
//   S = q k^T      tS = tq k^T + q tk^T      out += (P (A - pivot)) v + P tv
//
// docs/sm90_derivatives.md has the steps.
#pragma once

#include "cuda/host/launch.cuh"
#include "cuda/score/tangent_policy.cuh"
#include "cuda/score/tangent_rows.cuh"
#include "cuda/sm90/derivatives/given_tangents.cuh"
#include "cuda/sm90/shared/forward_consumer.cuh"
#include "cuda/sm90/shared/forward_work.cuh"
#include "cuda/sm90/shared/products.cuh"
#include "cuda/sm90/shared/tiles.h"
#include "cuda/stages/tile_order.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/store_row.cuh"

namespace flashattn_ext::sm90 {

struct JvpMaps {
  CUtensorMap q, k, v, tq, tk, tv;  // those of absent tangents are never used
};

template <class T, int kHeadDim, class TileOfRow, class Given>
struct Jvp : ForwardConsumer<Jvp<T, kHeadDim, TileOfRow, Given>> {
  static constexpr ForwardTile kTile = TileOfRow::kTile;
  static constexpr int kGroups = kTile.groups, kQueries = kTile.queries(), kKeys = kTile.keys, kStages = kTile.stages;
  static constexpr RegisterBudget kRegisters = register_budget(kGroups);
  static constexpr int kThreads = (kGroups + 1) * kGroupThreads, kWarps = kGroups * 4;
  static constexpr int kPanels = panels(kHeadDim);
  static constexpr int kScoreTiles = kKeys / 8, kOutTiles = kHeadDim / 8, kSteps = kKeys / 16;
  using Element = T;
  using Visibility = ArithmeticVisibility;
  using KeyWalk = typename Visibility::Walk;
  using Tangents = PlainTangents;
  using Rule = Tangents::Rule;
  using Work = ForwardWork;
  using KeyTile = T[kPanels][kKeys][kPanelColumns];
  using QueryTile = T[kPanels][kQueries][kPanelColumns];
  static __device__ __forceinline__ int ping_pong() { return kJvpPingPong; }
  static constexpr bool kTailsOfCaches = false;
  static constexpr bool kClearsTail = true;

  struct Shared {
    QueryTile q, tq;
    KeyTile k[kStages], tk[kStages], v[kStages], tv[kStages];
    LseWords<float> words[kQueries];
    // `full` of a stage: the rows and their tangents have arrived; `empty`: both may be overwritten.
    ptx::Barrier q_full[1], q_empty[1];
    ptx::Barrier k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
    ptx::Barrier work_full, work_empty, tail_cleared;
    Work work;
  };
  static_assert(sizeof(Shared) <= kSharedLimit);
  static_assert(kStages >= 2);  // the next keys are loaded before these values

  // --- the producer thread ------------------------------------------------------------------------------------------

  struct Loader {
    Shared& shared;
    const JvpParams& p;
    const JvpMaps& maps;
    RingPosition<kStages> k, v;
    uint32_t q_parity = 0, work_parity = 0;

    // The loads of a barrier `full` in one phase.
    static constexpr int kQueryLoads = Given::kQ ? 2 : 1, kKeyLoads = Given::kK ? 2 : 1;
    static constexpr int kValueLoads = Given::kLogits && Given::kV ? 2 : 1;

    __device__ void load_tiles(const TileGrid& grid) {
      each_forward_work<kQueries, kKeys, false, Visibility::kTakesLate>(
          p, grid, static_cast<int>(blockIdx.x), [&](int tile) { return grid.next(tile); },
          [&](const Work& work, int key_start) {
            publish_work(shared, work, &work_parity);
            if (Given::kAny && work.sees_keys()) load_tile(work, key_start);
          });
      publish_work(shared, Work{}, &work_parity);
    }
    __device__ void load_tile(const Work& work, int key_start) {
      load_keys(work, key_start, work.last);
      const int batch = p.is_varlen() ? 0 : work.b;
      ptx::barrier_wait(&shared.q_empty[0], q_parity ^ 1);
      load_panels(shared.q, shared.q_full[0], maps.q, work.query_start + work.row0, work.h, batch);
      if constexpr (Given::kQ) {
        load_panels(shared.tq, shared.q_full[0], maps.tq, work.query_start + work.row0, work.h, batch);
      }
      q_parity ^= 1;
      for (int n = work.last; n >= work.first; --n) {
        if (n > work.first) load_keys(work, key_start, n - 1);
        load_values(work, key_start, n);
      }
    }
    __device__ void load_keys(const Work& work, int key_start, int n) {
      const int batch = p.is_varlen() ? 0 : work.b, hk = work.h / static_cast<int>(p.group_size());
      ptx::barrier_wait(&shared.k_empty[k.stage], k.parity ^ 1);
      load_panels(shared.k[k.stage], shared.k_full[k.stage], maps.k, key_start + n * kKeys, hk, batch);
      if constexpr (Given::kK) {
        load_panels(shared.tk[k.stage], shared.k_full[k.stage], maps.tk, key_start + n * kKeys, hk, batch);
      }
      k.advance();
    }
    __device__ void load_values(const Work& work, int key_start, int n) {
      const int batch = p.is_varlen() ? 0 : work.b, hk = work.h / static_cast<int>(p.group_size());
      ptx::barrier_wait(&shared.v_empty[v.stage], v.parity ^ 1);
      if constexpr (Given::kLogits) {
        load_panels(shared.v[v.stage], shared.v_full[v.stage], maps.v, key_start + n * kKeys, hk, batch);
      }
      if constexpr (Given::kV) {
        load_panels(shared.tv[v.stage], shared.v_full[v.stage], maps.tv, key_start + n * kKeys, hk, batch);
      }
      v.advance();
    }
  };

  // --- the consumer warpgroups ------------------------------------------------------------------------------------

  Shared& shared;
  const JvpParams& p;
  const int group, warp_row;  // first of this warp's 16 rows, within the tile
  const Rule& score;
  OneStage q;
  uint32_t work_parity = 0, tail_parity = 0;
  RingPosition<kStages> k, v;
  uint32_t q_fragments[kHeadDim / 16][4];  // operands from registers leave shared memory to those of the other products
  float scores[kScoreTiles][4], tangents[kScoreTiles][4], out[kOutTiles][4];
  uint32_t weights[kSteps][4], tangent_weights[kSteps][4];  // P and P (A - pivot), packed
  TangentRows<1, false> rows;

  __device__ Jvp(Shared& shared, const JvpParams& params, const Rule& score, int group)
      : shared(shared),
        p(params),
        group(group),
        warp_row(uniform(static_cast<int>(threadIdx.x) / 32 - 4) * 16),
        score(score) {}

  __device__ __forceinline__ auto& score_tile() { return reinterpret_cast<float (&)[1][kScoreTiles][4]>(scores); }
  __device__ __forceinline__ auto& tangent_tile() { return reinterpret_cast<float (&)[1][kScoreTiles][4]>(tangents); }

  __device__ __forceinline__ void compute_tiles() {
    if (group == 0) this->pass_phase(kGroups - 1);
    for (Work work = receive_work(shared, &work_parity); work.exists(); work = receive_work(shared, &work_parity)) {
      start_tile(work);
      if (Given::kAny && work.sees_keys()) this->compute_tile(work, Nothing{});
      finish_tile(work);
    }
  }

  // The words of the lse of row r (g or g + 8) of this warp: of the call, and later in shared memory.
  __device__ __forceinline__ LseWords<float> words_of(const Work& work, int r) const {
    const int row = work.row0 + warp_row + quad() + 8 * r;
    if (row >= work.length_q) return LseWords<float>::of_no_key();
    return LseWords<float>::of(p, work.b, work.h, int64_t{work.query_start} + row);
  }
  __device__ __forceinline__ LseWords<float>& kept_words(int r) const {
    return shared.words[warp_row + quad() + 8 * r];
  }
  __device__ __forceinline__ void start_tile(const Work& work) {
    set_zero(out);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const LseWords<float> words = words_of(work, r);
      rows.start(0, r, words);
      if (lane_in_quad() == 0) kept_words(r) = words;
    }
    __syncwarp();
  }

  // compute_tile calls it, with the key tiles that this warpgroup sees.
  __device__ __forceinline__ void compute_steps(const Work& work, KeyWalk& walk, Nothing) {
    const int& n = walk.n;
    const Mask32 mask = work.mask(p);
    const int row = work.row0 + warp_row;
    // Keys that every row of the warp sees; tiles with other keys are masked.
    const Limits unmasked{mask.keys_of(row + 15, row + 16).begin, mask.keys_of(row, row + 1).end};
    load_fragments(q_fragments, shared.q, warp_row);
    ptx::hold(q_fragments);
    Visibility::await_keys(shared, k);
    this->await_phase();
    multiply_queries();
    this->pass_phase(group);
    ptx::wgmma_wait<0>();
    hold_scores();
    this->end_keys(Visibility::is_last(walk));
    weigh(work, n, unmasked);
    pack();
    if (n == work.last) this->clear_tail_of_values(work);
    if (Visibility::has_next(shared, k, group, walk)) {
      for (Visibility::advance(walk);; Visibility::advance(walk)) {
        Visibility::await_keys(shared, k);
        this->await_phase();
        multiply_queries();
        ptx::barrier_wait(&shared.v_full[v.stage], v.parity);
        multiply_values();
        this->pass_phase(group);
        ptx::wgmma_wait<1>();
        hold_scores();
        this->end_keys(Visibility::is_last(walk));
        weigh(work, n, unmasked);
        hold_scores();
        // The loop exits here, before the wait in end_values, for the reason that forward.cuh gives.
        if (!Visibility::has_next(shared, k, group, walk)) break;
        end_values();
        pack();
      }
      end_values();
      pack();
    }
    ptx::barrier_wait(&shared.v_full[v.stage], v.parity);
    multiply_values();
    end_values();
  }

  // One group of products each: for scores and the tangents of logits, and for values.
  __device__ __forceinline__ void multiply_queries() {
    set_zero(scores);  // products of operands in registers add
    if constexpr (!Given::kQ) set_zero(tangents);
    hold_scores();
    ptx::wgmma_fence();
    issue_score_product(scores, q_fragments, shared.k[k.stage], 0);
    if constexpr (Given::kQ) {
      issue_score_product<kHeadDim, uint64_t>(tangents, shared.tq, group * 64, shared.k[k.stage]);
    }
    if constexpr (Given::kK) issue_score_product(tangents, q_fragments, shared.tk[k.stage], 0);
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void multiply_values() {
    ptx::hold(out);
    ptx::wgmma_fence();
    if constexpr (Given::kLogits) issue_accumulate<32, uint64_t>(out, tangent_weights, shared.v[v.stage]);
    if constexpr (Given::kV) issue_accumulate<32, uint64_t>(out, weights, shared.tv[v.stage]);
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void hold_scores() {
    ptx::hold(scores);
    ptx::hold(tangents);
  }

  __device__ __forceinline__ void end_values() {
    ptx::wgmma_wait<0>();
    ptx::hold(out);
    release(shared.v_empty[v.stage]);
    v.advance();
  }

  // Products become P and P (A - pivot). They are packed later: the registers of packed ones are operands of products
  // in flight.
  __device__ __forceinline__ void weigh(const Work& work, int n, const Limits& unmasked) {
    if constexpr (!Given::kLogits) set_zero(tangents);
    const auto& rule = Tangents::make_logits(p, score, score_tile(), tangent_tile(), Nothing{});
    const int row = work.row0 + warp_row + quad(), key0 = n * kKeys;
    if (key0 < unmasked.begin || key0 + kKeys > unmasked.end) {
      hide_keys<true, true>(score_tile(), work.mask(p), row, key0 + 2 * lane_in_quad());
      rows.hide(score_tile(), tangent_tile());
    }
    rows.subtract_words(score_tile(), rule, [&](int, int r) { return kept_words(r); });
    rows.find_pivots(score_tile(), tangent_tile(), rule);
    rows.weigh(score_tile(), tangent_tile(), rule);
  }
  __device__ __forceinline__ void pack() {
    if constexpr (Given::kLogits) pack_scores<T>(tangent_weights, tangents);
    if constexpr (Given::kV) pack_scores<T>(weights, scores);
  }

  __device__ __forceinline__ void skip_more() {}
  __device__ __forceinline__ void clear_values(int count, int thread, int threads) {
    if constexpr (Given::kLogits) clear_rows(shared.v[v.stage], count, thread, threads);
    if constexpr (Given::kV) clear_rows(shared.tv[v.stage], count, thread, threads);
  }

  __device__ __forceinline__ void finish_tile(const Work& work) {
    const SinkTangent sink(p, work.h);
    const int row = work.row0 + warp_row + quad(), columns = static_cast<int>(p.head_dim_v);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool exists = row + 8 * r < work.length_q;
      const int64_t at = int64_t{work.query_start} + row + 8 * r;
      const RowTangent tangent = rows.finish(p, sink, 0, r, kept_words(r));
      if (exists && lane_in_quad() == 0) *row_statistic(p.tangents.lse, work.b, work.h, at) = tangent.lse;
      add_row(row_pointer<const T>(p.out, work.b, work.h, at), r, tangent, exists, columns);
      store_row(row_pointer<T>(p.tangents.out, work.b, work.h, at), out, r, 1.f, false, exists, columns);
    }
  }
  // Row r of `out`, the sums over keys, becomes that of the tangent. from: the row of the result.
  __device__ __forceinline__ void add_row(const T* from, int r, const RowTangent& row, bool exists, int columns) {
    const bool aligned = reinterpret_cast<uintptr_t>(from) % sizeof(uint32_t) == 0;
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
      const int column = n * 8 + 2 * lane_in_quad();
      float2 pair{};
      if (exists && aligned && column + 1 < columns) {
        pair = TensorCore<T>::unpack(*reinterpret_cast<const uint32_t*>(from + column));
      } else if (exists && column < columns) {
        pair.x = widen(from[column]);
        if (column + 1 < columns) pair.y = widen(from[column + 1]);
      }
      out[n][2 * r] = out[n][2 * r] * row.sums + row.factor * pair.x;
      out[n][2 * r + 1] = out[n][2 * r + 1] * row.sums + row.factor * pair.y;
    }
  }
};

template <class Kernel, class Rule>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    jvp_kernel(const __grid_constant__ JvpParams p, const __grid_constant__ JvpMaps maps,
               const __grid_constant__ TileGrid grid, const __grid_constant__ Rule score) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char memory[];
  SharedOf<Kernel>& shared = *reinterpret_cast<SharedOf<Kernel>*>(memory);
  using Loader = typename Kernel::Loader;
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&maps.q, &maps.k, &maps.v}) ptx::prefetch_tensor_map(map);
    ptx::barrier_init(&shared.q_full[0], Loader::kQueryLoads);
    ptx::barrier_init(&shared.q_empty[0], Kernel::kWarps);
    for (int i = 0; i < Kernel::kStages; ++i) {
      ptx::barrier_init(&shared.k_full[i], Loader::kKeyLoads);
      ptx::barrier_init(&shared.k_empty[i], Kernel::kWarps);
      ptx::barrier_init(&shared.v_full[i], Loader::kValueLoads);
      ptx::barrier_init(&shared.v_empty[i], Kernel::kWarps);
    }
    ptx::barrier_init(&shared.work_full, 1);
    ptx::barrier_init(&shared.work_empty, Kernel::kWarps);
    ptx::barrier_init(&shared.tail_cleared, Kernel::kWarps);
    ptx::fence_barrier_init();
  }
  __syncthreads();
  // The producer warpgroup gives registers to the consumer warpgroups.
  if (threadIdx.x < kGroupThreads) {
    ptx::give_registers<Kernel::kRegisters.producer>();
    if (threadIdx.x == 0) Loader{shared, p, maps}.load_tiles(grid);
  } else {
    ptx::take_registers<Kernel::kRegisters.consumer>();
    Kernel(shared, p, score, uniform(static_cast<int>(threadIdx.x) / kGroupThreads) - 1).compute_tiles();
  }
#endif
}

template <class Kernel>
void run_jvp(const JvpParams& p) {
  const int64_t blocks = tile_count(p.seqlen_q, Kernel::kQueries), heads = p.batch * p.heads_q, all = blocks * heads;
  JvpMaps maps{};
  maps.q = query_map(p, p.q, p.head_dim, Kernel::kQueries);
  maps.k = key_map(p, p.k, p.head_dim, Kernel::kKeys);
  maps.v = key_map(p, p.v, p.head_dim_v, Kernel::kKeys);
  const AttnParams& tangents = p.tangents;
  if (tangents.q.data) maps.tq = query_map(p, tangents.q, p.head_dim, Kernel::kQueries);
  if (tangents.k.data) maps.tk = key_map(p, tangents.k, p.head_dim, Kernel::kKeys);
  if (tangents.v.data) maps.tv = key_map(p, tangents.v, p.head_dim_v, Kernel::kKeys);
  int* const taken = static_cast<int*>(p.workspace);
  const TileGrid grid{forward_order(p, blocks, 2 * element_bytes(p)), static_cast<int>(all), taken};
  const int64_t processors = multiprocessors();
  if (all > processors) {
    zero_taken(p, taken);
  }
  const auto score = Kernel::Rule::of(p);
  launch(jvp_kernel<Kernel, std::decay_t<decltype(score)>>, "sm90 jvp", p, std::min(all, processors), Kernel::kThreads,
         kSharedBytesOf<Kernel>, maps, grid, score);
}

// Runs a call that has these tangents.
template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
struct JvpRun {
  using TileOfRow = TileOf<kernel_table::kSm90Jvp, T, kHeadDim, kOptions, kHeadDimV>;
  template <class Given>
  static void run(const JvpParams& p) {
    run_jvp<Jvp<T, kHeadDim, TileOfRow, Given>>(p);
  }
};

template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
void jvp(const JvpParams& p) {
  static_assert(kOptions == kPlain && kHeadDimV == kHeadDim);
  if (p.batch * p.heads_q == 0) return;
  run_with_tangents<JvpRun<T, kHeadDim, kOptions, kHeadDimV>>(p);
}

}  // namespace flashattn_ext::sm90
