// 16 bytes of 16- or 32-bit elements at an address that is a multiple of one element only.
#pragma once

#include <cstdint>

namespace flashattn_ext {

template <class T>
__device__ __forceinline__ uint4 load_unaligned(const T* from) {
  const bool odd = sizeof(T) == 2 && reinterpret_cast<uintptr_t>(from) % 4 != 0;
  if (!odd) {
    const uint32_t* const words = reinterpret_cast<const uint32_t*>(from);
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
  const uint16_t* const halves = reinterpret_cast<const uint16_t*>(from);
  const uint32_t* const words = reinterpret_cast<const uint32_t*>(halves + 1);
  const uint32_t a = words[0], b = words[1], c = words[2];
  return make_uint4(halves[0] | a << 16, __funnelshift_l(a, b, 16), __funnelshift_l(b, c, 16),
                    c >> 16 | static_cast<uint32_t>(halves[7]) << 16);
}

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
