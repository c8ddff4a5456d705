// Tile sizes of the CPU kernels, and how scratch memory is handed out.
#pragma once

#include "gemm.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// A private build, made to compare tiles, names another one of fp32 and 16-bit inputs:
// -DFLASHATTN_EXT_CPU_QUERIES=... -DFLASHATTN_EXT_CPU_KEYS=..., both multiples of 64.
#if !defined(FLASHATTN_EXT_CPU_QUERIES) && !defined(FLASHATTN_EXT_CPU_KEYS)
#define FLASHATTN_EXT_CPU_QUERIES (kVectorBytes == 32 ? 192 : 128)
#define FLASHATTN_EXT_CPU_KEYS 192
#endif

// Queries and keys of one tile. Scores, operands and accumulators of a tile (about 1 MB at head_dim 128) live in the L2
// cache; dropout.h wants key tiles that start at multiples of 64 and query tiles that start at multiples of 16, and
// whole register tiles are multiples of kTileRows. One core of an EPYC 9004, GFLOP/s of 116, fp32, D=64, S=2048:
//   AVX-512  128x128 fwd  97 bwd 93   128x192 fwd 99 bwd 100   192x192 fwd 101 bwd 99   128x256 fwd 96 bwd 100
//   AVX2     128x128 fwd  88 bwd 83   128x192 fwd 89 bwd  92   192x192 fwd  91 bwd 92    96x128 fwd 90 bwd  89
template <class Real>
struct Tile {
  static constexpr int64_t kQueries = FLASHATTN_EXT_CPU_QUERIES;
  static constexpr int64_t kKeys = FLASHATTN_EXT_CPU_KEYS;
  static_assert(kQueries > 0 && kQueries % 64 == 0 && kKeys > 0 && kKeys % 64 == 0,
                "a tile is whole blocks of 64 x 64");
};
template <>
struct Tile<double> {  // fewer elements of twice the size, for a similar amount of memory
  static constexpr int64_t kQueries = 64;
  static constexpr int64_t kKeys = 64;
};

// Hands out 64-byte aligned pieces of one block; with base == nullptr it only measures.
class ScratchCarver {
 public:
  explicit ScratchCarver(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  T* take(int64_t count) {
    T* piece = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
