// TPipe, TQue, TQueBind, TBuf: buffers in the memories of a core, and the flags between the pipe that fills a buffer
// and the one that drains it.
#pragma once

#include <deque>
#include <exception>

#include "tensor.h"

#if __cplusplus > 201703L
#include <source_location>
#else
namespace std {
struct source_location {  // what the compiler's own function for it needs before C++20
  struct __impl {
    const char *_M_file_name, *_M_function_name;
    unsigned _M_line, _M_column;
  };
};
}  // namespace std
#endif

namespace ascend_emulator {

// The function that an object is created in. Like Site, the last argument of a constructor.
struct Caller {
  const char* function;  // with its parameters, in the compiler's spelling
#if __cplusplus > 201703L
  static constexpr Caller here(std::source_location at = std::source_location::current()) {
    return {at.function_name()};
  }
#else
  static Caller here(const void* at = __builtin_source_location()) {
    return {static_cast<const std::source_location::__impl*>(at)->_M_function_name};
  }
#endif
  // Whether the last two names before the parameters are the same: C::C(..), or C<T>::C(..).
  bool is_constructor() const {
    std::string path;
    int depth = 0;
    for (const char* at = function; *at && (*at != '(' || depth); ++at) {
      depth -= *at == '>';
      if (!depth && *at != '<' && *at != '>') path += *at;
      depth += *at == '<';
    }
    const size_t last = path.rfind("::");
    if (last == std::string::npos || last == 0) return false;
    const size_t outer = path.find_last_of(": ", last - 1) + 1;  // 0 where nothing precedes it
    return path.substr(outer, last - outer) == path.substr(last + 2);
  }
};

}  // namespace ascend_emulator

namespace AscendC {

class TPipe;

namespace queue_detail {
// Which pipe works on a buffer at a position, as the writer and as the reader of the queue.
constexpr pipe_t writer(TPosition source) {
  return source == TPosition::GM || source == TPosition::VECIN ? PIPE_MTE2 : PIPE_V;
}
constexpr pipe_t reader(TPosition target) {
  return target == TPosition::GM || target == TPosition::VECOUT ? PIPE_MTE3 : PIPE_V;
}
}  // namespace queue_detail

// The pipes of the whole path: MTE2 -> V, V -> MTE3, or MTE2 -> MTE3 without compute.
template <TPosition source, TPosition target, int32_t depth>
class TQueBind {
 public:
  static constexpr pipe_t kWriter = queue_detail::writer(source), kReader = queue_detail::reader(target);
  // The position of its tensors: a queue that GM fills has VECIN, one that is drained to GM has VECOUT.
  static constexpr TPosition kPosition = kWriter == PIPE_MTE2   ? TPosition::VECIN
                                         : kReader == PIPE_MTE3 ? TPosition::VECOUT
                                                                : TPosition::VECCALC;

  template <typename T>
  LocalTensor<T> AllocTensor(Site site = Site::here());
  template <typename T>
  bool EnQue(const LocalTensor<T>& tensor, Site site = Site::here());
  template <typename T>
  LocalTensor<T> DeQue(Site site = Site::here());
  template <typename T>
  void FreeTensor(LocalTensor<T>& tensor, Site site = Site::here());
  bool HasTensorInQue() const { return !queued_.empty(); }

 private:
  friend class TPipe;
  static HardEvent full_event() { return ascend_emulator::event_between(kWriter, kReader); }
  static HardEvent free_event() { return ascend_emulator::event_between(kReader, kWriter); }
  ascend_emulator::Buffer& own(ascend_emulator::Buffer* buffer, const char* call, Site site);

  std::vector<ascend_emulator::Buffer*> buffers_;
  std::deque<ascend_emulator::Buffer*> queued_;
  size_t next_ = 0;
};

namespace queue_detail {
// VECIN is filled from GM, VECOUT is drained to GM, VECCALC stays with the vector unit.
constexpr TPosition source_of(TPosition position) {
  return position == TPosition::VECIN ? TPosition::GM : TPosition::VECCALC;
}
constexpr TPosition target_of(TPosition position) {
  return position == TPosition::VECOUT ? TPosition::GM : TPosition::VECCALC;
}
constexpr bool has_pipes(TPosition position) { return position == TPosition::VECIN || position == TPosition::VECOUT; }
}  // namespace queue_detail

template <TPosition position, int32_t depth, typename = std::enable_if_t<queue_detail::has_pipes(position)>>
using TQue = TQueBind<queue_detail::source_of(position), queue_detail::target_of(position), depth>;

template <TPosition position = TPosition::VECCALC>
class TBuf {
 public:
  template <typename T>
  LocalTensor<T> Get(uint32_t length, Site site = Site::here()) {
    return GetWithOffset<T>(length, 0, site);
  }
  template <typename T>
  LocalTensor<T> Get() {
    take(buffer_->bytes);
    return LocalTensor<T>(position, buffer_->address, int64_t(buffer_->bytes), nullptr);
  }
  template <typename T>
  LocalTensor<T> GetWithOffset(uint32_t size, uint32_t bufferOffset, Site site = Site::here()) {
    const int64_t bytes = int64_t(size) * int64_t(sizeof(T));
    if (bufferOffset + bytes > buffer_->bytes)
      ascend_emulator::fail(site,
                            ascend_emulator::format("TBuf: %lld bytes requested at offset %u, but the buffer has %u",
                                                    (long long)bytes, bufferOffset, buffer_->bytes));
    take(uint32_t(bufferOffset + bytes));
    return LocalTensor<T>(position, buffer_->address + bufferOffset, bytes, nullptr);
  }

 private:
  void take(uint32_t end) const {
    ascend_emulator::core().report().counters.take(size_t(buffer_->memory), buffer_->address + end);
  }
  friend class TPipe;
  ascend_emulator::Buffer* buffer_ = nullptr;
};

class TPipe {
 public:
  // On a cube core of these chips a pipe sets three flags from M to MTE1, which the vendor's matrix products wait for,
  // and its destructor waits for them: a kernel that sets one of them itself sets it twice.
  // It may not be a member of an object, where the vendor's compiler cannot fold the object's constants any more.
  explicit TPipe(Site site = Site::here(), ascend_emulator::Caller caller = ascend_emulator::Caller::here())
      : site_(site) {
    if (caller.is_constructor())
      ascend_emulator::fail(site, "TPipe: a member of an object; create it in the kernel function and pass it on");
    ascend_emulator::core().open_pipe(site);
    if (!has_cube_flags()) return;
    for (int n = 0; n < kCubeFlags; ++n)
      ascend_emulator::core().set_flag(HardEvent::M_MTE1, take_id(HardEvent::M_MTE1, site), site);
  }
  TPipe(const TPipe&) = delete;
  ~TPipe() {
    if (!std::uncaught_exceptions()) close();
  }

  template <TPosition source, TPosition target, int32_t depth>
  bool InitBuffer(TQueBind<source, target, depth>& queue, uint8_t num, uint32_t length, Site site = Site::here()) {
    using Queue = TQueBind<source, target, depth>;
    for (int n = 0; n < num; ++n) {
      ascend_emulator::Buffer& buffer = reserve(Queue::kPosition, length, site);
      buffer.full_event = take_id(Queue::full_event(), site);
      buffer.free_event = take_id(Queue::free_event(), site);
      ascend_emulator::core().report().counters.take(size_t(buffer.memory), buffer.address + buffer.bytes);
      queue.buffers_.push_back(&buffer);
      closers_.push_back([&buffer] {
        if (buffer.free_pending) ascend_emulator::core().wait_flag(Queue::free_event(), buffer.free_event, buffer.site);
      });
    }
    return true;
  }
  template <TPosition position>
  bool InitBuffer(TBuf<position>& buf, uint32_t length, Site site = Site::here()) {
    buf.buffer_ = &reserve(position, length, site);
    return true;
  }

  template <HardEvent event>
  TEventID AllocEventID(Site site = Site::here()) {
    const int id = take_id(event, site);
    ascend_emulator::core().event_ids.given[event] |= uint8_t(1u << id);
    return TEventID(id);
  }
  template <HardEvent event>
  void ReleaseEventID(TEventID id, Site site = Site::here()) {
    auto& ids = ascend_emulator::core().event_ids;
    const unsigned bit = id >= 0 && id < 8 ? 1u << id : 0;
    if (!(ids.given[event] & bit))
      ascend_emulator::fail(site,
                            ascend_emulator::format("ReleaseEventID<HardEvent::%s>: id %d is not from AllocEventID",
                                                    ascend_emulator::event_name(event), int(id)));
    ids.given[event] &= uint8_t(~bit);
    ids.used[event] &= uint8_t(~bit);
  }
  TEventID FetchEventID(HardEvent event, Site site = Site::here()) {
    auto& ids = ascend_emulator::core().event_ids;
    const int id = ids.unused(event, site);
    ids.shown[event] |= uint8_t(1u << id);
    return TEventID(id);
  }

 private:
  ascend_emulator::Buffer& reserve(TPosition position, uint32_t length, Site site) {
    const ascend_emulator::Memory memory = ascend_emulator::memory_of(position);
    const uint32_t bytes = (length + 31) / 32 * 32;
    uint32_t& top = top_[size_t(memory)];
    const auto& info = ascend_emulator::info(memory);
    ascend_emulator::core().local(memory, "InitBuffer", site);
    if (buffers_.size() == 64) ascend_emulator::fail(site, "InitBuffer: more than 64 buffers");
    if (uint64_t(top) + bytes > info.bytes)
      ascend_emulator::fail(
          site,
          ascend_emulator::format("InitBuffer: a buffer of %u bytes at %u ends beyond %s, which has %u usable bytes",
                                  bytes, top, info.name, info.bytes));
    buffers_.emplace_back();
    buffers_.back().position = position;
    buffers_.back().memory = memory;
    buffers_.back().address = top;
    buffers_.back().bytes = bytes;
    top += bytes;
    return buffers_.back();
  }

  // Queues and explicit flags share the eight ids of a pair of pipes.
  int take_id(HardEvent event, Site site) {
    auto& ids = ascend_emulator::core().event_ids;
    const int id = ids.unused(event, site);
    ids.used[event] |= uint8_t(1u << id);
    return id;
  }

  static constexpr int kCubeFlags = 3;
  static bool has_cube_flags() { return ascend_emulator::core().position().kind == ascend_emulator::CoreKind::aic; }

  // The hardware's flags must be 0 again at the end: TPipe waits for the last frees, and for its own flags.
  void close() {
    for (const auto& closer : closers_) closer();
    for (int n = 0; n < kCubeFlags && has_cube_flags(); ++n) {
      ascend_emulator::core().wait_flag(HardEvent::M_MTE1, n, site_);
      ascend_emulator::core().event_ids.used[HardEvent::M_MTE1] &= uint8_t(~(1u << n));
    }
    for (const auto& [event, ids] : ascend_emulator::core().event_ids.given)
      if (ids)
        ascend_emulator::core().report().error(site_.text() + ": AllocEventID<HardEvent::" +
                                               ascend_emulator::event_name(event) + "> without ReleaseEventID");
    ascend_emulator::core().event_ids = {};
    ascend_emulator::core().close_pipe();
    for (const auto& buffer : buffers_)
      if (buffer.state != ascend_emulator::Buffer::State::free)
        ascend_emulator::core().report().error(
            buffer.site.text() + ": a tensor of a queue is still allocated when the kernel ends (FreeTensor)");
  }

  Site site_;
  std::deque<ascend_emulator::Buffer> buffers_;
  std::vector<std::function<void()>> closers_;
  std::array<uint32_t, ascend_emulator::kMemories> top_{};
};

template <TPosition source, TPosition target, int32_t depth>
template <typename T>
LocalTensor<T> TQueBind<source, target, depth>::AllocTensor(Site site) {
  using ascend_emulator::Buffer;
  if (buffers_.empty()) ascend_emulator::fail(site, "AllocTensor: the queue has no buffers (InitBuffer)");
  for (size_t tried = 0; tried < buffers_.size(); ++tried) {
    Buffer& buffer = *buffers_[next_];
    next_ = (next_ + 1) % buffers_.size();
    if (buffer.state != Buffer::State::free) continue;
    if (buffer.free_pending) ascend_emulator::core().wait_flag(free_event(), buffer.free_event, site);
    buffer.free_pending = false;
    buffer.state = Buffer::State::allocated;
    buffer.site = site;
    return LocalTensor<T>(buffer.position, buffer.address, int64_t(buffer.bytes), &buffer);
  }
  ascend_emulator::fail(
      site, ascend_emulator::format("AllocTensor: all %zu buffers of the queue are in use", buffers_.size()));
}

template <TPosition source, TPosition target, int32_t depth>
ascend_emulator::Buffer& TQueBind<source, target, depth>::own(ascend_emulator::Buffer* buffer, const char* call,
                                                              Site site) {
  for (ascend_emulator::Buffer* mine : buffers_)
    if (mine == buffer) return *buffer;
  ascend_emulator::fail(site, std::string(call) + ": the tensor does not come from this queue");
}

template <TPosition source, TPosition target, int32_t depth>
template <typename T>
bool TQueBind<source, target, depth>::EnQue(const LocalTensor<T>& tensor, Site site) {
  using ascend_emulator::Buffer;
  Buffer& buffer = own(tensor.buffer(), "EnQue", site);
  if (buffer.state != Buffer::State::allocated)
    ascend_emulator::fail(site, "EnQue: the tensor is already free or queued");
  if (int32_t(queued_.size()) >= (depth ? depth : 1) && queued_.size() >= buffers_.size())
    ascend_emulator::fail(site, "EnQue: the queue is full");
  ascend_emulator::core().set_flag(full_event(), buffer.full_event, site);
  buffer.state = Buffer::State::queued;
  ++buffer.generation;
  queued_.push_back(&buffer);
  return true;
}

template <TPosition source, TPosition target, int32_t depth>
template <typename T>
LocalTensor<T> TQueBind<source, target, depth>::DeQue(Site site) {
  if (queued_.empty()) ascend_emulator::fail(site, "DeQue of an empty queue: call EnQue first");
  ascend_emulator::Buffer& buffer = *queued_.front();
  queued_.pop_front();
  ascend_emulator::core().wait_flag(full_event(), buffer.full_event, site);
  buffer.state = ascend_emulator::Buffer::State::allocated;
  return LocalTensor<T>(buffer.position, buffer.address, int64_t(buffer.bytes), &buffer);
}

template <TPosition source, TPosition target, int32_t depth>
template <typename T>
void TQueBind<source, target, depth>::FreeTensor(LocalTensor<T>& tensor, Site site) {
  using ascend_emulator::Buffer;
  Buffer& buffer = own(tensor.buffer(), "FreeTensor", site);
  if (buffer.state == Buffer::State::free) ascend_emulator::fail(site, "FreeTensor: the tensor was already freed");
  if (buffer.state == Buffer::State::queued)
    ascend_emulator::fail(site, "FreeTensor: the tensor is still in the queue");
  ascend_emulator::core().set_flag(free_event(), buffer.free_event, site);
  buffer.free_pending = true;
  buffer.state = Buffer::State::free;
  ++buffer.generation;
}

}  // namespace AscendC
