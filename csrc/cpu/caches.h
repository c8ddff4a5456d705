// The caches of one core of this machine.
#pragma once

#include <cstdint>
#include <vector>

namespace flashattn_ext {

struct Cache {
  int level;
  int64_t bytes;
};

// The caches that hold data, from the first level on, as Linux describes them for the first core; empty where it does
// not tell.
const std::vector<Cache>& data_caches();

// The bytes of one level; 0 where they are not known.
int64_t cache_bytes(int level);

}  // namespace flashattn_ext
