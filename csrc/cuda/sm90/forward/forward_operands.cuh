// The operands of the Hopper forward (forward.cuh): tiles in shared memory, weights, and the product of weights with
// values, for inputs of 16 bits and in e4m3. A kernel has one object of them, whose registers in e4m3 are the sums of
// one product; all lanes of a warpgroup call its functions.
//   Element                        of tiles of q and k, which have kColumns of them in a row
//   Values                         a tile of values
//   kSteps                         of the product with values, each of which takes four registers of weights
//   kRegisters                     of a thread
//   kTolerance                     of OnlineSoftmax::weigh
//   kComparesThree                 whether largest_scores finds the maxima of rows
//   kZeroRows                      whether a tile of values ends in zeros behind a packed sequence
//   prepare(p, taken)              before the launch: zeroes TileGrid::taken, if any, and transposes values in e4m3
//   query_map(p), key_map(p)
//   value_map(p), values_at(...)   where a tile of values is in its map: for KV head hk, key tile n of sequence b,
//   which
//                                  begins at row key_start of batch entry `entry` (0 in packed calls)
//   isolate(values, warp, each)    as isolate_panel_rows
//   rescale(out, shrink)           multiplies rows of `out`, at once or with the next addition
//   pack(weights, scores)
//   accumulate(out, ...)           starts the product with values
//   add_product(out, ...)          the whole product, with kInTurn
//   hold(out), add(out)            after the wait for it, in this order; release the stage of values between them
#pragma once

#include "cuda/host/launch.cuh"
#include "cuda/score/isolation.cuh"
#include "cuda/score/scores.cuh"
#include "cuda/sm90/fp8/transposed_values.h"
#include "cuda/sm90/fp8/value_transposer.cuh"
#include "cuda/sm90/shared/forward_work.cuh"
#include "cuda/sm90/shared/products.cuh"
#include "cuda/sm90/shared/tiles.h"
#include "cuda/tile/fp8.cuh"
#include "cuda/tile/warp.cuh"

namespace flashattn_ext::sm90 {

// The largest scores of rows g and g + 8 of a 16-row tile, as OnlineSoftmax::weigh takes them, with the integer
// instruction of Hopper that compares three numbers. As integers, the numbers
// that are not negative have the order of their values, and are larger than negative ones, which have the opposite
// order: if the largest integer of a row is negative, its smallest one is the largest score.
template <int N>
__device__ __forceinline__ void largest_scores(float (&largest)[2], const float (&x)[N][4]) {
  int found[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    found[r] = max(__float_as_int(x[0][2 * r]), __float_as_int(x[0][2 * r + 1]));
#pragma unroll
    for (int n = 1; n < N; ++n) {
      found[r] = __vimax3_s32(found[r], __float_as_int(x[n][2 * r]), __float_as_int(x[n][2 * r + 1]));
    }
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) found[r] = max(found[r], __shfl_xor_sync(~0u, found[r], step));
  }
  if (__any_sync(~0u, (found[0] | found[1]) < 0)) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int least = min(__float_as_int(x[0][2 * r]), __float_as_int(x[0][2 * r + 1]));
#pragma unroll
      for (int n = 1; n < N; ++n) {
        least = __vimin3_s32(least, __float_as_int(x[n][2 * r]), __float_as_int(x[n][2 * r + 1]));
      }
      for (int step = 1; step < 4; step *= 2) least = min(least, __shfl_xor_sync(~0u, least, step));
      if (found[r] < 0) found[r] = least;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) largest[r] = __int_as_float(found[r]);
}

struct TileOrigin {
  int row, head, batch;
};

// kTransposes: whether the kernel transposes values itself (e4m3).
template <class T, int kHeadDim, int kHeadDimV, class TileOfRow, bool kTransposes>
struct ForwardOperands {
  static constexpr int kKeys = TileOfRow::kTile.keys, kOutTiles = kHeadDimV / 8;
  using Element = T;
  using Values = T[panels(kHeadDimV)][kKeys][kPanelColumns];
  static constexpr int kColumns = kHeadDim, kSteps = kKeys / 16;
  static constexpr RegisterBudget kRegisters = register_budget(TileOfRow::kTile.groups * TileOfRow::kTile.teams());
  static constexpr bool kZeroRows = false, kDefersRescaling = false;
  static constexpr bool kInTurn = TileOfRow::kTile.order == ForwardOrder::kInTurn;
  static constexpr int kRowStages = 0;
  static constexpr bool kComparesThree = false;
  static constexpr float kTolerance = flashattn_ext::kTolerance;

  static void prepare(const AttnParams& p, int* taken) {
    if (taken) zero_taken(p, taken);
  }
  static CUtensorMap query_map(const AttnParams& p) {
    return flashattn_ext::query_map(p, p.q, p.head_dim, TileOfRow::kTile.queries());
  }
  static CUtensorMap key_map(const AttnParams& p) { return flashattn_ext::key_map(p, p.k, p.head_dim, kKeys); }
  static CUtensorMap value_map(const AttnParams& p) { return flashattn_ext::key_map(p, p.v, p.head_dim_v, kKeys); }
  static __device__ __forceinline__ TileOrigin values_at(const AttnParams&, int entry, int, int hk, int key_start,
                                                         int n) {
    return {key_start + n * kKeys, hk, entry};
  }

  template <int kWarps, class Each>
  static __device__ __forceinline__ bool isolate(Values& values, int warp, const Each& each) {
    return isolate_panel_rows<kWarps>(values, warp, each);
  }
  static __device__ __forceinline__ void rescale(float (&out)[kOutTiles][4], const float (&shrink)[2]) {
    flashattn_ext::rescale(out, shrink);
  }
  static __device__ __forceinline__ void pack(uint32_t (&weights)[kSteps][4], const float (&scores)[kKeys / 8][4]) {
    pack_scores<T>(weights, scores);
  }
  static __device__ __forceinline__ void accumulate(float (&out)[kOutTiles][4], const uint32_t (&weights)[kSteps][4],
                                                    const Values& values) {
    sm90::accumulate<32, uint64_t>(out, weights, values);
  }
  static __device__ __forceinline__ void hold(float (&out)[kOutTiles][4]) { ptx::hold(out); }
  static __device__ __forceinline__ void add(float (&)[kOutTiles][4]) {}
  static __device__ __forceinline__ void add_product(float (&out)[kOutTiles][4], const uint32_t (&weights)[kSteps][4],
                                                     const Values& values) {
    accumulate(out, weights, values);
    ptx::wgmma_wait<0>();
    hold(out);
  }
};

// e4m3. Tiles of q and k are tiles of pairs. The product with values needs keys that are contiguous: a kernel before
// this one has transposed the values (transposed_values.h), in the order of keys in which scores, packed, are weights.
// Tensor cores keep about 14 bits of the sums of a product in e4m3: sums over one tile of keys are added to `out` by
// fp32 instructions, which rescale it as well.
template <int kHeadDim, int kHeadDimV, class TileOfRow, bool kTransposes>
struct ForwardOperands<Float8, kHeadDim, kHeadDimV, TileOfRow, kTransposes> {
  static constexpr int kKeys = TileOfRow::kTile.keys, kOutTiles = kHeadDimV / 8;
  static_assert(kKeys == kTransposedKeys);
  using Element = ptx::E4m3Pair;
  using Values = Element[1][kHeadDimV][kPanelColumns];
  static constexpr int kColumns = kHeadDim / 2, kSteps = kKeys / 32;
  static constexpr RegisterBudget kRegisters = register_budget(TileOfRow::kTile.groups);
  static constexpr int kRowStages = kTransposes ? 2 : 0;
  static constexpr bool kZeroRows = true, kDefersRescaling = true;
  static constexpr float kTolerance = 0;
  static constexpr bool kComparesThree = kHeadDimV <= 64;  // above it is slower

  static void prepare(const AttnParams& p, int* taken) {
    if (!kTransposes) {
      transpose_values(p, taken);
    } else if (taken) {
      zero_taken(p, taken);
    }
  }

  // kInTurn multiplies parts of the columns one after another, two at a time.
  static constexpr bool kInTurn = TileOfRow::kTile.order == ForwardOrder::kInTurn;
  static constexpr int kParts = kInTurn && kHeadDimV % 64 == 0 ? kHeadDimV / 64 : 1, kPartTiles = kOutTiles / kParts;

  float sums[kParts > 1 ? 2 : 1][kPartTiles][4];
  float shrink[2];  // the factors for `out` before these sums are added

  static CUtensorMap query_map(const AttnParams& p) {
    return pair_map(p, p.q, p.head_dim, query_rows(p), p.heads_q, batch_entries(p), TileOfRow::kTile.queries());
  }
  static CUtensorMap key_map(const AttnParams& p) {
    return pair_map(p, p.k, p.head_dim, key_rows(p), p.heads_k, batch_entries(p), kKeys);
  }
  // Transposed, a box is a tile: rows are columns of v, and columns pairs of keys.
  static CUtensorMap value_map(const AttnParams& p) {
    if (kTransposes) return pair_map(p, p.v, p.head_dim_v, key_rows(p), p.heads_k, batch_entries(p), kKeys);
    return pair_map(p, transposed_view(p), kKeys, p.head_dim_v, transposed_tiles(p), transposed_heads(p), kHeadDimV);
  }
  static __device__ __forceinline__ TileOrigin values_at(const AttnParams& p, int entry, int b, int hk, int key_start,
                                                         int n) {
    if (kTransposes) return {key_start + n * kKeys, hk, entry};
    const TransposedTile tile = transposed_tile(p, b, hk, key_start);
    return {0, tile.first + n, tile.head};
  }

  template <int kWarps, class Each>
  static __device__ __forceinline__ bool isolate(Values& values, int warp, const Each& each) {
    return isolate_transposed<kWarps>(values[0], warp, each);
  }
  __device__ __forceinline__ void rescale(float (&)[kOutTiles][4], const float (&factors)[2]) {
    shrink[0] = factors[0];
    shrink[1] = factors[1];
  }
  static __device__ __forceinline__ void pack(uint32_t (&weights)[kSteps][4], const float (&x)[kKeys / 8][4]) {
    unrolled<kSteps, 4>([&](int step, int i) {
      const float (&low)[4] = x[4 * step + i / 2 * 2], (&high)[4] = x[4 * step + i / 2 * 2 + 1];
      const int r = i % 2 * 2;
      weights[step][i] = ptx::e4m3x4(low[r], low[r + 1], high[r], high[r + 1]);
    });
  }
  __device__ __forceinline__ void accumulate(float (&)[kOutTiles][4], const uint32_t (&weights)[kSteps][4],
                                             const Values& values) {
    multiply<0>(weights, values);
  }
  __device__ __forceinline__ void hold(float (&)[kOutTiles][4]) { ptx::hold(sums[0]); }
  __device__ __forceinline__ void add(float (&out)[kOutTiles][4]) { add_part<0>(out); }

  // The whole product with a tile of values, of kInTurn.
  __device__ __forceinline__ void add_product(float (&out)[kOutTiles][4], const uint32_t (&weights)[kSteps][4],
                                              const Values& values) {
    multiply<0>(weights, values);
    if constexpr (kParts > 1) multiply<1>(weights, values);
    add_parts<0>(out, weights, values);
  }

 private:
  template <int kPart>
  __device__ __forceinline__ void multiply(const uint32_t (&weights)[kSteps][4], const Values& values) {
    const uint64_t b = ptx::swizzled_descriptor(values[0][kPart * kPartTiles * 8], 0);
    auto& c = sums[kPart % 2];
    ptx::hold(c);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) ptx::wgmma(c, weights[step], b + step * 2, step > 0);
    ptx::wgmma_commit();
  }
  template <int kPart>
  __device__ __forceinline__ void add_part(float (&out)[kOutTiles][4]) {
#pragma unroll
    for (int n = 0; n < kPartTiles; ++n) {
      float (&to)[4] = out[kPart * kPartTiles + n];
#pragma unroll
      for (int e = 0; e < 4; ++e) to[e] = fmaf(to[e], shrink[e / 2], sums[kPart % 2][n][e]);
    }
  }
  template <int kPart>
  __device__ __forceinline__ void add_parts(float (&out)[kOutTiles][4], const uint32_t (&weights)[kSteps][4],
                                            const Values& values) {
    ptx::wgmma_wait<(kPart + 1 < kParts)>();
    ptx::hold(sums[kPart % 2]);
    add_part<kPart>(out);
    if constexpr (kPart + 2 < kParts) multiply<kPart + 2>(weights, values);
    if constexpr (kPart + 1 < kParts) add_parts<kPart + 1>(out, weights, values);
  }
};

}  // namespace flashattn_ext::sm90
