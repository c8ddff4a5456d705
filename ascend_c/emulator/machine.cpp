#include "machine.h"

#include <algorithm>

#include "rates.h"

namespace ascend_emulator {

namespace {
thread_local Core* current = nullptr;
constexpr size_t kStackBytes = 512 * 1024;
}  // namespace

Core& core() { return *current; }

Machine::Machine(KernelMetaType type, int blocks, const Options& options, GlobalMemory& gm, Report& report)
    : type_(type), options_(options), gm_(gm), report_(report), random_(options.seed) {
  std::vector<CorePosition> positions;
  for (int block = 0; block < blocks; ++block) {
    const bool mixed = type == AscendC::KERNEL_TYPE_MIX_AIC_1_2;
    if (mixed) positions.push_back({CoreKind::aic, block, 0, blocks, mixed});
    for (int sub = 0; sub < (mixed ? 2 : 1); ++sub) positions.push_back({CoreKind::aiv, block, sub, blocks, mixed});
  }
  cores_.resize(positions.size());  // pipes() counts them
  for (size_t n = 0; n < positions.size(); ++n) {
    cores_[n] = std::make_unique<Core>(int(n), positions[n], *this, options, gm, report);
    coroutines_.push_back(std::make_unique<Coroutine>());
  }
}

// --- coroutines -----------------------------------------------------------------------------------------------------

void Machine::entry(unsigned low, unsigned high) {
  reinterpret_cast<Machine*>(uintptr_t(low) | uintptr_t(high) << 32)->body();
}

void Machine::body() {
  const int number = running_;
  try {
    (*kernel_)();
    cores_[size_t(number)]->finish();
  } catch (const Fault& fault) {
    if (!stopping_ || !faulted_) report_.error(fault.what());
    if (!stopping_) faulted_ = true;
  }
  coroutines_[size_t(number)]->done = true;
  swapcontext(&coroutines_[size_t(number)]->context, &main_);
}

void Machine::resume(int number) {
  running_ = number;
  current = cores_[size_t(number)].get();
  coroutines_[size_t(number)]->ready = nullptr;
  swapcontext(&main_, &coroutines_[size_t(number)]->context);
  current = nullptr;
}

bool Machine::runnable(int number) const {
  const Coroutine& coroutine = *coroutines_[size_t(number)];
  return !coroutine.done && (!coroutine.ready || coroutine.ready());
}

void Machine::suspend(Core& core, std::function<bool()> ready, std::string waits_for, Site site) {
  Coroutine& mine = *coroutines_[size_t(core.number_)];
  mine.ready = std::move(ready);
  mine.waits_for = std::move(waits_for);
  mine.site = site;
  swapcontext(&mine.context, &main_);
  if (stopping_) throw Fault(mine.waits_for);
}

void Machine::pause() {
  if (cores_.size() > 1 && random_() % 16 == 0) suspend(*current, nullptr, "", {});
}

void Machine::run(const std::function<void()>& kernel) {
  kernel_ = &kernel;
  const auto address = reinterpret_cast<uintptr_t>(this);
  for (auto& coroutine : coroutines_) {
    coroutine->stack.resize(kStackBytes);
    getcontext(&coroutine->context);
    coroutine->context.uc_stack.ss_sp = coroutine->stack.data();
    coroutine->context.uc_stack.ss_size = kStackBytes;
    coroutine->context.uc_link = nullptr;
    makecontext(&coroutine->context, reinterpret_cast<void (*)()>(&Machine::entry), 2, unsigned(address),
                unsigned(address >> 32));
  }
  std::vector<int> order(cores_.size());
  for (size_t n = 0; n < order.size(); ++n) order[n] = int(n);
  for (;;) {
    if (options_.mode == Mode::random) std::shuffle(order.begin(), order.end(), random_);
    bool moved = false;
    for (int number : order)
      if (runnable(number)) {
        resume(number);
        moved = true;
      }
    if (moved) continue;
    const bool left =
        std::any_of(coroutines_.begin(), coroutines_.end(), [](const auto& coroutine) { return !coroutine->done; });
    if (!left) break;
    if (!move_stuck_cores()) stop_stuck_cores();
  }
  gm_.settle(options_.mode == Mode::random ? &random_ : nullptr);
  if (!faulted_) check_flags_left();
}

// Every core waits for another: delayed entries have to run. In `late` mode only the entries that set a flag for which
// a core waits.
bool Machine::move_stuck_cores() {
  bool moved = false;
  for (auto& each : cores_) {
    current = each.get();
    try {
      if (options_.mode != Mode::late) {
        while (each->step_any(options_.mode != Mode::random)) moved = true;
        continue;
      }
      for (int p = 0; p < kPipes; ++p) {
        const auto& queue = each->pipes_[size_t(p)].queue;
        const auto set = std::find_if(queue.begin(), queue.end(),
                                      [](const Core::Entry& entry) { return entry.kind == Core::Kind::cross_set; });
        if (set == queue.end()) continue;
        each->demand_late(pipe_t(p), set->sequence);
        moved = true;
      }
    } catch (const Fault& fault) {
      report_.error(fault.what());
      faulted_ = true;
      each->pipes_ = {};
      for (auto& pipe : each->pipes_) pipe.clock.assign(size_t(pipes()), 0);
    }
  }
  current = nullptr;
  return moved;
}

// Ends the cores that are stuck. The first error is the cause, unless another core failed before.
void Machine::stop_stuck_cores() {
  std::string who;
  Site site;
  for (size_t n = 0; n < cores_.size(); ++n) {
    if (coroutines_[n]->done) continue;
    if (who.empty()) site = coroutines_[n]->site;
    who += (who.empty() ? "" : "; ") + cores_[n]->name() + " waits for " + coroutines_[n]->waits_for + " (" +
           coroutines_[n]->site.text() + ")";
  }
  if (!faulted_) report_.error(site.text() + ": deadlock between cores: " + who);
  stopping_ = faulted_ = true;
  for (size_t n = 0; n < cores_.size(); ++n)
    if (!coroutines_[n]->done) resume(int(n));
}

// --- flags between cores --------------------------------------------------------------------------------------------

std::vector<int> Machine::group(const Core& core, int mode) const {
  std::vector<int> members;
  for (const auto& other : cores_) {
    const bool same_kind = other->position_.kind == core.position_.kind,
               same_block = other->position_.block == core.position_.block;
    if (same_kind && (mode == 0 || same_block)) members.push_back(other->number_);
  }
  return members;
}

std::vector<int> Machine::receivers(const Core& core, int mode) const {
  if (mode != 2) return group(core, mode);
  std::vector<int> others;
  for (const auto& other : cores_)
    if (other->position_.kind != core.position_.kind && other->position_.block == core.position_.block)
      others.push_back(other->number_);
  return others;
}

void Machine::arrive(Core& core, int mode, int id, const Clock& clock, double time, Site site) {
  const auto flag = size_t(id);
  coroutines_[size_t(core.number_)]->pending[flag][mode].push_back({clock, time, site});
  const std::vector<int> members = group(core, mode);
  for (int member : members)
    if (coroutines_[size_t(member)]->pending[flag][mode].empty()) return;
  Signal joined{Clock(size_t(pipes())), 0, site};
  for (int member : members) {
    auto& pending = coroutines_[size_t(member)]->pending[flag][mode];
    for (size_t p = 0; p < joined.clock.size(); ++p)
      joined.clock[p] = std::max(joined.clock[p], pending.front().clock[p]);
    joined.time = std::max(joined.time, pending.front().time + kCrossCoreCycles);
    pending.pop_front();
  }
  for (int receiver : receivers(core, mode)) {
    auto& received = coroutines_[size_t(receiver)]->received[flag];
    received.push_back(joined);
    if (received.size() > size_t(kCrossLimit))
      fail(site,
           format("CrossCoreSetFlag: flag %d of %s is set %zu times without a wait, but its counter holds at most %d",
                  id, cores_[size_t(receiver)]->name().c_str(), received.size(), kCrossLimit));
  }
}

void Machine::wait(Core& core, int id, Site site) {
  auto& received = coroutines_[size_t(core.number_)]->received[size_t(id)];
  if (received.empty())
    suspend(core, [&received] { return !received.empty(); }, format("cross-core flag %d", id), site);
  core.learn(received.front().clock, received.front().time);
  received.pop_front();
}

bool Machine::copies_there(const Core& core, const GmRange& range, double begin, double end) {
  auto& copies = copies_[range];
  const bool shared = std::any_of(copies.begin(), copies.end(), [&](const auto& other) {
    return other.first != core.number_ && begin < other.second.second && other.second.first < end;
  });
  copies[core.number_] = {begin, end};
  return shared;
}

void Machine::meet(Core& core, bool vector_only, Site site) {
  Meeting& meeting = meetings_[vector_only];
  const int mine = meeting.number;
  meeting.clock.resize(size_t(pipes()));
  for (size_t p = 0; p < meeting.clock.size(); ++p)
    meeting.clock[p] = std::max(meeting.clock[p], core.pipes_[PIPE_S].clock[p]);
  meeting.time = std::max(meeting.time, core.pipes_[PIPE_S].time + kCrossCoreCycles);
  if (++meeting.arrived == (vector_only ? group(core, 0).size() : cores_.size())) {
    ++meeting.number;
    meeting.arrived = 0;
    meeting.last_clock = meeting.clock;
  } else {
    suspend(core, [&meeting, mine] { return meeting.number != mine; }, "SyncAll", site);
  }
  core.learn(meeting.last_clock, meeting.time);
}

void Machine::check_flags_left() {
  for (size_t n = 0; n < cores_.size(); ++n)
    for (int id = 0; id < kCrossFlags; ++id) {
      const auto& received = coroutines_[n]->received[size_t(id)];
      if (!received.empty())
        report_.error(
            received.front().site.text() +
            format(": CrossCoreSetFlag: flag %d of %s is never waited for: its counter leaks into the next kernel", id,
                   cores_[n]->name().c_str()));
      for (const auto& [mode, pending] : coroutines_[n]->pending[size_t(id)])
        if (!pending.empty())
          report_.error(pending.front().site.text() +
                        format(": CrossCoreSetFlag: %s sets flag %d in mode %d, but another core of its group does not",
                               cores_[n]->name().c_str(), id, mode));
    }
}

Report launch(KernelMetaType type, int blocks, const Options& options, GlobalMemory& gm,
              const std::function<void()>& kernel) {
  Report report;
  Machine all(type, blocks, options, gm, report);
  all.run(kernel);
  return report;
}

}  // namespace ascend_emulator
