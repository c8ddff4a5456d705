// Work distribution: workers draw tile numbers from one atomic counter, which balances uneven (causal, varlen) tiles.
// Results do not depend on the assignment of tiles to workers.
#pragma once

#include "cpu/vectors/simd.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

struct WorkItem {
  int64_t batch;
  int64_t tile;  // index within the batch entry
  int64_t head;
  int64_t tile_of_call;  // the tile, counted through all batch entries
};

// The order of the items of a batch entry, which comes before the next entry.
enum class WorkOrder {
  kTilesFirst,  // by tile, then head
  kHeadsFirst,  // by head, then tile
  kLastTiles,   // by tile from the last one on, then head
};

// Maps an item number to a work item. Every worker has its own cursor and calls find() with ascending numbers.
class WorkCursor {
 public:
  WorkCursor(int64_t batches, int64_t heads, WorkOrder order) : batches_(batches), heads_(heads), order_(order) {}

  // False if there is no such item. tiles_of(b) is the number of tiles of batch entry b.
  template <class TilesOf>
  bool find(int64_t number, TilesOf tiles_of, WorkItem* item) {
    while (batch_ < batches_) {
      const int64_t tiles = tiles_of(batch_), items = tiles * heads_, n = number - first_;
      if (n < items) {
        const bool heads_first = order_ == WorkOrder::kHeadsFirst;
        int64_t tile = heads_first ? n % tiles : n / heads_;
        if (order_ == WorkOrder::kLastTiles) tile = tiles - 1 - tile;
        *item = {batch_, tile, heads_first ? n / tiles : n % heads_, first_ / heads_ + tile};
        return true;
      }
      first_ += items;
      ++batch_;
    }
    return false;
  }

 private:
  int64_t batches_, heads_;
  WorkOrder order_;
  int64_t batch_ = 0, first_ = 0;
};

// While it exists, results of this thread that are too small for a normal number (2^-126 in fp32) become 0. Processors
// take a hundred cycles for such a result, and a row with steep ALiBi slopes has many: keys far away have weights down
// to 2^-126 of the largest. Denormal inputs keep their values.
class FlushedResults {
 public:
#if defined(__SSE__)
  FlushedResults() : before_(_mm_getcsr()) { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON); }
  ~FlushedResults() { _mm_setcsr(before_); }
  FlushedResults(const FlushedResults&) = delete;
  FlushedResults& operator=(const FlushedResults&) = delete;

 private:
  const unsigned before_;
#else
  FlushedResults() {}  // Arm's mode would flush denormal inputs, too
#endif
};

// Runs body(worker) on up to `items` workers of the executor.
template <class Body>
inline void run_workers(const CpuExecutor& executor, int64_t items, Body body) {
  const int workers = static_cast<int>(lesser<int64_t>(executor.num_threads, items));
  if (workers <= 0) return;
  const auto run = [](void* context, int worker) {
    const FlushedResults flushed;
    (*static_cast<Body*>(context))(worker);
  };
  executor.run(workers, run, &body);
}

// Calls body(item) for every item below `items`.
template <class Body>
inline void for_each_item(const AttnParams& p, int64_t items, Body body) {
  std::atomic<int64_t> next{0};
  run_workers(*static_cast<const CpuExecutor*>(p.stream), items, [&](int) {
    int64_t item;
    while ((item = next.fetch_add(1, std::memory_order_relaxed)) < items) body(item);
  });
}

// Runs all tiles; each of the `heads` of batch entry b has tiles_of(b) of them. kernel_of(worker) makes the kernel of a
// worker, whose run(item) processes a tile of a head.
template <class TilesOf, class KernelOf>
inline void run_tiles(const AttnParams& p, int64_t heads, WorkOrder order, TilesOf tiles_of, KernelOf kernel_of) {
  int64_t items = 0;
  for (int64_t b = 0; b < p.batch; ++b) items += tiles_of(b) * heads;
  std::atomic<int64_t> next{0};
  run_workers(*static_cast<const CpuExecutor*>(p.stream), items, [&](int worker) {
    auto kernel = kernel_of(worker);
    WorkCursor cursor(p.batch, heads, order);
    WorkItem item;
    while (cursor.find(next.fetch_add(1, std::memory_order_relaxed), tiles_of, &item)) kernel.run(item);
  });
}

// Runs the query tiles of all query heads. Causal tiles see more keys towards the end of the sequence: the longest
// start first.
template <class TilesOf, class KernelOf>
inline void run_query_tiles(const AttnParams& p, TilesOf tiles_of, KernelOf kernel_of) {
  run_tiles(p, p.heads_q, WorkOrder::kLastTiles, tiles_of, kernel_of);
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
