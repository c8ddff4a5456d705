// Forward on Hopper: a thread block computes tiles of queries of one head, 64 rows in each of two or three warpgroups,
// while one more warp loads queries, keys and values by TMA (Shah et al. 2024, "FlashAttention-3"). Key tiles come in
// descending order. The step of key tile n issues the product for its scores, then that for the values of n + 1: the
// softmax of n runs under the second one. Warpgroups take turns at issuing products, so that the softmax of one also
// runs under the products of another. docs/sm90_forward.md says what was measured.
#pragma once

#include "../common/bias_centres.cuh"
#include "../common/device.h"
#include "../common/general_scores.cuh"
#include "../common/intervals.cuh"
#include "../common/launch.cuh"
#include "../common/ring.cuh"
#include "../common/scores.cuh"
#include "../common/store_row.cuh"
#include "../common/tensor_map.h"
#include "../common/tile_order.cuh"
#include "forward_bias.cuh"
#include "forward_large.cuh"
#include "forward_mask.cuh"
#include "forward_work.cuh"
#include "kernels.h"
#include "products.cuh"
#include "tiles.h"

namespace flashattn_ext::sm90 {

struct ForwardMaps {
  CUtensorMap q, k, v;
};
struct BiasedForwardMaps : ForwardMaps {
  CUtensorMap bias;
};

template <class T, int kHeadDim, Kind kKind, int kHeadDimV>
struct Forward {
  static constexpr bool kGeneral = kKind == Kind::kGeneral, kBias = kKind == Kind::kBias;
  using Maps = std::conditional_t<kBias, BiasedForwardMaps, ForwardMaps>;
  using Score = std::conditional_t<can_score(kKind), GeneralScore, PlainScore<float, true>>;
  static constexpr bool kDropout = can_drop(kKind), kMasks = can_mask(kKind);
  static constexpr bool kHasCentres = kGeneral || kKind == Kind::kScores;
  static constexpr ForwardTile kTile = forward_tile<kHeadDim, kKind, kHeadDimV>();
  static constexpr RegisterBudget kRegisters = register_budget(kTile.groups);
  static constexpr int kGroups = kTile.groups, kQueries = kTile.queries(), kKeys = kTile.keys;
  static constexpr int kStages = kTile.stages;
  static constexpr int kThreads = (kGroups + 1) * kGroupThreads, kWarps = kGroups * 4;
  static constexpr int kPanels = panels(kHeadDim), kValuePanels = panels(kHeadDimV);
  static constexpr int kScoreTiles = kKeys / 8, kOutTiles = kHeadDimV / 8, kSteps = kKeys / 16;
  // What is added to the scores of a warp. Without a dense bias nothing is read for each score.
  using Bias = std::conditional_t<kGeneral, TileBias<T, false, 1, kScoreTiles>, DistanceBias<false, 1, kScoreTiles>>;

  using Work = ForwardWork;
  using KeyTile = sm90::KeyTile<kGroups>;
  using KeyBatch = sm90::KeyBatch<Work, KeyTile>;
  using PartialTile = sm90::PartialTile<kKeys>;

  // Tiles are as in common/panels.cuh. A barrier `full` says that a stage has arrived, `empty` that it may be
  // overwritten.
  struct Shared {
    T q[kPanels][kQueries][kPanelColumns];
    T k[kStages][kPanels][kKeys][kPanelColumns];
    T v[kStages][kValuePanels][kKeys][kPanelColumns];
    T bias[kBias ? kBiasStages : 0][(kKeys + kPanelColumns - 1) / kPanelColumns][kQueries][kPanelColumns];
    ptx::Barrier q_full, q_empty;
    ptx::Barrier k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
    ptx::Barrier work_full, work_empty, tail_cleared;
    Work work;
    // With a Mask (forward_mask.cuh). v_arrived: values are there that are to be inspected before they are at v_full.
    // tiles_end: few key tiles of a query tile are left to be loaded.
    // poisoned: of each row of a query tile and of the next one, whether it is to be NaN.
    KeyTile key_tiles[kMasks ? kStages : 0];  // with the stages of keys
    ptx::Barrier batch_full[kMasks ? kKeyBatches : 0], batch_empty[kMasks ? kKeyBatches : 0];
    ptx::Barrier pairs_full[kMasks ? kStages : 0], v_arrived[kMasks ? kStages : 0], tiles_end[kMasks ? 1 : 0];
    KeyBatch batches[kMasks ? kKeyBatches : 0];
    PartialTile partial_tiles[kMasks ? kStages : 0];
    bool poisoned[kMasks ? 2 : 0][kQueries];
    ptx::Barrier bias_full[kBias ? kBiasStages : 0], bias_empty[kBias ? kBiasStages : 0];
  };
  static_assert(sizeof(Shared) <= kSharedLimit);
  static_assert(kStages >= 2);  // the next keys are loaded before these values

  // Named barriers: each warpgroup has one that it waits at for its turn, the first of them with this number.
  static constexpr int kTurnBarrier = 1;

  template <class Take, class Body>
  static __device__ __forceinline__ void each_work(const AttnParams& p, const TileGrid& grid, const Take& take,
                                                   const Body& body) {
    each_forward_work<kQueries, kKeys, kBias, kMasks>(p, grid, static_cast<int>(blockIdx.x), take, body);
  }

  // --- the thread that loads, without a Mask ------------------------------------------------------------------------

  struct Loader {
    Shared& shared;
    const AttnParams& p;
    const Maps& maps;
    RingPosition<kStages> k, v;
    std::conditional_t<kBias, RingPosition<kBiasStages>, Nothing> bias;
    uint32_t q_parity = 0, work_parity = 0;

    __device__ void load_tiles(const TileGrid& grid) {
      each_work(
          p, grid, [&] { return grid.take(); },
          [&](const Work& work, int key_start) {
            publish(work);
            if (work.sees_keys()) load_tile(work, key_start);
          });
      publish(Work{});
    }
    __device__ void publish(const Work& work) {
      ptx::barrier_wait(&shared.work_empty, work_parity ^ 1);
      shared.work = work;
      ptx::barrier_arrive(&shared.work_full);
      work_parity ^= 1;
    }
    __device__ void load_tile(const Work& work, int key_start) {
      const int batch = p.is_varlen() ? 0 : work.b, hk = work.h / static_cast<int>(p.group_size());
      auto load_keys = [&](int n) {
        ptx::barrier_wait(&shared.k_empty[k.stage], k.parity ^ 1);
        load_panels(shared.k[k.stage], shared.k_full[k.stage], maps.k, key_start + n * kKeys, hk, batch);
        k.advance();
        if constexpr (kBias) {
          ptx::barrier_wait(&shared.bias_empty[bias.stage], bias.parity ^ 1);
          load_bias_tile(shared.bias[bias.stage], shared.bias_full[bias.stage], maps.bias, work.row0, n * kKeys, work.h,
                         work.b);
          bias.advance();
        }
      };
      load_keys(work.last);
      ptx::barrier_wait(&shared.q_empty, q_parity ^ 1);
      load_panels(shared.q, shared.q_full, maps.q, work.query_start + work.row0, work.h, batch);
      q_parity ^= 1;
      for (int n = work.last; n >= work.first; --n) {
        if (n > work.first) load_keys(n - 1);
        ptx::barrier_wait(&shared.v_empty[v.stage], v.parity ^ 1);
        load_panels(shared.v[v.stage], shared.v_full[v.stage], maps.v, key_start + n * kKeys, hk, batch);
        v.advance();
      }
    }
  };
  static __device__ void load(Shared& shared, const AttnParams& p, const Maps& maps, const TileGrid& grid) {
    if constexpr (kMasks) {
      const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
      if (warp == 0) {
        FoundKeyLoader<Forward, Maps>{shared, p, maps}.load_all();
      } else if (warp == 1) {
        KeyFinder<Forward>{shared, p}.find_all(grid);
      } else {
        inspect_values<Forward>(shared, p, warp - 2);
      }
    } else {
      if (threadIdx.x == 0) Loader{shared, p, maps}.load_tiles(grid);
    }
  }

  // --- the warpgroups that compute --------------------------------------------------------------------------------

  Shared& shared;
  const AttnParams& p;
  const int group, warp_row;  // first of this warp's 16 rows, within the tile
  const Score& score;
  uint32_t q_parity = 0, work_parity = 0, tail_parity = 0;
  RingPosition<kStages> k, v;
  std::conditional_t<kBias, RingPosition<kBiasStages>, Nothing> bias_at;
  float scores[kScoreTiles][4], out[kOutTiles][4];
  uint32_t weights[kSteps][4];
  uint32_t signs[kDropout ? kSteps : 4][2];  // which weights dropout keeps: Dropout::packed_signs
  std::conditional_t<kGeneral, typename TileBias<T, false, 1, kScoreTiles>::Ahead, Nothing> bias_ahead;
  OnlineSoftmax softmax;
  std::conditional_t<kHasCentres, CentreSums, NoCentreSums> centres;
  float shrink[2];  // what `out` is to be multiplied with before the next values are added

  __device__ Forward(Shared& shared, const AttnParams& params, const Score& score, int group)
      : shared(shared),
        p(params),
        group(group),
        warp_row(uniform(static_cast<int>(threadIdx.x) / 32 - 4) * 16),
        score(score) {}

  static __device__ __forceinline__ int g() { return threadIdx.x % 32 / 4; }
  static __device__ __forceinline__ int t() { return threadIdx.x % 4; }
  __device__ __forceinline__ bool drops() const { return kDropout && (!kGeneral || p.has_dropout()); }

  __device__ __forceinline__ void compute_tiles() {
    Dropout dropout = drops() ? Dropout(p, 0) : Dropout();
    if constexpr (kDropout) dropout.key = {uniform(dropout.key.low), uniform(dropout.key.high)};
    if (group == 0) give_turn(kGroups - 1);
    for (Work work = receive_work(shared, &work_parity); work.exists(); work = receive_work(shared, &work_parity)) {
      dropout.batch = Dropout::batch_of(p, work.b);
      start_tile(work.h);
      if (work.sees_keys()) compute_tile(work, dropout);
      finish_tile(work);
    }
  }

  // Where a warpgroup is among the key tiles of a query tile; with a Mask the tile's keys are there.
  struct KeyWalk {
    int n;     // the tile
    int last;  // the tile to end with, without a Mask
    // With a Mask:
    KeyTile tile;  // n and who sees it
    bool done;     // whether the last tile has been left
    int run;       // how many tiles come next that are known already
  };

  __device__ __forceinline__ void compute_tile(const Work& work, const Dropout& dropout) {
    if constexpr (kMasks) {
      KeyWalk walk;
      walk.run = 0;
      ptx::barrier_wait(&shared.q_full, q_parity);
      for (receive_keys(walk); !walk.done;) {
        if (walk.tile.has(KeyTile::kSeen + group)) {
          compute_steps(work, walk, dropout);
        } else {
          skip_step(work, walk.n);
          if (walk.tile.has(KeyTile::kLast)) end_queries();
          goes_on(walk);
        }
      }
    } else {
      const Limits own = work.tiles_of<kKeys>(p, work.row0 + group * 64);  // other warpgroups may see more
      KeyWalk walk{own.end - 1, own.begin};
      int n = work.last;
      for (; n >= own.end; --n) skip_step(work, n);
      ptx::barrier_wait(&shared.q_full, q_parity);
      n >= own.begin ? compute_steps(work, walk, dropout) : end_queries();
      for (n = min(n, own.begin - 1); n >= work.first; --n) skip_step(work, n);
    }
  }

  // Waits for the next keys, and finds out which they are.
  __device__ __forceinline__ void receive_keys(KeyWalk& walk) {
    ptx::barrier_wait(&shared.k_full[k.stage], k.parity);
    walk.done = false;
    // One lane reads, and the shuffles bring that to uniform registers. When all lanes read the same, ptxas leaves out
    // the shuffles, and what depends on the walk, as stages and operands of products do, is in no uniform register.
    KeyTile tile{};
    if (threadIdx.x % 32 == 0) tile = shared.key_tiles[k.stage];
    walk.tile = {uniform(tile.n), uniform(tile.bits)};
    walk.n = walk.tile.n;
    walk.run = walk.tile.run();
  }
  // Whether there is another key tile and it is computed in the next step. With a Mask the walk is there already.
  __device__ __forceinline__ bool goes_on(KeyWalk& walk) {
    if constexpr (kMasks) {
      if (walk.run > 0) {  // all see all of the next tile, and it is not the last
        ptx::barrier_wait(&shared.k_full[k.stage], k.parity);
        --walk.run;
        --walk.n;
        walk.tile.bits = KeyTile::kPlain;
        return true;
      }
      walk.done = walk.tile.has(KeyTile::kLast);
      if (walk.done) return false;
      receive_keys(walk);
      return walk.tile.has(KeyTile::kSeen + group);
    } else {
      return walk.n > walk.last;
    }
  }

  static __device__ __forceinline__ void go_on(KeyWalk& walk) {
    if (!kMasks) --walk.n;
  }

  __device__ __forceinline__ void compute_steps(const Work& work, KeyWalk& walk, const Dropout& dropout) {
    const int& n = walk.n;
    const Mask32 mask = work.mask(p);
    const int row = work.row0 + warp_row;
    // Keys that every row of the warp sees: other tiles have a mask.
    const Limits unmasked{mask.keys_of(row + 15, row + 16).begin, mask.keys_of(row, row + 1).end};
    if (!kMasks) ptx::barrier_wait(&shared.k_full[k.stage], k.parity);
    take_turn();
    score_product<kHeadDim, uint64_t>(scores, shared.q, group * 64, shared.k[k.stage]);
    give_turn(group);
    if (!kGeneral) draw_signs(work, n, dropout);
    const auto biases = begin_biases(work, n);
    ptx::wgmma_wait<0>();
    ptx::hold(scores);
    end_keys(kMasks ? walk.tile.has(KeyTile::kLast) : n == walk.last);
    weigh(work, walk, unmasked, biases);
    if (kGeneral) draw_signs(work, n, dropout);
    // Without a Mask nothing has been summed up before.
    if constexpr (kMasks) rescale(out, shrink);
    pack_weights();
    if (n == work.last) clear_tail_of_values(work);
    if (goes_on(walk)) {
      for (go_on(walk);; go_on(walk)) {
        if (!kMasks) ptx::barrier_wait(&shared.k_full[k.stage], k.parity);
        take_turn();
        score_product<kHeadDim, uint64_t>(scores, shared.q, group * 64, shared.k[k.stage]);
        ptx::barrier_wait(&shared.v_full[v.stage], v.parity);
        accumulate<32, uint64_t>(out, weights, shared.v[v.stage]);
        give_turn(group);
        if (!kGeneral) draw_signs(work, n, dropout);
        const auto biases = begin_biases(work, n);
        ptx::wgmma_wait<1>();
        ptx::hold(scores);
        end_keys(kMasks ? walk.tile.has(KeyTile::kLast) : n == walk.last);
        weigh(work, walk, unmasked, biases);
        if (kGeneral) draw_signs(work, n, dropout);
        ptx::hold(scores);
        // The loop ends here, before the wait in end_step: within one block of instructions the compiler would move the
        // wait to before the exponentials, and nothing would run under the product of the values.
        if (!goes_on(walk)) break;
        end_step();
      }
      end_step();
    }
    ptx::barrier_wait(&shared.v_full[v.stage], v.parity);
    accumulate<32, uint64_t>(out, weights, shared.v[v.stage]);
    end_values();
  }

  __device__ __forceinline__ void end_keys(bool last_of_tile) {
    release(shared.k_empty[k.stage]);
    k.advance();
    if (last_of_tile) end_queries();
  }
  __device__ __forceinline__ void end_queries() {
    release(shared.q_empty);
    q_parity ^= 1;
  }

  // A key tile that only other warpgroups see.
  __device__ __forceinline__ void skip_step(const Work& work, int n) {
    take_turn();
    give_turn(group);
    if (n == work.last) clear_tail_of_values(work);
    ptx::barrier_wait(&shared.k_full[k.stage], k.parity);
    ptx::barrier_wait(&shared.v_full[v.stage], v.parity);
    release(shared.k_empty[k.stage]);
    release(shared.v_empty[v.stage]);
    k.advance();
    v.advance();
    if constexpr (kBias) {
      ptx::barrier_wait(&shared.bias_full[bias_at.stage], bias_at.parity);
      end_bias();
    }
  }
  __device__ __forceinline__ void end_bias() {
    __syncwarp();
    release(shared.bias_empty[bias_at.stage]);
    bias_at.advance();
  }

  // Warpgroups issue their products one after another: each hands the turn to the next one.
  __device__ __forceinline__ void take_turn() const {
    ptx::named_barrier_sync(kTurnBarrier + group, 2 * kGroupThreads);
  }
  __device__ __forceinline__ void give_turn(int from) const {
    ptx::named_barrier_arrive(kTurnBarrier + (from + 1) % kGroups, 2 * kGroupThreads);
  }

  __device__ __forceinline__ void start_tile(int h) {
    const float sink = head_sink(p, h);
    set_zero(out);
    softmax.start(sink);
    centres.start();
  }

  __device__ __forceinline__ void pack_weights() {
    pack_scores<T>(weights, scores);
    if constexpr (kDropout) {
      if (drops()) Dropout::drop_packed(weights, signs);
    }
  }

  // Called while products are under way: the compiler spreads the generator over their issue, which costs less than
  // drawing afterwards. General kernels draw afterwards: the registers hold a bias until then.
  __device__ __forceinline__ void draw_signs(const Work& work, int n, const Dropout& dropout) {
    if constexpr (kDropout) {
      if (!drops()) return;
      dropout.packed_signs(signs, p.origin, work.h, work.row0 + warp_row, n * kKeys);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) asm volatile("" : "+r"(signs[step][0]), "+r"(signs[step][1]));
    }
  }

  // The bias of this warp's scores against key tile n.
  __device__ __forceinline__ Bias bias(const Work& work, int n) const {
    return Bias(p, work.b, work.h, work.mask(p), work.row0 + warp_row, n * kKeys);
  }
  // Reads what is to be added to the scores before their product is waited for. General kernels find the rest again
  // rather than keep it in registers.
  __device__ __forceinline__ auto begin_biases(const Work& work, int n) {
    if constexpr (kGeneral) bias(work, n).load_ahead(bias_ahead);
    if constexpr (kKind == Kind::kScores) {
      return bias(work, n);
    } else {
      return Nothing{};
    }
  }

  // After the last row of a packed sequence come values of another one: weights of 0 would still carry over a NaN. The
  // warpgroups zero these rows together.
  __device__ __forceinline__ void clear_tail_of_values(const Work& work) {
    const int rows = work.length_k - work.last * kKeys;
    if (rows >= kKeys || !p.is_varlen()) return;
    ptx::barrier_wait(&shared.v_full[v.stage], v.parity);
    clear_rows(shared.v[v.stage], rows, threadIdx.x - kGroupThreads, kGroups * kGroupThreads);
    ptx::fence_async_shared();
    __syncwarp();
    release(shared.tail_cleared);
    ptx::barrier_wait(&shared.tail_cleared, tail_parity);
    tail_parity ^= 1;
  }

  // Scores against a key tile become weights. They are packed later, in pack_weights: the registers of packed weights
  // are operands of the product that is under way, which writes to `out` as well.
  template <class Biases>
  __device__ __forceinline__ void weigh(const Work& work, const KeyWalk& walk, const Limits& unmasked,
                                        [[maybe_unused]] const Biases& biases) {
    auto& x = reinterpret_cast<float (&)[1][kScoreTiles][4]>(scores);
    const int row = work.row0 + warp_row + g(), key0 = walk.n * kKeys, key = key0 + 2 * t();
    [[maybe_unused]] DistanceLogit logit;  // of kScores
    if constexpr (kGeneral) {
      score.template make_logits<T>(x);
      bias(work, walk.n).add(x, bias_ahead);
    } else if constexpr (kBias) {
      ptx::barrier_wait(&shared.bias_full[bias_at.stage], bias_at.parity);
      add_bias_tile(scores, shared.bias[bias_at.stage], warp_row + g(), score.softmax_scale);
      end_bias();
    } else if constexpr (kKind == Kind::kScores) {
      score.template store<T>(x);
      logit.factor = biases.add(x, score.factor, logit.row);
    } else {
      store_scores(x, score);
    }
    const bool before = key0<unmasked.begin, after = key0 + kKeys> unmasked.end;
    if (before || after) {  // one branch around both: with two, dropout's bits are not drawn under the products
      if (before) hide_keys<true, false>(x, work.mask(p), row, key);
      if (after) hide_keys<false, true>(x, work.mask(p), row, key);
    }
    if (kMasks && !walk.tile.has(warp_row / 16)) {
      const int slot = walk.tile.slot();
      ptx::barrier_wait(&shared.pairs_full[slot], walk.tile.slot_parity());
      hide_keys_by_interval(x, row, [&](int tile) {
        return *reinterpret_cast<const int4*>(&shared.partial_tiles[slot].pairs[tile * 8 + 2 * t()]);
      });
    }
    auto keep_shrink = [&](const float (&factors)[2]) {
      shrink[0] = factors[0];
      shrink[1] = factors[1];
    };
    [[maybe_unused]] float sums[2];
    auto keep_sum = [&](int r, float sum) {
      if constexpr (kHasCentres) sums[r] = sum;
    };
    if constexpr (kKind == Kind::kScores) {
      softmax.weigh(scores, logit, kTolerance, keep_shrink, keep_sum);
    } else if constexpr (kBias) {
      softmax.weigh(scores, ScaledLogit{kLog2E<float>}, kTolerance, keep_shrink);
    } else {
      softmax.weigh(scores, stored_rule(score), kTolerance, keep_shrink, keep_sum);
    }
    if constexpr (kHasCentres) {
      if (p.centres.data) centres.add(bias(work, walk.n), 0, scores, sums, shrink);
    }
  }

  __device__ __forceinline__ void end_step() {
    end_values();
    rescale(out, shrink);
    pack_weights();
  }
  __device__ __forceinline__ void end_values() {
    ptx::wgmma_wait<0>();
    ptx::hold(out);
    release(shared.v_empty[v.stage]);
    v.advance();
  }

  // Whether rows g and g + 8 are to be NaN; begins anew for the query tile after the next.
  __device__ __forceinline__ void take_poisoned(bool (&poisoned)[2]) {
    bool* const rows = &shared.poisoned[work_parity ^ 1][warp_row + g()];
#pragma unroll
    for (int r = 0; r < 2; ++r) poisoned[r] = rows[8 * r];
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 2; ++r) rows[8 * r] = false;
    __syncwarp();
  }

  __device__ __forceinline__ void finish_tile(const Work& work) {
    bool poisoned[2] = {false, false};
    if constexpr (kMasks) take_poisoned(poisoned);

    const float keep_scale = 256.f / p.dropout_threshold;
    const int row = work.row0 + warp_row + g();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = softmax.total(r);
      const bool exists = row + 8 * r < work.length_q;
      const int64_t at = int64_t{work.query_start} + row + 8 * r;
      const float factor = poisoned[r] ? not_a_number() : keep_scale / sum;
      const int columns = static_cast<int>(p.head_dim_v);
      if (t() == 0 && exists) *row_statistic(p.lse, work.b, work.h, at) = softmax.lse(r, sum);
      store_row(row_pointer<T>(p.out, work.b, work.h, at), out, r, factor, sum == 0, exists, columns);
      if constexpr (kHasCentres) {
        if (p.centres.data) centres.write(row_pointer<float>(p.centres, work.b, work.h, at), r, sum, exists);
      }
    }
  }
};

template <class Kernel>
__device__ __forceinline__ void run_forward(const AttnParams& p, const typename Kernel::Maps& maps,
                                            const TileGrid& grid, const typename Kernel::Score& score) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char memory[];
  typename Kernel::Shared& in_memory = *reinterpret_cast<typename Kernel::Shared*>(memory);
  typename Kernel::Shared& shared = Kernel::kMasks ? uniform_shared(in_memory) : in_memory;
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&maps.q);
    ptx::prefetch_tensor_map(&maps.k);
    ptx::prefetch_tensor_map(&maps.v);
    ptx::barrier_init(&shared.q_full, 1);
    ptx::barrier_init(&shared.q_empty, Kernel::kWarps);
    for (int i = 0; i < Kernel::kStages; ++i) {
      ptx::barrier_init(&shared.k_full[i], 1);
      ptx::barrier_init(&shared.k_empty[i], Kernel::kWarps);
      ptx::barrier_init(&shared.v_full[i], Kernel::kMasks ? kValueInspectors : 1);
      ptx::barrier_init(&shared.v_empty[i], Kernel::kWarps);
      if (Kernel::kMasks) {
        ptx::barrier_init(&shared.pairs_full[i], 32);
        ptx::barrier_init(&shared.v_arrived[i], 1);
      }
    }
    for (int i = 0; Kernel::kBias && i < kBiasStages; ++i) {
      ptx::barrier_init(&shared.bias_full[i], 1);
      ptx::barrier_init(&shared.bias_empty[i], Kernel::kWarps);
    }
    for (int i = 0; Kernel::kMasks && i < kKeyBatches; ++i) {
      ptx::barrier_init(&shared.batch_full[i], 1);
      ptx::barrier_init(&shared.batch_empty[i], 1);
    }
    if (Kernel::kMasks) ptx::barrier_init(&shared.tiles_end[0], 1);
    ptx::barrier_init(&shared.work_full, 1);
    ptx::barrier_init(&shared.work_empty, Kernel::kWarps);
    ptx::barrier_init(&shared.tail_cleared, Kernel::kWarps);
    ptx::fence_barrier_init();
  }
  if constexpr (Kernel::kMasks) {
    for (int row = threadIdx.x; row < 2 * Kernel::kQueries; row += Kernel::kThreads) shared.poisoned[0][row] = false;
  }
  __syncthreads();
  // One warpgroup loads; it gives its registers to those that compute.
  if (threadIdx.x < kGroupThreads) {
    ptx::give_registers<Kernel::kRegisters.producer>();
    Kernel::load(shared, p, maps, grid);
  } else {
    ptx::take_registers<Kernel::kRegisters.consumer>();
    Kernel(shared, p, score, uniform(static_cast<int>(threadIdx.x) / kGroupThreads) - 1).compute_tiles();
  }
#endif
}

template <class T, int kHeadDim, Kind kKind, int kHeadDimV>
__global__ void __launch_bounds__(Forward<T, kHeadDim, kKind, kHeadDimV>::kThreads, 1)
    forward_kernel(const __grid_constant__ AttnParams p,
                   const __grid_constant__ typename Forward<T, kHeadDim, kKind, kHeadDimV>::Maps maps,
                   const __grid_constant__ TileGrid grid,
                   const __grid_constant__ typename Forward<T, kHeadDim, kKind, kHeadDimV>::Score score) {
  run_forward<Forward<T, kHeadDim, kKind, kHeadDimV>>(p, maps, grid, score);
}

template <class T, int kHeadDim, Kind kKind, int kHeadDimV>
void forward_to_256(const AttnParams& p) {
  using Kernel = Forward<T, kHeadDim, kKind, kHeadDimV>;
  if (p.batch * p.heads_q == 0) return;
  typename Kernel::Maps maps{};
  static_cast<ForwardMaps&>(maps) = {query_map(p, p.q, p.head_dim, Kernel::kQueries),
                                     key_map(p, p.k, p.head_dim, Kernel::kKeys),
                                     key_map(p, p.v, p.head_dim_v, Kernel::kKeys)};
  if constexpr (Kernel::kBias) maps.bias = bias_map(p, p.bias, Kernel::kQueries);
  const int64_t blocks = tile_count(p.seqlen_q, Kernel::kQueries), heads = p.batch * p.heads_q, all = blocks * heads;
  int* const taken = static_cast<int*>(p.workspace);
  const TileGrid grid{forward_order(p, blocks, sizeof(T), Kernel::kBias ? p.batch : 1), static_cast<int>(all), taken};
  const int64_t processors = multiprocessors();
  if (all > processors) {
    check_launch(cudaMemsetAsync(taken, 0, sizeof(int), static_cast<cudaStream_t>(p.stream)), "memset", p);
  }
  launch(forward_kernel<T, kHeadDim, kKind, kHeadDimV>, "sm90 forward", p, std::min(all, processors), Kernel::kThreads,
         static_cast<int>(sizeof(typename Kernel::Shared)), maps, grid, Kernel::Score::of(p));
}

template <class T, int kHeadDim, Kind kKind, int kHeadDimV>
void forward(const AttnParams& p) {
  if constexpr (kHeadDim > 256) {
    forward_large<T, kHeadDim, kKind>(p);
  } else {
    forward_to_256<T, kHeadDim, kKind, kHeadDimV>(p);
  }
}

}  // namespace flashattn_ext::sm90
