// How a vector instruction walks over its operands: lanes in blocks of 32 bytes, eight blocks a repeat.
#pragma once

#include <algorithm>
#include <iterator>
#include <map>
#include <tuple>

#include "rates.h"
#include "tensor.h"

namespace ascend_emulator {

// Which lanes are active: the first `count` of all (count form), or a mask in each of `repeat` repeats.
struct Lanes {
  bool counted;
  uint64_t mask[2];
  uint32_t repeat;  // lanes_per_repeat() is the wider type's
  int64_t count;
  uint32_t width;  // lanes of a repeat

  bool active(uint32_t r, uint32_t lane) const {
    return counted ? int64_t(r) * width + lane < count : mask[lane / 64] >> (lane % 64) & 1;
  }
  // The number of active lanes of repeat r, if these are its first ones; otherwise 0.
  uint32_t leading(uint32_t r) const {
    if (counted) return uint32_t(std::clamp<int64_t>(count - int64_t(r) * width, 0, width));
    const bool whole = mask[0] == ~uint64_t(0);
    const uint64_t last = mask[whole];
    if ((!whole && mask[1]) || (last & (last + 1))) return 0;
    return (whole ? 64 : 0) + uint32_t(__builtin_popcountll(last));
  }
  bool any() const { return repeat && (counted ? count > 0 : (mask[0] || mask[1])); }
};

inline Lanes count_lanes(const char* name, int64_t count, uint32_t width, Site site) {
  if (count < 1) fail(site, format("%s: count %lld, it must be positive", name, (long long)count));
  return {true, {0, 0}, uint32_t((count + width - 1) / width), count, width};
}

inline Lanes mask_lanes(const char* name, const uint64_t* mask, Field<uint8_t> repeat, uint32_t width, Site site) {
  repeat.check((std::string(name) + ": repeat").c_str(), site);
  if (!mask[0] && !mask[1]) fail(site, std::string(name) + ": the mask is empty, so nothing would be computed");
  if (width == 64 && mask[1]) fail(site, std::string(name) + ": mask[1] must be 0 for types of 4 bytes (64 lanes)");
  return {false, {mask[0], width == 64 ? 0 : mask[1]}, repeat, 0, width};
}

inline Lanes mask_lanes(const char* name, uint64_t first, Field<uint8_t> repeat, uint32_t width, Site site) {
  if (first > width) fail(site, format("%s: mask %llu, the limit is %u lanes", name, (unsigned long long)first, width));
  const uint64_t all = ~uint64_t(0);
  const uint64_t mask[2] = {first >= 64 ? all : (uint64_t(1) << first) - 1,
                            first >= 128 ? all : (first > 64 ? (uint64_t(1) << (first - 64)) - 1 : 0)};
  return mask_lanes(name, mask, repeat, width, site);
}

// One operand: lane l of repeat r, in block b of 32 bytes, lies at address + (r * repeat + b * block) * 32 + its place
// in b.
template <typename T>
struct Operand {
  AscendC::LocalTensor<T> tensor;
  uint32_t block, repeat;  // strides in blocks
  uint32_t address = 0;

  size_t at(uint32_t r, uint32_t lane) const {
    constexpr uint32_t kLanes = kBlock / sizeof(T);
    return (size_t(r) * repeat + size_t(lane / kLanes) * block) * kBlock + lane % kLanes * sizeof(T);
  }
  // The bytes of the active lanes of repeat r, if these are contiguous; otherwise 0.
  size_t contiguous(const Lanes& lanes, uint32_t r) const {
    const size_t bytes = lanes.leading(r) * sizeof(T);
    return block == 1 || bytes <= kBlock ? bytes : 0;
  }
  // Checks the operand against its tensor and takes its address.
  void resolve(const char* name, const char* role, const Lanes& lanes, Site site) {
    size_t extent = 0;
    for (uint32_t r = lanes.repeat > 2 ? lanes.repeat - 2 : 0; r < lanes.repeat; ++r)
      for (uint32_t l = 0; l < lanes.width; ++l)
        if (lanes.active(r, l) && at(r, l) + sizeof(T) > extent) extent = at(r, l) + sizeof(T);
    address = tensor.operand(name, role, int64_t(extent), site);
  }
  template <typename Range>  // calls range(offset, bytes) for each contiguous piece of active lanes
  void ranges(const Lanes& lanes, uint32_t r, Range range) const {
    if (const size_t bytes = contiguous(lanes, r)) return range(address + at(r, 0), bytes);
    size_t begin = 0, end = 0;
    for (uint32_t l = 0; l < lanes.width; ++l) {
      if (!lanes.active(r, l)) continue;
      const size_t place = address + at(r, l);
      if (place != end || begin == end) {
        if (end > begin) range(begin, end - begin);
        begin = place;
      }
      end = place + sizeof(T);
    }
    if (end > begin) range(begin, end - begin);
  }
  void gather(Access& access, const Lanes& lanes, uint32_t r, T* values, bool own = false) const {
    ranges(lanes, r, [&](size_t offset, size_t bytes) { access.read(access.ub(), offset, bytes, own); });
    if (const size_t bytes = contiguous(lanes, r)) {
      std::memcpy(values, access.ub().bytes + address + at(r, 0), bytes);
      return;
    }
    for (uint32_t l = 0; l < lanes.width; ++l)
      if (lanes.active(r, l)) values[l] = access.load<T>(access.ub(), address + at(r, l));
  }
  void scatter(Access& access, const Lanes& lanes, uint32_t r, const T* values) const {
    ranges(lanes, r, [&](size_t offset, size_t bytes) { access.write(access.ub(), offset, bytes); });
    if (const size_t bytes = contiguous(lanes, r)) {
      std::memcpy(access.ub().bytes + address + at(r, 0), values, bytes);
      return;
    }
    for (uint32_t l = 0; l < lanes.width; ++l)
      if (lanes.active(r, l)) std::memcpy(access.ub().bytes + address + at(r, l), &values[l], sizeof(T));
  }
};

// Within a repeat a source and the destination must either match lane by lane or not overlap: an instruction may write
// some of its lanes before it reads others.
template <typename D, typename S>
void check_overlap(const char* name, Site site, const Lanes& lanes, const Operand<D>& dst, const Operand<S>& source) {
  const bool same_place = sizeof(D) == sizeof(S) && dst.address == source.address;
  if (same_place && dst.block == source.block && (dst.repeat == source.repeat || lanes.repeat == 1)) return;
  for (uint32_t r = 0; r < lanes.repeat; ++r) {
    std::map<size_t, size_t> writes;  // begin and end of what the repeat writes
    dst.ranges(lanes, r, [&](size_t offset, size_t bytes) { writes[offset] = offset + bytes; });
    bool same = sizeof(D) == sizeof(S), meet = false;
    for (uint32_t l = 0; same && l < lanes.width; ++l)
      if (lanes.active(r, l)) same = dst.address + dst.at(r, l) == source.address + source.at(r, l);
    if (same) continue;
    source.ranges(lanes, r, [&](size_t offset, size_t bytes) {
      const auto after = writes.lower_bound(offset + bytes);
      meet |= after != writes.begin() && std::prev(after)->second > offset;
    });
    if (meet)
      fail(site, std::string(name) +
                     ": source and destination of one repeat overlap partially; they must be the same "
                     "lanes or disjoint");
  }
}

// The check for an instruction whose results are not lanes of its source: the two must not overlap. In repeat r it
// writes `size` bytes from `to` + r * `pitch` on.
template <typename S>
void check_apart(const char* name, Site site, const Lanes& lanes, const Operand<S>& source, size_t to, size_t pitch,
                 size_t size) {
  bool meet = false;
  for (uint32_t r = 0; r < lanes.repeat; ++r)
    source.ranges(lanes, r, [&](size_t offset, size_t bytes) {
      meet |= offset < to + r * pitch + size && to + r * pitch < offset + bytes;
    });
  if (meet) fail(site, std::string(name) + ": source and destination of one repeat overlap");
}

inline double vector_cycles(const Lanes& lanes, double per_repeat) {
  return kVectorStartCycles + lanes.repeat * per_repeat;
}

// dst = f(sources), lane by lane. All sources of a repeat are read before it is written.
// `accumulates`: a source may be what an earlier repeat of this instruction wrote.
template <typename D, typename F, typename... S>
void lanewise(const char* name, Site site, Lanes lanes, double per_repeat, bool accumulates, F f, Operand<D> dst,
              Operand<S>... sources) {
  if (!lanes.any()) return;
  if (dst.block == 0) fail(site, std::string(name) + ": destination block stride 0 is illegal");
  dst.resolve(name, "the destination", lanes, site);
  (sources.resolve(name, "a source", lanes, site), ...);
  if (core().checks_data()) (check_overlap(name, site, lanes, dst, sources), ...);
  auto run = [=, sources = std::make_tuple(sources...)](Access& access) mutable {
    for (uint32_t r = 0; r < lanes.repeat; ++r) {
      D results[128];
      std::apply(
          [&](const auto&... source) {
            std::tuple<std::array<S, 128>...> values;
            std::apply([&](auto&... value) { (source.gather(access, lanes, r, value.data(), accumulates), ...); },
                       values);
            std::apply(
                [&](const auto&... value) {
                  const uint32_t leading = lanes.leading(r);
                  for (uint32_t l = 0; l < leading; ++l) results[l] = f(value[l]...);
                  for (uint32_t l = leading; l < lanes.width; ++l)
                    if (lanes.active(r, l)) results[l] = f(value[l]...);
                },
                values);
          },
          sources);
      dst.scatter(access, lanes, r, results);
    }
  };
  core().issue({PIPE_V, name, site, vector_cycles(lanes, per_repeat), 0, 0, {}, std::move(run)});
}

}  // namespace ascend_emulator
