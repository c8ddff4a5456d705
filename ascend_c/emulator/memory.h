// Bytes with a shadow: per granule whether it was ever written, who wrote it last and who has read it since.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <list>
#include <string>
#include <vector>

#include "report.h"

namespace ascend_emulator {

constexpr uint32_t kUbBytes = 192 * 1024 - 256;  // the last 256 bytes are reserved
constexpr uint32_t kBlock = 32;                  // bytes of a block, the unit of UB addresses and strides
constexpr uint32_t kRepeat = 256;                // bytes that one repeat of a vector instruction covers
constexpr uint32_t kGranule = 2;                 // bytes that share a shadow cell

// clock[p] = the last instruction of pipe p that is known to have finished.
using Clock = std::array<uint32_t, kPipes>;

struct Cell {
  Clock read{};  // per pipe, its last read since the write; 0 = none
  uint32_t written = 0;
  uint8_t writer = 0;
  bool valid = false;
};

// One memory: a UB, or one tensor in GM.
struct Space {
  std::string name;
  uint8_t* bytes = nullptr;
  size_t size = 0;
  std::vector<Cell> cells;

  Space(std::string name, uint8_t* bytes, size_t size, bool valid) : name(std::move(name)), bytes(bytes), size(size) {
    cells.resize((size + kGranule - 1) / kGranule);
    for (Cell& cell : cells) cell.valid = valid;
  }
  // A new block has its own clocks.
  void forget_accesses() {
    for (Cell& cell : cells) {
      cell.read = {};
      cell.written = 0;
    }
  }
};

// The GM tensors of a launch; an access must lie inside one of them.
class GlobalMemory {
 public:
  void add(std::string name, void* bytes, size_t size, bool valid) {
    spaces_.emplace_back(std::move(name), static_cast<uint8_t*>(bytes), size, valid);
  }
  // The tensor that contains `address`, or the one that ends nearest below it; null if there is none.
  Space* find(const uint8_t* address) {
    Space* best = nullptr;
    for (Space& space : spaces_)
      if (space.bytes <= address && (!best || space.bytes > best->bytes)) best = &space;
    return best;
  }
  std::list<Space>& spaces() { return spaces_; }

 private:
  std::list<Space> spaces_;
};

}  // namespace ascend_emulator
