// The backward of many short sequences in one kernel, for head dims up to 128. A thread block computes all key tiles of
// a KV head, so that each sum of dq belongs to one thread: it adds in registers, keeps the sums of a head in a piece of
// the workspace that stays in the L2 cache, and writes dq with the last key tile. No launch zeroes sums before, and
// none rounds them afterwards. Delta comes from the tiles of dout that the products read.
//
// Key tiles come in descending order: with a right bound the first one that meets a query tile is its last.
// docs/sm90_heads.md explains what each warp does.
#pragma once

#include "cuda/sm90/backward_short/heads_keys.cuh"
#include "cuda/sm90/backward_short/heads_producer.cuh"
#include "cuda/sm90/shared/packed_scores.cuh"
#include "cuda/sm90/shared/tiles.h"

namespace flashattn_ext::sm90 {

template <class T, int kHeadDim>
struct HeadBackward : PingPong {
  using Element = T;
  using Work = HeadWork;
  using Workspace = HeadWorkspace;
  using Maps = HeadMaps;
  using Visibility = ArithmeticQueries;
  using Walk = HeadWalk;
  static constexpr BackwardTile kTile = tile_of<kernel_table::kSm90Heads, T, kHeadDim, kPlain>();
  using Packing = PackedScores<T, kTile.queries, false>;
  using Gradients = PlainGradients<Packing>;
  static constexpr int kQueries = kTile.queries, kKeys = kTile.keys, kStages = kTile.stages,
                       kKeyStages = kTile.key_stages, kDscoreBuffers = 2, kOutStages = 1, kWorkStages = 2;
  static constexpr int kValueStages = kHeadDim > 64 ? 1 : kKeyStages;  // v is released without k
  static constexpr int kColumns = kHeadDim, kValueColumns = kHeadDim, kPanels = panels(kHeadDim),
                       kScorePanels = kQueries / kPanelColumns;
  static constexpr int kThreads = 4 * kGroupThreads, kKeyThreads = 2 * kGroupThreads, kDeltaWarps = 2,
                       kDeltaThreads = kDeltaWarps * 32;
  // The halves in which dq of a step is computed: rows, or columns.
  static constexpr bool kHalvesAreRows = kQueries == 128;
  static_assert(kTile.order == BackwardOrder::kApart && kHeadDim == (kHalvesAreRows ? 64 : 128));

  // As in backward.cuh. rows_full: dout has arrived; dout_full: delta has been added.
  struct Shared {
    alignas(kPanelAlignment) T k[kKeyStages][kPanels][kKeys][kPanelColumns];
    alignas(kPanelAlignment) T v[kValueStages][kPanels][kKeys][kPanelColumns];
    alignas(kPanelAlignment) T q[kStages][kPanels][kQueries][kPanelColumns];
    alignas(kPanelAlignment) T dout[kStages][kPanels][kQueries][kPanelColumns];
    alignas(kPanelAlignment) T out[kOutStages][kPanels][kQueries][kPanelColumns];
    alignas(kPanelAlignment) T dscores[kDscoreBuffers][kScorePanels][kKeys][kPanelColumns];
    float4 sums[8][kGroupThreads];  // half a step of dq, by thread
    float lse[kStages][kQueries], delta[kStages][kQueries];
    int has_marks[kStages];  // in lse
    Work work[kWorkStages];
    ptx::Barrier k_full[kKeyStages], keys_empty[kKeyStages];
    ptx::Barrier v_full[kValueStages], values_empty[kValueStages];
    ptx::Barrier q_full[kStages], rows_full[kStages], dout_full[kStages], queries_empty[kStages];
    ptx::Barrier out_full[kOutStages], out_empty[kOutStages];
    ptx::Barrier dscores_full[kDscoreBuffers], dscores_empty[kDscoreBuffers];
    ptx::Barrier work_full[kWorkStages], work_empty[kWorkStages];
  };
  static_assert(sizeof(Shared) <= kSharedLimit);

  static __device__ void init(Shared& shared) {
    auto set = [](auto& barriers, int arrivals) {
      for (ptx::Barrier& barrier : barriers) ptx::barrier_init(&barrier, arrivals);
    };
    set(shared.k_full, 1);
    set(shared.v_full, 1);
    set(shared.keys_empty, kThreads / 32 - 4);
    set(shared.values_empty, kKeyThreads / 32);
    set(shared.q_full, 1 + 32);
    set(shared.rows_full, 1);
    set(shared.dout_full, kDeltaThreads);
    set(shared.queries_empty, kKeyThreads);
    set(shared.out_full, 1);
    set(shared.out_empty, kDeltaThreads);
    set(shared.dscores_full, kKeyThreads);
    set(shared.dscores_empty, kGroupThreads);
    set(shared.work_full, 1);
    set(shared.work_empty, kThreads - kGroupThreads + kDeltaWarps);
  }

  Shared& shared;
  const AttnGradParams& p;
  const Workspace& workspace;
  const int warp_key;  // first of this warp's 16 keys, within the tile
  RingPosition<kWorkStages> works;
  RingPosition<kKeyStages> keys;
  RingPosition<kValueStages> values;
  RingPosition<kStages> queries;
  int has_marks = 0;  // BackwardStep
  RingPosition<kDscoreBuffers> buffers;
  float dk[kHeadDim / 8][4], dv[kHeadDim / 8][4];
  typename Packing::Packed weights;
  Gradients gradients;

  __device__ __forceinline__ HeadBackward(Shared& shared, const AttnGradParams& p, const Workspace& workspace)
      : PingPong{uniform(static_cast<int>(threadIdx.x) / kGroupThreads) - 1},
        shared(shared),
        p(p),
        workspace(workspace),
        warp_key(uniform(static_cast<int>(threadIdx.x) / 32 - 4) * 16) {}

  __device__ __forceinline__ int value_stage() const { return values.stage; }
  __device__ __forceinline__ auto this_step() const {
    return BackwardStep<Shared, Workspace>{p, workspace, shared, queries.stage, has_marks, group, warp_key};
  }
  __device__ __forceinline__ auto& kept_weights(typename Packing::Packed&) { return weights; }
  // Stores dk and dv, which ends the key tile.
  __device__ __forceinline__ void store(const Work& work) {
    store_keys<T>(p.dk, work, work.key0 + warp_key, dk, workspace.gradient_scale, p.head_dim);
    store_keys<T>(p.dv, work, work.key0 + warp_key, dv, workspace.keep_scale, p.head_dim_v);
    ptx::barrier_arrive(&shared.work_empty[works.stage]);
  }
};

// --- the warpgroup of dq ------------------------------------------------------------------------------------------

template <class Kernel>
struct HeadQueryGradients {
  using T = typename Kernel::Element;
  static constexpr int kQueries = Kernel::kQueries;
  static constexpr bool kHalvesAreRows = Kernel::kHalvesAreRows;

  typename Kernel::Shared& shared;
  const AttnGradParams& p;
  const HeadWorkspace& workspace;
  RingPosition<Kernel::kWorkStages> works;
  RingPosition<Kernel::kKeyStages> keys;
  RingPosition<Kernel::kDscoreBuffers> buffers;

  __device__ __forceinline__ void compute_tiles() {
    for_each_work(shared, works, [&](const HeadWork& work) {
      if (uniform(work.tiles) > 0) compute_tile(work);
      ptx::barrier_arrive(&shared.work_empty[works.stage]);
    });
  }

 private:
  // The sums of the next half are copied to shared memory while a half is multiplied.
  __device__ __forceinline__ void compute_tile(const HeadWork& work) {
    HeadWalk now(work, static_cast<int>(p.group_size()));
    __threadfence();  // copies, which read L2, follow this thread's stores of the key tile before
    fetch(work, now, 0);
    ptx::barrier_wait(&shared.k_full[keys.stage], keys.parity);
#pragma unroll 1
    while (now.left > 0) {
      const int h = now.h, m = now.m;
      ptx::barrier_wait(&shared.dscores_full[buffers.stage], buffers.parity);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float dq[8][4];
        take(dq, work.has_met(m));
        multiply(dq, half);
        if (half == 1) now.advance();
        if (now.left > 0) fetch(work, now, 1 - half);
        ptx::wgmma_wait<0>();
        ptx::hold(dq);
        if (half == 1) ptx::barrier_arrive(&shared.dscores_empty[buffers.stage]);
        if (uniform(work.n) > 0) {
          keep(dq, work, h, m, half);
        } else {
          store_dq(dq, work, h, m, half);
        }
      }
      buffers.advance();
    }
    release(shared.keys_empty[keys.stage]);
    keys.advance();
  }
  __device__ __forceinline__ void multiply(float (&dq)[8][4], int half) const {
    ptx::hold(dq);
    ptx::wgmma_fence();
    issue_transposed_product(dq, shared.dscores[buffers.stage][kHalvesAreRows ? half : 0],
                             shared.k[keys.stage][kHalvesAreRows ? 0 : half], sizeof(shared.k[0][0]), true);
    ptx::wgmma_commit();
  }

  static __device__ __forceinline__ int thread() { return threadIdx.x % kGroupThreads; }
  __device__ __forceinline__ float4* sums(const HeadWork& work, int h, int m, int half) const {
    const int64_t tile = work.dq_tile + h * workspace.query_tiles + m;
    return workspace.sums + (2 * tile + half) * kHalfVectors + thread();
  }
  // Starts to copy the sums of a half, if there are any. No other thread reads or writes them.
  __device__ __forceinline__ void fetch(const HeadWork& work, const HeadWalk& next, int half) const {
    if (!work.has_met(next.m)) return;
    const float4* const from = sums(work, next.h, next.m, half);
#pragma unroll
    for (int c = 0; c < 8; ++c) ptx::cp_async(&shared.sums[c][thread()], from + c * kGroupThreads, true);
  }
  __device__ __forceinline__ void take(float (&dq)[8][4], bool exist) const {
    if (!exist) return set_zero(dq);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncwarp();  // keeps the loads behind the wait
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const float4 x = shared.sums[c][thread()];
      dq[c][0] = x.x, dq[c][1] = x.y, dq[c][2] = x.z, dq[c][3] = x.w;
    }
  }
  __device__ __forceinline__ void keep(const float (&dq)[8][4], const HeadWork& work, int h, int m, int half) const {
    float4* const to = sums(work, h, m, half);
#pragma unroll
    for (int c = 0; c < 8; ++c) __stcg(to + c * kGroupThreads, make_float4(dq[c][0], dq[c][1], dq[c][2], dq[c][3]));
  }
  __device__ __forceinline__ void store_dq(const float (&dq)[8][4], const HeadWork& work, int h, int m,
                                           int half) const {
    const int column = kHalvesAreRows ? 0 : half * 64;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = m * kQueries + (kHalvesAreRows ? half * 64 : 0) + thread() / 32 * 16 + thread() % 32 / 4 + 8 * r;
      store_row(row_pointer<T>(p.dq, work.b, h, row) + column, dq, r, workspace.gradient_scale, false,
                row < work.length_q, static_cast<int>(p.head_dim) - column);
    }
  }
};

// --- the kernel ---------------------------------------------------------------------------------------------------

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    heads_kernel(const __grid_constant__ AttnGradParams p, const __grid_constant__ HeadWorkspace workspace,
                 const __grid_constant__ HeadMaps maps, const __grid_constant__ TileGrid grid) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char memory[];
  typename Kernel::Shared& shared = *reinterpret_cast<typename Kernel::Shared*>(memory);
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&maps.q, &maps.k, &maps.v, &maps.dout, &maps.out}) ptx::prefetch_tensor_map(map);
    Kernel::init(shared);
    ptx::fence_barrier_init();
  }
  ptx::wait_for_previous_kernel();
  __syncthreads();
  const int warpgroup = uniform(static_cast<int>(threadIdx.x) / kGroupThreads);
  if (warpgroup == 0) {
    ptx::give_registers<kApartRegisters.loader>();
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
    if (warp == 0) {
      HeadLoader<Kernel>{shared, p, workspace, maps}.load_heads(grid);
    } else if (warp <= Kernel::kDeltaWarps) {
      DeltaWarps<Kernel>{shared, p, workspace, static_cast<int>(threadIdx.x) - 32}.compute_tiles();
    }
  } else if (warpgroup == 3) {
    ptx::give_registers<kApartRegisters.queries>();
    HeadQueryGradients<Kernel>{shared, p, workspace}.compute_tiles();
  } else {
    ptx::take_registers<kApartRegisters.keys>();
    Kernel kernel(shared, p, workspace);
    HeadKeyGradients<Kernel>(kernel).compute_tiles();
  }
#endif
}

// --- on the host --------------------------------------------------------------------------------------------------

template <class T, int kHeadDim>
HeadWorkspace head_workspace(const AttnGradParams& p) {
  return HeadWorkspace(p, HeadBackward<T, kHeadDim>::kTile, head_blocks(p, multiprocessors()));
}

template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
size_t heads_bytes(const AttnGradParams& p) {
  return static_cast<size_t>(head_workspace<T, kHeadDim>(p).bytes);
}

template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
void heads(const AttnGradParams& p) {
  using Kernel = HeadBackward<T, kHeadDim>;
  static_assert(kOptions == kPlain && kHeadDimV == kHeadDim);
  const HeadWorkspace workspace = head_workspace<T, kHeadDim>(p);
  HeadMaps maps;
  maps.q = query_map(p, p.q, p.head_dim, Kernel::kQueries);
  maps.k = key_map(p, p.k, p.head_dim, Kernel::kKeys);
  maps.v = key_map(p, p.v, p.head_dim_v, Kernel::kKeys);
  maps.dout = query_map(p, p.dout, p.head_dim_v, Kernel::kQueries);
  maps.out = query_map(p, p.out, p.head_dim_v, Kernel::kQueries);
  const TileGrid grid{
      {static_cast<int>(tile_count(p.seqlen_k, Kernel::kKeys)), 1}, static_cast<int>(p.batch * p.heads_k), nullptr};
  launch_early(heads_kernel<Kernel>, "sm90 backward of heads", p,
               row_of_blocks(head_blocks(p, multiprocessors()), "sm90 backward of heads", p), Kernel::kThreads,
               kSharedBytesOf<Kernel>, p, workspace, maps, grid);
  launch_dsink(p, workspace);
}

}  // namespace flashattn_ext::sm90
