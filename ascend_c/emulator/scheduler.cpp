#include "scheduler.h"

#include <algorithm>

#include "machine.h"
#include "rates.h"

namespace ascend_emulator {

namespace {
constexpr int kEventIds = 8;
// Consumers first, so that `late` exposes missing flags.
constexpr pipe_t kDrainOrder[] = {PIPE_S, PIPE_MTE3, PIPE_FIX, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2};

void join(Clock& into, const Clock& other) {
  for (size_t p = 0; p < into.size(); ++p) into[p] = std::max(into[p], other[p]);
}
}  // namespace

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

// --- an instruction's accesses --------------------------------------------------------------------------------------

Access::Access(Core& core, pipe_t pipe, uint32_t index)
    : core_(core), pipe_(pipe), global_(core.global(pipe)), index_(index), clock_(core.pipes_[pipe].clock) {}

Space& Access::local(Memory memory) { return *core_.local_[size_t(memory)]; }

void Access::read(Space& space, size_t offset, size_t size, bool own, bool unwritten) {
  if (!size) return;
  space.settle(core_.shuffler());
  if (!space.valid.empty() && !unwritten) {
    uint8_t* const first = space.valid.data() + offset / 2;
    const size_t count = (offset + size + 1) / 2 - offset / 2;
    if (std::memchr(first, 0, count)) {
      report_unwritten(space, "reads");
      std::memset(first, 1, count);  // one report per place
    }
  }
  if (space.cells.empty()) return;
  for (size_t c = offset / space.granule; c <= (offset + size - 1) / space.granule; ++c) {
    Cell& cell = space.cells[c];
    const bool itself = cell.writer == global_ && cell.written == index_;
    if (cell.written && (itself ? !own : !after(cell.writer, cell.written)))
      race(space, false, cell.writer, cell.written, true);
    else
      check_written_back(space, std::max(offset, c * space.granule), cell);
    Cell::Read* slot = nullptr;
    for (Cell::Read& read : cell.reads) {
      if (read.index && read.pipe == global_) {
        slot = &read;
        break;
      }
      if (!slot && (!read.index || after(read.pipe, read.index))) slot = &read;
    }
    if (!slot) slot = &cell.reads[0];
    const bool same_pipe = slot->index && slot->pipe == global_;
    const uint32_t previous = !same_pipe ? 0 : slot->index == index_ ? slot->previous : slot->index;
    *slot = {index_, previous, global_};
  }
}

void Access::write_cached(Space& space, size_t offset, size_t size) {
  write(space, offset, size);
  core_.cache_.write(space.bytes + offset, size);
  core_.cache_site_ = core_.pipes_[pipe_].sites[index_];
}

void Access::check_written_back(const Space& space, size_t offset, const Cell& cell) {
  const bool by_scalar_unit = cell.written && cell.writer % kPipes == PIPE_S && cell.writer != global_;
  if (!by_scalar_unit || !core_.machine_.cores_[cell.writer / kPipes]->cache_.dirty(space.bytes + offset)) return;
  const auto& pipe = core_.pipes_[pipe_];
  core_.report_.error(pipe.sites[index_].text() + ": " + pipe.names[index_] + " reads bytes of " + space.name +
                      " that a scalar unit has not written back from its cache: DataCacheCleanAndInvalid is missing");
}

void Access::read_cached(Space& space, size_t offset, size_t size) {
  read(space, offset, size);
  if (space.cells.empty()) return;  // an input
  for (size_t c = offset / space.granule; c <= (offset + size - 1) / space.granule; ++c) {
    const Cell& cell = space.cells[c];
    const uint8_t* const byte = space.bytes + std::max(offset, c * space.granule);
    if (!cell.written || cell.writer == global_ || core_.cache_.invalidated_after(byte, cell.writer, cell.written))
      continue;
    const auto& pipe = core_.pipes_[pipe_];
    core_.report_.error(pipe.sites[index_].text() + ": " + pipe.names[index_] + " reads bytes of " + space.name +
                        " that this launch wrote and that the scalar unit may have cached earlier: " +
                        "DataCacheCleanAndInvalid is missing");
    break;
  }
  if (core_.cache_.read(space.bytes + offset, size, space.bytes, space.bytes + space.size)) return;
  const auto& pipe = core_.pipes_[pipe_];
  core_.report_.error(pipe.sites[index_].text() + ": " + pipe.names[index_] + " reads bytes of " + space.name +
                      " that were written after the scalar unit had cached them: DataCacheCleanAndInvalid is missing");
}

void Access::report_unwritten(const Space& space, const char* what) {
  const auto& pipe = core_.pipes_[pipe_];
  core_.report_.error(pipe.sites[index_].text() + ": " + pipe.names[index_] + " " + what + " bytes of " + space.name +
                      " that were never written");
}

void Access::add(Space& space, std::function<void()> apply) {
  if (core_.options_.mode == Mode::eager) return apply();
  constexpr size_t kMost = 4096;
  const uint64_t instruction = uint64_t(global_) << 32 | index_;
  const auto before = [this](const Addition& other) { return after(other.pipe, other.index); };
  if (space.additions.size() == kMost)
    space.settle(core_.shuffler());
  else if (space.last_adder != instruction)
    space.settle(before, core_.shuffler());
  space.last_adder = instruction;
  space.additions.push_back({global_, index_, std::move(apply)});
}

void Access::write(Space& space, size_t offset, size_t size, bool atomic) {
  if (!size) return;
  if (!atomic) space.settle(core_.shuffler());
  if (space.cells.empty()) {
    const auto& pipe = core_.pipes_[pipe_];
    return core_.report_.error(pipe.sites[index_].text() + ": " + pipe.names[index_] + " writes the input tensor " +
                               space.name);
  }
  if (!space.valid.empty()) {
    uint8_t* const first = space.valid.data() + offset / 2;
    const size_t count = (offset + size + 1) / 2 - offset / 2;
    if (atomic && std::memchr(first, 0, count)) report_unwritten(space, "adds to");
    std::memset(first, 1, count);
  }
  for (size_t c = offset / space.granule; c <= (offset + size - 1) / space.granule; ++c) {
    Cell& cell = space.cells[c];
    const bool itself = cell.writer == global_ && cell.written == index_;
    if (cell.written && !itself && !(atomic && cell.atomic) && !after(cell.writer, cell.written))
      race(space, true, cell.writer, cell.written, true);
    for (Cell::Read& read : cell.reads) {
      // An instruction may overwrite its own source, but not bytes that an earlier one still reads.
      const uint32_t other = read.pipe == global_ && read.index == index_ ? read.previous : read.index;
      if (other && !after(read.pipe, other)) race(space, true, read.pipe, other, false);
      read.index = 0;
    }
    cell.writer = global_;
    cell.written = index_;
    cell.atomic = atomic;
  }
}

void Access::race(const Space& space, bool writes, uint16_t other_pipe, uint32_t other, bool other_writes) {
  const Core& other_core = *core_.machine_.cores_[other_pipe / kPipes];
  const int their_pipe = other_pipe % kPipes;
  const auto& mine = core_.pipes_[pipe_];
  const auto& theirs = other_core.pipes_[size_t(their_pipe)];
  const std::string first = mine.sites[index_].text() + ": ";
  if (other_pipe == global_ && other == index_)
    return core_.report_.error(first + mine.names[index_] + ": a repeat reads what an earlier repeat of the same " +
                               "instruction wrote");
  const bool same_core = &other_core == &core_;
  const auto where = [same_core](const Core& core, int pipe) {
    return std::string(pipe_name(pipe)) + (same_core ? "" : " of " + core.name());
  };
  std::string text = first + "race: " + mine.names[index_] + " on " + where(core_, pipe_) +
                     (writes ? " writes " : " reads ") + space.name + " that " + theirs.names[other] + " on " +
                     where(other_core, their_pipe) + " (" + theirs.sites[other].text() + ") " +
                     (other_writes ? "writes" : "reads") + ", and nothing orders the two: ";
  if (!same_core)
    text += "a CrossCoreSetFlag and CrossCoreWaitFlag between the cores is missing";
  else if (other_pipe == global_)
    text += format("PipeBarrier<PIPE_%s> is missing", pipe_name(pipe_));
  else
    text += format("a flag from one pipe to the other is missing, HardEvent::%s_%s or %s_%s", pipe_name(their_pipe),
                   pipe_name(pipe_), pipe_name(pipe_), pipe_name(their_pipe));
  core_.report_.error(text);
}

// --- issuing --------------------------------------------------------------------------------------------------------

Core::Core(int number, CorePosition position, Machine& machine, const Options& options, GlobalMemory& gm,
           Report& report)
    : number_(number),
      position_(position),
      machine_(machine),
      options_(options),
      gm_(gm),
      report_(report),
      random_(options.seed + uint64_t(number) * 0x9E3779B97F4A7C15) {
  for (int m = 0; m < kMemories; ++m) {
    if ((Memory(m) == Memory::ub) != (position.kind == CoreKind::aiv)) continue;
    bytes_[size_t(m)].assign(options.mode == Mode::time ? 4096 : kMemoryInfo[m].bytes,
                             0xff);  // NaN in every float type
    local_[size_t(m)] = std::make_unique<Space>(kMemoryInfo[m].name, bytes_[size_t(m)].data(), bytes_[size_t(m)].size(),
                                                kBlock, Use::workspace);
  }
  for (Pipe& pipe : pipes_) pipe.clock.assign(size_t(machine.pipes()), 0);
  scalar_clock_ = std::make_shared<const Clock>(pipes_[PIPE_S].clock);
}

std::string Core::name() const {
  const int index =
      position_.mixed && position_.kind == CoreKind::aiv ? 2 * position_.block + position_.sub : position_.block;
  return format("%s %d", position_.kind == CoreKind::aic ? "AIC" : "AIV", index);
}

Space& Core::local(Memory memory, const char* name, Site site) {
  if (!local_[size_t(memory)]) fail(site, format("%s: %s has no %s", name, this->name().c_str(), info(memory).name));
  return *local_[size_t(memory)];
}

bool Core::has_pipe(pipe_t pipe) const {
  if (pipe == PIPE_S || pipe == PIPE_MTE2 || pipe == PIPE_MTE3) return true;
  return (pipe == PIPE_V) == (position_.kind == CoreKind::aiv);
}

std::pair<Space*, size_t> Core::gm(const void* address, size_t size, bool writes, const char* name, Site site) {
  const auto* at = static_cast<const uint8_t*>(address);
  Space* space = gm_.find(at, size);
  if (!space) fail(site, std::string(name) + ": the GM address is outside all tensors of the launch");
  const size_t offset = size_t(at - space->bytes);
  if (offset + size > space->size)
    fail(site, format("%s %s GM out of bounds: bytes %zu..%zu of '%s', which has %zu", name,
                      writes ? "writes" : "reads", offset, offset + size - 1, space->name.c_str(), space->size));
  return {space, offset};
}

void Core::push(Entry entry) {
  const pipe_t pipe = entry.work.pipe;
  if (!has_pipe(pipe))
    fail(entry.work.site,
         format("%s runs on pipe %s, which %s does not have", entry.work.name, pipe_name(pipe), name().c_str()));
  if (entry.kind == Kind::work && pipe != PIPE_S && !registers_set_)
    fail(entry.work.site, std::string(entry.work.name) +
                              ": mask and atomic registers are as the kernel before left them: a kernel without TPipe "
                              "begins with InitSocState()");
  entry.sequence = ++sequence_;
  last_site_ = entry.work.site;
  entry.issued = scalar_clock_;
  double& scalar = pipes_[PIPE_S].time;
  if ((pipe == PIPE_MTE1 || pipe == PIPE_M) && pipes_[pipe].begun.size() == kQueueEntries)
    scalar = std::max(scalar, pipes_[pipe].begun.front());
  entry.issue_time = scalar += entry.kind == Kind::work ? kCallCycles : kIssueCycles;
  pipes_[pipe].queue.push_back(std::move(entry));
  if (options_.mode == Mode::eager || options_.mode == Mode::time)
    while (step_any(true)) {
    }
  if (options_.mode == Mode::random) {
    for (uint64_t n = random_() % 4; n > 1 && step_any(false); --n) {
    }
    machine_.pause();
  }
}

void Core::learn(const Clock& clock, double time) {
  Pipe& scalar = pipes_[PIPE_S];
  join(scalar.clock, clock);
  scalar.time = std::max(scalar.time, time);
  Clock shared = scalar.clock;
  shared[global(PIPE_S)] = 0;  // only flags order stores of the scalar unit
  scalar_clock_ = std::make_shared<const Clock>(std::move(shared));
}

void Core::open_pipe(Site site) {
  if (has_pipe_object_) fail(site, "TPipe: a second one while the first still exists; a kernel has one at a time");
  if (address_site_.line)
    fail(site, "TPipe: the kernel has tensors with addresses of its own (" + address_site_.text() +
                   "), which must not be mixed with a TPipe");
  has_pipe_object_ = had_pipe_object_ = true;
  reset_registers();
}

void Core::take_address(Site site) {
  if (has_pipe_object_)
    fail(site,
         "LocalTensor: an address of its own beside a TPipe, which hands out local memory: the two must not be "
         "mixed");
  if (!address_site_.line) address_site_ = site;
}

void Core::check_given(HardEvent event, int id, const char* name, Site site) {
  if (has_pipe_object_ && !((event_ids.given[event] | event_ids.shown[event]) >> id & 1))
    fail(site, format("%s<HardEvent::%s>: the TPipe gave the kernel no event id %d: with a TPipe the ids come from "
                      "AllocEventID or FetchEventID",
                      name, event_name(event), id));
}

void Core::issue(Work work) {
  Entry entry{Kind::work, std::move(work)};
  push(std::move(entry));
}

void Core::check_event(HardEvent event, int id, const char* name, Site site) {
  if (!has_pipe(event_source(event)) || !has_pipe(event_target(event)))
    fail(site, format("%s<HardEvent::%s>: %s does not have both pipes", name, event_name(event), this->name().c_str()));
  if (id < 0 || id >= kEventIds)
    fail(site, format("%s<HardEvent::%s>: event id %d is outside 0..7", name, event_name(event), id));
}

void Core::set_flag(HardEvent event, int id, Site site) {
  check_event(event, id, "SetFlag", site);
  push({Kind::set, {event_source(event), "SetFlag", site}, event, id});
}

void Core::wait_flag(HardEvent event, int id, Site site) {
  check_event(event, id, "WaitFlag", site);
  push({Kind::wait, {event_target(event), "WaitFlag", site}, event, id});
  if (event_target(event) == PIPE_S) run_scalar();
}

void Core::barrier(pipe_t pipe, Site site) {
  if (pipe != PIPE_ALL) return push({Kind::barrier, {pipe, "PipeBarrier", site}});
  drain();
  waited_for_ = sequence_;
  Clock done(size_t(machine_.pipes()), 0);
  double time = 0;
  for (int p = 0; p < kPipes; ++p) {
    join(done, pipes_[p].clock);
    done[global(p)] = pipes_[p].count;
    time = std::max(time, pipes_[p].time);
  }
  for (Pipe& each : pipes_) {
    each.clock = done;
    each.time = time;
  }
  learn(done, time);
}

void Core::check_cross_id(int id, const char* name, Site site) {
  if (id >= kCrossFlags) fail(site, format("%s: flag id %d is outside 0..15", name, id));
  if (!position_.mixed) fail(site, std::string(name) + ": cross-core flags require a mixed kernel");
}

void Core::cross_set(int mode, pipe_t pipe, int id, Site site) {
  check_cross_id(id, "CrossCoreSetFlag", site);
  push({Kind::cross_set, {pipe, "CrossCoreSetFlag", site}, {}, id, mode});
}

void Core::cross_wait(int id, Site site) {
  check_cross_id(id, "CrossCoreWaitFlag", site);
  machine_.wait(*this, id, site);
}

void Core::sync_all(bool vector_only, Site site) {
  if (!position_.mixed) fail(site, "SyncAll requires a mixed kernel");
  barrier(PIPE_ALL, site);
  machine_.meet(*this, vector_only, site);
}

void Core::run_scalar() { demand(PIPE_S, sequence_); }

// --- running --------------------------------------------------------------------------------------------------------

bool Core::blocked(const Pipe& pipe) {
  const Entry& head = pipe.queue.front();
  return head.kind == Kind::wait && !flags_[{head.event, head.id}].set;
}

void Core::step(pipe_t which) {
  Pipe& pipe = pipes_[which];
  Entry entry = std::move(pipe.queue.front());
  pipe.queue.pop_front();
  if (pipe.joined != entry.issued) {
    join(pipe.clock, *entry.issued);
    pipe.joined = entry.issued;
  }
  pipe.time = std::max(pipe.time, entry.issue_time);
  pipe.begun.push_back(pipe.time);
  if (pipe.begun.size() > kQueueEntries) pipe.begun.pop_front();
  const uint32_t index = ++pipe.count;
  if (options_.mode != Mode::time) {
    pipe.sites.push_back(entry.work.site);
    pipe.names.push_back(entry.work.name);
  }
  if (which == PIPE_S) pipe.clock[global(PIPE_S)] = index;
  switch (entry.kind) {
    case Kind::work:
      run_work(entry, index);
      break;
    case Kind::barrier:
      pipe.clock[global(which)] = index;
      pipe.time += kBarrierCycles;
      report_.counters.cycles[size_t(position_.kind)][which] += kBarrierCycles;
      break;
    case Kind::set:
      step_set(entry);
      break;
    case Kind::wait:
      step_wait(entry);
      break;
    case Kind::cross_set: {
      Clock done = pipe.clock;
      done[global(which)] = index;
      machine_.arrive(*this, entry.mode, entry.id, done, pipe.time, entry.work.site);
      break;
    }
  }
}

void Core::run_work(Entry& entry, uint32_t index) {
  Pipe& pipe = pipes_[entry.work.pipe];
  Access access(*this, entry.work.pipe, index);
  // Without data the scalar unit still reads the caller's sizes, in GM.
  if (options_.mode != Mode::time || (entry.work.pipe == PIPE_S && entry.work.gm_read)) entry.work.run(access);
  double cycles = entry.work.cycles;
  if (entry.work.from.first && machine_.copies_there(*this, entry.work.from, pipe.time, pipe.time + cycles))
    cycles *= kSameAddress;
  pipe.time += cycles;
  Counters& counters = report_.counters;
  ++counters.instructions[size_t(position_.kind)][entry.work.pipe];
  counters.cycles[size_t(position_.kind)][entry.work.pipe] += cycles;
  counters.gm_read_bytes[size_t(entry.work.traffic)] += entry.work.gm_read;
  counters.gm_written_bytes[size_t(entry.work.traffic)] += entry.work.gm_written;
}

// A flag is one bit: a second set is safe only when the wait for the first is known to lie before it.
void Core::step_set(Entry& entry) {
  Flag& flag = flags_[{entry.event, entry.id}];
  Pipe& source = pipes_[entry.work.pipe];
  const std::string what = format("SetFlag<HardEvent::%s>(%d)", event_name(entry.event), entry.id);
  const pipe_t target = event_target(entry.event);
  // The scalar unit issues nothing before its own wait is over.
  const bool target_known = target == PIPE_S || source.clock[global(target)] >= flag.wait_index;
  if (flag.set)
    report_.error(entry.work.site.text() + ": " + what + " while the flag is still set (" + flag.set_site.text() +
                  "): the event is set twice without a wait in between");
  else if (!target_known)
    report_.error(entry.work.site.text() + ": " + what + " may come before the wait (" + flag.wait_site.text() +
                  ") for the previous set: nothing orders them, so the event can be set twice");
  flag.set = true;
  flag.set_site = entry.work.site;
  flag.clock = source.clock;
  flag.clock[global(entry.work.pipe)] = source.count;
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
  if (entry.work.pipe == PIPE_S) learn(target.clock, target.time);
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
    if (!step_any(options_.mode != Mode::random)) deadlock();
}

// Runs as little as possible: another pipe moves only up to the flag that this one waits for.
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

// Which pipes wait for which flags; *site becomes the line of the first.
std::string Core::waiting_pipes(Site* site) {
  std::string text;
  for (int p = 0; p < kPipes; ++p) {
    if (pipes_[p].queue.empty() || !blocked(pipes_[p])) continue;
    const Entry& head = pipes_[p].queue.front();
    if (text.empty()) *site = head.work.site;
    text +=
        std::string(text.empty() ? "" : "; ") + format("%s waits for HardEvent::%s event %d (%s), ", pipe_name(p),
                                                       event_name(head.event), head.id, head.work.site.text().c_str());
    std::string who = "which is never set";
    for (const Entry& entry : pipes_[event_source(head.event)].queue)
      if (entry.kind == Kind::set && entry.event == head.event && entry.id == head.id) {
        who = "set at " + entry.work.site.text() + ", which " + pipe_name(entry.work.pipe) + " never reaches";
        break;
      }
    text += who;
  }
  return text;
}

void Core::deadlock() {
  while (step_any(true)) {  // entries left after this are deadlocked
  }
  Site site;
  const std::string text = waiting_pipes(&site);
  fail(site, "deadlock: " + text);
}

void Core::finish() {
  drain();
  for (const auto& [key, flag] : flags_)
    if (flag.set)
      report_.error(flag.set_site.text() + ": " +
                    format("SetFlag<HardEvent::%s>(%d) is never waited for: the flag leaks into the next kernel",
                           event_name(key.first), key.second));
  if (cache_.any_dirty())
    report_.error(
        cache_site_.text() +
        ": data that SetValue writes to GM stays in the scalar unit's cache: DataCacheCleanAndInvalid is missing");
  if (atomic_add) report_.error(atomic_site.text() + ": SetAtomicAdd is still on when the kernel ends (SetAtomicNone)");
  if (!had_pipe_object_ && waited_for_ != sequence_)
    report_.error(last_site_.text() + ": the kernel ends before the pipes do: a kernel without TPipe ends with " +
                  "PipeBarrier<PIPE_ALL>()");
  for (const Pipe& pipe : pipes_) report_.counters.span_cycles = std::max(report_.counters.span_cycles, pipe.time);
}

}  // namespace ascend_emulator
