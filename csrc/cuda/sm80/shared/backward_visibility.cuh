// Policies of the sm_80 backward (backward.cuh) for visibility: which queries see a tile of keys. An object is of one
// tile of keys; every thread of a block calls its functions and the static ones. Kernel: Backward or Second.
//   Mask                     causal and window
//   Notes                    what a block keeps in shared memory for the tile of keys
//   some(rows), all(rows, length_q)
//                            those of `rows`, which causal and window leave, that see some key, or every key
//   note(...)                fills the Notes. first, last: tiles of queries of the walk
//   isolate_keys(kernel), isolate_queries(kernel, row0)
//                            keep inputs that are not finite out of results that do not see them (isolation.cuh)
//   isolate_key_rows(kernel, tile), isolate_query_rows<kRows>(kernel, row0, tile)
//                            the same for one more tile. isolate_key_rows is called only with a Mask, once the tile is
//                            visible to all threads
//   mask_of(kernel, h)       for SeenBy
//   added_before(kernel, m), added_after(kernel, before)
//                            in a deterministic call: the counter of query tile m (dq_order.cuh) before and after this
//                            key tile adds to it
#pragma once

#include "cuda/score/intervals.cuh"
#include "cuda/score/isolation.cuh"
#include "cuda/score/scores.cuh"
#include "cuda/stages/dq_order.cuh"

namespace flashattn_ext::sm80 {

// Causal and window alone.
template <class Kernel>
struct ArithmeticQueries {
  using Mask = UnplacedMask32;
  struct Notes {};

  __device__ ArithmeticQueries(const Kernel&, const Mask&, int, int, int) {}
  __device__ Limits some(const Limits& rows) const { return rows; }
  __device__ Limits all(const Limits& rows, int) const { return rows; }
  __device__ void note(const Kernel&, const Mask&, int, int, int) const {}

  static __device__ void isolate_keys(const Kernel&) {}
  static __device__ void isolate_queries(const Kernel&, int) {}
  template <class T>
  static __device__ void isolate_key_rows(const Kernel&, T*) {}
  template <int kRows, class T>
  static __device__ void isolate_query_rows(const Kernel&, int, T*) {}
  static __device__ Mask mask_of(const Kernel& kernel, int) { return kernel.mask(); }
  static __device__ int added_before(const Kernel& kernel, int m) {
    return key_tiles_before(kernel.mask(), kernel.n, Kernel::kKeys, m * Kernel::kQueries, Kernel::kQueries);
  }
  static __device__ int added_after(const Kernel&, int before) { return before + 1; }
};

// A Mask as well: intervals of rows for each key.
template <class Kernel>
struct IntervalQueries {
  using Mask = Mask32;
  struct Notes {
    IntervalPairs pairs;
    EarlierKeyTile before;  // in a deterministic call: the last key tile that adds to any of the walk's query tiles
  };

  IntervalExtremes of_keys;

  __device__ IntervalQueries(const Kernel& kernel, const Mask& mask, int key_start, int key0, int end)
      : of_keys(extremes(kernel, key_start, mask.seqlen_k).of_tile(key0, end)) {}
  __device__ Limits some(const Limits& rows) const { return clipped(rows, of_keys); }
  __device__ Limits all(const Limits& rows, int length_q) const { return clipped_to_all(rows, of_keys, length_q); }
  __device__ void note(const Kernel& kernel, const Mask& mask, int key_start, int first, int last) const {
    Notes& notes = kernel.notes()->visibility;
    if (threadIdx.x == 0) notes.pairs = IntervalPairs(kernel.p, kernel.b, kernel.hk, key_start);
    if (!kernel.p.deterministic || threadIdx.x >= 32) return;
    const Limits walk{first * Kernel::kQueries, (last + 1) * Kernel::kQueries};
    const EarlierKeyTile found =
        key_tile_before<Kernel::kKeys>(extremes(kernel, key_start, mask.seqlen_k), mask, kernel.n, walk);
    if (threadIdx.x == 0) notes.before = found;
  }

  // Rows of partially masked tiles that are not finite become zeros. Their queries get a log-sum-exp of NaN, which
  // makes their unmasked weights NaN. Their keys get values of NaN, which make their unmasked dS NaN.
  static __device__ void isolate_keys(const Kernel& kernel) {
    if (!kernel.p.has_intervals()) return;
    if (Kernel::kStages == 1) {
      ptx::cp_async_wait<0>();
      __syncthreads();
    }
    isolate_key_rows(kernel, kernel.k_tile);
  }
  static __device__ void isolate_queries(const Kernel& kernel, int row0) {
    // The tile of dout follows the tile of q.
    isolate_query_rows<2 * Kernel::kQueries>(kernel, row0, kernel.q_tile);
  }

  // Isolates one tile of keys; the next function kRows rows of queries from `tile` on.
  template <class T>
  static __device__ void isolate_key_rows(const Kernel& kernel, T* tile) {
    using RowTile = typename Kernel::RowTile;
    isolate_rows<RowTile, Kernel::kKeys, Kernel::kThreads>(tile, [&](int row, bool finite) {
      uint4* const values = reinterpret_cast<uint4*>(kernel.v_tile + row * RowTile::kStride);
#pragma unroll 1
      for (int i = 0; !finite && i < Kernel::kHeadDim * Kernel::kBytes / kVectorBytes; ++i) {
        values[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
      }
    });
  }
  template <int kRows, class T>
  static __device__ void isolate_query_rows(const Kernel& kernel, int row0, T* tile) {
    if (!kernel.p.has_intervals()) return;
    const auto* const extent = kernel.extent();
    if (row0 >= extent->unmasked_begin && row0 + Kernel::kQueries <= extent->unmasked_end) return;
    isolate_rows<typename Kernel::RowTile, kRows, Kernel::kThreads>(tile, [&](int row, bool finite) {
      if (!finite) kernel.lse[row % Kernel::kQueries] = not_a_number();
    });
  }
  static __device__ IntervalMask mask_of(const Kernel& kernel, int h) {
    return IntervalMask(kernel.mask(), kernel.notes()->visibility.pairs.head(h));
  }
  static __device__ int added_before(const Kernel& kernel, int m) {
    const KeyExtremes all = extremes(kernel, kernel.starts()->key, kernel.extent()->length_k);
    const Limits rows{m * Kernel::kQueries, (m + 1) * Kernel::kQueries};
    return key_tile_before<Kernel::kKeys>(all, kernel.mask(), kernel.notes()->visibility.before, rows) + 1;
  }
  static __device__ int added_after(const Kernel& kernel, int) { return kernel.n + 1; }

 private:
  // The extremes for all query heads that read the KV head.
  static __device__ KeyExtremes extremes(const Kernel& kernel, int key_start, int length_k) {
    const int group = static_cast<int>(kernel.p.group_size());
    return KeyExtremes(kernel.p, kernel.b, kernel.hk * group, group, key_start, length_k);
  }
};

}  // namespace flashattn_ext::sm80
