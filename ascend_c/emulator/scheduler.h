// One core: its pipes, flags and clocks. The kernel's scalar program issues entries to the pipes; the mode decides when
// they run. An entry runs after everything before it in its pipe, and after the flags that its pipe waits for: nothing
// else.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <random>
#include <set>

#include "memory.h"
#include "report.h"

// The cube's pipes are here so that flags and counters have one shape for both kinds of core.
enum pipe_t { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_FIX, PIPE_ALL };

// The pairs that exist on a vector core.
#define ASCEND_EMULATOR_EVENTS(X) \
  X(MTE2, V)                      \
  X(V, MTE2)                      \
  X(MTE3, V)                      \
  X(V, MTE3)                      \
  X(V, V)                         \
  X(MTE3, MTE2)                   \
  X(MTE2, MTE3)                   \
  X(S, V)                         \
  X(V, S)                         \
  X(S, MTE2)                      \
  X(MTE2, S)                      \
  X(S, MTE3)                      \
  X(MTE3, S)

namespace AscendC {
enum class HardEvent : uint8_t {
#define X(from, to) from##_##to,
  ASCEND_EMULATOR_EVENTS(X)
#undef X
      MAX
};
using TEventID = int8_t;
}  // namespace AscendC

namespace ascend_emulator {

using AscendC::HardEvent;

const char* pipe_name(int pipe);
const char* event_name(HardEvent event);
pipe_t event_source(HardEvent event);
pipe_t event_target(HardEvent event);
// The event from one pipe to another; MAX where the hardware has none.
HardEvent event_between(pipe_t source, pipe_t target);

enum class Mode { eager, late, random };

struct Options {
  Mode mode = Mode::eager;
  uint64_t seed = 0;
};

class Core;

// An instruction while it executes: every byte that it touches goes through here.
class Access {
 public:
  Access(Core& core, pipe_t pipe, uint32_t index) : core_(core), pipe_(pipe), index_(index) {}
  // `own`: the instruction may read what it wrote itself (accumulation over repeats).
  void read(Space& space, size_t offset, size_t size, bool own = false);
  void write(Space& space, size_t offset, size_t size);
  template <typename T>
  T load(Space& space, size_t offset) {
    T value;
    std::memcpy(&value, space.bytes + offset, sizeof(T));
    return value;
  }
  Space& ub();

 private:
  void race(const Space& space, bool writes, int other_pipe, uint32_t other, bool other_writes);
  bool after(int pipe, uint32_t index) const;

  Core& core_;
  pipe_t pipe_;
  uint32_t index_;
};

struct Work {
  pipe_t pipe;
  const char* name;
  Site site;
  double cycles = 0;
  uint64_t gm_read = 0, gm_written = 0;
  std::function<void(Access&)> run = {};
};

struct Flag {
  bool set = false;
  Site set_site, wait_site;
  Clock clock{};            // what the setter had finished
  uint32_t wait_index = 0;  // the last wait, in the target pipe's count: the next set has to come after it
  double time = 0;
};

class Core {
 public:
  Core(int block, int blocks, const Options& options, GlobalMemory& gm, Report& report);

  void issue(Work work);
  void set_flag(HardEvent event, int id, Site site);
  void wait_flag(HardEvent event, int id, Site site);
  void barrier(pipe_t pipe, Site site);
  void run_scalar();  // S completes what it has issued to itself
  void finish();      // drains every pipe and checks what is left over

  // The tensor in GM that holds these bytes, and their offset; ends the block if there is none.
  std::pair<Space*, size_t> gm(const void* address, size_t size, bool writes, const char* name, Site site);
  Space& ub() { return ub_; }
  Report& report() { return report_; }
  int block() const { return block_; }
  int blocks() const { return blocks_; }

  struct Pools {  // of event ids, for TPipe
    std::map<HardEvent, uint8_t> used;
  } event_ids;

 private:
  friend class Access;
  enum class Kind { work, set, wait, barrier };
  struct Entry {
    Kind kind;
    Work work;
    HardEvent event{};
    int id = 0;
    uint64_t sequence = 0;
    Clock issued{};  // what the scalar unit had waited for when it issued this
    double issue_time = 0;
  };
  struct Pipe {
    std::deque<Entry> queue;
    Clock clock{};
    uint32_t count = 0;                              // entries that have run
    std::vector<Site> sites = std::vector<Site>(1);  // by count, from 1
    std::vector<const char*> names = std::vector<const char*>(1);
    double time = 0;
    bool busy = false;  // in the chain of demands, to see cycles
  };
  using FlagKey = std::pair<HardEvent, int>;

  void push(Entry entry);
  void step(pipe_t pipe);
  void step_set(Entry& entry);
  void step_wait(Entry& entry);
  bool blocked(const Pipe& pipe);  // its head waits for a flag that is not set
  bool step_any(bool in_order);
  void demand(pipe_t pipe, uint64_t sequence);
  void demand_late(pipe_t pipe, uint64_t sequence);
  void drain();
  void check_id(HardEvent event, int id, const char* name, Site site);
  [[noreturn]] void deadlock();

  int block_, blocks_;
  Options options_;
  GlobalMemory& gm_;
  Report& report_;
  std::vector<uint8_t> ub_bytes_;
  Space ub_;
  std::array<Pipe, kPipes> pipes_;
  std::map<FlagKey, Flag> flags_;
  uint64_t sequence_ = 0;
  std::mt19937_64 random_;
};

// The core whose kernel runs on this thread.
Core& core();

// Runs the kernel once per block, one after the other.
Report launch(int blocks, const Options& options, GlobalMemory& gm, const std::function<void()>& kernel);

}  // namespace ascend_emulator

#define __global__
#define __aicore__
#define __gm__
#define __ubuf__
#define GM_ADDR __gm__ uint8_t*
#define ASCEND_IS_AIV (true)
#define ASCEND_IS_AIC (false)

namespace AscendC {

using ascend_emulator::Site;

inline int64_t GetBlockIdx() { return ascend_emulator::core().block(); }
inline int64_t GetBlockNum() { return ascend_emulator::core().blocks(); }

template <HardEvent event>
void SetFlag(int32_t eventID, Site site = Site::here()) {
  ascend_emulator::core().set_flag(event, eventID, site);
}

template <HardEvent event>
void WaitFlag(int32_t eventID, Site site = Site::here()) {
  ascend_emulator::core().wait_flag(event, eventID, site);
}

template <pipe_t pipe>
void PipeBarrier(Site site = Site::here()) {
  static_assert(pipe != PIPE_S, "PIPE_S needs and allows no barrier");
  ascend_emulator::core().barrier(pipe, site);
}

}  // namespace AscendC
