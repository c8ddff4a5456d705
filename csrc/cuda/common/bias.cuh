// Biases in accumulator tiles: what is added to the scores that a lane holds, in units of log2 (../../bias.h has the
// definition).
#pragma once

#include "../../bias.h"
#include "rows.cuh"
#include "tensor_core.cuh"

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
enum class Reached { kNone, kBelow, kAbove, kWhole, kPart };  // kNone: there is no relative bias

// rows, keys: extent of the tile. kBelow, kAbove: all distances are clamped, to the same end. kWhole: none is.
__device__ __forceinline__ Reached reached(const HeadBias<float>& head, int tile_distance, int rows, int keys) {
  const int64_t lowest = int64_t{tile_distance} - (rows - 1), highest = int64_t{tile_distance} + (keys - 1);
  if (!head.relative) return Reached::kNone;
  if (highest <= -head.reach) return Reached::kBelow;
  if (lowest >= head.reach) return Reached::kAbove;
  return -head.reach <= lowest && highest <= head.reach ? Reached::kWhole : Reached::kPart;
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

  Place<kTransposed> place;
  HeadBias<float> head;
  Reached range;
  float end;                 // the relative bias of the whole tile where it is clamped, in units of log2
  bool wide;                 // the bias is fp32, otherwise it is of the input type
  bool pairs;                // two neighbouring elements of the bias can be read at once
  int rows_left, keys_left;  // of the sequence, from the lane's first score on

  __device__ __forceinline__ TileBias(const AttnParams& p, int b, int h, const Mask32& mask, int row0, int key0)
      : place(mask, row0, key0), head(HeadBias<float>::of(p, b, h)) {
    range = reached(head, place.tile_distance, kRows, kKeys);
    end = 0;
    if (range == Reached::kBelow || range == Reached::kAbove) {
      end = head.relative[head.entry(place.tile_distance)] * kLog2E<float>;
    }
    head.slope *= kLog2E<float>;
    wide = p.bias.dtype == DType::kFloat32;
    const int bytes = wide ? 4 : static_cast<int>(sizeof(T));
    pairs = reinterpret_cast<uintptr_t>(head.bias) % (2 * bytes) == 0 && head.row_stride % 2 == 0;
    rows_left = mask.seqlen_q - place.row;
    keys_left = mask.seqlen_k - place.key;
  }

  // Adds to the logits of column tile n, which are in units of log2.
  __device__ __forceinline__ void add(float (&logits)[kRowTiles][4], int n) const {
    if (head.slope != 0) {
      const float first = static_cast<float>(place.distance);
      each([&](int i, int e) {
        logits[i][e] -= head.slope * fabsf(first + static_cast<float>(place.distance_on(i, n, e)));
      });
    }
    if (range == Reached::kWhole) {
      const float* const first = head.relative + place.distance;
      each([&](int i, int e) { add_log(logits[i][e], first[place.distance_on(i, n, e)]); });
    } else if (range == Reached::kPart) {
      each([&](int i, int e) {
        add_log(logits[i][e], head.relative[head.entry(place.distance + place.distance_on(i, n, e))]);
      });
    } else if (range != Reached::kNone) {
      each([&](int i, int e) { logits[i][e] = add_bias(logits[i][e], end); });
    }
    if (head.bias) wide ? add_elements<float>(logits, n) : add_elements<T>(logits, n);
  }

 private:
  template <class Body>
  static __device__ __forceinline__ void each(const Body& body) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) body(i, e);
    }
  }
  static __device__ __forceinline__ void add_log(float& logit, float bias) {
    logit = add_bias(logit, bias * kLog2E<float>);
  }

  // Element: of the bias. What is outside the sequence is not read.
  template <class Element>
  __device__ __forceinline__ void add_elements(float (&logits)[kRowTiles][4], int n) const {
    const Element* const first = static_cast<const Element*>(head.bias) + place.row * head.row_stride + place.key;
    float bias[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const int rows = place.rows_on(i, n, e), keys = place.keys_on(i, n, e);
        const Element* const from = first + rows * head.row_stride + keys;
        if constexpr (!kTransposed) {
          const bool exists = rows < rows_left && keys + 1 < keys_left;
          if (pairs && exists) {
            const float2 pair = TensorCore<Element>::load_pair(from);
            bias[i][e] = pair.x;
            bias[i][e + 1] = pair.y;
          } else {
            bias[i][e] = rows < rows_left && keys < keys_left ? widen(from[0]) : 0.f;
            bias[i][e + 1] = exists ? widen(from[1]) : 0.f;
          }
        } else {
          const bool exists = keys < keys_left;
          bias[i][e] = exists && rows < rows_left ? widen(from[0]) : 0.f;
          bias[i][e + 1] = exists && rows + 1 < rows_left ? widen(from[head.row_stride]) : 0.f;
        }
      }
    }
    each([&](int i, int e) { add_log(logits[i][e], bias[i][e]); });
  }
};

}  // namespace flashattn_ext
