// Tiles of the sm_80 kernels by the shared memory that the GPU gives a thread block. A backward has a tile for each of
// the three sizes below. A plain forward in 16 bits has one tile for all of them, and another one for the sizes that
// kForwardsOfLessShared names. Second derivatives have two: with kLarge the GPU gives kLargeShared, and the other tile
// fits into derivative_shared().
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/table/kernel_table.h"

namespace flashattn_ext::sm80 {

// Bytes of shared memory that a thread block may have: on GPUs of compute capability 8.6, 8.9 and 12.0, on 8.0 and 8.7,
// and on Hopper and newer data centre GPUs.
constexpr int kSmallShared = 99 * 1024, kMediumShared = 163 * 1024, kLargeShared = 227 * 1024;

// Calls body(size), where size is a std::integral_constant, with the largest of these sizes that is at most `most`, and
// with kSmallShared below that.
template <class Body>
auto with_shared_memory(int most, const Body& body) {
  return most >= kLargeShared    ? body(std::integral_constant<int, kLargeShared>())
         : most >= kMediumShared ? body(std::integral_constant<int, kMediumShared>())
                                 : body(std::integral_constant<int, kSmallShared>());
}

// The shared memory that the kernels of a class of head dims require, by the bytes of an element. fp32 rows of more
// than 384 columns do not fit into kSmallShared.
constexpr int least_shared(int bytes, int head_dim) {
  return bytes == 4 && head_dim > 384 ? kMediumShared : kSmallShared;
}

// The shared memory that forward mode and second derivatives require, whose kernels hold more tiles.
constexpr int derivative_shared(int bytes, int head_dim) {
  return bytes == 4 && head_dim > 128 ? kMediumShared : kSmallShared;
}

// Whether the forward of a row up to 256 head dims (forward.cuh) tracks the largest logit of a row. The kernels of most
// calls would spill registers with it.
constexpr bool tells_largest(Options options) { return (options & kMasks) != 0; }

// Whether code for the architecture that is being compiled may run the tiles for this much shared memory. Code for 9.0a
// runs on Hopper alone, where a thread block may have kLargeShared: kernels for less shared memory would double the
// compile time.
template <int kShared>
constexpr bool kRunsHere =
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    kShared >= kLargeShared;
#else
    true;
#endif

// Columns of v and out in one run of the forward of forward.cuh, which accumulates `out` in registers. They suffice for
// 256 columns: with larger head dims it runs twice, each time for half of the columns, and computes the scores again.
constexpr int out_columns(int head_dim) { return head_dim > 256 ? head_dim / 2 : head_dim; }

// The forward of head dims above 256, in 16 bits, without options (forward_large.cuh), by the bytes of shared memory
// that a thread block may have.
template <class T, int kHeadDim, int kShared>
constexpr ForwardTile large_forward_tile() {
  constexpr int kRow = row_of_kernel(kernel_table::kSm80Forward, kTypeOf<T>, kHeadDim, kPlain);
  return kernel_table::kSm80Forward[kRow].tiles[kShared >= kLargeShared ? 0 : kShared >= kMediumShared ? 1 : 2];
}

// Tiles of the plain forward in 16 bits for GPUs with one of the smaller sizes, on whose multiprocessors too few thread
// blocks of the table's tile are resident. All others run the table's.
struct ForwardOfLessShared {
  int head_dim, shared;
  ForwardTile tile;
};
// Notes: TFLOP/s, full / causal, at 4 x 4096 tokens on an H200 limited to that much shared memory; after the semicolon,
// those of the table's tile.
inline constexpr ForwardOfLessShared kForwardsOfLessShared[] = {
    {128, kSmallShared, {4, 2, 32, 2}},   // 313 / 303; 279 / 266
    {192, kSmallShared, {8, 1, 64, 1}},   // 297 / 283; 236 / 228
    {256, kMediumShared, {8, 1, 64, 1}},  // 320 / 306; 271 / 261
};
template <class T, int kHeadDim, Options kOptions, int kShared>
constexpr const ForwardOfLessShared* forward_of_less_shared() {
  constexpr bool kMayHaveOne = sizeof(T) == 2 && kOptions == kPlain;
  for (const auto& entry : kForwardsOfLessShared) {
    if (kMayHaveOne && entry.head_dim == kHeadDim && entry.shared == kShared) return &entry;
  }
  return nullptr;
}
// The tile of a forward (forward.cuh) on a GPU whose thread blocks may have kShared bytes, one of the three sizes.
template <class T, int kHeadDim, Options kOptions, int kShared>
constexpr ForwardTile forward_tile() {
  constexpr const ForwardOfLessShared* kOther = forward_of_less_shared<T, kHeadDim, kOptions, kShared>();
  if constexpr (kOther != nullptr) {
    return kOther->tile;
  } else {
    return tile_of<kernel_table::kSm80Forward, T, kHeadDim, kOptions>();
  }
}
// The size whose kernel runs on such a GPU: kLargeShared unless it has a tile of its own.
template <class T, int kHeadDim, Options kOptions, int kShared>
constexpr int size_of_forward() {
  return forward_of_less_shared<T, kHeadDim, kOptions, kShared>() ? kShared : kLargeShared;
}

// Keys of a step. Where register pressure is highest, code for sm_80 spills with more than 32 keys; kHasOption:
// dropout, or options of a score alone. Only device code knows its architecture, so the host allocates shared memory
// for the keys of the table.
template <int kHeadDim, bool kHasOption>
constexpr int step_keys(const ForwardTile& tile) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if (kHeadDim == 144 || (kHeadDim == 128 && kHasOption)) return tile.keys < 32 ? tile.keys : 32;
#endif
  return tile.keys;
}

// Thread blocks of a forward on a multiprocessor, which bound its registers, by the shared memory of each. Code for
// GPUs of 8.6, 8.9 and 12.0 counts those that 100 KB hold. The PTX of 8.0 in a build knows of no such limit.
constexpr int forward_blocks(const ForwardTile& tile, int bytes) {
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
  const int most = 100 * 1024 / (bytes + 1024);  // 1 KB of each is the driver's
  return most < 1 ? 1 : most < tile.blocks ? most : tile.blocks;
#else
  return tile.blocks;
#endif
}

// The tile of a backward on a GPU whose thread blocks may have kShared bytes, one of the three sizes above. For a
// kernel without a row, which finishes dq of the others of its class, it is that of the first of them.
template <class T, int kHeadDim, Options kOptions, int kShared>
constexpr BackwardTile backward_tile() {
  const BackwardTile* tiles = nullptr;
  for (const auto& row : kernel_table::kSm80Backward) {
    const bool is_of_class = (row.types & kTypeOf<T>) && row.head_dims == kHeadDim;
    if (is_of_class && (!tiles || row.options == kOptions)) tiles = row.tiles;
  }
  return tiles[kShared >= kLargeShared ? 0 : kShared >= kMediumShared ? 1 : 2];
}
// The largest of the three sizes whose backward has the same tile: one kernel runs for both.
template <class T, int kHeadDim, Options kOptions, int kShared>
constexpr int size_of_same_tile() {
  constexpr BackwardTile kTile = backward_tile<T, kHeadDim, kOptions, kShared>();
  return kTile == backward_tile<T, kHeadDim, kOptions, kLargeShared>()    ? kLargeShared
         : kTile == backward_tile<T, kHeadDim, kOptions, kMediumShared>() ? kMediumShared
                                                                          : kShared;
}

// The tile of second derivatives. All rows of an element size and a class have the same one.
template <class T, int kHeadDim, bool kLarge>
constexpr BackwardTile second_tile() {
  for (const auto& row : kernel_table::kSm80Second) {
    if ((row.types & kTypeOf<T>) && row.head_dims == kHeadDim) return row.tiles[kLarge ? 0 : 1];
  }
  return {};
}

}  // namespace flashattn_ext::sm80
