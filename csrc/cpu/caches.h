// The caches of one core of this machine.
#pragma once

#include <cstdint>
#include <vector>

namespace flashattn_ext {

struct Cache {
  int level;
  int64_t bytes;
};

// The data and unified caches of the first core, from level 1 on, as Linux reports them; empty if it reports none.
const std::vector<Cache>& data_caches();

// The size of one level in bytes; 0 if unknown.
int64_t cache_bytes(int level);

}  // namespace flashattn_ext
