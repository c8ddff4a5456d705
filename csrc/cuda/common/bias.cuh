// Biases in accumulator tiles: what is added to the scores that a lane holds, in units of log2 (../../bias.h has the
// definition).
#pragma once

#include <type_traits>

#include "../../bias.h"
#include "rows.cuh"
#include "tensor_core.cuh"
#include "warp.cuh"

namespace flashattn_ext {

// Where the scores are that a lane holds of a warp's tile. Rows of accumulators are queries in the forward, and keys in
// the backward, whose scores are transposed. Element e of row tile i and column tile n is at first + an offset that the
// compiler knows.
template <bool kTransposed>
struct Place {
  int row, key;       // query and key of the lane's first score
  int distance;       // of that score: key - position of the query
  int tile_distance;  // of the first score of the warp's tile

  // row0, key0: of the first score of the warp's tile.
  __device__ __forceinline__ Place(const Mask32& mask, int row0, int key0) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    row = row0 + (kTransposed ? 2 * t : g);
    key = key0 + (kTransposed ? g : 2 * t);
    tile_distance = key0 - row0 - mask.first_position();
    distance = tile_distance + (key - key0) - (row - row0);
  }
  static __device__ __forceinline__ constexpr int rows_on(int i, int n, int e) {
    return kTransposed ? 8 * n + e % 2 : 16 * i + 8 * (e / 2);
  }
  static __device__ __forceinline__ constexpr int keys_on(int i, int n, int e) {
    return kTransposed ? 16 * i + 8 * (e / 2) : 8 * n + e % 2;
  }
  static __device__ __forceinline__ constexpr int distance_on(int i, int n, int e) {
    return keys_on(i, n, e) - rows_on(i, n, e);
  }
};

// How the distances of a tile meet the reach of a relative bias.
enum class Reached { kNone, kBelow, kAbove, kSome };  // kNone: there is no relative bias

// rows, keys: extent of the tile. kBelow, kAbove: all distances are clamped, to the same end.
__device__ __forceinline__ Reached reached(bool exists, int reach, int tile_distance, int rows, int keys) {
  if (!exists) return Reached::kNone;
  if (tile_distance + (keys - 1) <= -reach) return Reached::kBelow;
  return tile_distance - (rows - 1) >= reach ? Reached::kAbove : Reached::kSome;
}

// A logit plus a bias. One of -inf hides the score, also when that is not a number.
__device__ __forceinline__ float add_bias(float logit, float bias) {
  return bias == -infinity() ? -infinity() : logit + bias;
}

// The biases of one head and one tile of a warp, of kRowTiles row tiles and kColumnTiles column tiles of accumulators.
// T: the input type.
template <class T, bool kTransposed, int kRowTiles, int kColumnTiles>
struct TileBias {
  static constexpr int kRows = kTransposed ? 8 * kColumnTiles : 16 * kRowTiles;
  static constexpr int kKeys = kTransposed ? 16 * kRowTiles : 8 * kColumnTiles;
  // A lane's part of a tile of a bias of 16 bits, in pairs of neighbouring keys: rows g and g + 8 of each row tile. It
  // is read before the product of the scores is waited for.
  using Ahead = uint32_t[kRowTiles][2][kColumnTiles];

  Place<kTransposed> place;
  HeadBias<float> head;
  int reach;  // of the relative bias; one beyond all sequences is as good as any
  Reached range;
  float end;                 // the relative bias of the whole tile where it is clamped, in units of log2
  bool wide;                 // the bias is fp32, otherwise it is of the input type
  bool whole;                // all of the tile is within the sequence
  int rows_left, keys_left;  // of the sequence, from the lane's first score on

  __device__ __forceinline__ TileBias(const AttnParams& p, int b, int h, const Mask32& mask, int row0, int key0)
      : place(mask, row0, key0), head(HeadBias<float>::of(p, b, h)) {
    constexpr int64_t kLongest = 1 << 30;
    reach = static_cast<int>(head.reach < kLongest ? head.reach : kLongest);
    range = reached(head.relative != nullptr, reach, place.tile_distance, kRows, kKeys);
    range = uniform_range();
    end = 0;
    if (range == Reached::kBelow || range == Reached::kAbove) {
      end = head.relative[entry(place.tile_distance)] * kLog2E<float>;
    }
    head.slope *= kLog2E<float>;
    wide = p.bias.dtype == DType::kFloat32;
    whole = row0 + kRows <= mask.seqlen_q && key0 + kKeys <= mask.seqlen_k;
    rows_left = mask.seqlen_q - place.row;
    keys_left = mask.seqlen_k - place.key;
  }

  // The range, so that the compiler knows that all lanes take the same branches: lanes that may not be there cannot
  // exchange sums without function calls, across which products of Hopper do not run.
  __device__ __forceinline__ Reached uniform_range() const {
    return static_cast<Reached>(uniform(static_cast<int>(range)));
  }
  // The entry of the relative bias for a distance.
  __device__ __forceinline__ int entry(int distance) const { return min(max(distance, -reach), reach); }

  // Adds to the logits of column tiles n0 to n0 + kCount, which are in units of log2. Branches that all lanes take
  // alike decide what there is to add. ahead: what load_ahead has read, if it was called.
  template <int kCount>
  __device__ __forceinline__ void add(float (&logits)[kRowTiles][kCount][4], int n0) const {
    add_distances(logits, n0);
    if (head.bias) wide ? add_elements<float>(logits, n0) : add_elements<T>(logits, n0);
  }
  __device__ __forceinline__ void add(float (&logits)[kRowTiles][kColumnTiles][4], Ahead& ahead) const {
    add_distances(logits, 0);
    if (head.bias) wide ? add_elements<float>(logits, 0) : add_ahead(logits, ahead);
  }

  // Reads a bias of 16 bits: 16 bytes at a time where it allows that, which lanes exchange when they use them.
  __device__ __forceinline__ void load_ahead(Ahead& ahead) const {
    static_assert(!kTransposed && kColumnTiles % 4 == 0);
    if (!head.bias || wide) return;
    const T* const first = element<T>(0, 0);
    const bool vectors = in_vectors();
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int rows = 16 * i + 8 * r;
        const T* const row = first + rows * head.row_stride;
        if (vectors) {
#pragma unroll
          for (int n = 0; n < kColumnTiles; n += 4) {
            const uint4 x = *reinterpret_cast<const uint4*>(row + 6 * (threadIdx.x % 4) + 8 * n);
            ahead[i][r][n] = x.x, ahead[i][r][n + 1] = x.y, ahead[i][r][n + 2] = x.z, ahead[i][r][n + 3] = x.w;
          }
        } else {
#pragma unroll
          for (int n = 0; n < kColumnTiles; ++n) {
            uint32_t low = 0, high = 0;
            if (rows < rows_left && 8 * n < keys_left) low = reinterpret_cast<const uint16_t*>(row)[8 * n];
            if (rows < rows_left && 8 * n + 1 < keys_left) high = reinterpret_cast<const uint16_t*>(row)[8 * n + 1];
            ahead[i][r][n] = low | high << 16;
          }
        }
      }
    }
  }

 private:
  template <int kCount, class Body>
  static __device__ __forceinline__ void each(const Body& body) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) body(i, n, e);
      }
    }
  }
  static __device__ __forceinline__ void add_log(float& logit, float bias) {
    logit = add_bias(logit, bias * kLog2E<float>);
  }
  template <class Element>
  __device__ __forceinline__ const Element* element(int rows, int keys) const {
    return static_cast<const Element*>(head.bias) + (place.row + rows) * head.row_stride + place.key + keys;
  }
  // Whether a quad's rows can be read in vectors, 64 bytes for four column tiles.
  __device__ __forceinline__ bool in_vectors() const {
    return whole && reinterpret_cast<uintptr_t>(head.bias) % 16 == 0 && head.row_stride % 8 == 0;
  }

  template <int kCount>
  __device__ __forceinline__ void add_distances(float (&logits)[kRowTiles][kCount][4], int n0) const {
    if (head.slope != 0) {
      const float first = static_cast<float>(place.distance);
      each<kCount>([&](int i, int n, int e) {
        const float on = static_cast<float>(place.distance_on(i, n0 + n, e));
        logits[i][n][e] -= fabsf(first + on) * head.slope;
      });
    }
    if (range == Reached::kSome) {
      if constexpr (kTransposed) {
        each<kCount>([&](int i, int n, int e) {
          add_log(logits[i][n][e], head.relative[entry(place.distance + place.distance_on(i, n0 + n, e))]);
        });
      } else {
        add_relative(logits);
      }
    } else if (range != Reached::kNone) {
      each<kCount>([&](int i, int n, int e) { logits[i][n][e] = add_bias(logits[i][n][e], end); });
    }
  }

  // For all columns of a tile that is not transposed. Scores whose tiles are on the same diagonal have the same
  // entries: two are read for each column tile, for even and odd columns, and those of rows further down were read for
  // the columns before.
  template <int kCount>
  __device__ __forceinline__ void add_relative(float (&logits)[kRowTiles][kCount][4]) const {
    constexpr int kBands = 2 * kRowTiles;
    float recent[kBands][2];  // of rows 8 * k
    auto read = [&](int k, int n) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int distance = place.distance + place.distance_on(k / 2, n, k % 2 * 2 + odd);
        recent[k][odd] = head.relative[entry(distance)] * kLog2E<float>;
      }
    };
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
      for (int k = kBands - 1; k >= 0; --k) {
        if (n == 0 || k == 0) {
          read(k, n);
        } else {
          recent[k][0] = recent[k - 1][0], recent[k][1] = recent[k - 1][1];
        }
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          float& logit = logits[k / 2][n][k % 2 * 2 + odd];
          logit = add_bias(logit, recent[k][odd]);
        }
      }
    }
  }

  // Element: of the bias. What is outside the sequence is not read.
  template <class Element, int kCount>
  __device__ __forceinline__ void add_elements(float (&logits)[kRowTiles][kCount][4], int n0) const {
    constexpr int kTogether = kCount < 4 ? kCount : 4;  // column tiles that are read before the first is used
    static_assert(kCount % kTogether == 0);
    const Element* const first = element<Element>(0, 0);
#pragma unroll
    for (int group = 0; group < kCount; group += kTogether) {
      float bias[kRowTiles][kTogether][4];
      auto read = [&](int i, int n, int e) {
        const int rows = place.rows_on(i, n0 + group + n, e), keys = place.keys_on(i, n0 + group + n, e);
        const bool exists = whole || (rows < rows_left && keys < keys_left);
        bias[i][n][e] = exists ? widen(first[rows * head.row_stride + keys]) : 0.f;
      };
      each<kTogether>(read);
      each<kTogether>([&](int i, int n, int e) { add_log(logits[i][group + n][e], bias[i][n][e]); });
    }
  }

  __device__ __forceinline__ void add_ahead(float (&logits)[kRowTiles][kColumnTiles][4], Ahead& ahead) const {
    const bool vectors = in_vectors();
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int n = 0; n < kColumnTiles; n += 4) {
          uint32_t pairs[4] = {ahead[i][r][n], ahead[i][r][n + 1], ahead[i][r][n + 2], ahead[i][r][n + 3]};
          if (vectors) transpose_quad(pairs);
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            const float2 bias = TensorCore<Narrow>::unpack(pairs[m]);
            add_log(logits[i][n + m][2 * r], bias.x);
            add_log(logits[i][n + m][2 * r + 1], bias.y);
          }
        }
      }
    }
  }
  // A bias that is not wide has 16 bits. With fp32 inputs there is none.
  using Narrow = std::conditional_t<sizeof(T) == 2, T, __nv_bfloat16>;
};

}  // namespace flashattn_ext
