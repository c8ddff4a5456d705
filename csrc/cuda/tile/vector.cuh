// Vectors of 16 bytes whose addresses are aligned to one element (8, 16 or 32 bits) only.
#pragma once

#include <cstdint>
#include <type_traits>

namespace flashattn_ext {

// Bytes `shift` (below 16) to `shift` + 15 of two vectors that follow each other.
__device__ __forceinline__ uint4 shift_vectors(const uint4& low, const uint4& high, int shift) {
  const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  uint32_t by_two[6], by_one[5], x[4];
#pragma unroll
  for (int i = 0; i < 6; ++i) by_two[i] = shift & 8 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) by_one[i] = shift & 4 ? by_two[i + 1] : by_two[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = __funnelshift_r(by_one[i], by_one[i + 1], shift % 4 * 8);
  return make_uint4(x[0], x[1], x[2], x[3]);
}

// Up to 16 bytes of elements at any address. Loading and getting are separate, so that a thread can load several
// vectors before it waits for the first.
template <class T>
class UnalignedVector {
 public:
  // Loads `count` elements, at least 1, from `from` on: as one or two whole aligned vectors, which neighbouring threads
  // share in the L1 cache, or one by one in get() when these reach beyond `end`.
  __device__ __forceinline__ void load(const T* from, int count, const void* end) {
    from_ = from;
    bytes_ = min(count, kElements) * kSize;
    const uint4* const base = reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(from) - shift());
    const bool two = shift() + bytes_ > 16;
    whole_ = base + 1 + two <= end;
    if (whole_) low_ = base[0];
    if (whole_ && two) high_ = base[1];
  }
  // The elements, and zeros after them.
  __device__ __forceinline__ uint4 get() const {
    if (!whole_) return single_elements();
    const uint4 x = shift() == 0 ? low_ : shift_vectors(low_, high_, shift());
    return bytes_ == 16
               ? x
               : make_uint4(keep(x.x, bytes_), keep(x.y, bytes_ - 4), keep(x.z, bytes_ - 8), keep(x.w, bytes_ - 12));
  }

 private:
  static constexpr int kSize = sizeof(T), kElements = 16 / kSize;

  __device__ __forceinline__ int shift() const { return static_cast<int>(reinterpret_cast<uintptr_t>(from_) % 16); }
  static __device__ __forceinline__ uint32_t keep(uint32_t word, int bytes) {
    return bytes >= 4 ? word : bytes <= 0 ? 0 : word & (kSize == 1 ? (1u << 8 * bytes) - 1 : 0xFFFFu);
  }
  __device__ __forceinline__ uint4 single_elements() const {
    using Bits = std::conditional_t<sizeof(T) == 1, uint8_t, std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>>;
    uint32_t words[4] = {};
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      if (e * kSize >= bytes_) break;
      words[e * kSize / 4] |= static_cast<uint32_t>(reinterpret_cast<const Bits*>(from_)[e]) << e * kSize % 4 * 8;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }

  const T* from_;
  int bytes_;
  bool whole_;
  uint4 low_, high_ = {};
};

template <class T>
__device__ __forceinline__ void store_unaligned(T* to, const uint4& x) {
  const bool odd = sizeof(T) == 2 && reinterpret_cast<uintptr_t>(to) % 4 != 0;
  if (!odd) {
    uint32_t* const words = reinterpret_cast<uint32_t*>(to);
    words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
    return;
  }
  uint16_t* const halves = reinterpret_cast<uint16_t*>(to);
  uint32_t* const words = reinterpret_cast<uint32_t*>(halves + 1);
  halves[0] = static_cast<uint16_t>(x.x);
  words[0] = __funnelshift_l(x.x, x.y, 16);
  words[1] = __funnelshift_l(x.y, x.z, 16);
  words[2] = __funnelshift_l(x.z, x.w, 16);
  halves[7] = static_cast<uint16_t>(x.w >> 16);
}

}  // namespace flashattn_ext
