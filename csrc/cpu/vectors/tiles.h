// The tile size of a call, and the allocator of scratch memory.
#pragma once

#include "cpu/vectors/gemm.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// The tile of a call (tile_size.h); with a BlockMask a block of it.
template <class Op>
inline TileSize tile_size(const AttnParams& p) {
  if (p.has_blocks()) return {kMaskBlock, kMaskBlock};
  constexpr int64_t kElementBytes = sizeof(typename Op::Unit) / Op::kPack;
  return flashattn_ext::tile_size((p.head_dim + p.head_dim_v) * kElementBytes, sizeof(typename Op::Real));
}

// Bits of the queries of a tile, 16 in a word: of visibility (panel_mask.h) and of dropout (keep_bits.h).
constexpr int64_t kWordLanes = 16;

// The bits of one vector of queries, from `lane` on, out of the words of one key.
inline uint32_t bits_of_lanes(const uint16_t* words, int64_t lane) {
  return static_cast<uint32_t>(words[lane / kWordLanes]) >> (lane % kWordLanes);
}

// Carves 64-byte aligned arrays out of one block; with base == nullptr it only counts bytes.
class ScratchCarver {
 public:
  ScratchCarver(void* base) : base_(static_cast<char*>(base)) {}
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
