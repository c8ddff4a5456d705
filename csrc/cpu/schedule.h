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
};

// Finds a work item by its number: items are ordered by batch entry, then tile, then head. Every worker has a cursor of
// its own and asks for ascending numbers.
class WorkCursor {
 public:
  WorkCursor(int64_t batches, int64_t heads) : batches_(batches), heads_(heads) {}

  // False when there is no such item. tiles_of(b) is the number of tiles of batch entry b.
  template <class TilesOf>
  bool find(int64_t number, TilesOf tiles_of, WorkItem* item) {
    while (batch_ < batches_) {
      const int64_t items = tiles_of(batch_) * heads_;
      if (number < first_ + items) {
        *item = {batch_, (number - first_) / heads_, (number - first_) % heads_};
        return true;
      }
      first_ += items;
      ++batch_;
    }
    return false;
  }

 private:
  int64_t batches_, heads_;
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
