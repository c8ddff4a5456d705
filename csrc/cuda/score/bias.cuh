// Biases in accumulator tiles: the terms added to the scores that a lane holds, in units of log2 (rules/bias.h has the
// definition).
#pragma once

#include <type_traits>

#include "cuda/score/distance_bias.cuh"
#include "cuda/tile/warp.cuh"

namespace flashattn_ext {

// Adds an element of a bias to a logit in units of log2, rounded once in every kernel. Element: of the bias; fp16 has
// no number that narrowed() changes.
template <class Element>
__device__ __forceinline__ void add_log(float& logit, float bias) {
  const float narrow = std::is_same_v<Element, __half> ? bias : narrowed_beyond(kNarrowsFrom<float>, bias);
  logit = bias == -infinity() ? -infinity() : fmaf(narrow, kLog2E<float>, logit);
}

// The biases of one head and one tile of a warp, of kRowTiles row tiles and kColumnTiles column tiles of accumulators.
// T: the input type.
template <class T, bool kTransposed, int kRowTiles, int kColumnTiles>
struct TileBias : DistanceBias<kTransposed, kRowTiles, kColumnTiles> {
  using Distances = DistanceBias<kTransposed, kRowTiles, kColumnTiles>;
  using Distances::head, Distances::place;
  using Element = T;
  static constexpr bool kHasElements = true;
  // A lane's prefetched elements of a 16-bit bias tile, in pairs of neighbouring keys: rows g and g + 8 of each row
  // tile. They are loaded before the wait for the product of the scores.
  using Ahead = uint32_t[kRowTiles][2][kColumnTiles];

  bool has_bias;             // a bias of any shape
  bool wide;                 // the bias is fp32, otherwise it is of the input type
  bool whole;                // all of the tile is within the sequence
  int rows_left, keys_left;  // rows and keys of the sequence from the lane's first score on

  __device__ __forceinline__ TileBias(const AttnParams& p, int b, int h, const Mask32& mask, int row0, int key0)
      : Distances(p, b, h, mask, row0, key0) {
    has_bias = p.bias.data != nullptr;
    wide = p.bias.dtype == DType::kFloat32;
    whole = row0 + Distances::kRows <= mask.seqlen_q && key0 + Distances::kKeys <= mask.seqlen_k;
    rows_left = mask.seqlen_q - place.row;
    keys_left = mask.seqlen_k - place.key;
  }

  __device__ __forceinline__ bool has_any() const { return has_bias || Distances::has_any(); }

  // Adds the biases to the logits, in units of log2, of column tiles [n0, n0 + kCount). All branches are warp-uniform.
  // ahead: the elements that load_ahead has read.
  template <int kCount>
  __device__ __forceinline__ void add_columns(float (&logits)[kRowTiles][kCount][4], int n0) const {
    Distances::add_columns(logits, n0);
    if (has_bias) wide ? add_elements<float>(logits, n0) : add_elements<T>(logits, n0);
  }
  __device__ __forceinline__ void add(float (&logits)[kRowTiles][kColumnTiles][4], Ahead& ahead) const {
    Distances::add_to_logits(logits);
    if (has_bias) wide ? add_elements<float>(logits, 0) : add_ahead(logits, ahead);
  }

  // Prefetches a 16-bit bias, with 16-byte loads where its alignment allows them; add_ahead then exchanges their words
  // between lanes.
  __device__ __forceinline__ void load_ahead(Ahead& ahead) const {
    static_assert(!kTransposed && kColumnTiles % 4 == 0);
    if (!has_bias || wide) return;
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
            const uint4 x = *reinterpret_cast<const uint4*>(row + 6 * lane_in_quad() + 8 * n);
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

 protected:
  template <class Element>
  __device__ __forceinline__ const Element* element(int rows, int keys) const {
    return static_cast<const Element*>(head.bias) + (place.row + rows) * head.row_stride + place.key + keys;
  }
  // Whether a quad of lanes can read its rows in 16-byte vectors: 64 bytes for four column tiles.
  __device__ __forceinline__ bool in_vectors() const {
    return whole && reinterpret_cast<uintptr_t>(head.bias) % 16 == 0 && head.row_stride % 8 == 0;
  }

  // Element: of the bias. Elements outside the sequence are not read.
  template <class Element, int kCount>
  __device__ __forceinline__ void read_elements(float (&bias)[kRowTiles][kCount][4], int n0) const {
    const Element* const first = element<Element>(0, 0);
    each_element<kRowTiles, kCount>([&](int i, int n, int e) {
      const int rows = place.rows_on(i, n0 + n, e), keys = place.keys_on(i, n0 + n, e);
      const bool exists = whole || (rows < rows_left && keys < keys_left);
      bias[i][n][e] = exists ? widen(first[rows * head.row_stride + keys]) : 0.f;
    });
  }
  template <class Element, int kCount>
  __device__ __forceinline__ void add_elements(float (&logits)[kRowTiles][kCount][4], int n0) const {
    constexpr int kTogether = kCount < 4 ? kCount : 4;  // column tiles that are read before the first is used
    static_assert(kCount % kTogether == 0);
#pragma unroll
    for (int group = 0; group < kCount; group += kTogether) {
      float bias[kRowTiles][kTogether][4];
      read_elements<Element>(bias, n0 + group);
      each_element<kRowTiles, kTogether>(
          [&](int i, int n, int e) { add_log<Element>(logits[i][group + n][e], bias[i][n][e]); });
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
            add_log<Narrow>(logits[i][n + m][2 * r], bias.x);
            add_log<Narrow>(logits[i][n + m][2 * r + 1], bias.y);
          }
        }
      }
    }
  }
  // The type of a bias that is not `wide`, which has 16 bits. With fp32 inputs every bias is fp32.
  using Narrow = std::conditional_t<sizeof(T) == 2, T, __nv_bfloat16>;
};

// Where a warp's tile of scores is, on which its biases depend: it begins at row `row` and key `key` of a head.
template <class Mask>
struct TileCoordinates {
  int b, h;
  Mask mask;
  int row, key;

  // p: the call, or the tangents of one.
  template <class Bias>
  __device__ __forceinline__ Bias bias(const AttnParams& p) const {
    return Bias(p, b, h, mask, row, key);
  }
};
template <class Mask>
TileCoordinates(int, int, Mask, int, int) -> TileCoordinates<Mask>;

// A TileBias with elements that `read` has loaded before the products of the tile, which hide their latency.
template <class T, bool kTransposed, int kRowTiles, int kColumnTiles>
struct TileBiasAhead : TileBias<T, kTransposed, kRowTiles, kColumnTiles> {
  using Base = TileBias<T, kTransposed, kRowTiles, kColumnTiles>;
  float elements[kRowTiles][kColumnTiles][4];

  using Base::Base;
  __device__ __forceinline__ void read() {
    if (this->has_bias)
      this->wide ? Base::template read_elements<float>(elements, 0) : Base::template read_elements<T>(elements, 0);
  }
  template <int kCount>
  __device__ __forceinline__ void add_columns(float (&logits)[kRowTiles][kCount][4], int n0) const {
    Base::Distances::add_columns(logits, n0);
    if (!this->has_bias) return;
    each_element<kRowTiles, kCount>(
        [&](int i, int n, int e) { add_log<float>(logits[i][n][e], elements[i][n0 + n][e]); });
  }
};

}  // namespace flashattn_ext
