// The tile size of a call, and the allocator of scratch memory.
#pragma once

#include "cpu/vectors/gemm.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// The tile of a call (tile_size.h).
template <class Op>
inline TileSize tile_size(const AttnParams& p) {
  constexpr int64_t kElementBytes = sizeof(typename Op::Unit) / Op::kPack;
  return flashattn_ext::tile_size((p.head_dim + p.head_dim_v) * kElementBytes, sizeof(typename Op::Real));
}

// Carves 64-byte aligned arrays out of one block; with base == nullptr it only counts bytes.
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
