#include "cpu/caches.h"

#include <fstream>
#include <string>

namespace flashattn_ext {
namespace {

std::string first_word(const std::string& path) {
  std::string word;
  std::ifstream(path) >> word;
  return word;
}

// "48K", "1M" or a plain number of bytes; 0 for anything else.
int64_t bytes_of(const std::string& size) {
  int64_t bytes = 0;
  size_t n = 0;
  for (; n < size.size() && size[n] >= '0' && size[n] <= '9'; ++n) bytes = 10 * bytes + (size[n] - '0');
  const std::string unit = size.substr(n);
  return unit == "K" ? bytes << 10 : unit == "M" ? bytes << 20 : unit.empty() ? bytes : 0;
}

std::vector<Cache> read_data_caches() {
  std::vector<Cache> caches;
  for (int index = 0;; ++index) {
    const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/";
    const std::string level = first_word(folder + "level");
    if (level.empty()) return caches;
    const int64_t bytes = bytes_of(first_word(folder + "size"));
    if (first_word(folder + "type") != "Instruction" && bytes > 0) caches.push_back({level[0] - '0', bytes});
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
