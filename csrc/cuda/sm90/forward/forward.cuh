// Forward on Hopper, warp-specialised and persistent: a thread block computes tiles of queries of one head, 64 rows in
// each of two to four warpgroups, while one more warp loads queries, keys and values by TMA (Shah et al. 2024,
// "FlashAttention-3"). Key tiles come in descending order. The step of key tile n issues the product for its scores,
// then that for the values of n + 1: the softmax of n overlaps the second one. Warpgroups issue their products in
// ping-pong order, so that the softmax of one also overlaps the products of another. docs/sm90_forward.md draws a step.
// What options change is in policies: forward_mask.cuh, forward_blocks.cuh, score_policy.cuh and dropout_policy.cuh.
#pragma once

#include <type_traits>

#include "cuda/host/launch.cuh"
#include "cuda/ptx/async.cuh"
#include "cuda/score/scores.cuh"
#include "cuda/sm90/forward/forward_memory.cuh"
#include "cuda/sm90/forward/forward_operands.cuh"
#include "cuda/sm90/forward/forward_policies.cuh"
#include "cuda/sm90/fp8/value_transposer.cuh"
#include "cuda/sm90/shared/forward_consumer.cuh"
#include "cuda/sm90/shared/forward_work.cuh"
#include "cuda/sm90/shared/tiles.h"
#include "cuda/stages/tile_order.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/store_row.cuh"

namespace flashattn_ext::sm90 {

// TileOfRow: kTile, of the row of the table of kernels; Policies: forward_policies.cuh; Chunking:
// invariant/invariant.cuh. kTransposes: forward_operands.cuh.
template <class T, int kHeadDim, int kHeadDimV, class TileOfRow, class Policies, class Chunking = NoChunks,
          bool kTransposes = false>
struct Forward : ForwardConsumer<Forward<T, kHeadDim, kHeadDimV, TileOfRow, Policies, Chunking, kTransposes>> {
  static constexpr ForwardTile kTile = TileOfRow::kTile;
  using Operands = ForwardOperands<T, kHeadDim, kHeadDimV, TileOfRow, kTransposes>;
  using Element = typename Operands::Element;
  static constexpr RegisterBudget kRegisters = Operands::kRegisters;
  static constexpr int kGroups = kTile.groups, kQueries = kTile.queries(), kKeys = kTile.keys;
  static constexpr int kStages = kTile.stages, kQueryStages = kTile.query_stages, kElementBytes = sizeof(T);
  static constexpr int kThreads = (kTile.teams() * kGroups + 1) * kGroupThreads,
                       kWarps = kGroups * 4;  // kWarps: a team
  static constexpr int kPanels = panels(Operands::kColumns);
  static constexpr int kScoreTiles = kKeys / 8, kOutTiles = kHeadDimV / 8, kSteps = Operands::kSteps;
  using Visibility = typename Policies::template Visibility<kKeys, kGroups, kTile.teams()>;
  using Scoring = typename Policies::template Scoring<T, kKeys>;
  using Dropping = typename Policies::template Dropping<kSteps>;
  using Generator = typename Dropping::Generator;
  using Maps = typename Scoring::Maps;
  using Score = typename Scoring::Rule;
  using KeyWalk = typename Visibility::Walk;
  static constexpr bool kMasks = Policies::kMasks, kLists = Policies::kLists, kFinds = kMasks && !kLists;
  static constexpr int kMaskStages = kMasks ? kStages : 0, kFoundStages = kFinds ? kStages : 0;
  static constexpr bool kTurnsOfValues = kGroups > 2;  // with kInTurn
  static constexpr bool kClearsTail = !Operands::kZeroRows, kTailsOfCaches = Policies::kTailsOfCaches;
  static constexpr int kBiasTiles = Scoring::kTileStages;
  static constexpr int kRowStages = Operands::kRowStages, kTransposers = kRowStages > 0 ? kTransposingWarps : 0;

  // Warpgroups of one team share query tiles, warps of the producer warpgroup, and a Shared.
  static constexpr int kTeams = kTile.teams(), kSharedBytes = kSharedLimit / kTeams / kPanelAlignment * kPanelAlignment;
  // Whether rows of `out` are stored by TMA, where shared memory has room for them.
  static constexpr int kOutPanels = panels(kHeadDimV), kOtherBytes = 2048;  // at most: barriers and the work
  static constexpr int kTileBytes =
      (kQueryStages * kPanels + kOutPanels) * kQueries * 128 +
      kStages * static_cast<int>(kPanels * kKeys * 128 + sizeof(typename Operands::Values));
  static constexpr bool kStoresByTma = std::is_same_v<Chunking, NoChunks> && !Policies::kTailsOfCaches && !kFinds &&
                                       kBiasTiles == 0 && !Scoring::kIsFp8 && kTileBytes + kOtherBytes <= kSharedBytes;

  using Work = ForwardWork;
  using SeenWork = typename Chunking::Work;
  using KeyTile = std::conditional_t<kLists, MaskBlock, sm90::KeyTile<kGroups>>;
  using KeyBatch = sm90::KeyBatch<Work, KeyTile>;
  using PartialTile = std::conditional_t<kLists, PartialValues, sm90::PartialTile<kKeys>>;

  // Tiles are as in cuda/tile/panels.cuh. A barrier `full` says that a stage has arrived, `empty` that it may be
  // overwritten.
  struct Shared {
    alignas(kPanelAlignment) Element q[kQueryStages][kPanels][kQueries][kPanelColumns];
    alignas(kPanelAlignment) Element k[kStages][kPanels][kKeys][kPanelColumns];
    alignas(kPanelAlignment) typename Operands::Values v[kStages];
    // Values before they are transposed (value_transposer.cuh).
    alignas(panel_alignment(kRowStages)) MaybeArray<Element[1][kKeys][kPanelColumns], kRowStages> rows;
    alignas(panel_alignment(kBiasTiles)) MaybeArray<T[panels(kKeys)][kQueries][kPanelColumns], kBiasTiles> bias;
    alignas(panel_alignment(kStoresByTma))
        MaybeArray<T[kOutPanels][kOutRows][kPanelColumns], kStoresByTma ? kWarps : 0> out;
    ptx::Barrier q_full[kQueryStages], q_empty[kQueryStages];
    ptx::Barrier k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
    MaybeArray<ptx::Barrier, kRowStages> rows_full, rows_empty;
    ptx::Barrier work_full, work_empty, tail_cleared;
    Work work;
    // With a Mask (forward_mask.cuh) or a BlockMask (forward_blocks.cuh); members whose size depends on kFinds are
    // those of a Mask alone. v_arrived: values have arrived that are inspected before v_full completes. tiles_end: all
    // key tiles of a query tile but the last kKeyTilesAhead have been loaded. poisoned: whether the result is NaN, for
    // each row of a query tile and of the next one.
    MaybeArray<KeyTile, kMaskStages> key_tiles;  // one for each stage of keys
    MaybeArray<ptx::Barrier, kFinds ? kKeyBatches : 0> batch_full, batch_empty;
    MaybeArray<ptx::Barrier, kFoundStages> pairs_full;
    MaybeArray<ptx::Barrier, kMaskStages> v_arrived;
    MaybeArray<ptx::Barrier, kFinds ? 1 : 0> tiles_end;
    MaybeArray<KeyBatch, kFinds ? kKeyBatches : 0> batches;
    MaybeArray<PartialTile, kMaskStages> partial_tiles;
    MaybeArray<bool[kQueries], kMasks ? 2 : 0> poisoned;
    MaybeArray<ptx::Barrier, kBiasTiles> bias_full, bias_empty;
  };
  static_assert(sizeof(Shared) <= kSharedBytes);
  static_assert(kStages >= 2);  // the next keys are loaded before these values

  // The first teams of all thread blocks have the first tiles, then the second ones.
  template <class Take, class Body>
  static __device__ __forceinline__ void each_work(const AttnParams& p, const TileGrid& grid, const Take& take,
                                                   const Body& body, int team = 0) {
    each_forward_work<kQueries, kKeys, Scoring::kBatchesTogether, Visibility::kTakesLate>(
        p, grid, static_cast<int>(team * gridDim.x + blockIdx.x), take, body);
  }

  // --- the producer thread, without a Mask and a BlockMask ----------------------------------------------------------

  struct Loader {
    Shared& shared;
    const AttnParams& p;
    const Maps& maps;
    RingPosition<kStages> k, v;
    RingPosition<kRowStages> rows;
    BiasTileLoader<kBiasTiles> bias;
    QueryPosition<kQueryStages> q;
    uint32_t work_parity = 0;

    __device__ void load_tiles(const TileGrid& grid) {
      each_work(
          p, grid, [&](int tile) { return grid.next(tile); },
          [&](const Work& work, int key_start) {
            publish_work(shared, work, &work_parity);
            if (work.sees_keys()) load_tile(work, key_start);
          });
      publish_work(shared, Work{}, &work_parity);
    }
    __device__ void load_tile(const Work& work, int key_start) {
      const int batch = p.is_varlen() ? 0 : work.b, hk = work.h / static_cast<int>(p.group_size());
      load_steps(
          work,
          [&](auto& to, ptx::Barrier& full) {
            load_panels(to, full, maps.q, work.query_start + work.row0, work.h, batch);
          },
          [&](auto& to, ptx::Barrier& full, const auto& map, int n) {
            load_panels(to, full, map, key_start + n * kKeys, hk, batch);
          },
          [&](auto& to, ptx::Barrier& full, const auto& map, int n) {
            const TileOrigin at = Operands::values_at(p, batch, work.b, hk, key_start, n);
            load_panels(to, full, map, at.row, at.head, at.batch);
          });
    }
    // load_q(tile, barrier): starts copying the queries. load_k and load_v(tile, barrier, map, n): the keys and the
    // values of key tile n.
    template <class LoadQueries, class LoadKeys, class LoadValues>
    __device__ __forceinline__ void load_steps(const Work& work, const LoadQueries& load_q, const LoadKeys& load_k,
                                               const LoadValues& load_v) {
      auto load_keys = [&](int n) {
        ptx::barrier_wait(&shared.k_empty[k.stage], k.parity ^ 1);
        load_k(shared.k[k.stage], shared.k_full[k.stage], maps.k, n);
        k.advance();
        bias.load(shared, maps, work, n * kKeys);
      };
      load_keys(work.last);  // they have room earlier than the queries
      ptx::barrier_wait(&shared.q_empty[q.stage], q.parity ^ 1);
      load_q(shared.q[q.stage], shared.q_full[q.stage]);
      q.advance();
      for (int n = work.last; n >= work.first; --n) {
        if (n > work.first) load_keys(n - 1);
        if constexpr (kTransposers) {
          ptx::barrier_wait(&shared.rows_empty[rows.stage], rows.parity ^ 1);
          load_v(shared.rows[rows.stage], shared.rows_full[rows.stage], maps.v, n);
          rows.advance();
        } else {
          ptx::barrier_wait(&shared.v_empty[v.stage], v.parity ^ 1);
          load_v(shared.v[v.stage], shared.v_full[v.stage], maps.v, n);
          v.advance();
        }
      }
    }
  };
  // --- the consumer warpgroups ------------------------------------------------------------------------------------

  Shared& shared;
  const AttnParams& p;
  const int team, group, warp_row;  // warp_row: first of this warp's 16 rows, within the tile
  const Score& score;
  QueryPosition<kQueryStages> q;
  uint32_t work_parity = 0, tail_parity = 0;
  RingPosition<kStages> k, v;
  float scores[kScoreTiles][4], out[kOutTiles][4];
  uint32_t weights[kSteps][4];
  Operands operands;
  Dropping dropping;
  Chunking chunking;
  OnlineSoftmax<> softmax;
  Scoring scoring;
  float shrink[2];                       // the factors for `out` before the next values are added
  const CUtensorMap* out_map = nullptr;  // set with kStoresByTma; nullptr: warps store their rows themselves

  // group: among those of the thread block.
  __device__ Forward(Shared& shared, const AttnParams& params, const Score& score, int group, const TileGrid&)
      : shared(shared),
        p(params),
        team(kTeams == 1 ? 0 : uniform(team_of_warp(static_cast<int>(threadIdx.x) / 32))),
        group(group - team * kGroups),
        warp_row((uniform(static_cast<int>(threadIdx.x) / 32 - 4) - team * kWarps) * 16),
        score(score) {}
  // Warps of the producer warpgroup belong to the teams in turn.
  static __device__ __forceinline__ int team_of_warp(int warp) {
    return kTeams == 1 ? 0 : warp < 4 ? warp % kTeams : (warp - 4) / kWarps;
  }
  __device__ __forceinline__ int ping_pong() const { return kForwardPingPong + team * kGroups; }

  // The TileCoordinates of this warp's scores against key tile n.
  __device__ __forceinline__ auto tile_coordinates(const SeenWork& work, int n) const {
    return TileCoordinates{work.b, work.h, work.mask(p), work.row0 + warp_row, n * kKeys};
  }
  __device__ __forceinline__ auto begin_scores(const SeenWork& work, int n) {
    return scoring.begin(p, [&] { return tile_coordinates(work, n); }, shared, warp_row);
  }
  // The scores as tiles of one row tile, as functions of all architectures take them.
  __device__ __forceinline__ auto& score_tile() { return reinterpret_cast<float (&)[1][kScoreTiles][4]>(scores); }

  __device__ __forceinline__ void compute_tiles() {
    Generator generator(p);
    if (group == 0) this->pass_phase(kGroups - 1);
    for (Work work = receive_work(shared, &work_parity); work.exists(); work = receive_work(shared, &work_parity)) {
      generator.start_tile(p, work.b);
      start_tile(work);
      if (work.sees_keys()) this->compute_tile(work, generator);
      finish_tile(work);
    }
    if constexpr (kStoresByTma) ptx::bulk_wait<0>();
  }

  __device__ __forceinline__ void compute_steps(const SeenWork& work, KeyWalk& walk, const Generator& generator) {
    const int& n = walk.n;
    const auto mask = work.mask(p);
    const int row = work.row0 + warp_row;
    // Keys that every row of the warp sees; tiles with other keys are masked.
    const Limits unmasked{mask.keys_of(row + 15, row + 16).begin, mask.keys_of(row, row + 1).end};
    if constexpr (Operands::kInTurn) return compute_steps_in_turn(work, walk, unmasked);
    Visibility::await_keys(shared, k);
    this->await_phase();
    score_product<Operands::kColumns, uint64_t>(scores, shared.q[q.stage], group * 64, shared.k[k.stage]);
    this->pass_phase(group);
    const auto begun = begin_scores(work, n);
    Visibility::begin(shared, p, k, warp_row, walk);
    ptx::wgmma_wait<0>();
    ptx::hold(scores);
    this->end_keys(Visibility::is_last(walk));
    weigh(work, walk, unmasked, begun);
    dropping.draw(p, generator, work.h, row, n * kKeys);
    dropping.pack_early(operands, scores);
    // Otherwise `out` is still zero.
    if (Visibility::kResumes || Operands::kDefersRescaling) operands.rescale(out, shrink);
    pack_weights();
    if (n == work.last) this->clear_tail_of_values(work);
    if (Visibility::has_next(shared, k, group, walk)) {
      for (Visibility::advance(walk);; Visibility::advance(walk)) {
        Visibility::await_keys(shared, k);
        this->await_phase();
        score_product<Operands::kColumns, uint64_t>(scores, shared.q[q.stage], group * 64, shared.k[k.stage]);
        ptx::barrier_wait(&shared.v_full[v.stage], v.parity);
        operands.accumulate(out, weights, shared.v[v.stage]);
        this->pass_phase(group);
        const auto begun = begin_scores(work, n);
        Visibility::begin(shared, p, k, warp_row, walk);
        ptx::wgmma_wait<1>();
        ptx::hold(scores);
        this->end_keys(Visibility::is_last(walk));
        chunking.end_scores(n, softmax);
        weigh(work, walk, unmasked, begun);
        dropping.draw(p, generator, work.h, row, n * kKeys);
        dropping.pack_early(operands, scores);
        ptx::hold(scores);
        // The loop exits here, before the wait in end_step: within one basic block the compiler would move the wait to
        // before the exponentials, and nothing would overlap the product of the values.
        if (!Visibility::has_next(shared, k, group, walk)) break;
        end_step(n);
      }
      end_step(n);
    }
    ptx::barrier_wait(&shared.v_full[v.stage], v.parity);
    operands.accumulate(out, weights, shared.v[v.stage]);
    end_values();
  }

  // Computes the steps without overlap within the warpgroup, for ForwardOrder::kInTurn. Three or four warpgroups take
  // turns at the products with values instead of those for scores: then their softmaxes begin further apart.
  __device__ __forceinline__ void compute_steps_in_turn(const SeenWork& work, KeyWalk& walk, const Limits& unmasked) {
    for (;; Visibility::advance(walk)) {
      Visibility::await_keys(shared, k);
      if constexpr (!kTurnsOfValues) this->await_phase();
      score_product<Operands::kColumns, uint64_t>(scores, shared.q[q.stage], group * 64, shared.k[k.stage]);
      if constexpr (!kTurnsOfValues) this->pass_phase(group);
      const auto begun = begin_scores(work, walk.n);
      Visibility::begin(shared, p, k, warp_row, walk);
      ptx::wgmma_wait<0>();
      ptx::hold(scores);
      this->end_keys(Visibility::is_last(walk));
      weigh(work, walk, unmasked, begun);
      operands.rescale(out, shrink);
      pack_weights();
      ptx::barrier_wait(&shared.v_full[v.stage], v.parity);
      if constexpr (kTurnsOfValues) this->await_phase();
      operands.add_product(out, weights, shared.v[v.stage]);
      if constexpr (kTurnsOfValues) this->pass_phase(group);
      release(shared.v_empty[v.stage]);
      v.advance();
      if (!Visibility::has_next(shared, k, group, walk)) return;
    }
  }

  __device__ __forceinline__ void skip_more() { scoring.skip(shared); }
  __device__ __forceinline__ void clear_values(int rows, int thread, int threads) {
    clear_rows(shared.v[v.stage], rows, thread, threads);
  }

  __device__ __forceinline__ void start_tile(const Work& work) {
    set_zero(out);
    // The sink is counted after the last key. As the first maximum it would leave weights near 1 that 16 bits do not
    // hold exactly, and dS would lose digits.
    softmax.start(-infinity());
    scoring.start_tile(p, work.b, work.h);
  }

  __device__ __forceinline__ void pack_weights() { dropping.pack(operands, weights, p, scores); }

  // Scores against a key tile become weights. They are packed later, in pack_weights: the registers of packed weights
  // are operands of the product in flight, which writes to `out` as well.
  template <class Begun>
  __device__ __forceinline__ void weigh(const SeenWork& work, const KeyWalk& walk, const Limits& unmasked,
                                        const Begun& begun) {
    const int row = work.row0 + warp_row + quad(), key0 = walk.n * kKeys, key = key0 + 2 * lane_in_quad();
    const auto coordinates = [&] { return tile_coordinates(work, walk.n); };
    const auto& rule = scoring.make_logits(p, score, score_tile(), coordinates, begun);
    const bool before = (key0 < unmasked.begin), after = (key0 + kKeys > unmasked.end);
    // One branch around both, because most tiles take neither.
    if (before || after) {
      if (before) hide_keys<true, false>(score_tile(), work.mask(p), row, key);
      if (after) hide_keys<false, true>(score_tile(), work.mask(p), row, key);
    }
    Visibility::hide(shared, p, warp_row, walk, score_tile(), row);
    const auto keep_shrink = [&](const float (&factors)[2]) {
      shrink[0] = factors[0];
      shrink[1] = factors[1];
    };
    float sums[2];
    const auto keep_sum = [&](int r, float sum) { sums[r] = sum; };
    if constexpr (Operands::kComparesThree) {
      float largest[2];
      largest_scores(largest, scores);
      softmax.weigh(scores, largest, rule, Operands::kTolerance, keep_shrink, keep_sum);
    } else {
      softmax.weigh(scores, rule, Operands::kTolerance, keep_shrink, keep_sum);
    }
    scoring.add_centres(p, coordinates, 0, scores, sums, shrink);
  }

  __device__ __forceinline__ void end_step(int n) {
    end_values();
    if (chunking.begins(n)) {
      pack_weights();
      return chunking.end_values(out);
    }
    operands.rescale(out, shrink);
    pack_weights();
  }
  __device__ __forceinline__ void end_values() {
    ptx::wgmma_wait<0>();
    operands.hold(out);
    release(shared.v_empty[v.stage]);
    v.advance();
    operands.add(out);
  }

  __device__ __forceinline__ void finish_tile(const Work& work) {
    bool poisoned[2] = {false, false};
    Visibility::take_poisoned(shared, work_parity ^ 1, warp_row, poisoned);

    float sink_shrink[2] = {1, 1};
    if (p.has_sink) softmax.end(head_sink(p, work.h), Scoring::kWeightScale, sink_shrink);
    const float scale = 256.f / p.dropout_threshold * scoring.value_scale(p, work.b, work.h);
    const int row = work.row0 + warp_row + quad(), columns = static_cast<int>(p.head_dim_v);
    const int64_t at = int64_t{work.query_start} + row;
    const float sums[2] = {softmax.total(0), softmax.total(1)};
    const bool exist[2] = {row < work.length_q, row + 8 < work.length_q}, zero[2] = {sums[0] == 0, sums[1] == 0};
    float factors[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) factors[r] = poisoned[r] ? not_a_number() : scale * sink_shrink[r] / sums[r];
    if constexpr (Scoring::kIsFp8) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        store_row_of_fp8(p, work.b, work.h, at + 8 * r, out, r, factors[r], zero[r], exist[r], columns);
      }
    } else if (!store_by_tma(work, factors, exist[1] && !zero[0] && !zero[1])) {
      store_rows(row_pointer<T>(p.out, work.b, work.h, at), 8 * p.out.row_stride, out, factors, zero, exist, columns);
    }
    constexpr float kTotal = 1 / Scoring::kWeightScale;
    softmax.store_statistics(p, work.b, work.h, at, {sums[0] * kTotal, sums[1] * kTotal}, exist);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scoring.store_centres(p, work.b, work.h, at + 8 * r, 0, r, sums[r] / sink_shrink[r], exist[r]);
    }
  }

  // Returns false if the warp has to store its rows itself. plain: whether those of this lane exist and are not zero.
  __device__ __forceinline__ bool store_by_tma(const Work& work, const float (&factors)[2], bool plain) {
    if constexpr (kStoresByTma) {
      if (!out_map || !__all_sync(~0u, plain)) return false;
      start_store(shared.out[warp_row / kOutRows], *out_map, out, factors, work.query_start + work.row0 + warp_row,
                  work.h, p.is_varlen() ? 0 : work.b);
      return true;
    }
    return false;
  }
};

// Kernel is Forward, or a type derived from it whose each_work and Loader have other works (invariant/, few_queries/).
template <class Kernel, class Params, class Maps, class Grid, class Score>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    forward_kernel(const __grid_constant__ Params p, const __grid_constant__ Maps maps,
                   const __grid_constant__ Grid grid, const __grid_constant__ Score score) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char memory[];
  auto* const teams = reinterpret_cast<SharedOf<Kernel>*>(memory);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&maps.q);
    ptx::prefetch_tensor_map(&maps.k);
    ptx::prefetch_tensor_map(&maps.v);
    for (int team = 0; team < Kernel::kTeams; ++team) init_barriers<Kernel>(teams[team]);
    ptx::fence_barrier_init();
  }
  for (int team = 0; team < Kernel::kTeams; ++team) Kernel::Visibility::clear(teams[team], Kernel::kThreads);
  ptx::wait_for_previous_kernel();
  __syncthreads();
  SharedOf<Kernel>& in_memory = teams[Kernel::team_of_warp(static_cast<int>(threadIdx.x) / 32)];
  constexpr bool kUniform = Kernel::Visibility::kUniformShared || Kernel::kTeams > 1;
  SharedOf<Kernel>& shared = kUniform ? uniform_shared(in_memory) : in_memory;
  // The producer warpgroup gives registers to the consumer warpgroups.
  if (threadIdx.x < kGroupThreads) {
    ptx::give_registers<Kernel::kRegisters.producer>();
    Kernel::Visibility::template load<Kernel>(shared, p, maps, grid);
    if constexpr (Kernel::kTransposers) ValueTransposer<Kernel>::run(shared);
  } else {
    ptx::take_registers<Kernel::kRegisters.consumer>();
    Kernel kernel(shared, p, score, uniform(static_cast<int>(threadIdx.x) / kGroupThreads) - 1, grid);
    if constexpr (Kernel::kStoresByTma) kernel.out_map = maps.has_out ? &maps.out : nullptr;
    kernel.compute_tiles();
  }
#endif
}

// name: of the kernel, in errors. tiles: or other works; a thread block takes several.
template <class Kernel, class Params, class Maps, class Grid>
void launch_forward_kernel(const char* name, const Params& p, int64_t tiles, const Maps& maps, const Grid& grid) {
  const int64_t blocks = std::min<int64_t>(tiles, multiprocessors());
  const auto score = Kernel::Score::of(p);
  launch_early(forward_kernel<Kernel, Params, Maps, Grid, std::decay_t<decltype(score)>>, name, p,
               row_of_blocks(blocks, name, p), Kernel::kThreads, Kernel::kTeams * kSharedBytesOf<Kernel>, p, maps, grid,
               score);
}

template <class Kernel>
void launch_forward(const AttnParams& p) {
  if (p.batch * p.heads_q == 0) return;
  typename Kernel::Maps maps{};
  static_cast<ForwardMaps&>(maps) = {Kernel::Operands::query_map(p), Kernel::Operands::key_map(p),
                                     Kernel::Operands::value_map(p)};
  if constexpr (Kernel::kStoresByTma) {
    maps.has_out = rows_are_aligned(p.out, p.head_dim_v, Kernel::kElementBytes);
    if (maps.has_out) maps.out = query_map(p, p.out, p.head_dim_v, kOutRows);
  }
  Kernel::Scoring::set_bias_map(p, &maps, Kernel::kQueries);
  const TileGrid grid = forward_grid(p, tile_count(p.seqlen_q, Kernel::kQueries), Kernel::kElementBytes,
                                     Kernel::Scoring::kBatchesTogether ? p.batch : 1, Kernel::kMasks);
  Kernel::Operands::prepare(p, grid.taken);
  launch_forward_kernel<Kernel>("sm90 forward", p, grid.tiles, maps, grid);
}

template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
void forward(const AttnParams& p, bool transposes) {
  using TileOfRow = TileOf<kernel_table::kSm90Forward, T, kHeadDim, kOptions, kHeadDimV>;
  using Policies = ForwardPolicies<kOptions>;
  if constexpr (kIsFloat8<T> && can_transpose(includes(kOptions, kIntervals), kHeadDimV)) {
    if (transposes) {
      return launch_forward<Forward<T, kHeadDim, kHeadDimV, TileOfRow, Policies, NoChunks, true>>(p);
    }
  }
  launch_forward<Forward<T, kHeadDim, kHeadDimV, TileOfRow, Policies>>(p);
}

}  // namespace flashattn_ext::sm90
