// What the kernels of backward.cuh share: the works of a thread block, its producer warp, and the stores of dk and dv.
#pragma once

#include "cuda/decode/few_queries/backward_plan.h"
#include "cuda/host/launch.cuh"
#include "cuda/ptx/async.cuh"
#include "cuda/score/scores.cuh"
#include "cuda/sm90/shared/products.cuh"
#include "cuda/sm90/shared/tiles.h"
#include "cuda/stages/backward_workspace.h"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/rows.cuh"
#include "cuda/tile/tile.cuh"
#include "rules/mask.h"

namespace flashattn_ext::sm90 {

struct FewQueriesMaps {
  CUtensorMap q, dout, k, v, dk, dv;
};

// One part of the keys of a KV head. tiles: its key tiles, and those among them that some row sees.
struct FewQueriesWork {
  int b, head_k, part;
  Limits tiles, visible;
  __device__ __forceinline__ bool sees_keys() const { return visible.begin < visible.end; }
};

// kHeldRows: rows of the tile; kRowStages: works whose rows are in shared memory at a time; kNumStages: stages of the
// ring of keys; kReaders: warpgroups that read a stage of keys.
template <class T, int kHeadDim, int kHeldRows, int kRowStages, int kNumStages, int kReaders>
struct FewQueriesBase {
  static constexpr int kRows = kHeldRows, kKeys = 64, kGroups = 2, kStages = kNumStages;
  static constexpr int kThreads = (kGroups + 1) * kGroupThreads;
  static constexpr int kPanels = panels(kHeadDim), kColumnTiles = kHeadDim / 8;

  struct Rows {
    T q[kPanels][kRows][kPanelColumns], dout[kPanels][kRows][kPanelColumns];
  };
  struct Stage {
    T k[kPanels][kKeys][kPanelColumns], v[kPanels][kKeys][kPanelColumns];
  };
  struct Shared {
    Rows rows[kRowStages];
    Stage stages[kStages];
    float lse[kRowStages][kRows], delta[kRowStages][kRows];  // as in the workspace; +inf for rows that do not exist
    ptx::Barrier full[kStages], empty[kStages], rows_full[kRowStages], rows_empty[kRowStages];
  };

  const AttnGradParams& p;
  const BackwardWorkspace& workspace;
  const FewQueriesMaps& maps;
  const decode::BackwardPlan& plan;
  Shared& memory;
  const int queries;  // queries of a head
  const Mask32 mask;
  const Limits seen, whole;  // keys visible to at least one row, and to every row
  RingPosition<kStages> at;
  RingPosition<kRowStages> rows_at;

  __device__ FewQueriesBase(Shared& memory, const AttnGradParams& params, const BackwardWorkspace& workspace,
                            const FewQueriesMaps& maps, const decode::BackwardPlan& plan)
      : p(params),
        workspace(workspace),
        maps(maps),
        plan(plan),
        memory(memory),
        queries(static_cast<int>(params.seqlen_q)),
        mask(params, params.seqlen_q, params.seqlen_k),
        seen(mask.keys_of(0, static_cast<int>(params.seqlen_q))),
        whole(mask.keys_of_all(0, static_cast<int>(params.seqlen_q))) {}

  static __device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x) % kGroupThreads; }
  static __device__ __forceinline__ int group() { return uniform(static_cast<int>(threadIdx.x) / kGroupThreads); }
  static __device__ __forceinline__ int warp_row() { return uniform(thread() / 32) * 16; }

  // The index of a row of the tile in the arrays of rows of the workspace.
  __device__ __forceinline__ int64_t index_of_row(const FewQueriesWork& work, int row) const {
    return (work.head_k * plan.group + row / queries) * workspace.rows + work.b * queries + row % queries;
  }

  // Calls body(work) for every work of this thread block.
  template <class Body>
  __device__ __forceinline__ void each_work(const Body& body) const {
    const int heads = static_cast<int>(p.heads_k), works = static_cast<int>(p.batch) * heads * plan.parts;
#pragma unroll 1
    for (int i = static_cast<int>(blockIdx.x); i < works; i += static_cast<int>(gridDim.x)) {
      const int task = i / plan.parts, part = i % plan.parts;
      const int begin = part * plan.part_keys, end = min(begin + plan.part_keys, static_cast<int>(p.seqlen_k));
      const int first = max(begin, seen.begin), last = min(end, seen.end);
      FewQueriesWork work{task / heads, task % heads, part, {begin / kKeys, (end + kKeys - 1) / kKeys}, {0, 0}};
      if (first < last) work.visible = {first / kKeys, (last + kKeys - 1) / kKeys};
      body(work);
    }
  }

  __device__ void init() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        ptx::barrier_init(&memory.full[i], 2);
        ptx::barrier_init(&memory.empty[i], kReaders * kGroupThreads / 32);
      }
      for (int i = 0; i < kRowStages; ++i) {
        ptx::barrier_init(&memory.rows_full[i], 32);
        ptx::barrier_init(&memory.rows_empty[i], kGroups * kGroupThreads / 32);
      }
      ptx::fence_barrier_init();
    }
    for (Rows& rows : memory.rows) {  // padding rows, which no copy writes
      clear_rows(rows.q, plan.rows, static_cast<int>(threadIdx.x), kThreads);
      clear_rows(rows.dout, plan.rows, static_cast<int>(threadIdx.x), kThreads);
    }
    ptx::fence_async_shared();
  }

  // --- the producer warp ---

  // The first stages of a work do not wait for its rows, whose memory the work before may still use.
  __device__ void load() {
    each_work([&](const FewQueriesWork& work) {
      if (!work.sees_keys()) return;
      const int begin = work.visible.begin, end = work.visible.end, ahead = min(begin + kStages, end);
      load_tiles(work, begin, ahead);
      load_rows(work);
      load_tiles(work, ahead, end);
    });
  }
  __device__ __forceinline__ void load_tiles(const FewQueriesWork& work, int first, int last) {
    if (threadIdx.x % 32 != 0) return;
#pragma unroll 1
    for (int tile = first; tile < last; ++tile, at.advance()) {
      Stage& to = memory.stages[at.stage];
      ptx::barrier_wait(&memory.empty[at.stage], at.parity ^ 1);
      load_panels(to.k, memory.full[at.stage], maps.k, tile * kKeys, work.head_k, work.b);
      load_panels(to.v, memory.full[at.stage], maps.v, tile * kKeys, work.head_k, work.b);
    }
  }
  __device__ __forceinline__ void load_rows(const FewQueriesWork& work) {
    const int stage = rows_at.stage, lane = static_cast<int>(threadIdx.x) % 32, head = work.head_k * plan.group;
    ptx::barrier_wait(&memory.rows_empty[stage], rows_at.parity ^ 1);
    rows_at.advance();
#pragma unroll 1
    for (int row = lane; row < kRows; row += 32) {
      const bool exists = row < plan.rows;
      const int64_t index = index_of_row(work, row);
      memory.lse[stage][row] = exists ? workspace.lse[index] : infinity();
      memory.delta[stage][row] = exists ? workspace.delta[index] : 0.f;
    }
    ptx::Barrier* const full = &memory.rows_full[stage];
    if (lane != 0) return ptx::barrier_arrive(full);
    ptx::barrier_arrive_expect(full, 2 * kPanels * plan.rows * kPanelColumns * static_cast<int>(sizeof(T)));
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      ptx::tma_load(memory.rows[stage].q[panel], &maps.q, full, panel * kPanelColumns, 0, head, work.b);
      ptx::tma_load(memory.rows[stage].dout[panel], &maps.dout, full, panel * kPanelColumns, 0, head, work.b);
    }
  }

  // --- the warpgroups ---

  // Writes the rows of dk or dv of this warp's 16 keys over its part of a tile of the stage, and starts storing them.
  __device__ __forceinline__ void store_keys(const CUtensorMap& map, T (&tile)[kPanels][kKeys][kPanelColumns],
                                             const FewQueriesWork& work, int key, float (&sum)[kColumnTiles][4],
                                             float factor) const {
    const int row = warp_row();
    unrolled<kColumnTiles, 4>([&](int n, int e) { sum[n][e] *= factor; });
    uint32_t packed[kColumnTiles / 2][4];
    pack_scores<T>(packed, sum);
    store_panels(tile, row, packed);
    ptx::fence_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      ptx::tma_store(&map, tile[panel][row], panel * kPanelColumns, key + row, work.head_k, work.b);
    }
    ptx::bulk_commit();
  }
  // Releases a stage when what this warp stores has been read.
  __device__ __forceinline__ void release_stored(ptx::Barrier& empty) const {
    if (threadIdx.x % 32 == 0) ptx::bulk_wait_read<0>();
    release(empty);
  }
  // A row of the partial dq of a work: [B][Hk][parts][rows][kHeadDim], where rows are all heads of query 0, and so on.
  __device__ __forceinline__ float* partial_row(const FewQueriesWork& work, int row) const {
    const int64_t part = (int64_t{work.b} * p.heads_k + work.head_k) * plan.parts + work.part;
    return plan.dq + (part * plan.rows + row % queries * plan.group + row / queries) * kHeadDim;
  }
  // dk and dv of tiles that no row sees.
  __device__ __forceinline__ void store_zeros(const FewQueriesWork& work, const Limits& tiles) const {
    const int first = tiles.begin * kKeys, last = min(tiles.end * kKeys, static_cast<int>(p.seqlen_k));
    const auto clear = [&](const TensorView& to, int64_t columns) {
      constexpr int kElements = 8;
      const int vectors = static_cast<int>(columns) / kElements;
#pragma unroll 1
      for (int i = static_cast<int>(threadIdx.x); i < (last - first) * vectors; i += kGroups * kGroupThreads) {
        T* const row = row_pointer<T>(to, work.b, work.head_k, first + i / vectors);
        *reinterpret_cast<uint4*>(row + i % vectors * kElements) = make_uint4(0, 0, 0, 0);
      }
    };
    clear(p.dk, p.head_dim);
    clear(p.dv, p.head_dim_v);
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    few_queries_backward_kernel(const __grid_constant__ AttnGradParams p,
                                const __grid_constant__ BackwardWorkspace workspace,
                                const __grid_constant__ FewQueriesMaps maps,
                                const __grid_constant__ decode::BackwardPlan plan) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char memory[];
  Kernel kernel(*reinterpret_cast<SharedOf<Kernel>*>(memory), p, workspace, maps, plan);
  kernel.init();
  ptx::wait_for_previous_kernel();
  __syncthreads();
  if (Kernel::group() == Kernel::kGroups) {
    ptx::give_registers<kBackwardRegisters.producer>();
    if (Kernel::warp_row() == 0) kernel.load();
  } else {
    ptx::take_registers<kBackwardRegisters.consumer>();
    kernel.compute();
  }
#endif
}

template <class T, class Kernel>
void launch_few_queries_backward(const AttnGradParams& p, const BackwardWorkspace& workspace,
                                 const decode::BackwardPlan& plan) {
  static_assert(kSharedBytesOf<Kernel> <= kSharedLimit);
  const auto rows = [&](const TensorView& t, int64_t columns) {
    return tensor_map(p, t, columns, p.seqlen_q, p.heads_q, p.batch, static_cast<int>(p.seqlen_q), p.dtype, plan.group);
  };
  const FewQueriesMaps maps{rows(p.q, p.head_dim),
                            rows(p.dout, p.head_dim_v),
                            key_map(p, p.k, p.head_dim, Kernel::kKeys),
                            key_map(p, p.v, p.head_dim_v, Kernel::kKeys),
                            key_map(p, p.dk, p.head_dim, 16),
                            key_map(p, p.dv, p.head_dim_v, 16)};
  const int64_t works = p.batch * p.heads_k * plan.parts;
  launch_early(few_queries_backward_kernel<Kernel>, "sm90 few_queries_backward", p,
               dim3(static_cast<unsigned>(std::min<int64_t>(works, multiprocessors()))), Kernel::kThreads,
               kSharedBytesOf<Kernel>, p, workspace, maps, plan);
}

}  // namespace flashattn_ext::sm90
