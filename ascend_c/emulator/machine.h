// The cores of one launch, which run at the same time as coroutines, and the flags between them.
#pragma once

#include <ucontext.h>

#include "scheduler.h"

namespace AscendC {
enum KernelMetaType : uint8_t { KERNEL_TYPE_AIV_ONLY, KERNEL_TYPE_MIX_AIC_1_2 };
}  // namespace AscendC

namespace ascend_emulator {

using AscendC::KernelMetaType;

constexpr int kCrossFlags = 16, kCrossLimit = 15;

class Machine {
 public:
  Machine(KernelMetaType type, int blocks, const Options& options, GlobalMemory& gm, Report& report);

  void run(const std::function<void()>& kernel);

  int pipes() const { return int(cores_.size()) * kPipes; }
  KernelMetaType type() const { return type_; }

  // A CrossCoreSetFlag that its pipe has reached.
  void arrive(Core& core, int mode, int id, const Clock& clock, double time, Site site);
  // Waits, while other cores run, until the counter is above 0, and takes one from it.
  void wait(Core& core, int id, Site site);
  // Waits until every core (or every AIV) is here.
  void meet(Core& core, bool vector_only, Site site);
  // Notes that a core copies from this range at this modelled time, and returns whether another core does too. Of the
  // two, the core that runs later here is told.
  bool copies_there(const Core& core, const GmRange& range, double begin, double end);
  // A point where another core may run first (random mode).
  void pause();

 private:
  friend class Access;
  struct Signal {
    Clock clock;
    double time;
    Site site;
  };
  using Signals = std::array<std::deque<Signal>, kCrossFlags>;
  struct Coroutine {
    ucontext_t context;
    std::vector<char> stack;
    bool done = false;
    std::function<bool()> ready;  // empty: it can run
    std::string waits_for;
    Site site;
    Signals received;
    std::array<std::map<int, std::deque<Signal>>, kCrossFlags>
        pending;  // by mode: signals that wait for the other cores of the group
  };

  static void entry(unsigned low, unsigned high);
  void body();
  void resume(int number);
  void suspend(Core& core, std::function<bool()> ready, std::string waits_for, Site site);
  bool runnable(int number) const;
  std::vector<int> group(const Core& core, int mode) const;      // cores that set together
  std::vector<int> receivers(const Core& core, int mode) const;  // cores whose counter goes up
  bool move_stuck_cores();
  void stop_stuck_cores();
  void check_flags_left();

  KernelMetaType type_;
  Options options_;
  GlobalMemory& gm_;
  Report& report_;
  std::vector<std::unique_ptr<Core>> cores_;
  std::vector<std::unique_ptr<Coroutine>> coroutines_;
  const std::function<void()>* kernel_ = nullptr;
  ucontext_t main_;
  int running_ = -1;
  bool stopping_ = false, faulted_ = false;
  struct Meeting {  // a SyncAll
    size_t arrived = 0;
    int number = 0;
    Clock clock, last_clock;  // work finished by the arrived cores; and at the last complete meeting
    double time = 0;
  };
  std::map<bool, Meeting> meetings_;
  // When each core last copied from a range of GM, in modelled time.
  std::map<GmRange, std::map<int, std::pair<double, double>>> copies_;
  std::mt19937_64 random_;
};

Report launch(KernelMetaType type, int blocks, const Options& options, GlobalMemory& gm,
              const std::function<void()>& kernel);

}  // namespace ascend_emulator

#define __global__
#define __aicore__
#define __gm__
#define __ubuf__
#define GM_ADDR __gm__ uint8_t*
// In the device header these end in `constexpr(...)`, so that `if ASCEND_IS_AIC {` is the only form that compiles
// there. The same holds here: `if (ASCEND_IS_AIC)` does not compile.
#define ASCEND_EMULATOR_IS(which) constexpr(true) if (ascend_emulator::core().position().kind == which)
#define ASCEND_IS_AIV ASCEND_EMULATOR_IS(ascend_emulator::CoreKind::aiv)
#define ASCEND_IS_AIC ASCEND_EMULATOR_IS(ascend_emulator::CoreKind::aic)
#define KERNEL_TASK_TYPE_DEFAULT(type) ascend_emulator::check_kernel_type(AscendC::type)

namespace ascend_emulator {
inline void check_kernel_type(KernelMetaType type, Site site = Site::here()) {
  if (core().machine().type() != type) fail(site, "KERNEL_TASK_TYPE_DEFAULT differs from the type of the launch");
}
// The hardware has ids 0 to 7. The vendor reserves 6 and 7: only TPipe hands them out.
inline void check_event_id(HardEvent event, int id, const char* name, Site site) {
  if (id >= 0 && id < 8) core().check_given(event, id, name, site);
  if (core().has_pipe_object() && id >= 0 && id < 8) return;
  if (id < 0 || id > 5)
    fail(site, format("%s<HardEvent::%s>: event id %d, kernels may use 0..5; 6 and 7 are reserved by the vendor", name,
                      event_name(event), id));
}
}  // namespace ascend_emulator

namespace AscendC {

using ascend_emulator::Site;

// Kernels without TPipe call it first.
inline void InitSocState() { ascend_emulator::core().reset_registers(); }

inline int64_t GetSubBlockIdx() { return ascend_emulator::core().position().sub; }
inline int64_t GetBlockNum() { return ascend_emulator::core().position().blocks; }
inline int64_t GetTaskRation() {
  const auto& position = ascend_emulator::core().position();
  return position.mixed && position.kind == ascend_emulator::CoreKind::aiv ? 2 : 1;
}
inline int64_t GetBlockIdx() { return ascend_emulator::core().position().block * GetTaskRation() + GetSubBlockIdx(); }

template <HardEvent event>
void SetFlag(int32_t eventID, Site site = Site::here()) {
  ascend_emulator::check_event_id(event, eventID, "SetFlag", site);
  ascend_emulator::core().set_flag(event, eventID, site);
}

template <HardEvent event>
void WaitFlag(int32_t eventID, Site site = Site::here()) {
  ascend_emulator::check_event_id(event, eventID, "WaitFlag", site);
  ascend_emulator::core().wait_flag(event, eventID, site);
}

template <pipe_t pipe>
void PipeBarrier(Site site = Site::here()) {
  static_assert(pipe != PIPE_S, "PIPE_S needs no barrier and does not accept one");
  ascend_emulator::core().barrier(pipe, site);
}

template <uint8_t modeId, pipe_t pipe>
void CrossCoreSetFlag(uint16_t flagId, Site site = Site::here()) {
  static_assert(modeId <= 2, "the modes are 0, 1 and 2");
  static_assert(pipe != PIPE_S && pipe != PIPE_ALL, "a cross-core flag must be set by a pipe other than S");
  ascend_emulator::core().cross_set(modeId, pipe, flagId, site);
}

// The template arguments are ignored, as on the hardware: the wait stops the issue to every pipe.
template <uint8_t modeId = 0, pipe_t pipe = PIPE_S>
void CrossCoreWaitFlag(uint16_t flagId, Site site = Site::here()) {
  ascend_emulator::core().cross_wait(flagId, site);
}

template <bool isAIVOnly = true>
void SyncAll(Site site = Site::here()) {
  ascend_emulator::core().sync_all(isAIVOnly, site);
}

}  // namespace AscendC
