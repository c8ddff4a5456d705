// The tile scheduler of the Hopper forwards: the producer publishes the next tile of queries to the consumer warps.
#pragma once

#include "cuda/host/launch.cuh"
#include "cuda/stages/tile_order.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/rows.cuh"
#include "cuda/tile/warp.cuh"

namespace flashattn_ext::sm90 {

// One tile of queries. Numbers count from the start of a sequence.
struct alignas(16) ForwardWork {
  int b, h, row0;  // row0: first query of the tile; an empty work ends the kernel
  // Key tiles that queries of the tile see; with a Mask, not all between them. Consumers of a call with a BlockMask get
  // places along a run of blocks instead (TilesOfRun).
  int first, last;
  int query_start, length_q, length_k;  // the sequence's; query_start in the rows of its batch entry

  __device__ bool exists() const { return row0 < length_q; }
  __device__ bool sees_keys() const { return first <= last; }
  __device__ Mask32 mask(const AttnParams& p) const { return Mask32(p, length_q, length_k); }

  // Key tiles that the 64 queries from `row` on see, as far as causal and window are concerned; an empty range is at
  // `first`.
  template <int kKeys>
  __device__ __forceinline__ Limits tiles_of(const AttnParams& p, int row) const {
    const Limits none{first, first};
    if (row >= length_q) return none;
    const Limits keys = mask(p).keys_of(row, min(row + 64, length_q));
    return keys.begin < keys.end ? Limits{keys.begin / kKeys, (keys.end - 1) / kKeys + 1} : none;
  }
};

// Calls body(work, first row of the keys in their batch entry) for all tiles of kQueries queries that this thread block
// computes, from tile number `tile` on. take(tile): the number of the next tile; called before `body`, which hides its
// latency, or with kTakesLate after it. kBatchesTogether: the batch entries of a head are consecutive, because they may
// read the same bias.
template <int kQueries, int kKeys, bool kBatchesTogether, bool kTakesLate, class Take, class Body>
__device__ __forceinline__ void each_forward_work(const AttnParams& p, const TileGrid& grid, int tile, const Take& take,
                                                  const Body& body) {
  const int heads = static_cast<int>(p.heads_q), all_heads = heads * static_cast<int>(p.batch);
  while (tile < grid.tiles) {
    const int following = kTakesLate ? 0 : take(tile);
    const auto [head, block] = grid.index(tile, all_heads);
    // The longest tiles of causal heads come first. A sequence may be longer than the host knows: then a tile number
    // stands for later tiles too.
    int m = grid.blocks - 1 - block;
    const int batch = static_cast<int>(p.batch);
    ForwardWork work{kBatchesTogether ? head % batch : head / heads, kBatchesTogether ? head / batch : head % heads};
    const Sequence queries = query_sequence(p, work.b), keys = key_sequence(p, work.b);
    work.query_start = static_cast<int>(queries.start);
    work.length_q = static_cast<int>(queries.length);
    work.length_k = static_cast<int>(keys.length);
    for (; m * kQueries < work.length_q; m += grid.blocks) {
      work.row0 = m * kQueries;
      const Limits visible = work.mask(p).keys_of(work.row0, min(work.row0 + kQueries, work.length_q));
      work.first = visible.begin / kKeys;
      work.last = visible.end > visible.begin ? (visible.end - 1) / kKeys : work.first - 1;
      body(work, static_cast<int>(keys.start));
    }
    tile = kTakesLate ? take(tile) : following;
  }
}

// Zeroes TileGrid::taken, for calls whose thread blocks take their tiles from it (zero_taken.cu).
void zero_taken(const AttnParams& p, int* taken);

// Publishes a tile to the consumer warps; one thread calls it. parity: of the barriers, 0 at first.
template <class Shared>
__device__ __forceinline__ void publish_work(Shared& shared, const ForwardWork& work, uint32_t* parity) {
  ptx::barrier_wait(&shared.work_empty, *parity ^ 1);
  shared.work = work;
  ptx::barrier_arrive(&shared.work_full);
  *parity ^= 1;
}

// Waits for the next tile; all lanes of a warp call it.
template <class Shared>
__device__ __forceinline__ ForwardWork receive_work(Shared& shared, uint32_t* parity) {
  ptx::barrier_wait(&shared.work_full, *parity);
  *parity ^= 1;
  ForwardWork work{};
  if (threadIdx.x % 32 == 0) work = shared.work;
  release(shared.work_empty);
  for (int* field :
       {&work.b, &work.h, &work.row0, &work.first, &work.last, &work.query_start, &work.length_q, &work.length_k}) {
    *field = uniform(*field);
  }
  return work;
}

// Whether thread blocks take the tiles of a forward one by one, from a counter. To zero the counter costs one to two
// microseconds. It gains less in calls of one or two tiles for each thread block (TileGrid::next), and in calls of few
// tiles for each whose lengths are nearly even: all are equal without a window or if a head has one tile, and if a
// head has two, each thread block has as many of both lengths.
inline bool takes_tiles(const AttnParams& p, int64_t tiles, bool has_mask) {
  constexpr int64_t kMostRounds = 16;  // of a tile for every thread block
  const bool unbounded = p.window_left == kUnbounded && p.window_right == kUnbounded;
  const int64_t rounds = tile_count(tiles, multiprocessors());
  if (rounds <= 1 || has_mask || p.is_varlen()) return rounds > 1;
  return rounds > (unbounded || tiles <= 2 * p.batch * p.heads_q ? kMostRounds : 2);
}
// The tiles of a forward, `blocks` of a sequence. at_least: forward_order. In more than two rounds without a counter,
// the two tiles of a head follow each other, so that their thread blocks read the same keys.
inline TileGrid forward_grid(const AttnParams& p, int64_t blocks, int64_t element_bytes, int64_t at_least,
                             bool has_mask) {
  const int64_t tiles = blocks * p.batch * p.heads_q;
  int* const taken = takes_tiles(p, tiles, has_mask) ? static_cast<int*>(p.workspace) : nullptr;
  TileOrder order = forward_order(p, blocks, element_bytes, at_least);
  if (!taken && blocks == 2 && tiles > 2 * multiprocessors()) order.section = 1;
  return {order, static_cast<int>(tiles), taken};
}

}  // namespace flashattn_ext::sm90
