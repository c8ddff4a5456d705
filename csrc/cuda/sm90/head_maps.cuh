// Tensor maps of inputs whose heads do not begin at multiples of 16 bytes, as a map has to: with an odd head dim, say.
// If rows do, every eighth head begins at the same distance from such an address. So there is a map for each of eight
// sets of heads, which begins at the address before them, and copies begin at a column of it.
#pragma once

#include "../common/aligned_rows.h"
#include "../common/panels.cuh"
#include "../common/tensor_map.h"

namespace flashattn_ext::sm90 {

struct HeadMaps {
  static constexpr int kSets = 8;  // 8 elements of 16 bits are 16 bytes
  CUtensorMap of[kSets];
  int column[kSets];  // the first one of the heads of a set

  // The maps of [batch][heads][rows][columns] in 16 bits.
  void set(const AttnParams& p, const TensorView& t, int64_t columns, int64_t rows, int64_t heads, int box_rows) {
    constexpr int kBytes = 2;
    for (int set = 0; set < std::min<int64_t>(heads, kSets); ++set) {
      const uintptr_t first = reinterpret_cast<uintptr_t>(t.data) + set * t.head_stride * kBytes;
      const TensorView view{reinterpret_cast<void*>(first / kVectorBytes * kVectorBytes), t.batch_stride, t.row_stride,
                            t.head_stride * kSets};
      column[set] = static_cast<int>(first % kVectorBytes) / kBytes;
      of[set] = tensor_map(p, view, column[set] + columns, rows, (heads - set + kSets - 1) / kSets, batch_entries(p),
                           box_rows, p.dtype);
    }
  }
};

using flashattn_ext::load_panels;
// The same with these maps.
template <class T, int kPanels, int kRows>
__device__ __forceinline__ void load_panels(T (&to)[kPanels][kRows][kPanelColumns], ptx::Barrier& full,
                                            const HeadMaps& maps, int row, int head, int batch) {
  const unsigned set = static_cast<unsigned>(head) % HeadMaps::kSets,
                 number = static_cast<unsigned>(head) / HeadMaps::kSets;
  load_panels(to, full, maps.of[set], row, static_cast<int>(number), batch, maps.column[set]);
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) { ptx::prefetch_tensor_map(&map); }
__device__ __forceinline__ void prefetch_map(const HeadMaps&) {}  // one of them may be unused

}  // namespace flashattn_ext::sm90
