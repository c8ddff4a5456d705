#include "cpu/caches.h"

#include <fstream>
#include <string>

namespace flashattn_ext {
namespace {

std::vector<Cache> read_data_caches() {
  std::vector<Cache> caches;
  for (int index = 0;; ++index) {
    const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/";
    Cache cache{};
    std::string type, unit;  // of a size: K, M, or none for bytes
    if (!(std::ifstream(folder + "level") >> cache.level)) return caches;
    std::ifstream(folder + "type") >> type;
    std::ifstream(folder + "size") >> cache.bytes >> unit;
    cache.bytes = unit == "K" ? cache.bytes << 10 : unit == "M" ? cache.bytes << 20 : unit.empty() ? cache.bytes : 0;
    if (type != "Instruction" && cache.bytes > 0) caches.push_back(cache);
  }
}

}  // namespace

const std::vector<Cache>& data_caches() {
  static const std::vector<Cache> caches = read_data_caches();
  return caches;
}

int64_t cache_bytes(int level) {
  for (const Cache& cache : data_caches()) {
    if (cache.level == level) return cache.bytes;
  }
  return 0;
}

}  // namespace flashattn_ext
