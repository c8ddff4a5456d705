// A stand-in for CANN's kernel_operator.h that measures the size of code and computes nothing. Every instruction of the
// NPU, and every access to one of its registers, is kInstructions machine instructions of 4 bytes, which take operands
// and the packed strides from registers. Everything else is the compiler's own code for the scalar unit.
// CODE_SIZE_CUBE chooses the core: 1 is the cube core, 0 a vector core.
#pragma once

#include <cstdint>
#include <type_traits>

#define __aicore__
#define __global__
#define __gm__
#define ASCEND_IS_AIC constexpr(CODE_SIZE_CUBE == 1)
#define ASCEND_IS_AIV constexpr(CODE_SIZE_CUBE == 0)
#define KERNEL_TASK_TYPE_DEFAULT(type)
#define CODE_SIZE_INLINE inline __attribute__((always_inline))
// Three instructions: two that prepare operands, and the instruction itself.
#define CODE_SIZE_ASM ".4byte 0, 0, 0"

struct half {
  uint16_t bits;
};
struct bfloat16_t {
  uint16_t bits;
};
enum pipe_t { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_FIX, PIPE_ALL };

namespace code_size {

template <typename T>
CODE_SIZE_INLINE uint64_t word(const T& value) {
  static_assert(std::is_trivially_copyable<T>::value && sizeof(T) <= 8, "it fits a register");
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  return bits;
}
CODE_SIZE_INLINE void instruction() { asm volatile(CODE_SIZE_ASM ::: "memory"); }
template <typename A>
CODE_SIZE_INLINE void instruction(const A& a) {
  asm volatile(CODE_SIZE_ASM ::"r"(word(a)) : "memory");
}
template <typename A, typename B>
CODE_SIZE_INLINE void instruction(const A& a, const B& b) {
  asm volatile(CODE_SIZE_ASM ::"r"(word(a)), "r"(word(b)) : "memory");
}
template <typename A, typename B, typename C>
CODE_SIZE_INLINE void instruction(const A& a, const B& b, const C& c) {
  asm volatile(CODE_SIZE_ASM ::"r"(word(a)), "r"(word(b)), "r"(word(c)) : "memory");
}
template <typename A, typename B, typename C, typename D>
CODE_SIZE_INLINE void instruction(const A& a, const B& b, const C& c, const D& d) {
  asm volatile(CODE_SIZE_ASM ::"r"(word(a)), "r"(word(b)), "r"(word(c)), "r"(word(d)) : "memory");
}
// What an instruction leaves in a register.
CODE_SIZE_INLINE uint64_t result(uint64_t of) {
  uint64_t bits;
  asm volatile(CODE_SIZE_ASM : "=r"(bits) : "r"(of) : "memory");
  return bits;
}

// Fields of a register, the first one in the lowest bits.
CODE_SIZE_INLINE uint64_t pack(int) { return 0; }
template <typename T, typename... Rest>
CODE_SIZE_INLINE uint64_t pack(int width, T first, Rest... rest) {
  return (uint64_t(first) & ((uint64_t(1) << width) - 1)) | pack(width, rest...) << width;
}

}  // namespace code_size

CODE_SIZE_INLINE uint64_t get_ctrl() { return code_size::result(0); }
CODE_SIZE_INLINE void set_ctrl(uint64_t value) { code_size::instruction(value); }
CODE_SIZE_INLINE uint64_t sbitset0(uint64_t value, int64_t bit) { return value & ~(uint64_t(1) << bit); }
CODE_SIZE_INLINE uint64_t sbitset1(uint64_t value, int64_t bit) { return value | uint64_t(1) << bit; }

namespace AscendC {

enum class TPosition : uint8_t { GM, A1, A2, B1, B2, C1, C2, CO1, CO2, VECIN, VECOUT, VECCALC };
enum KernelMetaType { KERNEL_TYPE_AIV_ONLY, KERNEL_TYPE_MIX_AIC_1_2 };
enum class HardEvent : uint8_t {
  MTE2_MTE1,
  MTE1_MTE2,
  MTE1_M,
  M_MTE1,
  M_MTE2,
  M_FIX,
  FIX_M,
  MTE2_V,
  V_MTE2,
  V_MTE3,
  MTE3_V,
  MTE3_MTE2
};
enum class CacheLine : uint64_t { SINGLE_CACHE_LINE, ENTIRE_DATA_CACHE };
enum class DcciDst : uint64_t { CACHELINE_ALL, CACHELINE_UB, CACHELINE_OUT };
enum class RoundMode { CAST_NONE, CAST_RINT };

template <typename T>
struct LocalTensor {
  uint32_t address = 0, bytes = 0;
  LocalTensor() = default;
  CODE_SIZE_INLINE LocalTensor(TPosition, uint32_t address, uint32_t elements)
      : address(address), bytes(uint32_t(elements * sizeof(T))) {}
  CODE_SIZE_INLINE LocalTensor operator[](uint32_t offset) const {
    LocalTensor part;
    part.address = uint32_t(address + offset * sizeof(T));
    part.bytes = uint32_t(bytes - offset * sizeof(T));
    return part;
  }
  template <typename U>
  CODE_SIZE_INLINE LocalTensor<U> ReinterpretCast() const {
    LocalTensor<U> other;
    other.address = address;
    other.bytes = bytes;
    return other;
  }
};
template <typename T>
struct GlobalTensor {
  T* address = nullptr;
  CODE_SIZE_INLINE void SetGlobalBuffer(T* buffer) { address = buffer; }
  CODE_SIZE_INLINE GlobalTensor operator[](uint64_t offset) const { return {address + offset}; }
  CODE_SIZE_INLINE T GetValue(uint64_t offset) const { return *static_cast<const volatile T*>(address + offset); }
};

CODE_SIZE_INLINE int64_t GetBlockIdx() { return int64_t(code_size::result(1)); }
CODE_SIZE_INLINE int64_t GetBlockNum() { return int64_t(code_size::result(2)); }
CODE_SIZE_INLINE int64_t GetSubBlockIdx() { return int64_t(code_size::result(3)); }
CODE_SIZE_INLINE int64_t GetTaskRation() { return CODE_SIZE_CUBE ? 1 : 2; }

// The registers of masks and of atomic additions.
CODE_SIZE_INLINE void InitSocState() {
  for (int registers = 0; registers < 4; ++registers) code_size::instruction();
}

// --- synchronisation
template <HardEvent event>
CODE_SIZE_INLINE void SetFlag(int32_t id) {
  code_size::instruction(id);
}
template <HardEvent event>
CODE_SIZE_INLINE void WaitFlag(int32_t id) {
  code_size::instruction(id);
}
template <pipe_t pipe>
CODE_SIZE_INLINE void PipeBarrier() {
  code_size::instruction();
}
template <uint8_t mode, pipe_t pipe>
CODE_SIZE_INLINE void CrossCoreSetFlag(uint16_t id) {
  code_size::instruction(id);
}
CODE_SIZE_INLINE void CrossCoreWaitFlag(uint16_t id) { code_size::instruction(id); }
template <typename T, CacheLine line, DcciDst where>
CODE_SIZE_INLINE void DataCacheCleanAndInvalid(const GlobalTensor<T>& at) {
  code_size::instruction(at.address);
}
template <typename T>
CODE_SIZE_INLINE void SetAtomicAdd() {
  code_size::instruction();
}
CODE_SIZE_INLINE void SetAtomicNone() { code_size::instruction(); }

// --- copies
struct DataCopyExtParams {
  uint16_t blockCount;
  uint32_t blockLen, srcStride, dstStride;
  CODE_SIZE_INLINE DataCopyExtParams(int64_t count, int64_t length, int64_t source, int64_t target, int64_t)
      : blockCount(count), blockLen(length), srcStride(source), dstStride(target) {}
};
template <typename T>
struct DataCopyPadExtParams {
  bool isPad;
  uint8_t left, right;
  T value;
  CODE_SIZE_INLINE DataCopyPadExtParams(bool isPad, int64_t left, int64_t right, T value)
      : isPad(isPad), left(left), right(right), value(value) {}
};
template <typename T>
CODE_SIZE_INLINE void DataCopyPad(const LocalTensor<T>& to, const GlobalTensor<T>& from, const DataCopyExtParams& p,
                                  const DataCopyPadExtParams<T>& padding) {
  if (padding.isPad) code_size::instruction(padding.value);
  code_size::instruction(to.address, from.address, code_size::pack(21, p.blockLen, p.blockCount, padding.left * 64),
                         code_size::pack(32, p.srcStride, p.dstStride));
}
template <typename T>
CODE_SIZE_INLINE void DataCopyPad(const GlobalTensor<T>& to, const LocalTensor<T>& from, const DataCopyExtParams& p) {
  code_size::instruction(to.address, from.address, code_size::pack(21, p.blockLen, p.blockCount),
                         code_size::pack(32, p.srcStride, p.dstStride));
}
// Whole blocks, with a number of elements.
template <typename T>
CODE_SIZE_INLINE void DataCopy(const LocalTensor<T>& to, const GlobalTensor<T>& from, uint32_t count) {
  code_size::instruction(to.address, from.address, code_size::pack(32, count * sizeof(T) / 32));
}
template <typename T>
CODE_SIZE_INLINE void DataCopy(const GlobalTensor<T>& to, const LocalTensor<T>& from, uint32_t count) {
  code_size::instruction(to.address, from.address, code_size::pack(32, count * sizeof(T) / 32));
}
struct Nd2NzParams {
  uint16_t ndNum = 0, nValue = 0, dValue = 0, srcNdMatrixStride = 0, srcDValue = 0, dstNzC0Stride = 0, dstNzNStride = 0,
           dstNzMatrixStride = 0;
};
template <typename T>
CODE_SIZE_INLINE void DataCopy(const LocalTensor<T>& to, const GlobalTensor<T>& from, const Nd2NzParams& p) {
  code_size::instruction(to.address, from.address,
                         code_size::pack(16, p.ndNum, p.nValue, p.dValue, p.srcNdMatrixStride),
                         code_size::pack(16, p.srcDValue, p.dstNzC0Stride, p.dstNzNStride, p.dstNzMatrixStride));
}

// --- cube core
struct LoadData2DParams {
  uint16_t startIndex = 0;
  uint8_t repeatTimes = 0;
  uint16_t srcStride = 0, dstGap = 0;
  bool ifTranspose = false;
};
template <typename T>
struct LoadData3DParamsV2 {
  uint16_t l1H = 0, l1W = 0, channelSize = 0, kExtension = 0, mExtension = 0, kStartPt = 0, mStartPt = 0;
  bool enTranspose = false;
};
struct MmadParams {
  uint16_t m = 0, n = 0, k = 0;
  bool cmatrixInitVal = true, kDirectionAlign = false;
};
template <typename T>
struct InitConstValueParams {
  uint16_t repeatTimes = 0, blockNum = 0, dstGap = 0;
  T initValue = T();
};
struct FixpipeParamsV220 {
  uint16_t nSize = 0, mSize = 0, srcStride = 0;
  uint32_t dstStride = 0;
};
CODE_SIZE_INLINE void SetHF32Mode(bool on) { code_size::instruction(on); }
template <typename T>
CODE_SIZE_INLINE void Fill(const LocalTensor<T>& to, const InitConstValueParams<T>& p) {
  code_size::instruction(to.address, code_size::pack(16, p.repeatTimes, p.blockNum, p.dstGap), p.initValue);
}
template <typename T>
CODE_SIZE_INLINE void LoadData(const LocalTensor<T>& to, const LocalTensor<T>& from, const LoadData2DParams& p) {
  code_size::instruction(to.address, from.address,
                         code_size::pack(16, p.startIndex, p.repeatTimes, p.srcStride, p.dstGap), p.ifTranspose);
}
template <typename T>
CODE_SIZE_INLINE void LoadData(const LocalTensor<T>& to, const LocalTensor<T>& from, const LoadData3DParamsV2<T>& p) {
  code_size::instruction(code_size::pack(16, p.l1H, p.l1W));  // the register of the image
  code_size::instruction();                                   // and that of its padding
  code_size::instruction(to.address, from.address,
                         code_size::pack(16, p.kExtension, p.mExtension, p.kStartPt, p.mStartPt),
                         code_size::pack(16, p.channelSize, p.enTranspose));
}
template <typename T>
CODE_SIZE_INLINE void Mmad(const LocalTensor<float>& c, const LocalTensor<T>& a, const LocalTensor<T>& b,
                           const MmadParams& p) {
  code_size::instruction(c.address, a.address, b.address,
                         code_size::pack(12, p.m, p.n, p.k, p.cmatrixInitVal, p.kDirectionAlign));
}
CODE_SIZE_INLINE void Fixpipe(const GlobalTensor<float>& to, const LocalTensor<float>& from,
                              const FixpipeParamsV220& p) {
  code_size::instruction(1);  // the register of matrices in rows
  code_size::instruction(to.address, from.address, code_size::pack(16, p.nSize, p.mSize, p.srcStride), p.dstStride);
}

// --- vector core
struct BinaryRepeatParams {
  uint64_t bits;
  CODE_SIZE_INLINE BinaryRepeatParams(uint8_t to, uint8_t a, uint8_t b, uint8_t to_rep, uint8_t a_rep, uint8_t b_rep)
      : bits(code_size::pack(8, to, a, b, to_rep, a_rep, b_rep)) {}
};
struct UnaryRepeatParams {
  uint64_t bits;
  CODE_SIZE_INLINE UnaryRepeatParams(uint16_t to, uint16_t from, uint8_t to_rep, uint8_t from_rep)
      : bits(code_size::pack(16, to, from, to_rep | from_rep << 8)) {}
};
struct BrcbRepeatParams {
  uint64_t bits;
  CODE_SIZE_INLINE BrcbRepeatParams(uint16_t block, uint16_t repeat) : bits(code_size::pack(16, block, repeat)) {}
};

}  // namespace AscendC

namespace code_size {

// The mask of the lanes: a number of them, or bits.
CODE_SIZE_INLINE void set_mask(uint64_t lanes) {
  const uint64_t below = lanes >= 64 ? ~uint64_t(0) : (uint64_t(1) << lanes) - 1;
  const uint64_t above = lanes <= 64 ? 0 : lanes >= 128 ? ~uint64_t(0) : (uint64_t(1) << (lanes - 64)) - 1;
  instruction(above, below);
}
CODE_SIZE_INLINE void set_mask(const uint64_t* mask) { instruction(mask[1], mask[0]); }
// The mode that counts lanes, and back.
template <typename F>
CODE_SIZE_INLINE void counted(uint64_t count, const F& f) {
  instruction();
  instruction(uint64_t(0), count);
  f();
  instruction();
  instruction(~uint64_t(0), ~uint64_t(0));
}
template <typename M>
using IsMask = std::enable_if_t<std::is_integral<M>::value || std::is_pointer<std::decay_t<M>>::value>;

}  // namespace code_size

namespace AscendC {

#define CODE_SIZE_BINARY(NAME)                                                                                      \
  template <typename T, typename M, typename = code_size::IsMask<M>>                                                \
  CODE_SIZE_INLINE void NAME(const LocalTensor<T>& to, const LocalTensor<T>& a, const LocalTensor<T>& b,            \
                             const M& mask, uint8_t repeat, const BinaryRepeatParams& p) {                          \
    code_size::set_mask(mask);                                                                                      \
    code_size::instruction(to.address, a.address, b.address, p.bits | uint64_t(repeat) << 56);                      \
  }                                                                                                                 \
  template <typename T>                                                                                             \
  CODE_SIZE_INLINE void NAME(const LocalTensor<T>& to, const LocalTensor<T>& a, const LocalTensor<T>& b,            \
                             int32_t count) {                                                                       \
    code_size::counted(count, [&] { code_size::instruction(to.address, a.address, b.address, uint64_t(0x0808)); }); \
  }
CODE_SIZE_BINARY(Add)
CODE_SIZE_BINARY(Sub)
CODE_SIZE_BINARY(Mul)
CODE_SIZE_BINARY(Div)
CODE_SIZE_BINARY(Max)
CODE_SIZE_BINARY(Min)
CODE_SIZE_BINARY(And)
CODE_SIZE_BINARY(Or)
CODE_SIZE_BINARY(FusedMulAdd)

#define CODE_SIZE_SCALAR(NAME)                                                                                       \
  template <typename T, typename S, typename M, typename = code_size::IsMask<M>>                                     \
  CODE_SIZE_INLINE void NAME(const LocalTensor<T>& to, const LocalTensor<S>& from, const S& scalar, const M& mask,   \
                             uint8_t repeat, const UnaryRepeatParams& p) {                                           \
    code_size::set_mask(mask);                                                                                       \
    code_size::instruction(to.address, from.address, scalar, p.bits | uint64_t(repeat) << 56);                       \
  }                                                                                                                  \
  template <typename T>                                                                                              \
  CODE_SIZE_INLINE void NAME(const LocalTensor<T>& to, const LocalTensor<T>& from, const T& scalar, int32_t count) { \
    code_size::counted(count, [&] { code_size::instruction(to.address, from.address, scalar, uint64_t(0x0808)); });  \
  }
CODE_SIZE_SCALAR(Adds)
CODE_SIZE_SCALAR(Muls)
CODE_SIZE_SCALAR(Maxs)
CODE_SIZE_SCALAR(Mins)
CODE_SIZE_SCALAR(ShiftLeft)
CODE_SIZE_SCALAR(ShiftRight)
CODE_SIZE_SCALAR(Axpy)

#define CODE_SIZE_UNARY(NAME)                                                                                     \
  template <typename T, typename M, typename = code_size::IsMask<M>>                                              \
  CODE_SIZE_INLINE void NAME(const LocalTensor<T>& to, const LocalTensor<T>& from, const M& mask, uint8_t repeat, \
                             const UnaryRepeatParams& p) {                                                        \
    code_size::set_mask(mask);                                                                                    \
    code_size::instruction(to.address, from.address, p.bits | uint64_t(repeat) << 56);                            \
  }                                                                                                               \
  template <typename T>                                                                                           \
  CODE_SIZE_INLINE void NAME(const LocalTensor<T>& to, const LocalTensor<T>& from, int32_t count) {               \
    code_size::counted(count, [&] { code_size::instruction(to.address, from.address, uint64_t(0x0808)); });       \
  }
CODE_SIZE_UNARY(Exp)
CODE_SIZE_UNARY(Ln)
CODE_SIZE_UNARY(Abs)

template <typename T, typename S, typename M, typename = code_size::IsMask<M>>
CODE_SIZE_INLINE void Cast(const LocalTensor<T>& to, const LocalTensor<S>& from, RoundMode, const M& mask,
                           uint8_t repeat, const UnaryRepeatParams& p) {
  code_size::set_mask(mask);
  code_size::instruction(to.address, from.address, p.bits | uint64_t(repeat) << 56);
}
template <typename T, typename S>
CODE_SIZE_INLINE void Cast(const LocalTensor<T>& to, const LocalTensor<S>& from, RoundMode, uint32_t count) {
  code_size::counted(count, [&] { code_size::instruction(to.address, from.address, uint64_t(0x0804)); });
}
template <typename T, typename M, typename = code_size::IsMask<M>>
CODE_SIZE_INLINE void Duplicate(const LocalTensor<T>& to, const T& value, const M& mask, uint8_t repeat, uint16_t block,
                                uint8_t repeat_stride) {
  code_size::set_mask(mask);
  code_size::instruction(to.address, value, code_size::pack(16, block, repeat_stride, repeat));
}
template <typename T>
CODE_SIZE_INLINE void Duplicate(const LocalTensor<T>& to, const T& value, int32_t count) {
  code_size::counted(count, [&] { code_size::instruction(to.address, value, uint64_t(0x0801)); });
}
template <typename T>
CODE_SIZE_INLINE void Brcb(const LocalTensor<T>& to, const LocalTensor<T>& from, uint8_t repeat,
                           const BrcbRepeatParams& p) {
  code_size::instruction(to.address, from.address, p.bits | uint64_t(repeat) << 56);
}
#define CODE_SIZE_REDUCE(NAME, FIRST, SECOND)                                                                        \
  template <typename T, typename M, typename = code_size::IsMask<M>>                                                 \
  CODE_SIZE_INLINE void NAME(const LocalTensor<T>& to, const LocalTensor<T>& from, FIRST, SECOND, int32_t to_stride, \
                             int32_t block, int32_t stride) {                                                        \
    code_size::set_mask(mask);                                                                                       \
    code_size::instruction(to.address, from.address, code_size::pack(16, to_stride, block, stride, repeat << 8));    \
  }
CODE_SIZE_REDUCE(BlockReduceMax, int32_t repeat, const M& mask)
CODE_SIZE_REDUCE(BlockReduceSum, int32_t repeat, const M& mask)
CODE_SIZE_REDUCE(WholeReduceSum, const M& mask, int32_t repeat)
struct GatherMaskParams {
  uint8_t src0BlockStride = 1;
  uint16_t repeatTimes = 0, src0RepeatStride = 8;
  uint8_t src1RepeatStride = 0;
};
template <typename T>
CODE_SIZE_INLINE void GatherMask(const LocalTensor<T>& to, const LocalTensor<T>& from, uint8_t pattern, bool,
                                 uint32_t mask, const GatherMaskParams& p, uint64_t& count) {
  code_size::set_mask(mask);
  code_size::instruction(to.address, from.address, pattern, code_size::pack(16, p.repeatTimes, p.src0RepeatStride));
  count = code_size::result(4);
}

}  // namespace AscendC
