// Backward on Hopper for head dims up to 128, with dropout up to 144, in plain calls up to 160, and up to 192 where v
// has at most 128 columns. A thread block keeps one tile of keys, 64 in each of two consumer warpgroups, and loops over
// the query tiles that see it; a producer warp loads those by TMA (Shah et al. 2024, "FlashAttention-3"). Scores are
// transposed, S^T = K Q^T, so that packed P^T and dS^T already have the register layout of the A operands of the
// products for dv and (up to 144) dk. Only dS^T, for the dq product, and dq itself, which another warp adds to the
// workspace (dq_adder.cuh), go through shared memory. Products of one step overlap with the arithmetic of another:
// docs/sm90_backward.md.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/sm90/backward/backward_apart.cuh"
#include "cuda/sm90/backward/backward_policies.cuh"
#include "cuda/sm90/backward_wide/backward_wide.cuh"
#include "cuda/sm90/shared/backward_blocks.cuh"
#include "cuda/sm90/shared/backward_step.cuh"
#include "cuda/sm90/shared/dq_adder.cuh"
#include "cuda/stages/backward_workspace.h"

namespace flashattn_ext::sm90 {

template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
struct Backward : PingPong {
  using Element = T;
  using Policies = BackwardPolicies<kOptions>;
  using Visibility = typename Policies::Visibility;
  using Dropping = typename Policies::Dropping;
  using Heads = typename Policies::Heads;
  using Work = typename Visibility::Work;
  static constexpr bool kLists = Visibility::kLists;
  using Walk = std::conditional_t<kLists, ListedWalk, QueryWalk<true, Visibility, Heads>>;
  static constexpr BackwardTile kTile = tile_of<kernel_table::kSm90Backward, T, kHeadDim, kOptions, kHeadDimV>();
  using Packing = PackedScores<T, kTile.queries, Dropping::kDrops>;
  using Gradients = typename Policies::template Gradients<T, Packing>;
  using Workspace = typename Gradients::Workspace;
  using Maps = typename Gradients::Maps;
  static constexpr bool kMasks = Visibility::kHasIntervals;
  using Layout = DqLayout<T, kHeadDim, kTile.queries, false>;
  static constexpr int kQueries = kTile.queries, kKeys = kTile.keys, kStages = kTile.stages,
                       kKeyStages = kTile.key_stages;
  static constexpr bool kPaired = false, kSharesKeys = false;
  static constexpr int kBlocks = 1, kColumns = kHeadDim, kValueColumns = kHeadDimV;
  static constexpr BackwardOrder kOrder = kTile.order;
  static constexpr bool kLateDq = kOrder == BackwardOrder::kPingPong;  // dq of a step is computed in the next one
  // walk_queries and walk_in_three_phases explain why this number of buffers is enough.
  static constexpr int kDscoreBuffers = kOrder == BackwardOrder::kThreePhases ? 1 : 2;
  // Three panels of v and dout leave room in shared memory for one stage of dout only and, beside two buffers of dS^T,
  // for the dq of one warpgroup at a time.
  static constexpr bool kDoutApart = kHeadDimV > 128;  // dout has stages of its own
  static constexpr int kDoutStages = kDoutApart ? 1 : kStages, kDqParts = kDoutApart && kDscoreBuffers == 2 ? 1 : 2;
  static constexpr bool kApart =
      kOrder == BackwardOrder::kApart || kOrder == BackwardOrder::kApartOnce;  // a third warpgroup computes dq
  static constexpr int kWorkStages = 2, kThreads = (kApart ? 4 : 3) * kGroupThreads, kWarps = 8,
                       kInspectors = kMasks ? 2 : 0;
  static constexpr int kPanels = panels(kHeadDim), kValuePanels = panels(kHeadDimV),
                       kScorePanels = kQueries / kPanelColumns;
  static constexpr int kColumnTiles = kHeadDim / 8;
  static constexpr int kDqTiles = std::max(8, Layout::kQueryColumnTiles);  // a product of dq has a panel or more
  // About how many heads a section has at least if it leaves no tiles for the end; twice as many in deterministic
  // calls (tile_order.cuh).
  // Thread blocks that process the same head at the same time reuse its data in L2 when long sequences do not fit the
  // cache; with too few heads in a section, long tiles come last.
  static constexpr int kSectionHeads = 16;
  static constexpr int kBiasStages = Gradients::kHasBias ? kStages : 0;

  // Tiles have the layout of cuda/tile/panels.cuh. A `full` barrier signals that a stage has arrived, an `empty`
  // barrier that it may be overwritten.
  struct Shared {
    alignas(kPanelAlignment) T k[kKeyStages][kPanels][kKeys][kPanelColumns];
    alignas(kPanelAlignment) T v[kKeyStages][kValuePanels][kKeys][kPanelColumns];
    alignas(kPanelAlignment) T q[kStages][kPanels][kQueries][kPanelColumns];
    alignas(kPanelAlignment) T dout[kDoutStages][kValuePanels][kQueries][kPanelColumns];
    alignas(kPanelAlignment) T dscores[kDscoreBuffers][kScorePanels][kKeys][kPanelColumns];  // dS^T: [keys][queries]
    DqPart<kDqTiles> dq[kDqParts];                                                           // through part_of
    float lse[kStages][kQueries], delta[kStages][kQueries];
    int has_marks[kStages];  // in lse
    alignas(panel_alignment(kBiasStages)) MaybeArray<T[kKeys / 64][kQueries][kPanelColumns], kBiasStages> bias;
    // Row centres, for the gradients of biases.
    MaybeArray<float[kCentres][kQueries], Gradients::kHasCentres ? kStages : 0> centres;
    PhiloxKey philox;
    MaybeArray<typename Packing::Kept, Dropping::kDrops ? 2 : 0> kept;  // one for each warpgroup
    Work work[kWorkStages];
    MaybeArray<int, kMasks ? kStepsKept : 0> added_before;
    MaybeArray<EarlierKeyTile, kMasks ? 1 : 0> before;  // for the inspector warps
    ptx::Barrier k_full[kKeyStages], v_full[kKeyStages], keys_empty[kKeyStages];
    ptx::Barrier q_full[kStages], dout_full[kDoutStages], queries_empty[kStages];
    MaybeArray<ptx::Barrier, kDoutApart ? kDoutStages : 0> dout_empty;
    ptx::Barrier work_full[kWorkStages], work_empty[kWorkStages];
    MaybeArray<ptx::Barrier, kApart ? kDscoreBuffers : 0> dscores_full, dscores_empty;
    MaybeArray<ptx::Barrier, kMasks ? kKeyStages : 0> keys_inspected;
    MaybeArray<ptx::Barrier, kMasks ? kStages : 0> queries_inspected;
    MaybeArray<ListedSteps<kStages, kStepsKept>, kLists ? 1 : 0> listed;

    // The buffer to which a warpgroup writes its part of dq.
    __device__ __forceinline__ DqPart<kDqTiles>& part_of(int group) { return dq[kDqParts == 1 ? 0 : group]; }
  };
  static_assert(sizeof(Shared) <= kSharedLimit);
  static_assert(!kDoutApart || !kMasks);  // the inspector warps expect dout in the stages of queries
  static_assert(kStages >= 2);            // the next scores are computed before these queries are released
  // BlockQueries takes a key tile for a block, and the adder of dq waits for either warpgroup apart.
  static_assert(!kLists || (kKeys == kBlockSide && kDqParts == 2));
  static_assert(!kApart ||
                ((includes(kGroups, kOptions) || kOptions == kDropout || kLists) && !kDoutApart && kDqTiles == 8));

  static __device__ void init(Shared& shared, const AttnGradParams& p) {
    if (Dropping::kDrops) shared.philox = Dropping::key(p);
    for (int i = 0; i < kKeyStages; ++i) {
      ptx::barrier_init(&shared.k_full[i], Visibility::kKeyArrivals);
      ptx::barrier_init(&shared.v_full[i], 1);
      ptx::barrier_init(&shared.keys_empty[i], kThreads / 32 - 4);
    }
    for (int i = 0; i < kStages; ++i) {
      ptx::barrier_init(&shared.q_full[i], kQueryArrivals<Gradients::kCopies>);
      if (i < kDoutStages) ptx::barrier_init(&shared.dout_full[i], 1);
      ptx::barrier_init(&shared.queries_empty[i], kWarps * 32 + kInspectors);
    }
    for (ptx::Barrier& barrier : shared.dout_empty) ptx::barrier_init(&barrier, kWarps * 32);
    for (int i = 0; i < kWorkStages; ++i) {
      ptx::barrier_init(&shared.work_full[i], 1);
      ptx::barrier_init(&shared.work_empty[i], kThreads - kGroupThreads + Gradients::kAdders + kInspectors);
    }
    for (ptx::Barrier& barrier : shared.dscores_full) ptx::barrier_init(&barrier, kWarps * 32);
    for (ptx::Barrier& barrier : shared.dscores_empty) ptx::barrier_init(&barrier, kGroupThreads);
    Visibility::template init<kInspectors>(shared);
  }

  using Adder = std::conditional_t<Gradients::kHasBias, BiasGradientAdder<Backward>, DqAdder<Backward>>;

  // The producer warpgroup: one warp loads, one adds dq to the workspace (two with a bias), and the last two inspect
  // values that a Mask or a BlockMask may hide. It gives registers to the two consumer warpgroups.
  static __device__ void run(Shared& shared, const AttnGradParams& p, const Workspace& workspace, const Maps& maps,
                             const TileGrid& grid) {
    if (threadIdx.x < kGroupThreads) {
      ptx::give_registers<kBackwardRegisters.producer>();
      const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
      if (warp >= 1 && warp <= Gradients::kAdders) {
        Adder(shared, p, workspace, maps, warp - 1).add_tiles();
      } else {
        BackwardLoader<Backward>::load_or_inspect(shared, p, workspace, maps, grid);
      }
    } else if (kApart && threadIdx.x >= 3 * kGroupThreads) {
      if constexpr (kApart) {
        ptx::give_registers<kApartRegisters.queries>();
        QueryGradients<Backward>{shared, p}.compute_tiles();
      }
    } else {
      ptx::take_registers<kApart ? kApartRegisters.keys : kBackwardRegisters.consumer>();
      Backward(shared, p, workspace, uniform(static_cast<int>(threadIdx.x) / kGroupThreads) - 1).compute_tiles();
    }
  }

  Shared& shared;
  const AttnGradParams& p;
  const Workspace& workspace;
  const int warp_key;  // first of this warp's 16 keys, within the tile
  RingPosition<kWorkStages> works;
  RingPosition<kKeyStages> keys;
  RingPosition<kStages> queries;  // the stage whose scores were computed last
  int has_marks = 0;              // BackwardStep
  std::conditional_t<kDoutApart, RingPosition<kDoutStages>, Nothing> douts;
  std::conditional_t<kApart, RingPosition<kDscoreBuffers>, Nothing> buffers;
  int buffer = 0;  // index into shared.dscores of the buffer written last
  float dk[kColumnTiles][4], dv[kHeadDimV / 8][4];
  typename Packing::Packed weights;
  typename Dropping::template Drawn<Packing> drawn;  // words of the next mask
  Gradients gradients;

  __device__ __forceinline__ Backward(Shared& shared, const AttnGradParams& params, const Workspace& workspace,
                                      int group)
      : PingPong{group},
        shared(shared),
        p(params),
        workspace(workspace),
        warp_key(uniform(static_cast<int>(threadIdx.x) / 32 - 4) * 16) {}

  static __device__ __forceinline__ int thread() { return threadIdx.x % kGroupThreads; }  // index in the warpgroup
  __device__ __forceinline__ int value_stage() const { return keys.stage; }
  __device__ __forceinline__ auto this_step() const {
    return BackwardStep<Shared, Workspace>{p, workspace, shared, queries.stage, has_marks, group, warp_key};
  }
  __device__ __forceinline__ void compute_tiles() {
    if (group == 1) pass_phase();
    for (;; works.advance()) {
      ptx::barrier_wait(&shared.work_full[works.stage], works.parity);
      const Work& work = shared.work[works.stage];
      if (!uniform(work.exists())) return;
      set_zero(dk);
      set_zero(dv);
      if (uniform(work.tiles) > 0) {
        if constexpr (kApart) {
          ApartWalk<Backward>(*this, work).run();
        } else if constexpr (kOrder == BackwardOrder::kThreePhases) {
          walk_in_three_phases(work);
        } else {
          walk_queries(work);
        }
      }
      Heads::template finish_tile<T, Layout>(p, workspace, work, warp_key, dk, dv);
      ptx::barrier_arrive(&shared.work_empty[works.stage]);
    }
  }

  // The two warpgroups ping-pong: one computes while the tensor cores work for the other. A step has two phases of each
  // warpgroup; docs/sm90_backward.md draws them, and why they order all accesses to the two buffers of dS^T. dq of a
  // step is computed in the next step. In the first step of a key tile the buffer holds no dq yet, and the adder skips
  // it.
  //
  // With a single dq buffer (kDqParts == 1) a warpgroup writes after the adder has read the dq that the other one wrote
  // in the phase before.
  __device__ __forceinline__ void walk_queries(const Work& work) {
    Limits unmasked =
        Visibility::unmasked(work, group, [&] { return Gradients::unmasked(p, work, work.key0 + group * 64); });
    unmasked = uniform(unmasked);
    const Limits whole = Visibility::whole(p, work);
    Walk now(p, work, Heads::in_walk(p));
    float scores[kQueries / 8][4], dq[kDqTiles][4];
    Visibility::await(shared.k_full, shared.keys_inspected, keys);
    clear_tail_of_keys(work);
    await_queries(now, whole);
    draw(work, now);
    publish_drawn();
    await_phase();
    score_product<kHeadDim>(scores, shared.k[keys.stage], group * 64, shared.q[queries.stage]);
    has_marks = shared.has_marks[queries.stage];
    pass_phase();
    draw_next(work, now);
    const auto begun = gradients.begin(this_step(), work, now);
    ptx::wgmma_wait<0>();
    ptx::hold(scores);
    weigh(scores, work, now, unmasked, begun);
    ptx::barrier_wait(&shared.v_full[keys.stage], keys.parity);
    typename Packing::Packed packed;
    while (now.left > 1) {
      const int stage = queries.stage;
      differentiate(packed, work, now, unmasked);
      queries.advance();
      now.advance();
      await_queries(now, whole);
      publish_drawn();
      await_phase();
      accumulate(dk, packed, shared.q[stage]);
      query_product(dq, 1);
      ptx::wgmma_wait<1>();
      score_product<kHeadDim>(scores, shared.k[keys.stage], group * 64, shared.q[queries.stage]);
      has_marks = shared.has_marks[queries.stage];
      ptx::wgmma_wait<1>();
      ptx::hold(dq);
      pass_phase();
      stage_dq(shared.part_of(group), dq, group);
      if (!passes_dq_late()) pass_dq(group);
      draw_next(work, now);
      const auto begun = gradients.begin(this_step(), work, now);
      ptx::wgmma_wait<0>();
      ptx::hold(scores);
      ptx::barrier_arrive(&shared.queries_empty[stage]);
      weigh(scores, work, now, unmasked, begun);
      if (passes_dq_late()) pass_dq(group);
    }
    differentiate(packed, work, now, unmasked);
    await_phase();
    query_product(dq, 1);
    accumulate(dk, packed, shared.q[queries.stage]);
    ptx::wgmma_wait<1>();
    ptx::hold(dq);
    pass_phase();
    stage_dq(shared.part_of(group), dq, group);
    ptx::wgmma_wait<0>();
    pass_dq(group);
    ptx::barrier_arrive(&shared.queries_empty[queries.stage]);
    await_phase();
    query_product(dq, 0);
    ptx::wgmma_wait<0>();
    ptx::hold(dq);
    pass_phase();
    release(shared.keys_empty[keys.stage]);
    stage_dq(shared.part_of(group), dq, group);
    pass_dq(group);
    queries.advance();
    keys.advance();
  }

  // The walk where dk and dv leave no registers for the next scores or for packed dS^T beside dq. A step has three
  // phases: scores; dP^T and dv; dk and dq. The product for dk runs while the other warpgroup still computes its dS^T.
  // Both products of the third phase read dS^T from shared memory.
  //
  // One buffer of dS^T is enough. A warpgroup writes it after its second phase of a step. The other warpgroup starts
  // that phase by its signal, which it sends after its last product of the step before is complete.
  __device__ __forceinline__ void walk_in_three_phases(const Work& work) {
    static_assert(kOptions == kPlain && kQueries == 64);
    const Limits unmasked = uniform(Packing::unmasked_queries(p, work.mask(p), work.key0 + group * 64, 64));
    ptx::barrier_wait(&shared.k_full[keys.stage], keys.parity);
    clear_tail_of_keys(work);
    ptx::barrier_wait(&shared.v_full[keys.stage], keys.parity);
    bool has_dq = false;  // a part of dq is written, and the adder not yet signalled
    for (Walk now(p, work, Heads::in_walk(p)); now.left > 0; now.advance()) {
      const int stage = queries.stage;
      compute_weights(work, now, unmasked, has_dq);
      typename Packing::Packed packed;
      differentiate(packed, work, now, unmasked);
      ptx::wgmma_wait<0>();  // the weights, operands of the dv product, free registers for dq
      ptx::hold(dv);
      ptx::named_barrier_arrive(kDscores + 1 - group, 2 * kGroupThreads);
      await_phase();
      accumulate(dk, shared.dscores[0][0], group * 64, shared.q[stage]);
      ptx::named_barrier_sync(kDscores + group, 2 * kGroupThreads);
      float dq[kDqTiles][4];
      query_product(dq, shared.dscores[0]);
      pass_phase();
      ptx::wgmma_wait<0>();
      ptx::hold(dk);
      ptx::hold(dq);
      ptx::barrier_arrive(&shared.queries_empty[stage]);
      queries.advance();
      stage_dq(shared.part_of(group), dq, group);
      has_dq = true;
    }
    pass_dq(group);
    release(shared.keys_empty[keys.stage]);
    keys.advance();
  }
  // The first of the three phases. The fence in pass_dq, which waits until dq of the step before is written, overlaps
  // with the product.
  __device__ __forceinline__ void compute_weights(const Work& work, const Walk& now, const Limits& unmasked,
                                                  bool has_dq) {
    float scores[kQueries / 8][4];
    ptx::barrier_wait(&shared.q_full[queries.stage], queries.parity);
    await_phase();
    score_product<kHeadDim>(scores, shared.k[keys.stage], group * 64, shared.q[queries.stage]);
    has_marks = shared.has_marks[queries.stage];
    pass_phase();
    if (has_dq) pass_dq(group);
    ptx::wgmma_wait<0>();
    ptx::hold(scores);
    weigh(scores, work, now, unmasked, Nothing{});
  }

  // Whether the weights are computed between writing a part of dq and signalling the adder. Signalling needs a fence
  // that waits for all writes. In a deterministic call other thread blocks wait for the addition, so there it is
  // signalled at once; at head_dim 128 the delay did not pay.
  __device__ __forceinline__ bool passes_dq_late() const { return kHeadDim < 128 && ptx::opaque(p.deterministic) == 0; }

  __device__ __forceinline__ void await_queries(const Walk& now, const Limits& whole) {
    ptx::barrier_wait(&shared.q_full[queries.stage], queries.parity);
    Visibility::template await_inspection<Packing, kQueries>(shared, queries, whole, now.m);
  }

  // The phase of the products dP^T and dv += P^T dO. Then dP^T becomes dS^T, in `packed` and in shared memory.
  __device__ __forceinline__ void differentiate(typename Packing::Packed& packed, const Work& work, const Walk& now,
                                                const Limits& unmasked) {
    float dscores[kQueries / 8][4];
    auto& at = dout_position();
    auto& dout = shared.dout[at.stage];
    ptx::barrier_wait(&shared.dout_full[at.stage], at.parity);
    clear_tail_of_queries(work, now);
    await_phase();
    score_product<kHeadDimV>(dscores, shared.v[keys.stage], group * 64, dout);
    typename Packing::Packed space;
    accumulate(dv, kept_weights(space), dout);
    pass_phase();
    ptx::wgmma_wait<1>();
    ptx::hold(dscores);
    gradients.differentiate(dscores, weights, this_step(), work, now,
                            is_masked_step<Visibility, Packing>(unmasked, now));
    pack_scores<T>(packed, dscores);
    buffer = buffer == kDscoreBuffers - 1 ? 0 : buffer + 1;
    store_panels(shared.dscores[buffer], warp_key, packed);
    ptx::fence_async_shared();
    if constexpr (kDoutApart) {
      ptx::wgmma_wait<0>();  // the dv product still reads dout and the weights, and dq reuses their registers
      ptx::hold(dv);
      ptx::barrier_arrive(&shared.dout_empty[at.stage]);
      at.advance();
    }
    gradients.store_bias_gradient(this_step(), dscores, packed);
  }

  // This warpgroup's part of dq = dS K, for this step (lag 0) or the step before (lag 1).
  __device__ __forceinline__ void query_product(float (&dq)[kDqTiles][4], int lag) {
    query_product(dq, shared.dscores[buffer < lag ? buffer + kDscoreBuffers - lag : buffer - lag]);
  }
  __device__ __forceinline__ void query_product(float (&dq)[kDqTiles][4],
                                                const T (&dscores)[kScorePanels][kKeys][kPanelColumns]) {
    constexpr bool kOwnRows = kQueries == 128;  // otherwise own columns: one panel, and half of a third panel if any
    constexpr int kPanelBytes = sizeof(shared.k[0][0]), kHalfBytes = (kDqTiles - 8) * 16;
    transposed_product(dq, dscores[kOwnRows ? group : 0], shared.k[keys.stage][kOwnRows ? 0 : group],
                       kDqTiles > 8 && group == 0 ? 2 * kPanelBytes : kPanelBytes + kHalfBytes);
  }
  // The stage of dout that belongs to the current queries.
  __device__ __forceinline__ auto& dout_position() {
    if constexpr (kDoutApart) {
      return douts;
    } else {
      return queries;
    }
  }

  // Turns scores into packed weights.
  template <class Begun>
  __device__ __forceinline__ void weigh(float (&scores)[kQueries / 8][4], const Work& work, const Walk& now,
                                        const Limits& unmasked, const Begun& begun) {
    gradients.weigh(weights, scores, this_step(), work, now, is_masked_step<Visibility, Packing>(unmasked, now), begun);
    drop_weights();
  }
  __device__ __forceinline__ void drop_weights() {
    Dropping::template drop<Packing>(weights, shared.kept, group, warp_key / 16 % 4);
  }
  // Draws this warp's part of the dropout mask of a step.
  __device__ __forceinline__ void draw(const Work& work, const Walk& at) {
    Dropping::template draw_part<Packing>(drawn, shared.philox, p, work.b, at.h, work.key0 + group * 64,
                                          at.m * kQueries);
  }
  // Draws that of the step after `now`, while the scores of `now` are computed. The branch keeps the compiler from
  // waiting for those first.
  __device__ __forceinline__ void draw_next(const Work& work, const Walk& now) {
    if (!Dropping::kDrops || now.left <= 1) return;
    Walk next = now;
    next.advance();
    draw(work, next);
  }
  // The weights that dropout keeps, in `space` if there is dropout.
  __device__ __forceinline__ auto& kept_weights(typename Packing::Packed& space) {
    return Dropping::template kept<Packing>(weights, &space);
  }
  // A phase lies between the last use of shared.kept and this call, and another between this call and the next use.
  __device__ __forceinline__ void publish_drawn() { Dropping::template publish<Packing>(shared.kept, group, drawn); }

  // Rows after the end of a packed sequence belong to another sequence: weights of 0 would still propagate its NaNs.
  // Each warpgroup zeroes all these rows, so that neither waits for the other.
  __device__ __forceinline__ void clear_tail_of_keys(const Work& work) const {
    if (!p.is_varlen()) return;  // first, so that other calls do not wait for the loads of the lengths
    const int rows = work.length_k - work.key0;
    if (rows >= kKeys) return;
    clear_rows(shared.k[keys.stage], rows, thread(), kGroupThreads);
    ptx::fence_async_shared();
    ptx::named_barrier_sync(kGroupCleared + group, kGroupThreads);
  }
  __device__ __forceinline__ void clear_tail_of_queries(const Work& work, const Walk& now) {
    if (!p.is_varlen()) return;
    const int rows = work.length_q - now.m * kQueries;
    if (rows >= kQueries) return;
    clear_rows(shared.q[queries.stage], rows, thread(), kGroupThreads);
    clear_rows(shared.dout[dout_position().stage], rows, thread(), kGroupThreads);
    ptx::fence_async_shared();
    ptx::named_barrier_sync(kGroupCleared + group, kGroupThreads);
  }
};

// The kernel for a class of head dims.
template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
using BackwardOf =
    std::conditional_t<tile_of<kernel_table::kSm90Backward, T, kHeadDim, kOptions, kHeadDimV>().is_wide(),
                       WideBackward<T, kHeadDim, kOptions, kHeadDimV>, Backward<T, kHeadDim, kOptions, kHeadDimV>>;

template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
auto backward_workspace(const AttnGradParams& p) {
  using Kernel = BackwardOf<T, kHeadDim, kOptions, kHeadDimV>;
  using Layout = typename Kernel::Layout;
  // Each thread block of a pair adds half of the columns of dq, with a counter of its own (DqOrder).
  const BackwardWorkspace base(p, Layout::kTileRows, Layout::kTileFloats, Kernel::kBlocks);
  return Kernel::Workspace::complete(p, base, Kernel::kKeys, 8);
}

template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
size_t backward_bytes(const AttnGradParams& p) {
  return static_cast<size_t>(backward_workspace<T, kHeadDim, kOptions, kHeadDimV>(p).bytes);
}

template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
void backward(const AttnGradParams& p) {
  const auto workspace = backward_workspace<T, kHeadDim, kOptions, kHeadDimV>(p);
  launch_prepare<T>(p, workspace);
  using Kernel = BackwardOf<T, kHeadDim, kOptions, kHeadDimV>;
  launch_backward_main<Kernel>("sm90 backward", p, workspace);
  using Layout = typename Kernel::Layout;
  launch_finish<Layout>(p, workspace);
  Kernel::Heads::template finish<Layout>(p, workspace);
  finish_biases(p, workspace);
}

}  // namespace flashattn_ext::sm90
