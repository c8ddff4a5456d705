// The vector instructions, each in the count form and in the mask + repeat form.
#pragma once

#include <cmath>
#include <limits>

#include "lanes.h"

namespace AscendC {

struct BinaryRepeatParams {
  ascend_emulator::Field<uint8_t> dstBlkStride = 1, src0BlkStride = 1, src1BlkStride = 1;
  ascend_emulator::Field<uint8_t> dstRepStride = 8, src0RepStride = 8, src1RepStride = 8;
  BinaryRepeatParams() = default;
  BinaryRepeatParams(ascend_emulator::Field<uint8_t> dstBlk, ascend_emulator::Field<uint8_t> src0Blk,
                     ascend_emulator::Field<uint8_t> src1Blk, ascend_emulator::Field<uint8_t> dstRep,
                     ascend_emulator::Field<uint8_t> src0Rep, ascend_emulator::Field<uint8_t> src1Rep)
      : dstBlkStride(dstBlk),
        src0BlkStride(src0Blk),
        src1BlkStride(src1Blk),
        dstRepStride(dstRep),
        src0RepStride(src0Rep),
        src1RepStride(src1Rep) {}
  void check(Site site) const {
    dstBlkStride.check("dstBlkStride", site);
    src0BlkStride.check("src0BlkStride", site);
    src1BlkStride.check("src1BlkStride", site);
    dstRepStride.check("dstRepStride", site);
    src0RepStride.check("src0RepStride", site);
    src1RepStride.check("src1RepStride", site);
  }
};

struct UnaryRepeatParams {
  ascend_emulator::Field<uint16_t> dstBlkStride = 1, srcBlkStride = 1;
  ascend_emulator::Field<uint8_t> dstRepStride = 8, srcRepStride = 8;
  UnaryRepeatParams() = default;
  UnaryRepeatParams(ascend_emulator::Field<uint16_t> dstBlk, ascend_emulator::Field<uint16_t> srcBlk,
                    ascend_emulator::Field<uint8_t> dstRep, ascend_emulator::Field<uint8_t> srcRep)
      : dstBlkStride(dstBlk), srcBlkStride(srcBlk), dstRepStride(dstRep), srcRepStride(srcRep) {}
  void check(Site site) const {
    dstBlkStride.check("dstBlkStride", site);
    srcBlkStride.check("srcBlkStride", site);
    dstRepStride.check("dstRepStride", site);
    srcRepStride.check("srcRepStride", site);
  }
};

struct BrcbRepeatParams {
  ascend_emulator::Field<uint16_t> dstBlkStride = 1, dstRepStride = 8;
  BrcbRepeatParams() = default;
  BrcbRepeatParams(ascend_emulator::Field<uint16_t> dstBlk, ascend_emulator::Field<uint16_t> dstRep)
      : dstBlkStride(dstBlk), dstRepStride(dstRep) {}
};

enum class SaturationMode : uint8_t { FLOAT, FLOAT8, INT, CAST };
// INT: whether sums and products of integers stop at the ends of their range (true) or wrap. Headers before mid-2026
// lack it; the register's own functions below exist in all of them.
template <SaturationMode mode>
void SetSaturationFlag(bool enableSat) {
  static_assert(mode == SaturationMode::FLOAT || mode == SaturationMode::INT || mode == SaturationMode::CAST,
                "SaturationMode is not supported on current platform!");
  constexpr int bit = mode == SaturationMode::FLOAT ? 48 : mode == SaturationMode::INT ? 53 : 59;
  const bool set = mode == SaturationMode::INT ? enableSat : !enableSat;
  uint64_t& ctrl = ascend_emulator::core().ctrl;
  ctrl = set ? ctrl | uint64_t(1) << bit : ctrl & ~(uint64_t(1) << bit);
}

enum class ReduceOrder { ORDER_VALUE_INDEX, ORDER_INDEX_VALUE, ORDER_ONLY_VALUE, ORDER_ONLY_INDEX };

}  // namespace AscendC

// Functions of the compiler.
inline uint64_t get_ctrl() { return ascend_emulator::core().ctrl; }
inline void set_ctrl(uint64_t value) { ascend_emulator::core().ctrl = value; }
inline uint64_t sbitset0(uint64_t value, int64_t bit) { return value & ~(uint64_t(1) << bit); }
inline uint64_t sbitset1(uint64_t value, int64_t bit) { return value | uint64_t(1) << bit; }

namespace ascend_emulator {

template <typename... T>
constexpr uint32_t lanes_per_repeat() {
  size_t widest = 0;
  ((widest = sizeof(T) > widest ? sizeof(T) : widest), ...);
  return uint32_t(kRepeat / widest);
}

// The arithmetic of one lane. half goes through float and is rounded once; integers wrap. `exact` is the same without
// a limit.
template <typename T>
inline constexpr bool kIsFloat = std::is_same_v<T, float> || std::is_same_v<T, half>;
template <typename T>
inline constexpr bool kIsInteger = std::is_same_v<T, int16_t> || std::is_same_v<T, int32_t>;

// Bit operations exist for 16 bits, shifts for integers of either width.
template <typename T>
inline constexpr bool kIsBits = std::is_same_v<T, int16_t> || std::is_same_v<T, uint16_t>;
template <typename T>
inline constexpr bool kIsShifted = kIsBits<T> || std::is_same_v<T, int32_t> || std::is_same_v<T, uint32_t>;

template <typename T>
auto wide(T value) {
  if constexpr (kIsFloat<T>)
    return float(value);
  else
    return uint32_t(value);
}

struct AddLane {
  template <typename T>
  T operator()(T a, T b) const {
    return T(wide(a) + wide(b));
  }
  static int64_t exact(int64_t a, int64_t b) { return a + b; }
};
struct SubLane {
  template <typename T>
  T operator()(T a, T b) const {
    return T(wide(a) - wide(b));
  }
  static int64_t exact(int64_t a, int64_t b) { return a - b; }
};
struct MulLane {
  template <typename T>
  T operator()(T a, T b) const {
    return T(wide(a) * wide(b));
  }
  static int64_t exact(int64_t a, int64_t b) { return a * b; }
};
struct DivLane {
  template <typename T>
  T operator()(T a, T b) const {
    return T(wide(a) / wide(b));
  }
};
struct MaxLane {
  template <typename T>
  T operator()(T a, T b) const {
    if constexpr (kIsFloat<T>) {
      if (std::isnan(float(a))) return a;
      if (std::isnan(float(b))) return b;
      return float(a) < float(b) ? b : a;
    } else {
      return a < b ? b : a;
    }
  }
};
struct MinLane {
  template <typename T>
  T operator()(T a, T b) const {
    if constexpr (kIsFloat<T>) {
      if (std::isnan(float(a))) return a;
      if (std::isnan(float(b))) return b;
      return float(b) < float(a) ? b : a;
    } else {
      return b < a ? b : a;
    }
  }
};
struct AndLane {
  template <typename T>
  T operator()(T a, T b) const {
    return T(a & b);
  }
};
struct OrLane {
  template <typename T>
  T operator()(T a, T b) const {
    return T(a | b);
  }
};
// A shift by the whole width leaves nothing (or the sign).
struct ShiftLeftLane {
  template <typename T>
  T operator()(T a, T bits) const {
    return T(uint64_t(a) << int(bits));
  }
};
struct ShiftRightLane {
  template <typename T>
  T operator()(T a, T bits) const {
    return T(int64_t(a) >> int(bits));
  }
};
struct ExpLane {
  template <typename T>
  T operator()(T a) const {
    return T(std::exp(float(a)));
  }
};
struct LnLane {
  template <typename T>
  T operator()(T a) const {
    return T(std::log(float(a)));
  }
};
struct FusedMulAddLane {
  template <typename T>
  T operator()(T was, T a, T b) const {
    return T(std::fma(float(a), float(was), float(b)));
  }
};
struct AbsLane {
  template <typename T>
  T operator()(T a) const {
    return T(std::fabs(float(a)));
  }
};

// Results in half, bfloat16 or of a product that are not finite: in saturation mode the hardware makes them finite.
inline void report_saturation(Report* report, const char* name, Site site) {
  report->error(site.text() + ": " + name + " saturates a result that is not finite; to keep infinities and NaN, set " +
                "CTRL[48] with set_ctrl(sbitset1(get_ctrl(), 48)) or SetSaturationFlag<SaturationMode::FLOAT>(false)");
}
inline bool saturates_floats() { return !(core().ctrl >> kCtrlNotFinite & 1); }

// Sums and products under the control register: a kernel that relies on integers that wrap, or on halfs that become
// infinite, has to enable it.
template <typename T, typename F>
auto under_ctrl(const char* name, Site site, F f) {
  constexpr bool overflows = std::is_same_v<F, AddLane> || std::is_same_v<F, SubLane> || std::is_same_v<F, MulLane>;
  if constexpr (kIsInteger<T> && overflows) {
    const bool saturates = core().ctrl >> kCtrlIntegersSaturate & 1;
    return [=, report = &core().report()](T a, T b) {
      using Limits = std::numeric_limits<T>;
      const int64_t exact = F::exact(a, b);
      if (!saturates || (exact >= Limits::min() && exact <= Limits::max())) return f(a, b);
      report->error(site.text() + ": " + name + " saturates an integer; to make integers wrap, clear CTRL[53] with " +
                    "set_ctrl(sbitset0(get_ctrl(), 53)) or SetSaturationFlag<SaturationMode::INT>(false)");
      return exact < 0 ? Limits::min() : Limits::max();
    };
  } else if constexpr (std::is_same_v<T, half>) {
    return [=, saturates = saturates_floats(), report = &core().report()](T a, T b) {
      const T result = f(a, b);
      if (saturates && !std::isfinite(float(result))) report_saturation(report, name, site);
      return result;
    };
  } else {
    return f;
  }
}

template <typename T, typename F>
void binary(const char* name, Site site, const Lanes& lanes, double rate, F f, const AscendC::LocalTensor<T>& dst,
            const AscendC::LocalTensor<T>& src0, const AscendC::LocalTensor<T>& src1,
            const AscendC::BinaryRepeatParams& p) {
  p.check(site);
  const bool same = dst.GetPhyAddr() == src1.GetPhyAddr() && p.dstRepStride == 0 && p.src1RepStride == 0;
  const bool accumulates = same && !std::is_same_v<F, DivLane>;
  lanewise(name, site, lanes, rate, accumulates, under_ctrl<T>(name, site, f),
           Operand<T>{dst, p.dstBlkStride, p.dstRepStride}, Operand<T>{src0, p.src0BlkStride, p.src0RepStride},
           Operand<T>{src1, p.src1BlkStride, p.src1RepStride});
}

template <typename D, typename S, typename F>
void unary(const char* name, Site site, const Lanes& lanes, double rate, F f, const AscendC::LocalTensor<D>& dst,
           const AscendC::LocalTensor<S>& src, const AscendC::UnaryRepeatParams& p) {
  p.check(site);
  lanewise(name, site, lanes, rate, false, f, Operand<D>{dst, p.dstBlkStride, p.dstRepStride},
           Operand<S>{src, p.srcBlkStride, p.srcRepStride});
}

template <typename D, typename S>
AscendC::UnaryRepeatParams dense() {
  const uint32_t lanes = lanes_per_repeat<D, S>();
  return {1, 1, uint32_t(lanes * sizeof(D) / kBlock), uint32_t(lanes * sizeof(S) / kBlock)};
}

inline double round_to_integer(double value, AscendC::RoundMode mode) {
  using AscendC::RoundMode;
  switch (mode) {
    case RoundMode::CAST_FLOOR:
      return std::floor(value);
    case RoundMode::CAST_CEIL:
      return std::ceil(value);
    case RoundMode::CAST_ROUND:
      return std::round(value);
    case RoundMode::CAST_TRUNC:
      return std::trunc(value);
    default:
      return std::nearbyint(value);
  }
}

// float <-> half, bfloat16_t and int32_t, half -> uint8_t, with the modes that exist for each. Integers saturate.
template <typename D, typename S>
D cast_lane(S value, AscendC::RoundMode mode) {
  if constexpr (std::is_same_v<D, int32_t>) {
    const double rounded = round_to_integer(value, mode);
    return std::isnan(value) ? 0 : int32_t(std::min(std::max(rounded, -2147483648.0), 2147483647.0));
  } else if constexpr (std::is_same_v<D, uint8_t>) {
    const double rounded = round_to_integer(float(value), mode);
    return std::isnan(rounded) ? 0 : uint8_t(std::min(std::max(rounded, 0.0), 255.0));
  } else if constexpr (std::is_same_v<S, float>) {
    D result;
    result.bits = narrow_float(value, std::is_same_v<D, half> ? 10 : 7, mode);
    return result;
  } else {
    return float(value);
  }
}

template <typename D, typename S>
auto cast_under_ctrl(AscendC::RoundMode mode, Site site) {
  constexpr bool to_float = std::is_same_v<D, float> || std::is_same_v<D, half> || std::is_same_v<D, bfloat16_t>;
  return [=, saturates = saturates_floats(), report = &core().report()](S a) {
    const D result = cast_lane<D>(a, mode);
    if constexpr (to_float && !std::is_integral_v<S>)
      if (saturates && !std::isfinite(float(result))) report_saturation(report, "Cast", site);
    return result;
  };
}

template <typename D, typename S>
void check_cast(AscendC::RoundMode mode, Site site) {
  using AscendC::RoundMode;
  constexpr bool widens = std::is_same_v<D, float> && (std::is_same_v<S, half> || std::is_same_v<S, bfloat16_t>);
  constexpr bool narrows = std::is_same_v<S, float> && (std::is_same_v<D, half> || std::is_same_v<D, bfloat16_t>);
  constexpr bool integers = (std::is_same_v<S, float> && std::is_same_v<D, int32_t>) ||
                            (std::is_same_v<S, int32_t> && std::is_same_v<D, float>);
  constexpr bool bytes = std::is_same_v<S, half> && std::is_same_v<D, uint8_t>;
  static_assert(widens || narrows || integers || bytes,
                "the emulator casts between float and half, bfloat16_t or int32_t, and half to uint8_t");
  if (widens && mode != RoundMode::CAST_NONE) fail(site, "Cast: a widening cast requires CAST_NONE");
  const bool none = mode == RoundMode::CAST_NONE || mode == RoundMode::CAST_ODD;
  if (std::is_same_v<D, bfloat16_t> && none)
    fail(site, "Cast: float to bfloat16_t takes CAST_RINT, FLOOR, CEIL, ROUND or TRUNC");
  if (std::is_same_v<D, int32_t> && none)
    fail(site, "Cast: float to int32_t takes CAST_RINT, FLOOR, CEIL, ROUND or TRUNC");
  if (bytes && mode == RoundMode::CAST_ODD) fail(site, "Cast: half to uint8_t does not take CAST_ODD");
}

// Sums are trees over neighbours in the type of the data; masked lanes count as 0.
template <typename T>
T tree_sum(T* values, uint32_t count) {
  for (; count > 1; count /= 2)
    for (uint32_t i = 0; i < count / 2; ++i) values[i] = AddLane()(values[2 * i], values[2 * i + 1]);
  return values[0];
}

// The reduction of lanes [first, first + count) of one repeat; its index goes to *index.
template <bool kMax, typename T>
T reduce_lanes(const Lanes& lanes, uint32_t r, const T* values, uint32_t first, uint32_t count, uint32_t* index) {
  T sums[128];
  T best{};
  bool found = false;
  for (uint32_t l = first; l < first + count; ++l) {
    const bool active = lanes.active(r, l);
    sums[l - first] = active ? values[l] : T(0.0f);
    if (!active) continue;
    if (!found || float(best) < float(values[l])) *index = l;
    best = found ? MaxLane()(best, values[l]) : values[l];
    found = true;
  }
  if constexpr (kMax)
    return best;
  else
    return tree_sum(sums, count);
}

template <typename T>
void store(Access& access, size_t offset, T value) {
  access.write(access.ub(), offset, sizeof(T));
  std::memcpy(access.ub().bytes + offset, &value, sizeof(T));
}

// One result per repeat, at dst[r * dst_stride]; with index a pair.
template <bool kMax, typename T>
void whole_reduce(const char* name, Site site, const Lanes& lanes, const AscendC::LocalTensor<T>& dst, Operand<T> src,
                  int64_t dst_stride, AscendC::ReduceOrder order) {
  using AscendC::ReduceOrder;
  static_assert(kIsFloat<T>, "half or float");
  if (!lanes.any()) return;
  const bool pair = order == ReduceOrder::ORDER_VALUE_INDEX || order == ReduceOrder::ORDER_INDEX_VALUE;
  const int64_t size = sizeof(T), entry = pair ? 2 * size : size;
  src.resolve(name, "the source", lanes, site);
  const uint32_t to = dst.operand(name, "the destination", (lanes.repeat - 1) * dst_stride * entry + entry, site,
                                  Memory::ub, uint32_t(size));  // the result needs the alignment of its type only
  if (core().checks_data()) check_apart(name, site, lanes, src, to, size_t(dst_stride * entry), size_t(entry));
  auto run = [=](Access& access) {
    using Index = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
    for (uint32_t r = 0; r < lanes.repeat; ++r) {
      T values[128];
      src.gather(access, lanes, r, values);
      uint32_t index = 0;
      const T value = reduce_lanes<kMax>(lanes, r, values, 0, lanes.width, &index);
      const size_t at = to + size_t(r * dst_stride * entry);
      if (order == ReduceOrder::ORDER_ONLY_INDEX) {
        store(access, at, Index(index));
        continue;
      }
      const bool index_first = order == ReduceOrder::ORDER_INDEX_VALUE;
      store(access, at + (index_first ? size_t(size) : 0), value);
      if (pair) store(access, at + (index_first ? 0 : size_t(size)), Index(index));
    }
  };
  core().issue({PIPE_V, name, site, vector_cycles(lanes, kWholeReduce), 0, 0, {}, std::move(run)});
}

// One result per block, eight per repeat; a block without an active lane is not written.
template <bool kMax, typename T>
void block_reduce(const char* name, Site site, const Lanes& lanes, const AscendC::LocalTensor<T>& dst, Operand<T> src,
                  int64_t dst_stride) {
  static_assert(kIsFloat<T>, "half or float");
  if (!lanes.any()) return;
  src.resolve(name, "the source", lanes, site);
  const int64_t entry = 8 * sizeof(T);
  const uint32_t to = dst.operand(name, "the destination", (lanes.repeat - 1) * dst_stride * entry + entry, site,
                                  Memory::ub, uint32_t(entry));
  if (core().checks_data()) check_apart(name, site, lanes, src, to, size_t(dst_stride * entry), size_t(entry));
  auto run = [=](Access& access) {
    constexpr uint32_t kLanes = kBlock / sizeof(T);
    for (uint32_t r = 0; r < lanes.repeat; ++r) {
      T values[128];
      src.gather(access, lanes, r, values);
      for (uint32_t b = 0; b < 8; ++b) {
        bool any = false;
        for (uint32_t l = 0; l < kLanes; ++l) any |= lanes.active(r, b * kLanes + l);
        uint32_t index = 0;
        if (any)
          store(access, to + size_t(r * dst_stride * entry) + b * sizeof(T),
                reduce_lanes<kMax>(lanes, r, values, b * kLanes, kLanes, &index));
      }
    }
  };
  core().issue(
      {PIPE_V, name, site, vector_cycles(lanes, per_repeat_block_reduce(sizeof(T))), 0, 0, {}, std::move(run)});
}

}  // namespace ascend_emulator

namespace AscendC {

// dst = src0 op src1. TYPES says which T the hardware has.
#define ASCEND_EMULATOR_BINARY(NAME, TYPES, RATE)                                                                     \
  template <typename T>                                                                                               \
  void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count,  \
            Site site = Site::here()) {                                                                               \
    static_assert(TYPES, #NAME " does not exist for this type");                                                      \
    const auto lanes = ascend_emulator::count_lanes(#NAME, count, ascend_emulator::lanes_per_repeat<T>(), site);      \
    binary(#NAME, site, lanes, RATE, ascend_emulator::NAME##Lane(), dst, src0, src1, BinaryRepeatParams());           \
  }                                                                                                                   \
  template <typename T, bool isSetMask = true, typename Mask>                                                         \
  std::enable_if_t<std::is_convertible_v<Mask, uint64_t> || std::is_convertible_v<Mask, const uint64_t*>> NAME(       \
      const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, Mask mask,                   \
      ascend_emulator::Field<uint8_t> repeatTime, const BinaryRepeatParams& repeatParams, Site site = Site::here()) { \
    static_assert(TYPES, #NAME " does not exist for this type");                                                      \
    static_assert(isSetMask, "a mask set by an earlier SetVectorMask is not emulated");                               \
    const auto lanes =                                                                                                \
        ascend_emulator::mask_lanes(#NAME, mask, repeatTime, ascend_emulator::lanes_per_repeat<T>(), site);           \
    binary(#NAME, site, lanes, RATE, ascend_emulator::NAME##Lane(), dst, src0, src1, repeatParams);                   \
  }

#define ASCEND_EMULATOR_ANY (ascend_emulator::kIsFloat<T> || ascend_emulator::kIsInteger<T>)
#define ASCEND_EMULATOR_FLOAT (ascend_emulator::kIsFloat<T>)
#define ASCEND_EMULATOR_SLOW (ascend_emulator::per_repeat_slow(sizeof(T)))
ASCEND_EMULATOR_BINARY(Add, ASCEND_EMULATOR_ANY, ascend_emulator::kSimple)
ASCEND_EMULATOR_BINARY(Sub, ASCEND_EMULATOR_ANY, ascend_emulator::kSimple)
ASCEND_EMULATOR_BINARY(Mul, ASCEND_EMULATOR_ANY, ascend_emulator::kSimple)
ASCEND_EMULATOR_BINARY(Max, ASCEND_EMULATOR_ANY, ascend_emulator::kSimple)
ASCEND_EMULATOR_BINARY(Min, ASCEND_EMULATOR_ANY, ascend_emulator::kSimple)
ASCEND_EMULATOR_BINARY(Div, ASCEND_EMULATOR_FLOAT, ASCEND_EMULATOR_SLOW)
ASCEND_EMULATOR_BINARY(And, (ascend_emulator::kIsBits<T>), ascend_emulator::kSimple)
ASCEND_EMULATOR_BINARY(Or, (ascend_emulator::kIsBits<T>), ascend_emulator::kSimple)
#undef ASCEND_EMULATOR_BINARY

// dst = src0 * dst + src1
template <typename T, bool isSetMask = true, typename Mask>
std::enable_if_t<std::is_convertible_v<Mask, uint64_t> || std::is_convertible_v<Mask, const uint64_t*>> FusedMulAdd(
    const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, Mask mask,
    ascend_emulator::Field<uint8_t> repeatTime, const BinaryRepeatParams& p, Site site = Site::here()) {
  using namespace ascend_emulator;
  static_assert(ASCEND_EMULATOR_FLOAT, "FusedMulAdd does not exist for this type");
  static_assert(isSetMask, "a mask set by an earlier SetVectorMask is not emulated");
  p.check(site);
  const auto lanes = mask_lanes("FusedMulAdd", mask, repeatTime, lanes_per_repeat<T>(), site);
  const Operand<T> to = {dst, p.dstBlkStride, p.dstRepStride};
  lanewise("FusedMulAdd", site, lanes, kSimple, false, FusedMulAddLane(), to, to,
           Operand<T>{src0, p.src0BlkStride, p.src0RepStride}, Operand<T>{src1, p.src1BlkStride, p.src1RepStride});
}

// dst = src * scalarValue + dst
template <typename T, bool isSetMask = true, typename Mask>
std::enable_if_t<std::is_convertible_v<Mask, uint64_t> || std::is_convertible_v<Mask, const uint64_t*>> Axpy(
    const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, Mask mask,
    ascend_emulator::Field<uint8_t> repeatTime, const UnaryRepeatParams& p, Site site = Site::here()) {
  using namespace ascend_emulator;
  static_assert(std::is_same_v<T, float>, "the emulator's Axpy takes float");
  static_assert(isSetMask, "a mask set by an earlier SetVectorMask is not emulated");
  p.check(site);
  const auto lanes = mask_lanes("Axpy", mask, repeatTime, lanes_per_repeat<T>(), site);
  const Operand<T> to = {dst, p.dstBlkStride, p.dstRepStride};
  lanewise(
      "Axpy", site, lanes, kSimple, false, [scalarValue](T was, T a) { return std::fma(a, scalarValue, was); }, to, to,
      Operand<T>{src, p.srcBlkStride, p.srcRepStride});
}

// dst = src op scalar
#define ASCEND_EMULATOR_SCALAR(NAME, LANE, TYPES)                                                                    \
  template <typename T>                                                                                              \
  void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, const int32_t& count,        \
            Site site = Site::here()) {                                                                              \
    static_assert(TYPES, #NAME " does not exist for this type");                                                     \
    const auto lanes = ascend_emulator::count_lanes(#NAME, count, ascend_emulator::lanes_per_repeat<T>(), site);     \
    const auto f = ascend_emulator::under_ctrl<T>(#NAME, site, ascend_emulator::LANE());                             \
    const auto lane = [f, scalarValue](T a) { return f(a, scalarValue); };                                           \
    unary(#NAME, site, lanes, ascend_emulator::kSimple, lane, dst, src, UnaryRepeatParams());                        \
  }                                                                                                                  \
  template <typename T, bool isSetMask = true, typename Mask>                                                        \
  std::enable_if_t<std::is_convertible_v<Mask, uint64_t> || std::is_convertible_v<Mask, const uint64_t*>> NAME(      \
      const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalarValue, Mask mask,                         \
      ascend_emulator::Field<uint8_t> repeatTime, const UnaryRepeatParams& repeatParams, Site site = Site::here()) { \
    static_assert(TYPES, #NAME " does not exist for this type");                                                     \
    static_assert(isSetMask, "a mask set by an earlier SetVectorMask is not emulated");                              \
    const auto lanes =                                                                                               \
        ascend_emulator::mask_lanes(#NAME, mask, repeatTime, ascend_emulator::lanes_per_repeat<T>(), site);          \
    const auto f = ascend_emulator::under_ctrl<T>(#NAME, site, ascend_emulator::LANE());                             \
    const auto lane = [f, scalarValue](T a) { return f(a, scalarValue); };                                           \
    unary(#NAME, site, lanes, ascend_emulator::kSimple, lane, dst, src, repeatParams);                               \
  }

ASCEND_EMULATOR_SCALAR(Adds, AddLane, ASCEND_EMULATOR_ANY)
ASCEND_EMULATOR_SCALAR(Muls, MulLane, ASCEND_EMULATOR_ANY)
ASCEND_EMULATOR_SCALAR(Maxs, MaxLane, ASCEND_EMULATOR_ANY)
ASCEND_EMULATOR_SCALAR(Mins, MinLane, ASCEND_EMULATOR_ANY)
ASCEND_EMULATOR_SCALAR(ShiftLeft, ShiftLeftLane, (ascend_emulator::kIsShifted<T>))
ASCEND_EMULATOR_SCALAR(ShiftRight, ShiftRightLane, (ascend_emulator::kIsShifted<T>))
#undef ASCEND_EMULATOR_SCALAR

// dst = op(src)
#define ASCEND_EMULATOR_UNARY(NAME, RATE)                                                                           \
  template <typename T>                                                                                             \
  void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t& count, Site site = Site::here()) { \
    static_assert(ASCEND_EMULATOR_FLOAT, #NAME " does not exist for this type");                                    \
    const auto lanes = ascend_emulator::count_lanes(#NAME, count, ascend_emulator::lanes_per_repeat<T>(), site);    \
    unary(#NAME, site, lanes, RATE, ascend_emulator::NAME##Lane(), dst, src, UnaryRepeatParams());                  \
  }                                                                                                                 \
  template <typename T, bool isSetMask = true, typename Mask>                                                       \
  std::enable_if_t<std::is_convertible_v<Mask, uint64_t> || std::is_convertible_v<Mask, const uint64_t*>> NAME(     \
      const LocalTensor<T>& dst, const LocalTensor<T>& src, Mask mask, ascend_emulator::Field<uint8_t> repeatTime,  \
      const UnaryRepeatParams& repeatParams, Site site = Site::here()) {                                            \
    static_assert(ASCEND_EMULATOR_FLOAT, #NAME " does not exist for this type");                                    \
    static_assert(isSetMask, "a mask set by an earlier SetVectorMask is not emulated");                             \
    const auto lanes =                                                                                              \
        ascend_emulator::mask_lanes(#NAME, mask, repeatTime, ascend_emulator::lanes_per_repeat<T>(), site);         \
    unary(#NAME, site, lanes, RATE, ascend_emulator::NAME##Lane(), dst, src, repeatParams);                         \
  }

ASCEND_EMULATOR_UNARY(Exp, ASCEND_EMULATOR_SLOW)
ASCEND_EMULATOR_UNARY(Ln, ASCEND_EMULATOR_SLOW)
ASCEND_EMULATOR_UNARY(Abs, ascend_emulator::kSimple)
#undef ASCEND_EMULATOR_UNARY
#undef ASCEND_EMULATOR_ANY
#undef ASCEND_EMULATOR_FLOAT
#undef ASCEND_EMULATOR_SLOW

template <typename D, typename S>
void Cast(const LocalTensor<D>& dst, const LocalTensor<S>& src, const RoundMode& roundMode, const uint32_t count,
          Site site = Site::here()) {
  ascend_emulator::check_cast<D, S>(roundMode, site);
  const auto lanes = ascend_emulator::count_lanes("Cast", count, ascend_emulator::lanes_per_repeat<D, S>(), site);
  const auto lane = ascend_emulator::cast_under_ctrl<D, S>(roundMode, site);
  unary("Cast", site, lanes, ascend_emulator::kSimple, lane, dst, src, ascend_emulator::dense<D, S>());
}

template <typename D, typename S, bool isSetMask = true, typename Mask>
std::enable_if_t<std::is_convertible_v<Mask, uint64_t> || std::is_convertible_v<Mask, const uint64_t*>> Cast(
    const LocalTensor<D>& dst, const LocalTensor<S>& src, const RoundMode& roundMode, Mask mask,
    ascend_emulator::Field<uint8_t> repeatTime, const UnaryRepeatParams& repeatParams, Site site = Site::here()) {
  static_assert(isSetMask, "a mask set by an earlier SetVectorMask is not emulated");
  ascend_emulator::check_cast<D, S>(roundMode, site);
  const auto lanes =
      ascend_emulator::mask_lanes("Cast", mask, repeatTime, ascend_emulator::lanes_per_repeat<D, S>(), site);
  const auto lane = ascend_emulator::cast_under_ctrl<D, S>(roundMode, site);
  unary("Cast", site, lanes, ascend_emulator::kSimple, lane, dst, src, repeatParams);
}

template <typename T>
void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, const int32_t& count, Site site = Site::here()) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Duplicate takes types of 2 and 4 bytes");
  const auto lanes = ascend_emulator::count_lanes("Duplicate", count, ascend_emulator::lanes_per_repeat<T>(), site);
  lanewise(
      "Duplicate", site, lanes, ascend_emulator::kSimple, false, [scalarValue] { return scalarValue; },
      ascend_emulator::Operand<T>{dst, 1, 8});
}

template <typename T, bool isSetMask = true, typename Mask>
std::enable_if_t<std::is_convertible_v<Mask, uint64_t> || std::is_convertible_v<Mask, const uint64_t*>> Duplicate(
    const LocalTensor<T>& dst, const T& scalarValue, Mask mask, ascend_emulator::Field<uint8_t> repeatTime,
    ascend_emulator::Field<uint16_t> dstBlockStride, ascend_emulator::Field<uint8_t> dstRepeatStride,
    Site site = Site::here()) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Duplicate takes types of 2 and 4 bytes");
  static_assert(isSetMask, "a mask set by an earlier SetVectorMask is not emulated");
  dstBlockStride.check("dstBlockStride", site);
  dstRepeatStride.check("dstRepeatStride", site);
  const auto lanes =
      ascend_emulator::mask_lanes("Duplicate", mask, repeatTime, ascend_emulator::lanes_per_repeat<T>(), site);
  lanewise(
      "Duplicate", site, lanes, ascend_emulator::kSimple, false, [scalarValue] { return scalarValue; },
      ascend_emulator::Operand<T>{dst, dstBlockStride, dstRepeatStride});
}

enum class GatherMaskMode : uint8_t { VERSION_V1 = 0, VERSION_V2 = 1 };
constexpr GatherMaskMode defaultGatherMaskMode = GatherMaskMode::VERSION_V2;
struct GatherMaskParams {
  ascend_emulator::Field<uint8_t> src0BlockStride = 1;
  ascend_emulator::Field<uint16_t> repeatTimes = 0, src0RepeatStride = 8;
  ascend_emulator::Field<uint8_t> src1RepeatStride = 8;
};

// The even (pattern 1) or odd (2) lanes of every repeat, one after the other. The other patterns, and those of a
// tensor, are not emulated, nor is reduceMode, under which `mask` counts.
template <typename T, GatherMaskMode mode = defaultGatherMaskMode>
void GatherMask(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const uint8_t src1Pattern, const bool reduceMode,
                const uint32_t mask, const GatherMaskParams& p, uint64_t& rsvdCnt, Site site = Site::here()) {
  using namespace ascend_emulator;
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "GatherMask takes types of 2 and 4 bytes");
  if (src1Pattern != 1 && src1Pattern != 2) fail(site, "GatherMask: the emulator supports only patterns 1 and 2");
  if (reduceMode || mask) fail(site, "GatherMask: the emulator supports only reduceMode false with mask 0");
  p.src0BlockStride.check("GatherMask: src0BlockStride", site, 1);
  p.repeatTimes.check("GatherMask: repeatTimes", site, 0, 255);
  p.src0RepeatStride.check("GatherMask: src0RepeatStride", site);
  constexpr uint32_t kWidth = kRepeat / sizeof(T);
  const uint32_t repeats = p.repeatTimes, count = repeats * kWidth / 2;
  if (!repeats) return;
  const uint64_t all[2] = {~uint64_t(0), sizeof(T) == 4 ? 0 : ~uint64_t(0)};
  const Lanes lanes = {false, {all[0], all[1]}, repeats, 0, kWidth};
  Operand<T> from = {src0, p.src0BlockStride, p.src0RepeatStride};
  from.resolve("GatherMask", "the source", lanes, site);
  const uint32_t to = dst.operand("GatherMask", "the destination", int64_t(count) * int64_t(sizeof(T)), site);
  auto run = [=](Access& access) {
    std::vector<T> kept;
    for (uint32_t r = 0; r < repeats; ++r) {
      T values[128];
      from.gather(access, lanes, r, values);
      for (uint32_t l = src1Pattern - 1u; l < kWidth; l += 2) kept.push_back(values[l]);
    }
    for (uint32_t i = 0; i < count; ++i) store(access, to + i * sizeof(T), kept[i]);
  };
  core().issue({PIPE_V,
                "GatherMask",
                site,
                vector_cycles(lanes, 256 / double(kGatherMaskBytesPerCycle)),
                0,
                0,
                {},
                std::move(run)});
  rsvdCnt = count;
}

// dst[i] = firstValue + i. Not one instruction: the scalar unit writes the first block, a flag makes the vector unit
// wait for it, and the rest is Adds. Nothing orders the scalar unit's stores behind what other pipes still do there.
template <typename T>
void CreateVecIndex(LocalTensor<T> dst, const T& firstValue, uint32_t count, Site site = Site::here()) {
  static_assert(std::is_same_v<T, int32_t> || std::is_same_v<T, float>, "the emulator supports int32_t and float");
  constexpr uint32_t kLanes = ascend_emulator::kBlock / sizeof(T);
  if (count == 0) return;
  dst.operand("CreateVecIndex", "the destination", int64_t(count) * int64_t(sizeof(T)), site);
  if (!ascend_emulator::core().has_pipe_object())
    ascend_emulator::fail(site, "CreateVecIndex: it takes an event id from a TPipe, which this kernel does not have");
  for (uint32_t i = 0; i < std::min(count, kLanes); ++i) dst.SetValue(i, T(firstValue + T(i)), site);
  const int id = ascend_emulator::core().event_ids.unused(HardEvent::S_V, site);
  ascend_emulator::core().set_flag(HardEvent::S_V, id, site);
  ascend_emulator::core().wait_flag(HardEvent::S_V, id, site);
  for (uint32_t done = kLanes; done < count;) {  // a block at a time, then a repeat at a time
    const uint32_t step = done < 8 * kLanes ? kLanes : 8 * kLanes, part = std::min(count - done, step);
    Adds(dst[done], dst[done - step], T(step), int32_t(part), site);
    ascend_emulator::core().barrier(PIPE_V, site);
    done += part;
  }
}

// Element i of repeat r fills block r * dstRepStride + i * dstBlkStride of dst.
template <typename T>
void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src, ascend_emulator::Field<uint8_t> repeatTime,
          const BrcbRepeatParams& repeatParams, Site site = Site::here()) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Brcb takes types of 2 and 4 bytes");
  using ascend_emulator::kBlock;
  repeatTime.check("Brcb: repeat", site, 0, 254);
  repeatParams.dstBlkStride.check("dstBlkStride", site, 1);
  repeatParams.dstRepStride.check("dstRepStride", site);
  const uint32_t repeat = repeatTime, block = repeatParams.dstBlkStride, pitch = repeatParams.dstRepStride;
  if (repeat == 0) return;
  const uint32_t from = src.operand("Brcb", "the source", int64_t(repeat) * 8 * int64_t(sizeof(T)), site);
  const uint32_t to =
      dst.operand("Brcb", "the destination", ((repeat - 1) * int64_t(pitch) + 7 * int64_t(block) + 1) * kBlock, site);
  auto run = [=](ascend_emulator::Access& access) {
    for (uint32_t i = 0; i < repeat * 8; ++i) {
      const size_t source = from + i * sizeof(T),
                   target = to + (i / 8 * size_t(pitch) + i % 8 * size_t(block)) * kBlock;
      access.read(access.ub(), source, sizeof(T));
      access.write(access.ub(), target, kBlock);
      const T value = access.load<T>(access.ub(), source);
      for (uint32_t b = 0; b < kBlock; b += sizeof(T)) std::memcpy(access.ub().bytes + target + b, &value, sizeof(T));
    }
  };
  ascend_emulator::core().issue({PIPE_V,
                                 "Brcb",
                                 site,
                                 ascend_emulator::kVectorStartCycles + repeat * ascend_emulator::kSimple,
                                 0,
                                 0,
                                 {},
                                 std::move(run)});
}

// WholeReduce takes mask and repeat, BlockReduce repeat and mask; the last strides are in blocks, the first in results.
#define ASCEND_EMULATOR_MASKED(RESULT)                        \
  template <typename T, bool isSetMask = true, typename Mask> \
  std::enable_if_t<std::is_convertible_v<Mask, uint64_t> || std::is_convertible_v<Mask, const uint64_t*>> RESULT

ASCEND_EMULATOR_MASKED(WholeReduceMax)(const LocalTensor<T>& dst, const LocalTensor<T>& src, Mask mask,
                                       ascend_emulator::Field<uint8_t> repeatTime, int32_t dstRepStride,
                                       int32_t srcBlkStride, int32_t srcRepStride,
                                       ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX, Site site = Site::here()) {
  static_assert(isSetMask, "a mask set by an earlier SetVectorMask is not emulated");
  const auto lanes =
      ascend_emulator::mask_lanes("WholeReduceMax", mask, repeatTime, ascend_emulator::lanes_per_repeat<T>(), site);
  ascend_emulator::whole_reduce<true>("WholeReduceMax", site, lanes, dst,
                                      {src, uint32_t(srcBlkStride), uint32_t(srcRepStride)}, dstRepStride, order);
}

ASCEND_EMULATOR_MASKED(WholeReduceSum)(const LocalTensor<T>& dst, const LocalTensor<T>& src, Mask mask,
                                       ascend_emulator::Field<uint8_t> repeatTime, int32_t dstRepStride,
                                       int32_t srcBlkStride, int32_t srcRepStride, Site site = Site::here()) {
  static_assert(isSetMask, "a mask set by an earlier SetVectorMask is not emulated");
  const auto lanes =
      ascend_emulator::mask_lanes("WholeReduceSum", mask, repeatTime, ascend_emulator::lanes_per_repeat<T>(), site);
  ascend_emulator::whole_reduce<false>("WholeReduceSum", site, lanes, dst,
                                       {src, uint32_t(srcBlkStride), uint32_t(srcRepStride)}, dstRepStride,
                                       ReduceOrder::ORDER_ONLY_VALUE);
}

ASCEND_EMULATOR_MASKED(BlockReduceMax)(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                                       ascend_emulator::Field<uint8_t> repeatTime, Mask mask, int32_t dstRepStride,
                                       int32_t srcBlkStride, int32_t srcRepStride, Site site = Site::here()) {
  static_assert(isSetMask, "a mask set by an earlier SetVectorMask is not emulated");
  const auto lanes =
      ascend_emulator::mask_lanes("BlockReduceMax", mask, repeatTime, ascend_emulator::lanes_per_repeat<T>(), site);
  ascend_emulator::block_reduce<true>("BlockReduceMax", site, lanes, dst,
                                      {src, uint32_t(srcBlkStride), uint32_t(srcRepStride)}, dstRepStride);
}

ASCEND_EMULATOR_MASKED(BlockReduceSum)(const LocalTensor<T>& dst, const LocalTensor<T>& src,
                                       ascend_emulator::Field<uint8_t> repeatTime, Mask mask, int32_t dstRepStride,
                                       int32_t srcBlkStride, int32_t srcRepStride, Site site = Site::here()) {
  static_assert(isSetMask, "a mask set by an earlier SetVectorMask is not emulated");
  const auto lanes =
      ascend_emulator::mask_lanes("BlockReduceSum", mask, repeatTime, ascend_emulator::lanes_per_repeat<T>(), site);
  ascend_emulator::block_reduce<false>("BlockReduceSum", site, lanes, dst,
                                       {src, uint32_t(srcBlkStride), uint32_t(srcRepStride)}, dstRepStride);
}
#undef ASCEND_EMULATOR_MASKED

}  // namespace AscendC
