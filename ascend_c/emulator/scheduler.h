// One core: its pipes, flags and clocks. The kernel's scalar program issues entries to the pipes; the mode decides when
// they run. An entry runs after all earlier entries of its pipe, and after the flags that its pipe waits for, with
// no other order. machine.h runs several cores at the same time.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>

#include "memory.h"
#include "report.h"

enum pipe_t { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_FIX, PIPE_ALL };

// The pairs of pipes that have flags; one exists on a core if both its pipes do.
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
  X(MTE3, S)                      \
  X(MTE2, MTE1)                   \
  X(MTE1, MTE2)                   \
  X(MTE1, M)                      \
  X(M, MTE1)                      \
  X(MTE2, M)                      \
  X(M, MTE2)                      \
  X(M, FIX)                       \
  X(FIX, M)                       \
  X(MTE2, FIX)                    \
  X(FIX, MTE2)                    \
  X(FIX, S)                       \
  X(M, S)                         \
  X(MTE1, FIX)                    \
  X(FIX, MTE1)

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

// `time` moves no data and checks none of it: only the time model runs, and the scalar unit's reads.
enum class Mode { eager, late, random, time };

struct Options {
  Mode mode = Mode::eager;
  uint64_t seed = 0;
  bool refuses_nan = false;  // in products, where the documents want none
};

class Core;
class Machine;

// An instruction while it executes: every byte that it touches goes through here.
class Access {
 public:
  Access(Core& core, pipe_t pipe, uint32_t index);
  // `own`: the instruction may read what it wrote itself (accumulation over repeats). `unwritten`: it may move bytes
  // that were never written, as long as no instruction computes with them.
  void read(Space& space, size_t offset, size_t size, bool own = false, bool unwritten = false);
  void write(Space& space, size_t offset, size_t size, bool atomic = false);
  // After write(.., atomic): adds to what is there, at once or later (memory.h).
  void add(Space& space, std::function<void()> apply);
  template <typename T>
  T load(Space& space, size_t offset) {
    T value;
    std::memcpy(&value, space.bytes + offset, sizeof(T));
    return value;
  }
  Space& local(Memory memory);
  Space& ub() { return local(Memory::ub); }
  // The scalar unit reads and writes GM through its cache, where a line stays as it was when first read.
  void read_cached(Space& space, size_t offset, size_t size);
  void write_cached(Space& space, size_t offset, size_t size);
  // The hardware orders this instruction behind the earlier ones of its pipe.
  void set_in_order() { in_order_ = true; }

 private:
  void report_unwritten(const Space& space, const char* what);
  // Another pipe reads bytes that are only in a scalar unit's cache.
  void check_written_back(const Space& space, size_t offset, const Cell& cell);
  void race(const Space& space, bool writes, uint16_t other_pipe, uint32_t other, bool other_writes);
  bool after(uint16_t pipe, uint32_t index) const {
    return clock_[pipe] >= index || (in_order_ && pipe == global_ && index != index_);
  }

  Core& core_;
  pipe_t pipe_;
  uint16_t global_;  // number of this pipe over all cores
  uint32_t index_;
  const Clock& clock_;
  bool in_order_ = false;
};

// A tensor, and the range of kSameAddressBytes in it.
using GmRange = std::pair<const Space*, int64_t>;

struct Work {
  pipe_t pipe;
  const char* name;
  Site site;
  double cycles = 0;
  uint64_t gm_read = 0, gm_written = 0;
  Traffic traffic = Traffic::tensors;
  std::function<void(Access&)> run = {};
  GmRange from = {};  // what a copy from GM reads
};

struct Flag {
  bool set = false;
  Site set_site, wait_site;
  Clock clock;              // work that the setter had finished
  uint32_t wait_index = 0;  // the last wait, in the target pipe's count: the next set has to come after it
  double time = 0;
};

// Bits of the control register. Nothing documents what an earlier kernel leaves in it: integers saturate, products of
// fp32 are rounded to HF32, and infinities and NaN become finite, until the kernel says otherwise.
constexpr int kCtrlIntegersSaturate = 53, kCtrlNotFinite = 48, kCtrlHf32 = 46;
constexpr uint64_t kCtrlAtStart = uint64_t(1) << kCtrlIntegersSaturate | uint64_t(1) << kCtrlHf32;

// Where a core stands in a launch.
struct CorePosition {
  CoreKind kind;
  int block, sub, blocks;  // AIV 2 * block + sub works with AIC block
  bool mixed;              // launched with both kinds
};

class Core {
 public:
  Core(int number, CorePosition position, Machine& machine, const Options& options, GlobalMemory& gm, Report& report);

  void issue(Work work);
  void set_flag(HardEvent event, int id, Site site);
  void wait_flag(HardEvent event, int id, Site site);
  void barrier(pipe_t pipe, Site site);
  void cross_set(int mode, pipe_t pipe, int id, Site site);
  void cross_wait(int id, Site site);
  void sync_all(bool vector_only, Site site);
  void run_scalar();  // S completes what it has issued to itself
  void finish();      // drains every pipe and checks for leftover flags and buffers

  // The tensor in GM that holds these bytes, and their offset; ends the block if there is none.
  std::pair<Space*, size_t> gm(const void* address, size_t size, bool writes, const char* name, Site site);
  Space& local(Memory memory, const char* name, Site site);
  Report& report() { return report_; }
  const CorePosition& position() const { return position_; }
  std::string name() const;
  Machine& machine() { return machine_; }

  struct Pools {                         // the event ids of TPipe, as bits
    std::map<HardEvent, uint8_t> used;   // ids that queues or the kernel hold
    std::map<HardEvent, uint8_t> given;  // ids that the kernel has from AllocEventID
    std::map<HardEvent, uint8_t> shown;  // to the kernel, by FetchEventID
    // The lowest id that is not yet allocated to a queue or an explicit flag.
    int unused(HardEvent event, Site site) {
      for (int id = 0; id < 8; ++id)
        if (!(used[event] >> id & 1)) return id;
      fail(site, std::string("all 8 event ids of HardEvent::") + event_name(event) +
                     " are taken (each buffer of a queue takes one)");
    }
  } event_ids;
  // Whether bytes are moved and checked; false if only the time model runs.
  bool refuses_nan() const { return options_.refuses_nan; }
  bool checks_data() const { return options_.mode != Mode::time; }
  // Writes back and invalidates cached GM: the bytes of this address's line from there on, or all lines.
  void invalidate(const void* address) { cache_.invalidate(address, scalar_clock_); }
  void invalidate_all() { cache_.invalidate_all(scalar_clock_); }
  // Local memory is either the TPipe's or the kernel's own, with tensors of fixed addresses.
  void open_pipe(Site site);
  void close_pipe() { has_pipe_object_ = false; }
  bool has_pipe_object() const { return has_pipe_object_; }
  void take_address(Site site);
  // Registers that an earlier kernel may have left in any state are set: by TPipe, or InitSocState.
  void reset_registers() {
    registers_set_ = true;
    atomic_add = false;
  }
  // With a TPipe a kernel gets the ids of its own flags from it.
  void check_given(HardEvent event, int id, const char* name, Site site);

  bool atomic_add = false;  // captured by the stores that follow
  Site atomic_site;
  uint64_t ctrl = kCtrlAtStart;  // the control register, captured by the instructions that follow

 private:
  friend class Access;
  friend class Machine;
  enum class Kind { work, set, wait, barrier, cross_set };
  struct Entry {
    Kind kind;
    Work work;
    HardEvent event{};
    int id = 0, mode = 0;
    uint64_t sequence = 0;
    std::shared_ptr<const Clock> issued = {};  // work that the scalar unit had waited for when it issued this
    double issue_time = 0;
  };
  struct Pipe {
    std::deque<Entry> queue;
    Clock clock;
    std::shared_ptr<const Clock> joined;             // the last `issued` that is in `clock`
    uint32_t count = 0;                              // entries that have run
    std::vector<Site> sites = std::vector<Site>(1);  // by count, from 1
    std::vector<const char*> names = std::vector<const char*>(1);
    double time = 0;
    std::deque<double> begun;  // modelled times at which the last kQueueEntries left the queue
    bool busy = false;         // in the chain of demands, to see cycles
  };
  using FlagKey = std::pair<HardEvent, int>;

  // Joins the finished work of another core into the knowledge of this core's scalar unit.
  void learn(const Clock& clock, double time);
  uint16_t global(int pipe) const { return uint16_t(number_ * kPipes + pipe); }
  bool has_pipe(pipe_t pipe) const;
  std::mt19937_64* shuffler() { return options_.mode == Mode::random ? &random_ : nullptr; }
  void push(Entry entry);
  void step(pipe_t pipe);
  void run_work(Entry& entry, uint32_t index);
  void step_set(Entry& entry);
  void step_wait(Entry& entry);
  bool blocked(const Pipe& pipe);  // its head waits for a flag that is not set
  bool step_any(bool in_order);
  void demand(pipe_t pipe, uint64_t sequence);
  void demand_late(pipe_t pipe, uint64_t sequence);
  void drain();
  void check_event(HardEvent event, int id, const char* name, Site site);
  void check_cross_id(int id, const char* name, Site site);
  std::string waiting_pipes(Site* site);
  [[noreturn]] void deadlock();

  int number_;
  CorePosition position_;
  Machine& machine_;
  Options options_;
  GlobalMemory& gm_;
  Report& report_;
  std::array<std::vector<uint8_t>, kMemories> bytes_;
  std::array<std::unique_ptr<Space>, kMemories> local_;
  std::array<Pipe, kPipes> pipes_;
  ScalarCache cache_;
  Site cache_site_;                            // where the last store into it was
  std::shared_ptr<const Clock> scalar_clock_;  // a copy of S's clock, shared by the entries issued under it
  std::map<FlagKey, Flag> flags_;
  bool has_pipe_object_ = false, had_pipe_object_ = false, registers_set_ = false;
  Site address_site_;        // where the first tensor with an address of its own was made
  uint64_t waited_for_ = 0;  // `sequence_` at the last PipeBarrier<PIPE_ALL>
  Site last_site_;           // where the last entry was issued
  uint64_t sequence_ = 0;
  std::mt19937_64 random_;
};

// The core whose kernel runs now.
Core& core();

}  // namespace ascend_emulator
