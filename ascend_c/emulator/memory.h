// Bytes with a shadow: which were ever written, and per granule its last writer and its readers since.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "report.h"

namespace ascend_emulator {

constexpr uint32_t kBlock = 32;    // bytes of a block, the unit of UB addresses and strides
constexpr uint32_t kRepeat = 256;  // bytes that one repeat of a vector instruction covers
constexpr uint32_t kFractal = 512;

// The memories of a core. The last bytes of UB and L1 are reserved.
enum class Memory : uint8_t { ub, l1, l0a, l0b, l0c };
struct MemoryInfo {
  const char* name;
  uint32_t bytes;
  uint32_t alignment;  // bytes to which an instruction's operand is aligned
};
constexpr MemoryInfo kMemoryInfo[kMemories] = {{"UB", 192 * 1024 - 256, 32},
                                               {"L1", 512 * 1024 - 256, 32},
                                               {"L0A", 64 * 1024, 512},
                                               {"L0B", 64 * 1024, 512},
                                               {"L0C", 128 * 1024, 1024}};
constexpr const MemoryInfo& info(Memory memory) { return kMemoryInfo[int(memory)]; }

// The last access that each of a few pipes made; pipes are counted over all cores of the launch.
struct Cell {
  struct Read {
    uint32_t index = 0;     // 0 = none
    uint32_t previous = 0;  // the read before it, of the same pipe
    uint16_t pipe = 0;
  };
  std::array<Read, 3> reads{};
  uint32_t written = 0;
  uint16_t writer = 0;
  bool atomic = false;  // the last write was an atomic addition
};

// An atomic addition to GM, by an instruction of a pipe. Its sum is formed some time before the next access:
// unordered additions are applied in any order.
struct Addition {
  uint16_t pipe;
  uint32_t index;
  std::function<void()> apply;
};

// What the kernel may do with a GM tensor. Workspace has a traffic class of its own: it is meant to stay in L2.
enum class Use { input, output, accumulator, workspace };

// One memory of a core, or one tensor in GM.
struct Space {
  std::string name;
  uint8_t* bytes = nullptr;
  size_t size = 0;
  uint32_t granule = kBlock;  // bytes that share a cell
  Use use = Use::workspace;
  std::vector<uint8_t> valid;  // per two bytes; empty: all bytes are valid
  std::vector<Cell> cells;     // empty: never written
  // L0A: how many fractals a row of fractals has, by the first byte of what one LoadData 3D wrote.
  std::map<size_t, int64_t> row_fractals;
  std::vector<Addition> additions;
  uint64_t last_adder = 0;  // the instruction that looked through them last

  Space(std::string name, uint8_t* bytes, size_t size, uint32_t granule, Use use, bool shadow = true)
      : name(std::move(name)), bytes(bytes), size(size), granule(granule), use(use) {
    if (!shadow) return;
    if (use == Use::output || use == Use::workspace) valid.assign((size + 1) / 2, 0);
    if (use != Use::input) cells.resize((size + granule - 1) / granule);
  }

  // Applies the additions that are due: in a random order, or last in, first out.
  template <typename Due>
  void settle(Due due, std::mt19937_64* random) {
    std::vector<Addition> now;
    const auto kept = [&due](const Addition& addition) { return !due(addition); };
    const auto from = std::stable_partition(additions.begin(), additions.end(), kept);
    std::move(from, additions.end(), std::back_inserter(now));
    additions.erase(from, additions.end());
    if (random)
      std::shuffle(now.begin(), now.end(), *random);
    else
      std::reverse(now.begin(), now.end());
    for (const Addition& addition : now) addition.apply();
  }
  void settle(std::mt19937_64* random) {
    if (!additions.empty()) settle([](const Addition&) { return true; }, random);
  }
};

// clock[p] = the last instruction of pipe p (counted over all cores) that is known to have finished.
using Clock = std::vector<uint32_t>;

// The scalar unit's cache of GM: lines that it has read, and its writes. It is not coherent.
class ScalarCache {
 public:
  static constexpr size_t kLine = 64;
  using Known = std::shared_ptr<const Clock>;

  // Reads bytes of one line of [begin, end); the rest of the line is cached too. Returns whether they match memory.
  bool read(const uint8_t* address, size_t size, const uint8_t* begin, const uint8_t* end) {
    const uint8_t* const line = address - reinterpret_cast<uintptr_t>(address) % kLine;
    for (const uint8_t* at = std::max(begin, line); at < std::min(end, line + kLine); ++at) bytes_.emplace(at, *at);
    return std::all_of(address, address + size, [this](const uint8_t& byte) { return bytes_.at(&byte) == byte; });
  }
  void write(const uint8_t* address, size_t size) {
    for (const uint8_t* at = address; at < address + size; ++at) {
      bytes_[at] = *at;
      dirty_.insert(at);
    }
  }
  bool dirty(const uint8_t* address) const { return dirty_.count(address); }
  bool any_dirty() const { return !dirty_.empty(); }
  // Whether the byte was removed from the cache after the scalar unit knew that an instruction of a pipe had finished.
  bool invalidated_after(const uint8_t* address, uint16_t pipe, uint32_t instruction) const {
    const auto line = lines_.find(address);
    return (line != lines_.end() && (*line->second)[pipe] >= instruction) || (all_ && (*all_)[pipe] >= instruction);
  }
  // `known`: the instructions that the scalar unit knows to have finished.
  void invalidate(const void* address, const Known& known) {
    const auto* first = static_cast<const uint8_t*>(address);
    const uint8_t* const end = first + kLine - reinterpret_cast<uintptr_t>(first) % kLine;
    bytes_.erase(bytes_.lower_bound(first), bytes_.lower_bound(end));
    dirty_.erase(dirty_.lower_bound(first), dirty_.lower_bound(end));
    for (const uint8_t* at = first; at < end; ++at) lines_[at] = known;
  }
  void invalidate_all(const Known& known) {
    bytes_.clear();
    dirty_.clear();
    all_ = known;
  }

 private:
  std::map<const uint8_t*, uint8_t> bytes_;
  std::set<const uint8_t*> dirty_;  // written, and not yet written back
  std::map<const uint8_t*, Known> lines_;
  Known all_;
};

// The GM tensors of a launch; an access must lie inside one of them.
class GlobalMemory {
 public:
  // Without a shadow only bounds are checked: for Mode::time, where addresses need not even be real.
  explicit GlobalMemory(bool shadow = true) : shadow_(shadow) {}

  // Adjacent rows of a user's tensor may be in one block and belong to different cores; the same `element` bytes never
  // do.
  void add(std::string name, const void* bytes, size_t size, Use use, uint32_t element = 2) {
    const uint32_t granule = use == Use::workspace ? kBlock : element;
    auto* begin = static_cast<uint8_t*>(const_cast<void*>(bytes));
    spaces_.emplace_back(std::move(name), begin, size, granule, use, shadow_);
  }
  // At the end of a launch.
  void settle(std::mt19937_64* random) {
    for (Space& space : spaces_) space.settle(random);
  }
  // The tensor that contains these bytes, or the one that begins nearest below them; null if there is none.
  Space* find(const uint8_t* address, size_t size) {
    Space* best = nullptr;
    for (Space& space : spaces_) {
      if (space.bytes > address) continue;
      if (address + size <= space.bytes + space.size) return &space;
      if (!best || space.bytes > best->bytes) best = &space;
    }
    return best;
  }

 private:
  bool shadow_;
  std::list<Space> spaces_;
};

}  // namespace ascend_emulator
