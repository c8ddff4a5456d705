// Policies of the Hopper backward (backward.cuh, backward_wide.cuh) for dropout and for grouped heads. All members are
// static.
#pragma once

#include "cuda/score/dropout.cuh"
#include "cuda/sm90/shared/backward_work.cuh"
#include "cuda/stages/backward_finish.cuh"
#include "cuda/tile/store_row.cuh"

namespace flashattn_ext::sm90 {

// --- dropout -------------------------------------------------------------------------------------------------------
//
// kept: the dropout mask of a step in shared memory (PackedScores::Kept), which a warpgroup draws together.
//   kDrops                   whether calls have dropout
//   key(p)                   of the generator
//   draw<Packing>(kept, ...)  for the warpgroup's keys from `key` on and the queries from row0 on
//   Drawn<Packing>, draw_part<Packing>(drawn, ...), publish<Packing>(kept, which, drawn)
//                            the same in two steps: a warp's part of the mask in registers, and from there to `kept`
//   drop<Packing>(...)        marks the weights that dropout does not keep. warp: of the warpgroup's four
//   kept<Packing>(weights, &space)
//                            the weights that dropout leaves, in `space` if they are others

struct NoBackwardDropout {
  static constexpr bool kDrops = false;

  static __device__ __forceinline__ PhiloxKey key(const AttnParams&) { return {}; }
  template <class Packing>
  using Drawn = Nothing;
  template <class Packing, class Masks>
  static __device__ __forceinline__ void draw(Masks&, int, const PhiloxKey&, const AttnParams&, int, int, int, int) {}
  template <class Packing>
  static __device__ __forceinline__ void draw_part(Nothing&, const PhiloxKey&, const AttnParams&, int, int, int, int) {}
  template <class Packing, class Masks>
  static __device__ __forceinline__ void publish(Masks&, int, const Nothing&) {}
  template <class Packing, class Masks>
  static __device__ __forceinline__ void drop(typename Packing::Packed&, Masks&, int, int) {}
  template <class Packing>
  static __device__ __forceinline__ auto& kept(typename Packing::Packed& weights, typename Packing::Packed*) {
    return weights;
  }
};

struct CounterBackwardDropout {
  static constexpr bool kDrops = true;

  static __device__ __forceinline__ PhiloxKey key(const AttnParams& p) { return Dropout(p, 0).key; }
  template <class Packing>
  using Drawn = typename Packing::Drawn;
  template <class Packing>
  static __device__ __forceinline__ void draw_part(Drawn<Packing>& drawn, const PhiloxKey& philox, const AttnParams& p,
                                                   int b, int h, int key, int row0) {
    Packing::draw(drawn, Dropout(philox, p, b), p.origin, h, key, row0);
  }
  template <class Packing, class Masks>
  static __device__ __forceinline__ void publish(Masks& kept, int which, const Drawn<Packing>& drawn) {
    Packing::publish(kept[which], drawn);
  }
  template <class Packing, class Masks>
  static __device__ __forceinline__ void draw(Masks& kept, int which, const PhiloxKey& philox, const AttnParams& p,
                                              int b, int h, int key, int row0) {
    Drawn<Packing> drawn;
    draw_part<Packing>(drawn, philox, p, b, h, key, row0);
    publish<Packing>(kept, which, drawn);
  }
  template <class Packing, class Masks>
  static __device__ __forceinline__ void drop(typename Packing::Packed& weights, Masks& kept, int which, int warp) {
    Packing::drop(weights, kept[which], warp);
  }
  template <class Packing>
  static __device__ __forceinline__ auto& kept(typename Packing::Packed& weights, typename Packing::Packed* space) {
    Packing::keep(*space, weights);
    return *space;
  }
};

// --- grouped heads -------------------------------------------------------------------------------------------------
//
// Which query heads the walk of a key tile covers, and what becomes of its dk and dv.
//   count(p)                 walks of a key tile, in one batch entry
//   in_walk(p)               query heads of a walk
//   first(work, heads)       the first of them
//   describe(p, head, work)  the producer warp: fills in the heads of walk number `head`
//   finish_tile<T, Layout>(p, workspace, work, warp_key, dk, dv)
//                            the warpgroups: what a finished walk does with dk and dv of a warp's 16 keys
//   finish(p, workspace)     the host, after the main kernel

// Writes this warp's 16 rows of dk or dv, times a factor. key: the first row, in the sequence; column: the first
// column.
template <class T, int N>
__device__ __forceinline__ void store_keys(const TensorView& to, const BackwardWork& work, int key,
                                           const float (&sum)[N][4], float factor, int64_t columns, int column = 0) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = key + ptx::opaque(threadIdx.x) % 32 / 4 + 8 * r;  // recomputed rather than kept in a register
    store_row(row_pointer<T>(to, work.b, work.hk, int64_t{work.key_start} + row) + column, sum, r, factor, false,
              row < work.length_k, static_cast<int>(columns) - column);
  }
}

// A walk covers all query heads of a KV head, so that its dk and dv are complete.
struct WholeGroups {
  static __host__ __device__ __forceinline__ int64_t count(const AttnParams& p) { return p.heads_k; }
  static __device__ __forceinline__ int in_walk(const AttnParams& p) {
    // group_size() divides 64 bits, a function call around which registers are spilled.
    return static_cast<int>(p.heads_q) / static_cast<int>(p.heads_k);
  }
  static __device__ __forceinline__ int first(const BackwardWork& work, int heads) { return uniform(work.hk) * heads; }
  static __device__ __forceinline__ void describe(const AttnParams&, int head, BackwardWork* work) { work->hk = head; }
  template <class T, class Layout, int N, int M>
  static __device__ __forceinline__ void finish_tile(const AttnGradParams& p, const BackwardWorkspace& workspace,
                                                     const BackwardWork& work, int warp_key, const float (&dk)[N][4],
                                                     const float (&dv)[M][4]) {
    const int key = work.key0 + warp_key;
    store_keys<T>(p.dk, work, key, dk, workspace.gradient_scale, p.head_dim);
    store_keys<T>(p.dv, work, key, dv, workspace.keep_scale, p.head_dim_v);
  }
  template <class Layout>
  static void finish(const AttnGradParams&, const BackwardWorkspace&) {}
};

// A walk covers one query head, and adds its dk and dv to sums in the workspace (GroupedWorkspace). Key tiles of one
// query head, which are computed at the same time, read the same queries.
struct QueryHeads {
  static __host__ __device__ __forceinline__ int64_t count(const AttnParams& p) { return p.heads_q; }
  static __device__ __forceinline__ int in_walk(const AttnParams&) { return 1; }
  static __device__ __forceinline__ int first(const BackwardWork& work, int) { return uniform(work.hq); }
  static __device__ __forceinline__ void describe(const AttnParams& p, int head, BackwardWork* work) {
    work->hk = head / static_cast<int>(p.group_size());
    work->hq = head;
  }
  template <class T, class Layout, int N, int M>
  static __device__ __forceinline__ void finish_tile(const AttnGradParams& p, const GroupedWorkspace& workspace,
                                                     const BackwardWork& work, int warp_key, const float (&dk)[N][4],
                                                     const float (&dv)[M][4]) {
    const int key = work.key0 + warp_key;
    if (work.tiles == 0 || key >= work.length_k) return;
    const int64_t first = work.hk * workspace.key_tiles + workspace.first_key_tile(p, work.b, work.key_start);
    const int64_t at = (first + key / Layout::kTileRows) * Layout::kTileFloats;
    add(workspace.dk + at, dk);
    add(workspace.dv + at, dv);
  }
  // The last stage rounds the sums as it does those of dq: the call's keys stand for its queries.
  template <class Layout>
  static void finish(const AttnGradParams& p, const GroupedWorkspace& workspace) {
    AttnGradParams keys = p;
    keys.heads_q = p.heads_k;
    keys.seqlen_q = p.seqlen_k;
    keys.cu_seqlens_q = p.cu_seqlens_k;
    keys.total_q = p.total_k;
    keys.dq = p.dk;
    BackwardWorkspace sums = workspace;
    sums.tiles = workspace.key_tiles;
    sums.dq = workspace.dk;
    launch_dq_finish<Layout>(keys, sums);
    keys.dq = p.dv;
    keys.head_dim = p.head_dim_v;
    sums.dq = workspace.dv;
    sums.gradient_scale = workspace.keep_scale;
    launch_dq_finish<Layout>(keys, sums);
  }

 private:
  // This warp's 16 rows, a tile of the layout.
  template <int N>
  static __device__ __forceinline__ void add(float* tile, const float (&sum)[N][4]) {
#pragma unroll
    for (int c = 0; c < N; ++c) ptx::add_fragment(tile + c * 128, sum[c]);
  }
};

}  // namespace flashattn_ext::sm90
