// What the two kernels of second derivatives on Hopper (second.cuh, second_apart.cuh) share: their loads, and the
// arithmetic of a step.
#pragma once

#include "cuda/sm90/derivatives/given_tangents.cuh"
#include "cuda/sm90/shared/backward_step.cuh"
#include "cuda/sm90/shared/backward_visibility.cuh"
#include "cuda/sm90/shared/dq_adder.cuh"
#include "cuda/sm90/shared/packed_scores.cuh"
#include "cuda/stages/second.cuh"

namespace flashattn_ext::sm90 {

constexpr int kSecondWorkStages = 2;

struct SecondMaps : BackwardMaps {
  CUtensorMap tq, tk, tv;  // those of absent tangents are never used
};

// What the producer and the adder of a backward (backward_step.cuh) do besides in second derivatives, as policies of
// scores in backward/backward_policies.cuh.
template <class Given>
struct SecondGradients {
  using Workspace = SecondWorkspace<BackwardWorkspace>;
  using Maps = SecondMaps;
  static constexpr int kCopies = Given::kQ ? 2 : 1, kAdders = 1;
  static constexpr bool kHasBias = false, kHasCentres = false, kBatchesTogether = false;

  static void set_more_maps(const SecondParams& p, Maps* maps, int queries, int keys) {
    const AttnParams& tangents = p.tangents;
    if (Given::kQ) maps->tq = query_map(p, tangents.q, p.head_dim, queries);
    if (Given::kK) maps->tk = key_map(p, tangents.k, p.head_dim, keys);
    if (Given::kV) maps->tv = key_map(p, tangents.v, p.head_dim_v, keys);
  }
  static __device__ __forceinline__ void prefetch_map(const Maps&) {}
  template <class Shared>
  static __device__ __forceinline__ void load_keys(Shared& shared, int stage, const Maps& maps, int row, int hk,
                                                   int batch) {
    if constexpr (Given::kK) load_panels(shared.tk[stage], shared.k_full[stage], maps.tk, row, hk, batch);
    if constexpr (Given::kV) load_panels(shared.tv[stage], shared.v_full[stage], maps.tv, row, hk, batch);
  }
  template <class Shared>
  static __device__ __forceinline__ void load_queries(Shared& shared, int stage, const Maps& maps, int row, int h,
                                                      int batch, int) {
    if constexpr (Given::kQ) load_panels(shared.tq[stage], shared.q_full[stage], maps.tq, row, h, batch);
  }
  template <class Shared>
  static __device__ __forceinline__ void load_rows(Shared& shared, int stage, const AttnGradParams& params,
                                                   const Workspace& workspace, int row, int h, int batch, int rows) {
    const auto& p = static_cast<const SecondParams&>(params);
    const float* const r = workspace.r + h * workspace.rows + batch * p.seqlen_q + row;
    const float* const tlse = row_statistic(p.tangents.lse, batch, h, row);
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < Shared::kQueries; i += 32) {
      shared.r[stage][i] = i < rows ? r[i] : 0.f;
      shared.tlse[stage][i] = i < rows ? tlse[i] : 0.f;
    }
  }
};

// Shared memory of both kernels. ScoreTiles: what they need for F, T and, in second.cuh, the weights of dv. The tiles
// have the layout of cuda/tile/panels.cuh, and the barriers mean what they do in backward.cuh.
template <class T, int kHeadDim, int kKeys, int kQueriesOfStep, int kStages, int kDqTiles, class ScoreTiles>
struct SecondShared {
  static constexpr int kQueries = kQueriesOfStep;
  using KeyTile = T[panels(kHeadDim)][kKeys][kPanelColumns];
  using QueryTile = T[panels(kHeadDim)][kQueries][kPanelColumns];

  KeyTile k[1], v[1], tk[1], tv[1];
  QueryTile q[kStages], dout[kStages], tq[kStages];
  ScoreTiles scores;
  DqPart<kDqTiles> dq[2];  // one for each warpgroup
  float lse[kStages][kQueries], delta[kStages][kQueries], r[kStages][kQueries], tlse[kStages][kQueries];
  int has_marks[kStages];  // in lse
  BackwardWork work[kSecondWorkStages];
  ptx::Barrier k_full[1], v_full[1], keys_empty[1];
  ptx::Barrier q_full[kStages], dout_full[kStages], queries_empty[kStages];
  ptx::Barrier work_full[kSecondWorkStages], work_empty[kSecondWorkStages];

  __device__ __forceinline__ DqPart<kDqTiles>& part_of(int group) { return dq[group]; }
};

// F and the weights of dv of rows with one weight become 0: the tangent of a row's only logit is that of lse.
template <class Step, int N>
__device__ __forceinline__ void clear_moved_rows(const Step& step, float (&of_values)[N][4], float (&f)[N][4],
                                                 int query) {
  step.clear_rows(of_values, query);
  step.clear_rows(f, query);
}

// The arithmetic of a lane on the scores of a step, transposed: rows are keys, columns the step's queries from `query`
// on. x, tangents, dp and b are in the order of PlainSecond; they become the weights of dv, T and F, in x, tangents and
// dp.
template <class Given, int kTiles, class Workspace>
struct SecondStep {
  using Scores = float[kTiles][4];

  // What PlainSecond takes for a step, and for dropout.
  const Workspace& workspace;
  const SecondRows rows;
  static constexpr int query = 0;
  struct KeepsAll {
    __device__ __forceinline__ void draw(int) {}
    __device__ __forceinline__ bool keeps(int, int, int) const { return true; }
  };

  template <class Shared>
  __device__ __forceinline__ SecondStep(const Workspace& workspace, const Shared& shared, int stage, int query)
      : workspace(workspace),
        rows{shared.lse[stage] + query, nullptr, shared.delta[stage] + query, shared.r[stage] + query,
             shared.tlse[stage] + query} {}

  // row0, key: the first query, and the lane's first key.
  __device__ __forceinline__ void run(Scores& x, Scores& tangents, Scores& dp, Scores& b, bool is_masked,
                                      const Mask32& mask, int row0, int key) const {
    if constexpr (!Given::kLogits) set_zero(tangents);
    if constexpr (!Given::kV) set_zero(b);
    if (is_masked) {
      differentiate_twice<true>(x, tangents, dp, b, SeenBy<1>(mask, row0 + 2 * lane_in_quad(), key));
    } else {
      differentiate_twice<false>(x, tangents, dp, b, {});
    }
  }

 private:
  template <bool kMasked>
  __device__ __forceinline__ void differentiate_twice(Scores& x, Scores& tangents, Scores& dp, Scores& b,
                                                      const SeenBy<1>& seen_by) const {
    using Tile = float[1][kTiles][4];
    KeepsAll dropping;
    PlainSecond().template differentiate_twice<kMasked>(*this, rows, reinterpret_cast<Tile&>(x),
                                                        reinterpret_cast<Tile&>(tangents), reinterpret_cast<Tile&>(dp),
                                                        reinterpret_cast<Tile&>(b), seen_by, dropping);
  }
};

// The part of a kernel's object that does not depend on how its warpgroups divide the work: a base class.
template <class Kernel>
struct SecondConsumer {
  static constexpr bool kSharesKeys = false;  // backward_step.cuh

  template <class Shared>
  static __device__ void init(Shared& shared, const AttnGradParams&) {
    ptx::barrier_init(&shared.k_full[0], Kernel::Given::kK ? 2 : 1);
    ptx::barrier_init(&shared.v_full[0], Kernel::Given::kV ? 2 : 1);
    ptx::barrier_init(&shared.keys_empty[0], Kernel::kWarps);
    for (int i = 0; i < Kernel::kStages; ++i) {
      ptx::barrier_init(&shared.q_full[i], kQueryArrivals<Kernel::Gradients::kCopies>);
      ptx::barrier_init(&shared.dout_full[i], 1);
      ptx::barrier_init(&shared.queries_empty[i], Kernel::kWarps * 32);
    }
    for (int i = 0; i < Kernel::kWorkStages; ++i) {
      ptx::barrier_init(&shared.work_full[i], 1);
      ptx::barrier_init(&shared.work_empty[i], Kernel::kWarps * 32 + Kernel::Gradients::kAdders);
    }
  }

  // The producer warpgroup: one warp loads, one adds dq to the workspace.
  template <class Shared, class Workspace>
  static __device__ void run(Shared& shared, const AttnGradParams& p, const Workspace& workspace,
                             const SecondMaps& maps, const TileGrid& grid) {
    if (threadIdx.x < kGroupThreads) {
      ptx::give_registers<kBackwardRegisters.producer>();
      const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
      if (warp == 0) BackwardLoader<Kernel>{shared, p, workspace, maps}.load_tiles(grid);
      if (warp == 1) DqAdder<Kernel>(shared, p, workspace, maps, 0).add_tiles();
    } else {
      ptx::take_registers<kBackwardRegisters.consumer>();
      Kernel(shared, p, workspace, uniform(static_cast<int>(threadIdx.x) / kGroupThreads) - 1).compute_tiles();
    }
  }

  __device__ __forceinline__ void compute_tiles() {
    Kernel& kernel = static_cast<Kernel&>(*this);
    auto& shared = kernel.shared;
    auto& works = kernel.works;
    for_each_work(shared, works, [&](const BackwardWork& work) {
      set_zero(kernel.dk);
      set_zero(kernel.dv);
      if (uniform(work.tiles) > 0) kernel.walk_queries(work);
      kernel.store_key_gradients(work);
      ptx::barrier_arrive(&shared.work_empty[works.stage]);
    });
  }

  // The rows of a step have arrived. Those behind a packed sequence hold rows of another one: as in backward.cuh each
  // warpgroup zeroes all of them, so that neither waits for the other.
  template <class Walk>
  __device__ __forceinline__ void await_queries(const BackwardWork& work, const Walk& now) const {
    auto& shared = self().shared;
    const auto& queries = self().queries;
    const int stage = queries.stage, rows = work.length_q - now.m * Kernel::kQueries;
    ptx::barrier_wait(&shared.q_full[stage], queries.parity);
    ptx::barrier_wait(&shared.dout_full[stage], queries.parity);
    if (rows >= Kernel::kQueries || !self().p.is_varlen()) return;
    clear_rows(shared.q[stage], rows, thread(), kGroupThreads);
    clear_rows(shared.dout[stage], rows, thread(), kGroupThreads);
    if constexpr (Kernel::Given::kQ) clear_rows(shared.tq[stage], rows, thread(), kGroupThreads);
    ptx::fence_async_shared();
    ptx::named_barrier_sync(kGroupCleared + self().group, kGroupThreads);
  }
  // Rows of K behind a packed sequence, once for a whole key tile. The fragments of K (second.cuh) are ordinary loads,
  // for which no other thread may be writing: both warpgroups zero a part of the rows and wait for each other.
  __device__ __forceinline__ void clear_tail_of_keys(const BackwardWork& work) const {
    auto& shared = self().shared;
    const int rows = work.length_k - work.key0, thread = static_cast<int>(threadIdx.x) - kGroupThreads;
    if (rows >= Kernel::kKeys || !self().p.is_varlen()) return;
    clear_rows(shared.k[0], rows, thread, 2 * kGroupThreads);
    if constexpr (Kernel::Given::kK) clear_rows(shared.tk[0], rows, thread, 2 * kGroupThreads);
    ptx::fence_async_shared();
    ptx::named_barrier_sync(kKeysCleared, 2 * kGroupThreads);
  }

 private:
  __device__ __forceinline__ const Kernel& self() const { return static_cast<const Kernel&>(*this); }
  static __device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x) % kGroupThreads; }
};

}  // namespace flashattn_ext::sm90
