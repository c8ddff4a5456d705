// The results of a launch: errors with their kernel lines, and counters per pipe.
#pragma once

#include <algorithm>
#include <array>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

namespace ascend_emulator {

// A line of the kernel. API functions take one as a last argument that callers never write.
struct Site {
  const char* file = "?";
  int line = 0;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
  std::string text() const {
    const std::string path = file;
    return path.substr(path.rfind('/') + 1) + ":" + std::to_string(line);
  }
};

// An error after which the block cannot go on; the launch records it.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

__attribute__((format(printf, 1, 2))) inline std::string format(const char* pattern, ...) {
  char buffer[1024];
  va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(buffer, sizeof(buffer), pattern, arguments);
  va_end(arguments);
  return buffer;
}

// Ends the block with "kernel.cpp:12: message".
[[noreturn]] inline void fail(Site site, const std::string& message) { throw Fault(site.text() + ": " + message); }

constexpr int kPipes = 7;
constexpr int kMemories = 5;  // the memories of a core: UB, L1, L0A, L0B, L0C
enum class CoreKind : uint8_t { aic, aiv };
constexpr int kCoreKinds = 2;
enum class Traffic : uint8_t { tensors, workspace };

struct Counters {
  using PerPipe = std::array<double, kPipes>;
  std::array<PerPipe, kCoreKinds> instructions{};
  std::array<PerPipe, kCoreKinds> cycles{};                     // modelled time that the pipes of all cores are busy
  std::array<uint64_t, 2> gm_read_bytes{}, gm_written_bytes{};  // by Traffic
  double span_cycles = 0;                                       // modelled time of the slowest core
  std::array<uint32_t, kMemories> taken_bytes{};                // where the last tensor of any core ends

  void take(size_t memory, uint32_t end) { taken_bytes[memory] = std::max(taken_bytes[memory], end); }
};

struct Report {
  std::vector<std::string> errors;    // each text once
  std::vector<std::string> warnings;  // actions that the documents forbid although the vendor's own code does them
  Counters counters;

  void error(const std::string& text) { add_once(&errors, text); }
  void warning(const std::string& text) { add_once(&warnings, text); }

  // A launch after this one.
  Report& operator+=(const Report& next) {
    for (const std::string& text : next.errors) error(text);
    for (const std::string& text : next.warnings) warning(text);
    const auto add = [](auto& to, const auto& from) {
      for (size_t i = 0; i < to.size(); ++i) to[i] += from[i];
    };
    for (size_t kind = 0; kind < kCoreKinds; ++kind) {
      add(counters.instructions[kind], next.counters.instructions[kind]);
      add(counters.cycles[kind], next.counters.cycles[kind]);
    }
    add(counters.gm_read_bytes, next.counters.gm_read_bytes);
    add(counters.gm_written_bytes, next.counters.gm_written_bytes);
    counters.span_cycles += next.counters.span_cycles;
    for (size_t memory = 0; memory < kMemories; ++memory) counters.take(memory, next.counters.taken_bytes[memory]);
    return *this;
  }

 private:
  static void add_once(std::vector<std::string>* texts, const std::string& text) {
    if (std::find(texts->begin(), texts->end(), text) == texts->end()) texts->push_back(text);
  }
};

}  // namespace ascend_emulator
