// Work distribution: workers draw tile numbers from one counter, so that uneven (causal, varlen) tiles balance
// themselves. No result depends on which worker computes what.
#pragma once

#include "simd.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

struct WorkItem {
  int64_t batch;
  int64_t tile;  // along the tiled sequence of the batch entry
  int64_t head;
  int64_t tile_of_call;  // the tile, counted through all batch entries
};

// Finds a work item by its number: items are ordered by batch entry, then tile, then head, or with heads_first by batch
// entry, then head, then tile. Every worker has a cursor of its own and asks for ascending numbers.
class WorkCursor {
 public:
  WorkCursor(int64_t batches, int64_t heads, bool heads_first = false)
      : batches_(batches), heads_(heads), heads_first_(heads_first) {}

  // False when there is no such item. tiles_of(b) is the number of tiles of batch entry b.
  template <class TilesOf>
  bool find(int64_t number, TilesOf tiles_of, WorkItem* item) {
    while (batch_ < batches_) {
      const int64_t tiles = tiles_of(batch_), items = tiles * heads_, n = number - first_;
      if (n < items) {
        const int64_t tile = heads_first_ ? n % tiles : n / heads_;
        *item = {batch_, tile, heads_first_ ? n / tiles : n % heads_, first_ / heads_ + tile};
        return true;
      }
      first_ += items;
      ++batch_;
    }
    return false;
  }

 private:
  int64_t batches_, heads_;
  bool heads_first_;
  int64_t batch_ = 0, first_ = 0;
};

// Runs body(worker) on up to `items` workers of the executor.
template <class Body>
inline void run_workers(const CpuExecutor& executor, int64_t items, Body body) {
  const int workers = static_cast<int>(lesser<int64_t>(executor.num_threads, items));
  if (workers <= 0) return;
  executor.run(workers, [](void* context, int worker) { (*static_cast<Body*>(context))(worker); }, &body);
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
