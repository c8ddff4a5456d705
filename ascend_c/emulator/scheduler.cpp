#include "scheduler.h"

#include <algorithm>

namespace ascend_emulator {

namespace {
thread_local Core* current = nullptr;
constexpr int kEventIds = 8;
// Consumers first, so that `late` shows what no flag orders.
constexpr pipe_t kDrainOrder[] = {PIPE_S, PIPE_MTE3, PIPE_FIX, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2};

void join(Clock& into, const Clock& other) {
  for (int p = 0; p < kPipes; ++p) into[p] = std::max(into[p], other[p]);
}
}  // namespace

Core& core() { return *current; }

const char* pipe_name(int pipe) {
  static const char* names[] = {"S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX"};
  return names[pipe];
}

const char* event_name(HardEvent event) {
  static const char* names[] = {
#define X(from, to) #from "_" #to,
      ASCEND_EMULATOR_EVENTS(X)
#undef X
  };
  return names[int(event)];
}

pipe_t event_source(HardEvent event) {
  static const pipe_t pipes[] = {
#define X(from, to) PIPE_##from,
      ASCEND_EMULATOR_EVENTS(X)
#undef X
  };
  return pipes[int(event)];
}

pipe_t event_target(HardEvent event) {
  static const pipe_t pipes[] = {
#define X(from, to) PIPE_##to,
      ASCEND_EMULATOR_EVENTS(X)
#undef X
  };
  return pipes[int(event)];
}

HardEvent event_between(pipe_t source, pipe_t target) {
  for (int e = 0; e < int(HardEvent::MAX); ++e)
    if (event_source(HardEvent(e)) == source && event_target(HardEvent(e)) == target) return HardEvent(e);
  return HardEvent::MAX;
}

// ---------------------------------------------------------------------------------------------- an instruction's
// accesses

Space& Access::ub() { return core_.ub_; }

bool Access::after(int pipe, uint32_t index) const { return core_.pipes_[pipe_].clock[pipe] >= index; }

void Access::read(Space& space, size_t offset, size_t size, bool own) {
  for (size_t c = offset / kGranule; c < (offset + size + kGranule - 1) / kGranule; ++c) {
    Cell& cell = space.cells[c];
    if (!cell.valid) {
      const auto& pipe = core_.pipes_[pipe_];
      core_.report_.error(pipe.sites[index_].text() + ": " + pipe.names[index_] + " reads bytes of " + space.name +
                          " that were never written");
      cell.valid = true;  // one report per place
    }
    const bool itself = cell.writer == pipe_ && cell.written == index_;
    if (cell.written && (itself ? !own : !after(cell.writer, cell.written)))
      race(space, false, cell.writer, cell.written, true);
    cell.read[pipe_] = index_;
  }
}

void Access::write(Space& space, size_t offset, size_t size) {
  for (size_t c = offset / kGranule; c < (offset + size + kGranule - 1) / kGranule; ++c) {
    Cell& cell = space.cells[c];
    const bool itself = cell.writer == pipe_ && cell.written == index_;
    if (cell.written && !itself && !after(cell.writer, cell.written))
      race(space, true, cell.writer, cell.written, true);
    for (int p = 0; p < kPipes; ++p) {
      const bool mine = p == pipe_ && cell.read[p] == index_;
      if (cell.read[p] && !mine && !after(p, cell.read[p])) race(space, true, p, cell.read[p], false);
      cell.read[p] = 0;
    }
    cell.writer = uint8_t(pipe_);
    cell.written = index_;
    cell.valid = true;
  }
}

void Access::race(const Space& space, bool writes, int other_pipe, uint32_t other, bool other_writes) {
  const auto& mine = core_.pipes_[pipe_];
  const auto& theirs = core_.pipes_[other_pipe];
  const std::string first = mine.sites[index_].text() + ": ";
  if (other_pipe == pipe_ && other == index_)
    return core_.report_.error(first + mine.names[index_] + ": a repeat reads what an earlier repeat of the same " +
                               "instruction wrote");
  std::string text = first + "race: " + mine.names[index_] + " on " + pipe_name(pipe_) +
                     (writes ? " writes " : " reads ") + space.name + " that " + theirs.names[other] + " on " +
                     pipe_name(other_pipe) + " (" + theirs.sites[other].text() + ") " +
                     (other_writes ? "writes" : "reads") + ", and nothing orders the two: ";
  if (other_pipe == pipe_)
    text += format("PipeBarrier<PIPE_%s> is missing", pipe_name(pipe_));
  else
    text += format("a flag from one pipe to the other is missing, HardEvent::%s_%s or %s_%s", pipe_name(other_pipe),
                   pipe_name(pipe_), pipe_name(pipe_), pipe_name(other_pipe));
  core_.report_.error(text);
}

// ------------------------------------------------------------------------------------------------------------- issuing

Core::Core(int block, int blocks, const Options& options, GlobalMemory& gm, Report& report)
    : block_(block),
      blocks_(blocks),
      options_(options),
      gm_(gm),
      report_(report),
      ub_bytes_(kUbBytes, 0xff),  // NaN in every float type
      ub_("UB", ub_bytes_.data(), kUbBytes, false),
      random_(options.seed + uint64_t(block) * 0x9E3779B97F4A7C15) {}

std::pair<Space*, size_t> Core::gm(const void* address, size_t size, bool writes, const char* name, Site site) {
  const auto* at = static_cast<const uint8_t*>(address);
  Space* space = gm_.find(at);
  if (!space) fail(site, std::string(name) + ": GM address outside every tensor of the launch");
  const size_t offset = size_t(at - space->bytes);
  if (offset + size > space->size)
    fail(site, format("%s %s GM out of bounds: bytes %zu..%zu of '%s', which has %zu", name,
                      writes ? "writes" : "reads", offset, offset + size - 1, space->name.c_str(), space->size));
  return {space, offset};
}

void Core::push(Entry entry) {
  Pipe& scalar = pipes_[PIPE_S];
  entry.sequence = ++sequence_;
  entry.issued = scalar.clock;
  entry.issued[PIPE_S] = 0;  // stores of the scalar unit are ordered by flags alone
  entry.issue_time = scalar.time;
  const pipe_t pipe = entry.work.pipe;
  pipes_[pipe].queue.push_back(std::move(entry));
  if (options_.mode == Mode::eager)
    while (step_any(true)) {
    }
  if (options_.mode == Mode::random)
    for (uint64_t n = random_() % 4; n > 1 && step_any(false); --n) {
    }
}

void Core::issue(Work work) {
  Entry entry{Kind::work, std::move(work)};
  push(std::move(entry));
}

void Core::check_id(HardEvent event, int id, const char* name, Site site) {
  if (id < 0 || id >= kEventIds)
    fail(site, format("%s<HardEvent::%s>: event id %d, the limit is 0..7", name, event_name(event), id));
}

void Core::set_flag(HardEvent event, int id, Site site) {
  check_id(event, id, "SetFlag", site);
  push({Kind::set, {event_source(event), "SetFlag", site}, event, id});
}

void Core::wait_flag(HardEvent event, int id, Site site) {
  check_id(event, id, "WaitFlag", site);
  push({Kind::wait, {event_target(event), "WaitFlag", site}, event, id});
  if (event_target(event) == PIPE_S) run_scalar();
}

void Core::barrier(pipe_t pipe, Site site) {
  if (pipe != PIPE_ALL) return push({Kind::barrier, {pipe, "PipeBarrier", site}});
  drain();
  Clock done{};
  double time = 0;
  for (int p = 0; p < kPipes; ++p) {
    done[p] = pipes_[p].count;
    time = std::max(time, pipes_[p].time);
  }
  for (Pipe& each : pipes_) {
    each.clock = done;
    each.time = time;
  }
}

void Core::run_scalar() { demand(PIPE_S, sequence_); }

// ------------------------------------------------------------------------------------------------------------- running

bool Core::blocked(const Pipe& pipe) {
  const Entry& head = pipe.queue.front();
  return head.kind == Kind::wait && !flags_[{head.event, head.id}].set;
}

void Core::step(pipe_t which) {
  Pipe& pipe = pipes_[which];
  Entry entry = std::move(pipe.queue.front());
  pipe.queue.pop_front();
  join(pipe.clock, entry.issued);
  pipe.time = std::max(pipe.time, entry.issue_time);
  const uint32_t index = ++pipe.count;
  pipe.sites.push_back(entry.work.site);
  pipe.names.push_back(entry.work.name);
  if (which == PIPE_S) pipe.clock[PIPE_S] = index;
  switch (entry.kind) {
    case Kind::work: {
      Access access(*this, which, index);
      entry.work.run(access);
      pipe.time += entry.work.cycles;
      Counters& counters = report_.counters;
      ++counters.instructions[which];
      counters.cycles[which] += entry.work.cycles;
      counters.gm_read_bytes += entry.work.gm_read;
      counters.gm_written_bytes += entry.work.gm_written;
      break;
    }
    case Kind::barrier:
      pipe.clock[which] = index;
      break;
    case Kind::set:
      step_set(entry);
      break;
    case Kind::wait:
      step_wait(entry);
      break;
  }
}

// A flag is one bit: a second set is safe only when the wait for the first is known to lie before it.
void Core::step_set(Entry& entry) {
  Flag& flag = flags_[{entry.event, entry.id}];
  Pipe& source = pipes_[entry.work.pipe];
  const std::string what = format("SetFlag<HardEvent::%s>(%d)", event_name(entry.event), entry.id);
  const pipe_t target = event_target(entry.event);
  // The scalar unit issues nothing before its own wait is over.
  const bool target_known = target == PIPE_S || source.clock[target] >= flag.wait_index;
  if (flag.set)
    report_.error(entry.work.site.text() + ": " + what + " while the flag is still set (" + flag.set_site.text() +
                  "): event set twice without a wait between");
  else if (!target_known)
    report_.error(entry.work.site.text() + ": " + what + " may come before the wait (" + flag.wait_site.text() +
                  ") for the set before it: nothing orders them, so the event can be set twice");
  flag.set = true;
  flag.set_site = entry.work.site;
  flag.clock = source.clock;
  flag.clock[entry.work.pipe] = source.count;
  flag.time = source.time;
}

void Core::step_wait(Entry& entry) {
  Flag& flag = flags_[{entry.event, entry.id}];
  Pipe& target = pipes_[entry.work.pipe];
  flag.set = false;
  join(target.clock, flag.clock);
  target.time = std::max(target.time, flag.time);
  flag.wait_index = target.count;
  flag.wait_site = entry.work.site;
}

// One entry of a pipe that can move: the oldest, or any.
bool Core::step_any(bool in_order) {
  std::vector<pipe_t> ready;
  for (int p = 0; p < kPipes; ++p)
    if (!pipes_[p].queue.empty() && !blocked(pipes_[p])) ready.push_back(pipe_t(p));
  if (ready.empty()) return false;
  const auto older = [this](pipe_t a, pipe_t b) {
    return pipes_[a].queue.front().sequence < pipes_[b].queue.front().sequence;
  };
  step(in_order ? *std::min_element(ready.begin(), ready.end(), older) : ready[random_() % ready.size()]);
  return true;
}

// Runs `pipe` up to and including the entry with this sequence number.
void Core::demand(pipe_t pipe, uint64_t sequence) {
  if (options_.mode == Mode::late) return demand_late(pipe, sequence);
  const auto& queue = pipes_[pipe].queue;
  while (!queue.empty() && queue.front().sequence <= sequence)
    if (!step_any(options_.mode == Mode::eager)) deadlock();
}

// As little as possible: another pipe moves only up to the flag that this one waits for.
void Core::demand_late(pipe_t which, uint64_t sequence) {
  Pipe& pipe = pipes_[which];
  if (pipe.busy) deadlock();
  pipe.busy = true;
  while (!pipe.queue.empty() && pipe.queue.front().sequence <= sequence) {
    if (blocked(pipe)) {
      const Entry& wait = pipe.queue.front();
      const pipe_t source = event_source(wait.event);
      const Entry* set = nullptr;
      for (const Entry& entry : pipes_[source].queue) {
        const bool matches = entry.kind == Kind::set && entry.event == wait.event && entry.id == wait.id;
        if (matches && !set) set = &entry;
      }
      if (!set || (source == which && set->sequence > wait.sequence)) deadlock();
      demand_late(source, set->sequence);
    }
    step(which);
  }
  pipe.busy = false;
}

void Core::drain() {
  for (pipe_t pipe : kDrainOrder) demand(pipe, sequence_);
}

void Core::deadlock() {
  while (step_any(true)) {  // what is left then is stuck for good
  }
  std::string text;
  Site site;
  for (int p = 0; p < kPipes; ++p) {
    if (pipes_[p].queue.empty() || !blocked(pipes_[p])) continue;
    const Entry& head = pipes_[p].queue.front();
    if (text.empty()) site = head.work.site;
    text +=
        std::string(text.empty() ? "" : "; ") + format("%s waits for HardEvent::%s event %d (%s), ", pipe_name(p),
                                                       event_name(head.event), head.id, head.work.site.text().c_str());
    std::string who = "which nobody sets";
    for (const Entry& entry : pipes_[event_source(head.event)].queue)
      if (entry.kind == Kind::set && entry.event == head.event && entry.id == head.id) {
        who = "set at " + entry.work.site.text() + ", where " + pipe_name(entry.work.pipe) + " never arrives";
        break;
      }
    text += who;
  }
  fail(site, "deadlock: " + text);
}

void Core::finish() {
  drain();
  for (const auto& [key, flag] : flags_)
    if (flag.set)
      report_.error(flag.set_site.text() + ": " +
                    format("SetFlag<HardEvent::%s>(%d) is never waited for: the flag leaks into the next kernel",
                           event_name(key.first), key.second));
  for (const Pipe& pipe : pipes_) report_.counters.span_cycles = std::max(report_.counters.span_cycles, pipe.time);
}

Report launch(int blocks, const Options& options, GlobalMemory& gm, const std::function<void()>& kernel) {
  Report report;
  for (int block = 0; block < blocks; ++block) {
    for (Space& space : gm.spaces()) space.forget_accesses();
    Core core(block, blocks, options, gm, report);
    current = &core;
    try {
      kernel();
      core.finish();
    } catch (const Fault& fault) {
      report.error(fault.what());
    }
    current = nullptr;
  }
  return report;
}

}  // namespace ascend_emulator
