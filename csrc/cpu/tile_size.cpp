#include "cpu/tile_size.h"

#include <atomic>
#include <stdexcept>
#include <string>

#include "cpu/caches.h"

namespace flashattn_ext {
namespace {

std::atomic<int64_t> set_queries{0}, set_keys{0};

}  // namespace

TileSize tile_that_fits(int64_t l2_bytes, int64_t row_bytes, int64_t score_bytes) {
  constexpr int64_t kLarge = 192, kSmall = 128;
  const int64_t read_again = kLarge * (row_bytes + kLarge * score_bytes);
  const int64_t length = l2_bytes > 0 && read_again > l2_bytes ? kSmall : kLarge;
  return {length, length};
}

TileSize tile_size(int64_t row_bytes, int64_t score_bytes) {
  const int64_t queries = set_queries.load(std::memory_order_relaxed);
  if (queries) return {queries, set_keys.load(std::memory_order_relaxed)};
  static const int64_t l2_bytes = cache_bytes(2);
  return tile_that_fits(l2_bytes, row_bytes, score_bytes);
}

void set_tile_size(const TileSize& size) {
  const auto is_size = [](int64_t n) { return n > 0 && n <= kLargestTile && n % kTileMultiple == 0; };
  if (!(size.queries == 0 && size.keys == 0) && !(is_size(size.queries) && is_size(size.keys))) {
    throw std::invalid_argument("set_cpu_tile: got " + std::to_string(size.queries) + " x " +
                                std::to_string(size.keys) + "; give two multiples of " + std::to_string(kTileMultiple) +
                                " up to " + std::to_string(kLargestTile) + ", or 0 and 0 for the machine's own");
  }
  set_queries = size.queries;
  set_keys = size.keys;
}

}  // namespace flashattn_ext
