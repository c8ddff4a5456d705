// The gradients of biases, from the gradients of the logits that a lane holds in the backward (rules/bias.h has the
// definition). Scores are transposed: rows of accumulators are keys.
//
// A warp keeps its sums over the scores of one head, or in whole heads of one tile of queries, in registers (BiasSums)
// and stores them in the workspace, where later tiles of whole heads add theirs; backward_finish.cu adds them up in a
// fixed order. Sums over diagonals are formed in registers and with shuffles, and added to the gradient of the relative
// bias in memory; deterministic calls add them to exact sums in the workspace.
#pragma once

#include "cuda/score/distance_bias.cuh"
#include "cuda/stages/backward_workspace.h"
#include "cuda/tile/warp.cuh"

namespace flashattn_ext {

// One lane's sums of gradients over the tiles of a head, without the scale of the weights that dropout keeps.
// kHasElements: there may be a bias of any shape too.
template <int kKeyTiles, bool kHasElements>
struct BiasSums {
  float slope = 0;  // sum of gradient * (|distance| - centre)
  float below = 0;  // sum of gradient * (1 - centre) in tiles wholly clamped to the lowest entry of the relative
  float above = 0;  // bias, or to the highest, and of gradient * -centre in the others
  float keys[kKeyTiles][2] = {};  // sums for the lane's keys, of a bias that all rows share
};

// How a kernel sums up the gradient of a relative bias. On Hopper the code for exact sums costs registers, and under
// that register pressure ptxas serialises all wgmma.
enum class RelativeGradient { kInAnyOrder, kInAnyOrderOrExact };

// The gradients of the biases of one head and one tile of a warp. Bias: TileBias or DistanceBias. Centres: the
// centres of rows (rules/bias.h); pair(centre, n) returns a centre of the lane's two rows of query tile n.
template <class Bias, class T, int kKeyTiles, int kQueryTiles, RelativeGradient kRelative, class Centres>
struct TileBiasGradient {
  using Sums = BiasSums<kKeyTiles, Bias::kHasElements>;
  static constexpr int kBands = 2 * kKeyTiles;  // keys of a lane

  const AttnGradParams& p;
  const Bias& bias;
  const GeneralWorkspace& workspace;
  const Centres centres;
  const int b, h;
  const bool counts;  // whether to sum up these scores: one of the thread blocks that compute them does
  Sums& sums;
  // Sums over diagonals. Scores of a lane with the same band (number of the 8-key tile minus number of the 8-query
  // tile) are on one diagonal. Bands end in descending order while n ascends: open[k] is the sum of band k - n.
  float open[kBands][2] = {}, last[2] = {};  // for even and odd queries; last: of the band that ended last

  // Adds query tile n; called for every n, in ascending order. gradient(i, e): the gradients of the tile's logits.
  template <class Gradient>
  __device__ __forceinline__ void add(const Gradient& gradient, int n) {
    if (!counts) return;
    if (p.dalibi_slopes) {
      const float first = static_cast<float>(bias.place.distance);
      const float2 centre = centres.pair(kDistance, n);
      each([&](int i, int e) {
        const float distance = fabsf(first + static_cast<float>(bias.place.distance_on(i, n, e)));
        sums.slope += gradient(i, e) * (distance - of_row(centre, e));
      });
    }
    if (p.drelative_bias) {
      const Reached range = bias.uniform_range();
      const float2 below = of_end(range == Reached::kBelow, centres.pair(kBelow, n));
      const float2 above = of_end(range == Reached::kAbove, centres.pair(kAbove, n));
      each([&](int i, int e) {
        sums.below += gradient(i, e) * of_row(below, e);
        sums.above += gradient(i, e) * of_row(above, e);
      });
      if (range != Reached::kBelow && range != Reached::kAbove) {
        if (n > 0) end_band(kBands - n, open[kBands - 1]);
#pragma unroll
        for (int k = kBands - 1; k >= 0; --k) {
#pragma unroll
          for (int odd = 0; odd < 2; ++odd) {
            open[k][odd] = (n > 0 && k > 0 ? open[k - 1][odd] : 0.f) + gradient(k / 2, k % 2 * 2 + odd);
          }
        }
      }
    }
    if constexpr (Bias::kHasElements) {
      if (p.dbias.data) add_bias_gradient(gradient, n);
    }
  }

  // Adds all query tiles at once, where only slopes and a relative bias can have gradients: no state is kept
  // from one query tile to the next, and four bands at a time are added to memory.
  __device__ __forceinline__ void add_all(const float (&gradients)[kKeyTiles][kQueryTiles][4]) const {
    static_assert(!Bias::kHasElements && kRelative != RelativeGradient::kInAnyOrderOrExact);
    if (p.dalibi_slopes) {
      const float first = static_cast<float>(bias.place.distance);
      sums.slope += sum_of([&](int i, int n, int e) {
        return gradients[i][n][e] * fabsf(first + static_cast<float>(bias.place.distance_on(i, n, e)));
      });
      sums.slope -= sum_times_centre(gradients, kDistance);
    }
    if (!p.drelative_bias) return;
    sums.below -= sum_times_centre(gradients, kBelow);
    sums.above -= sum_times_centre(gradients, kAbove);
    if (bias.range == Reached::kBelow || bias.range == Reached::kAbove) {
      const float sum = sum_of([&](int i, int n, int e) { return gradients[i][n][e]; });
      (bias.range == Reached::kBelow ? sums.below : sums.above) += sum;
    } else {
      constexpr int kTogether = 4, kFirst = kBands - 1, kLast = -kQueryTiles;
#pragma unroll
      for (int band = kFirst; band >= kLast; band -= kTogether) add_bands<kTogether>(gradients, band);
    }
  }

  // After the last query tile.
  __device__ __forceinline__ void finish() {
    if (!counts || !p.drelative_bias) return;
    const Reached range = bias.uniform_range();
    if (range == Reached::kBelow || range == Reached::kAbove) return;
#pragma unroll
    for (int k = kBands - 1; k >= 0; --k) end_band(k - (kQueryTiles - 1), open[k]);
    const float none[2] = {};
    end_band(-kQueryTiles, none);
  }

 private:
  // The value of element e's row, from the values of the even and the odd row.
  static __device__ __forceinline__ float of_row(float2 pair, int e) { return e % 2 ? pair.y : pair.x; }
  // The factors of gradients for one end of the relative bias. is_whole: whether the whole tile is clamped to that end.
  static __device__ __forceinline__ float2 of_end(bool is_whole, float2 centre) {
    const float own = is_whole ? 1.f : 0.f;
    return {own - centre.x, own - centre.y};
  }

  // The sum of term(i, n, e) over all scores, in four independent partial sums.
  template <class Term>
  static __device__ __forceinline__ float sum_of(const Term& term) {
    float part[4] = {};
    flashattn_ext::each_element<kKeyTiles, kQueryTiles>([&](int i, int n, int e) { part[e] += term(i, n, e); });
    return (part[0] + part[1]) + (part[2] + part[3]);
  }

  // The sum over all scores of the gradient times a centre of its row.
  __device__ __forceinline__ float sum_times_centre(const float (&gradients)[kKeyTiles][kQueryTiles][4],
                                                    Centre which) const {
    float part[2] = {};
#pragma unroll
    for (int n = 0; n < kQueryTiles; ++n) {
      const float2 centre = centres.pair(which, n);
      float sum[2] = {};  // sums over even and over odd rows
      unrolled<kKeyTiles, 4>([&](int i, int e) { sum[e % 2] += gradients[i][n][e]; });
      part[0] = fmaf(sum[0], centre.x, part[0]);
      part[1] = fmaf(sum[1], centre.y, part[1]);
    }
    return part[0] + part[1];
  }

  // The sum of a lane's gradients in one band, of even or of odd queries.
  static __device__ __forceinline__ float in_band(const float (&gradients)[kKeyTiles][kQueryTiles][4], int band,
                                                  int odd) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < kBands; ++k) {
      if (k - band >= 0 && k - band < kQueryTiles) sum += gradients[k / 2][k - band][k % 2 * 2 + odd];
    }
    return sum;
  }
  // Adds the sums over the diagonals of four bands, from `first` down, as end_band does. Each of the four lanes of a
  // row gets the sum of another band, so that a warp adds 32 contiguous numbers.
  template <int kTogether>
  __device__ __forceinline__ void add_bands(const float (&gradients)[kKeyTiles][kQueryTiles][4], int first) const {
    static_assert(kTogether == 4);
    float part[kTogether];
#pragma unroll
    for (int m = 0; m < kTogether; ++m) {
      part[m] = 0;
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int query = 2 * lane_in_quad() + odd;
        const float own = quad() >= query ? in_band(gradients, first - m, odd) : in_band(gradients, first - m + 1, odd);
        part[m] += __shfl_sync(~0u, own, (quad() + query) % 8 * 4 + lane_in_quad());
      }
    }
    const float sum = quad_sum_of_own(part);
    const int64_t at = h * (2 * bias.head.reach + 1) + bias.head.reach +
                       bias.entry(bias.place.tile_distance + 8 * (first - lane_in_quad()) + quad());
    ptx::add_if(sum != 0, static_cast<float*>(p.drelative_bias) + at, sum * workspace.keep_scale);
  }

  template <class Body>
  static __device__ __forceinline__ void each(const Body& body) {
    unrolled<kKeyTiles, 4>([&](int i, int e) { body(i, e); });
  }

  // Adds the sums over eight diagonals. Element (g, query) of an 8x8 tile is on diagonal g - query. A negative diagonal
  // d of a band is diagonal d + 8 of the band below it, so lanes with g < query contribute their sums of the band that
  // ended before (`last`).
  __device__ __forceinline__ void end_band(int band, const float (&ended)[2]) {
    float sum = 0;
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int query = 2 * lane_in_quad() + odd;
      const float own = quad() >= query ? ended[odd] : last[odd];
      // This lane sums up diagonal g: of the lanes with the same t, the one in row g + query has a part of it.
      sum += __shfl_sync(~0u, own, (quad() + query) % 8 * 4 + lane_in_quad());
      last[odd] = ended[odd];
    }
    sum = quad_sum(sum);
    const int entry = bias.entry(bias.place.tile_distance + 8 * band + quad());
    const int64_t at = h * (2 * bias.head.reach + 1) + bias.head.reach + entry;
    bool adds = lane_in_quad() == 0 && sum != 0;
    if (kRelative == RelativeGradient::kInAnyOrderOrExact && workspace.relative_sums) {
      // A sum that is not finite is the same in every order.
      const bool exactly = adds && fabsf(sum) < infinity();
      workspace.relative_sums[at].add_if(exactly, sum);
      adds = adds && !exactly;
    }
    ptx::add_if(adds, static_cast<float*>(p.drelative_bias) + at, sum * workspace.keep_scale);
  }

  template <class Gradient>
  __device__ __forceinline__ void add_bias_gradient(const Gradient& gradient, int n) {
    if (workspace.dbias_of_keys) {
      each([&](int i, int e) { sums.keys[i][e / 2] += gradient(i, e); });
    } else if (p.dbias.dtype == DType::kFloat32) {
      each_element<float>(gradient, n, [&](bool exists, float* to, float x) {
        ptx::add_if(exists && workspace.dbias_is_sum, to, x);
        ptx::store_if(exists && !workspace.dbias_is_sum, to, x);
      });
    } else if constexpr (sizeof(T) == 2) {
      each_element<T>(gradient, n, [](bool exists, T* to, float x) {
        T narrowed;
        narrow(x, &narrowed);
        ptx::store_if(exists, to, *reinterpret_cast<const uint16_t*>(&narrowed));
      });
    }
  }
  // body(exists, to, x) is called for every element; exists: whether it is within the sequence.
  template <class Element, class Gradient, class Body>
  __device__ __forceinline__ void each_element(const Gradient& gradient, int n, const Body& body) const {
    Element* const first = static_cast<Element*>(p.dbias.data) + b * p.dbias.batch_stride + h * p.dbias.head_stride +
                           bias.place.row * p.dbias.row_stride + bias.place.key;
    each([&](int i, int e) {
      const int rows = bias.place.rows_on(i, n, e), keys = bias.place.keys_on(i, n, e);
      body(rows < bias.rows_left && keys < bias.keys_left, first + rows * p.dbias.row_stride + keys,
           gradient(i, e) * workspace.keep_scale);
    });
  }
};

// Writes a warp's sums of a head to the workspace, adds the sums of a bias that all rows share to its gradient, and
// resets `sums`. tile: the key tile within the head; part: the warp within those that compute scores of the tile; key:
// the lane's first key, of length_k; adds: whether the workspace has sums of this part already, of the same warp.
template <int kKeyTiles, bool kHasElements>
__device__ __forceinline__ void end_head(BiasSums<kKeyTiles, kHasElements>& sums, const AttnGradParams& p,
                                         const GeneralWorkspace& workspace, int b, int h, int64_t tile, int part,
                                         int key, int length_k, bool adds = false) {
  const int lane = threadIdx.x % 32;
  if (workspace.sums) {
    float* const to =
        workspace.sums + ((h * workspace.key_tiles + tile) * workspace.parts + part) * GeneralWorkspace::kSums;
    const float all[GeneralWorkspace::kSums] = {sums.slope, sums.below, sums.above};
#pragma unroll
    for (int i = 0; i < GeneralWorkspace::kSums; ++i) {
      float sum = warp_sum(all[i]);
      if (adds) sum += to[i];
      ptx::store_if(lane == 0, to + i, sum);
    }
  }
  if (kHasElements && workspace.dbias_of_keys) {
    float* const to = static_cast<float*>(p.dbias.data) + b * p.dbias.batch_stride + h * p.dbias.head_stride + key;
#pragma unroll
    for (int i = 0; i < 2 * kKeyTiles; ++i) {
      const float sum = quad_sum(sums.keys[i / 2][i % 2]);
      ptx::add_if(lane_in_quad() == 0 && key + 8 * i < length_k, to + 8 * i, sum * workspace.keep_scale);
    }
  }
  sums = {};
}

}  // namespace flashattn_ext
