// The columns of kernel_table.h, which calls a row serves, and how a kernel finds its row.
#pragma once

#include <cstddef>

#include "cuda/table/options.h"
#include "cuda/table/tiles.h"

struct __half;
struct __nv_bfloat16;

// Which tile of its row a kernel is compiled with: the first one, except in private builds that measure other tiles.
#if !defined(FLASHATTN_EXT_TILE_CHOICE)
#define FLASHATTN_EXT_TILE_CHOICE 0
#endif

namespace flashattn_ext {

struct Float8;

// Element types of a row, as bits in the order of DType.
// kE4m3: keys and values in fp8, and in rows of the forward queries as well; other kernels get fp8 inputs widened to
// bfloat16.
enum Types : unsigned { kFp16 = 1, kBf16 = 2, kFp32 = 4, kE4m3 = 16, k16Bit = kFp16 | kBf16 };
template <class T>
inline constexpr Types kTypeOf = kFp32;
template <>
inline constexpr Types kTypeOf<__half> = kFp16;
template <>
inline constexpr Types kTypeOf<__nv_bfloat16> = kBf16;
template <>
inline constexpr Types kTypeOf<Float8> = kE4m3;
constexpr unsigned type_bit(DType type) {
  return type == DType::kFloat16    ? kFp16
         : type == DType::kBFloat16 ? kBf16
         : type == DType::kFloat32  ? kFp32
         : type == DType::kFloat8   ? kE4m3
                                    : 0;
}

// A class of head dims: the most columns of q and k, and of v and out, that its kernels take. They are the same in
// nearly all classes.
struct HeadDims {
  int qk, v;
  constexpr HeadDims(int both) : HeadDims(both, both) {}
  constexpr HeadDims(int qk, int v) : qk(qk), v(v) {}
  constexpr bool operator==(const HeadDims& other) const { return qk == other.qk && v == other.v; }
};

// The GPUs whose dispatch picks a row, and whose code a build therefore compiles.
enum Gpus {
  kHopper,     // compute capability 9.0 alone
  kOtherGpus,  // all but Hopper, which has kernels of its own for these calls
  kEveryGpu,
};

// `spill`: bytes of registers that ptxas may spill, which tools/check_cuda_sources.sh holds.
constexpr int kMaySpill = -1;  // any number

constexpr int kTileChoices = 3;
static_assert(FLASHATTN_EXT_TILE_CHOICE >= 0 && FLASHATTN_EXT_TILE_CHOICE < kTileChoices);

template <class Tile>
struct KernelRow {
  unsigned types;
  HeadDims head_dims;
  Options options;  // that its policies support
  Gpus gpus;
  int spill;
  Tile tiles[kTileChoices];  // a row with fewer ends in zeros
};
struct DecodeRow {
  unsigned types;
  int head_dim;
  int spill;
  decode::Tile tile;
  constexpr int kernel_rows() const { return tile.rows(); }  // the last template argument of its kernel
};
struct FewRowsRow {
  unsigned types;
  int head_dim;
  int row_tiles;
  int spill;
  constexpr int kernel_rows() const { return row_tiles; }
};

// What a call asks of the table.
struct KernelCall {
  unsigned type;  // one of Types
  int64_t head_dim, head_dim_v;
  Options options;
  bool wants_largest = false;  // AttnParams::row_maxima
  bool is_invariant = false;
};

// A kernel runs the calls that use no other options than its policies support; a kernel for fp8, for groups or for few
// keys runs those calls alone.
template <class Row>
constexpr bool serves(const Row& row, const KernelCall& call) {
  return (row.types & call.type) && call.head_dim <= row.head_dims.qk && call.head_dim_v <= row.head_dims.v &&
         includes(row.options, call.options) &&
         includes(call.options, static_cast<Options>(row.options & (kFp8 | kGroups | kBrief)));
}

// The number of the row that a kernel is compiled from; -1: the table does not have it.
template <class Row, size_t kRows>
constexpr int row_of_kernel(const Row (&table)[kRows], unsigned type, HeadDims head_dims, Options options) {
  for (size_t i = 0; i < kRows; ++i) {
    if ((table[i].types & type) && table[i].head_dims == head_dims && table[i].options == options)
      return static_cast<int>(i);
  }
  return -1;
}

template <class Tile>
constexpr Tile compiled_tile(const Tile (&tiles)[kTileChoices]) {
  return tiles[tiles[FLASHATTN_EXT_TILE_CHOICE].exists() ? FLASHATTN_EXT_TILE_CHOICE : 0];
}

// The tile of a kernel.
template <const auto& kTable, class T, int kHeadDim, Options kOptions, int kHeadDimV = kHeadDim>
constexpr auto tile_of() {
  constexpr int kRow = row_of_kernel(kTable, kTypeOf<T>, {kHeadDim, kHeadDimV}, kOptions);
  static_assert(kRow >= 0, "kernel_table.h has no such row");
  return compiled_tile(kTable[kRow].tiles);
}

// The tile of a kernel as a type.
template <const auto& kTable, class T, int kHeadDim, Options kOptions, int kHeadDimV>
struct TileOf {
  static constexpr auto kTile = tile_of<kTable, T, kHeadDim, kOptions, kHeadDimV>();
};

}  // namespace flashattn_ext
