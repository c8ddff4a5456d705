// Ordered accumulation by several workers, with the same bits for every number of threads: a counter admits
// contributions in ascending order of their numbers, and a worker waits until the counter reaches its own. Workers draw
// work in the same order, so that every earlier contribution is already in progress and the wait cannot deadlock.
#pragma once

#include "cpu/vectors/simd.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

using Turn = std::atomic<int32_t>;  // initially 0

inline void wait_for_turn(const Turn& turn, int64_t number) {
  while (turn.load(std::memory_order_acquire) != number) sched_yield();
}
inline void end_turn(Turn& turn, int64_t next) { turn.store(static_cast<int32_t>(next), std::memory_order_release); }

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
