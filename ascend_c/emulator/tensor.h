// GlobalTensor, LocalTensor, and the checks of every instruction on its operands.
#pragma once

#include <algorithm>
#include <type_traits>

#include "half.h"
#include "machine.h"
#include "rates.h"

namespace AscendC {
enum class TPosition : uint8_t { GM, A1, A2, B1, B2, C1, C2, CO1, CO2, VECIN, VECOUT, VECCALC };
using QuePosition = TPosition;
}  // namespace AscendC

namespace ascend_emulator {

// An instruction field of limited width. It keeps what the kernel gave, so that a value that would wrap is reported.
template <typename T>
class Field {
 public:
  Field() = default;
  template <typename V, typename = std::enable_if_t<std::is_integral_v<V> || std::is_enum_v<V>>>
  Field(V value) : value_(int64_t(value)) {}
  operator T() const { return T(value_); }
  void check(const char* what, Site site, int64_t minimum = 0, int64_t maximum = int64_t(T(-1))) const {
    if (value_ < minimum || value_ > maximum)
      fail(site,
           format("%s %lld is outside %lld..%lld", what, (long long)value_, (long long)minimum, (long long)maximum));
  }

 private:
  int64_t value_;
};

// A buffer of a TPipe. A tensor that was enqueued or freed keeps its old generation.
struct Buffer {
  enum class State { free, allocated, queued } state = State::free;
  uint32_t address = 0, bytes = 0;
  uint32_t generation = 0;
  AscendC::TPosition position = AscendC::TPosition::VECCALC;
  Memory memory = Memory::ub;
  int full_event = -1, free_event = -1;  // ids: contents are there; buffer may be written again
  bool free_pending = false;             // the reader has set free_event, without a wait since
  Site site;                             // where it was allocated last
};

constexpr Memory memory_of(AscendC::TPosition position) {
  using AscendC::TPosition;
  switch (position) {
    case TPosition::A1:
    case TPosition::B1:
    case TPosition::C1:
      return Memory::l1;
    case TPosition::A2:
      return Memory::l0a;
    case TPosition::B2:
      return Memory::l0b;
    case TPosition::CO1:
      return Memory::l0c;
    default:
      return Memory::ub;
  }
}

// Bytes that an instruction moves between GM and a core, for the counters.
inline Work gm_work(pipe_t pipe, const char* name, Site site, double cycles, const Space& space, uint64_t read,
                    uint64_t written, std::function<void(Access&)> run) {
  const Traffic traffic = space.use == Use::workspace ? Traffic::workspace : Traffic::tensors;
  return {pipe, name, site, cycles, read, written, traffic, std::move(run)};
}
// The work of a copy from GM, whose address other cores may be reading.
inline Work load_work(const char* name, Site site, double cycles, const Space& space, size_t offset, uint64_t bytes,
                      std::function<void(Access&)> run) {
  Work work = gm_work(PIPE_MTE2, name, site, cycles, space, bytes, 0, std::move(run));
  work.from = {&space, int64_t(offset) / kSameAddressBytes};
  return work;
}

}  // namespace ascend_emulator

namespace AscendC {

template <typename T>
class GlobalTensor {
 public:
  using PrimType = T;
  void SetGlobalBuffer(__gm__ T* buffer, uint64_t bufferSize) {
    data_ = buffer;
    size_ = int64_t(bufferSize);
  }
  void SetGlobalBuffer(__gm__ T* buffer) {
    data_ = buffer;
    size_ = -1;
  }
  const __gm__ T* GetPhyAddr() const { return data_; }
  const __gm__ T* GetPhyAddr(uint64_t offset) const { return data_ + offset; }
  uint64_t GetSize() const { return size_ > 0 ? uint64_t(size_) : 0; }
  GlobalTensor operator[](uint64_t offset) const {
    GlobalTensor part;
    part.data_ = data_ + offset;
    part.size_ = size_ < 0 ? -1 : std::max<int64_t>(0, size_ - int64_t(offset));
    return part;
  }
  T GetValue(uint64_t offset, Site site = Site::here()) const {
    check_extent("GetValue", int64_t((offset + 1) * sizeof(T)), site);
    auto [space, at] = ascend_emulator::core().gm(data_ + offset, sizeof(T), false, "GetValue", site);
    T value;
    auto run = [&value, space = space, at = at](ascend_emulator::Access& access) {
      access.read_cached(*space, at, sizeof(T));
      value = access.load<T>(*space, at);
    };
    ascend_emulator::core().issue(ascend_emulator::gm_work(PIPE_S, "GetValue", site, ascend_emulator::kScalarCycles,
                                                           *space, sizeof(T), 0, std::move(run)));
    ascend_emulator::core().run_scalar();
    return value;
  }
  void SetValue(uint64_t offset, T value, Site site = Site::here()) {
    check_extent("SetValue", int64_t((offset + 1) * sizeof(T)), site);
    auto [space, at] = ascend_emulator::core().gm(data_ + offset, sizeof(T), true, "SetValue", site);
    auto run = [value, space = space, at = at](ascend_emulator::Access& access) {
      std::memcpy(space->bytes + at, &value, sizeof(T));
      access.write_cached(*space, at, sizeof(T));
    };
    ascend_emulator::core().issue(ascend_emulator::gm_work(PIPE_S, "SetValue", site, ascend_emulator::kScalarCycles,
                                                           *space, 0, sizeof(T), std::move(run)));
  }

  // For the emulator's own files: an instruction touches `bytes` from the start. SetGlobalBuffer may have said how many
  // exist.
  void check_extent(const char* name, int64_t bytes, Site site) const {
    if (size_ >= 0 && bytes > size_ * int64_t(sizeof(T)))
      ascend_emulator::fail(site,
                            ascend_emulator::format("%s accesses %lld bytes of a GlobalTensor that has %lld left", name,
                                                    (long long)bytes, (long long)(size_ * int64_t(sizeof(T)))));
  }

 private:
  __gm__ T* data_ = nullptr;
  int64_t size_ = -1;  // elements; -1 = not given
};

enum class CacheLine : uint64_t { SINGLE_CACHE_LINE = 0, ENTIRE_DATA_CACHE };
enum class DcciDst : uint64_t { CACHELINE_ALL = 0, CACHELINE_UB, CACHELINE_OUT, CACHELINE_ATOMIC };

// Invalidates the scalar unit's cache: later reads come from GM again, for the line of the tensor's first byte from
// that byte on, or for all lines. Writes of SetValue there are written back.
template <typename T, CacheLine entireType, DcciDst dcciDst>
void DataCacheCleanAndInvalid(const GlobalTensor<T>& dst, Site = Site::here()) {
  static_assert(dcciDst == DcciDst::CACHELINE_ALL || dcciDst == DcciDst::CACHELINE_OUT,
                "for GM; CACHELINE_ATOMIC is not supported on Atlas A2 and A3");
  ascend_emulator::core().run_scalar();
  if (entireType == CacheLine::ENTIRE_DATA_CACHE)
    ascend_emulator::core().invalidate_all();
  else
    ascend_emulator::core().invalidate(dst.GetPhyAddr());
}

template <typename T>
class LocalTensor {
 public:
  using PrimType = T;
  LocalTensor() = default;
  // A tensor whose address is the kernel's own choice.
  LocalTensor(TPosition position, uint32_t address, uint32_t size, Site site = Site::here())
      : LocalTensor(position, address, int64_t(size) * int64_t(sizeof(T)), nullptr) {
    const auto& info = ascend_emulator::info(memory_);
    ascend_emulator::core().take_address(site);
    if (size == 0 || address_ + bytes_ > info.bytes)
      ascend_emulator::fail(site, ascend_emulator::format("LocalTensor: %lld bytes at byte %u of %s, which has %u",
                                                          (long long)bytes_, address_, info.name, info.bytes));
    ascend_emulator::core().report().counters.take(size_t(memory_), uint32_t(address_ + bytes_));
  }
  // For the emulator's own files: a tensor of a TPipe.
  LocalTensor(TPosition position, uint32_t address, int64_t bytes, ascend_emulator::Buffer* buffer)
      : position_(position),
        memory_(ascend_emulator::memory_of(position)),
        address_(address),
        bytes_(bytes),
        buffer_(buffer),
        generation_(buffer ? buffer->generation : 0) {}

  LocalTensor operator[](uint32_t offset) const {
    LocalTensor part = *this;
    part.address_ += offset * uint32_t(sizeof(T));
    part.bytes_ -= int64_t(offset) * int64_t(sizeof(T));
    return part;
  }
  template <typename U>
  LocalTensor<U> ReinterpretCast() const {
    LocalTensor<U> other;
    other.position_ = position_;
    other.memory_ = memory_;
    other.address_ = address_;
    other.bytes_ = bytes_;
    other.buffer_ = buffer_;
    other.generation_ = generation_;
    return other;
  }
  uint32_t GetSize() const { return bytes_ > 0 ? uint32_t(bytes_ / int64_t(sizeof(T))) : 0; }
  uint64_t GetPhyAddr() const { return address_; }

  T GetValue(uint32_t index, Site site = Site::here()) const {
    const uint32_t at = scalar_address("GetValue", index, site);
    T value{};
    ascend_emulator::core().issue({PIPE_S,
                                   "GetValue",
                                   site,
                                   ascend_emulator::kScalarCycles,
                                   0,
                                   0,
                                   {},
                                   [&value, at](ascend_emulator::Access& access) {
                                     access.read(access.ub(), at, sizeof(T));
                                     value = access.load<T>(access.ub(), at);
                                   }});
    ascend_emulator::core().run_scalar();
    return value;
  }
  void SetValue(uint32_t index, T value, Site site = Site::here()) const {
    const uint32_t at = scalar_address("SetValue", index, site);
    ascend_emulator::core().issue({PIPE_S,
                                   "SetValue",
                                   site,
                                   ascend_emulator::kScalarCycles,
                                   0,
                                   0,
                                   {},
                                   [value, at](ascend_emulator::Access& access) {
                                     access.write(access.ub(), at, sizeof(T));
                                     std::memcpy(access.ub().bytes + at, &value, sizeof(T));
                                   }});
  }

  // For the emulator's own files: the operand of instruction `name` in `memory`, which touches `extent` bytes from its
  // start.
  uint32_t operand(const char* name, const char* role, int64_t extent, Site site,
                   ascend_emulator::Memory memory = ascend_emulator::Memory::ub, uint32_t alignment = 0) const {
    using ascend_emulator::Buffer;
    using ascend_emulator::format;
    if (buffer_ && (buffer_->generation != generation_ || buffer_->state == Buffer::State::free))
      ascend_emulator::fail(site, format("%s: %s is a tensor that was already freed or enqueued", name, role));
    if (memory_ != memory)
      ascend_emulator::fail(site, format("%s: %s is in %s but must be in %s", name, role,
                                         ascend_emulator::info(memory_).name, ascend_emulator::info(memory).name));
    ascend_emulator::core().local(memory, name, site);
    if (!alignment) alignment = ascend_emulator::info(memory).alignment;
    if (address_ % alignment)
      ascend_emulator::fail(site, format("%s: %s starts at %s byte %u, which is not aligned to %u bytes", name, role,
                                         ascend_emulator::info(memory).name, address_, alignment));
    if (extent > bytes_)
      ascend_emulator::fail(site, format("%s: %s spans %lld bytes from its start, but the tensor has %lld", name, role,
                                         (long long)extent, (long long)bytes_));
    if (address_ + extent > ascend_emulator::info(memory).bytes)
      ascend_emulator::fail(
          site, format("%s: %s ends at %s byte %lld, which has %u", name, role, ascend_emulator::info(memory).name,
                       (long long)(address_ + extent), ascend_emulator::info(memory).bytes));
    return address_;
  }
  TPosition GetPosition() const { return position_; }
  ascend_emulator::Memory memory() const { return memory_; }
  ascend_emulator::Buffer* buffer() const { return buffer_; }

 private:
  template <typename>
  friend class LocalTensor;

  uint32_t scalar_address(const char* name, uint32_t index, Site site) const {
    return operand(name, "the tensor", (int64_t(index) + 1) * int64_t(sizeof(T)), site, ascend_emulator::Memory::ub,
                   1) +
           index * uint32_t(sizeof(T));
  }

  TPosition position_ = TPosition::VECCALC;
  ascend_emulator::Memory memory_ = ascend_emulator::Memory::ub;
  uint32_t address_ = 0;
  int64_t bytes_ = 0;
  ascend_emulator::Buffer* buffer_ = nullptr;
  uint32_t generation_ = 0;
};

}  // namespace AscendC
