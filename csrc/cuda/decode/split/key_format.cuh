// What the kernel of decoding (split.cuh) does differently for each type of keys and values. A format is a member of
// the kernel's object and may hold registers there.
//   kPack                     adjacent elements of keys and values that one element of a tile in shared memory holds
//   kSparesInstructions       whether the lanes of a warp divide runs of keys among them and pages are found without
//                             a division, because conversions take many instructions
//   kSoftmaxHasSink           whether the sink is in the online softmax of a part, or the epilogue counts it
//   widen_query(...)          writes a vector of q to shared memory if q needs a conversion, and returns whether it
//                             does
//   kPreparesQueries, prepare_query(row)
//                             whether a warp has to change each row of q in shared memory before it is an operand
//   start_part(p, b, key_head, row)
//                             called before the first product of a part; key_head(i, r), row(i, r): KV head and q in
//                             shared memory of row r of this lane in row tile i
//   score_product, accumulate the products of products.cuh
//   make_logits(score, x, has_slopes)
//                             products become stored scores; returns the rule for OnlineSoftmax::weigh
//   store_sums(to, x, r)      writes a lane's columns of row r of accumulators to a row in shared memory
//   value_factor(p, b, head)  the factor of the output
//   store(p, x, ...)          writes columns of a row of the output
#pragma once

#include "cuda/decode/split/plan.cuh"
#include "cuda/score/general_score.cuh"
#include "cuda/tile/fp8.cuh"
#include "cuda/tile/fp8_products.cuh"
#include "cuda/tile/products.cuh"

namespace flashattn_ext::decode {

// Writes four columns of a row to a view of type X, those that exist.
template <class X>
__device__ __forceinline__ void store_columns(const TensorView& view, const float (&x)[4], int b, int head, int64_t row,
                                              int column, int columns) {
  X* const to = row_pointer<X>(view, b, head, row) + column;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (column + e < columns) narrow(x[e], to + e);
  }
}

// Keys and values of the type of q.
template <class Key, int kRowTiles>
struct KeyFormat {
  using T = Key;
  using Core = TensorCore<T>;
  static constexpr int kPack = 1;
  static constexpr bool kSparesInstructions = false;
  static constexpr bool kSoftmaxHasSink = true;
  static constexpr bool kPreparesQueries = false;

  template <int kHeadDim>
  static __device__ __forceinline__ void prepare_query(T*) {}
  template <int kHeadDim, class HeadOf, class RowOf>
  __device__ __forceinline__ void start_part(const DecodeParams&, int, const HeadOf&, const RowOf&) {}
  static __device__ __forceinline__ bool widen_query(const DecodeParams&, T*, int, int, int64_t, int, int) {
    return false;
  }
  template <int kHeadDim, class Scores, class A, class B>
  static __device__ __forceinline__ void score_product(Scores& scores, const A& a, const B& b) {
    flashattn_ext::score_product<T, kHeadDim>(scores, a, b);
  }
  template <int kSteps, class Sums, class A, class B>
  static __device__ __forceinline__ void accumulate(Sums& sums, const A& a, const B& b) {
    flashattn_ext::accumulate<T, kSteps>(sums, a, b);
  }
  template <class Scores>
  static __device__ __forceinline__ auto make_logits(const GeneralScore& score, Scores& x, bool has_slopes) {
    return make_scores<T>(score, x, has_slopes);
  }
  template <int N>
  static __device__ __forceinline__ void store_sums(float* to, const float (&x)[N][4], int r) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      *reinterpret_cast<float2*>(to + n * 8 + 2 * lane_in_quad()) = make_float2(x[n][2 * r], x[n][2 * r + 1]);
    }
  }
  static __device__ __forceinline__ float value_factor(const DecodeParams&, int, int) { return 1.f; }
  static __device__ __forceinline__ void store(const DecodeParams& p, const float (&x)[4], int b, int head, int64_t row,
                                               int column, int columns) {
    store_columns<T>(p.out, x, b, head, row, column, columns);
  }
};

// Keys and values in fp8, q in bfloat16 or fp8 (fp8_products.cuh). A row of q is in shared memory as bfloat16 before
// prepare_query, and then as float16 times a power of two, with the factor of its products behind it, in the padding.
template <int kRowTiles>
struct KeyFormat<Float8, kRowTiles> {
  using T = __half;
  using Core = TensorCore<T>;
  static constexpr bool kPreparesQueries = true;
  static constexpr int kPack = 2;
  static constexpr bool kSparesInstructions = true;
  // Weights relative to a sink far above the logits would vanish in float16.
  static constexpr bool kSoftmaxHasSink = false;

  float of_products[kRowTiles][2];  // factors of products in the lane's rows: descales times the factor of the row

  template <int kHeadDim>
  static __device__ __forceinline__ void prepare_query(T* row) {
    const float factor = flashattn_ext::prepare_query<kHeadDim>(row);
    if (threadIdx.x % 32 == 0) *reinterpret_cast<float*>(row + kHeadDim) = factor;
  }
  template <int kHeadDim, class HeadOf, class RowOf>
  __device__ __forceinline__ void start_part(const DecodeParams& p, int b, const HeadOf& key_head, const RowOf& row) {
    unrolled<kRowTiles, 2>([&](int i, int r) {
      const float descale = p.descale_q.of(b, key_head(i, r)) * p.descale_k.of(b, key_head(i, r));
      of_products[i][r] = descale * *reinterpret_cast<const float*>(row(i, r) + kHeadDim);
    });
  }
  static __device__ __forceinline__ bool widen_query(const DecodeParams& p, T* to, int b, int head, int64_t row,
                                                     int column, int elements) {
    if (p.dtype != DType::kFloat8) return false;
    *reinterpret_cast<uint4*>(to) = widen_vector(row_pointer<const Float8>(p.q, b, head, row) + column, elements);
    return true;
  }
  template <int kHeadDim, class Scores, class A, class B>
  static __device__ __forceinline__ void score_product(Scores& scores, const A& a, const B& b) {
    score_product_fp8<kHeadDim>(scores, a, words_of(b));
  }
  template <int kSteps, class Sums, class A, class B>
  static __device__ __forceinline__ void accumulate(Sums& sums, const A& a, const B& b) {
    accumulate_fp8<kSteps>(sums, a, words_of(b));
  }
  template <class Scores>
  __device__ __forceinline__ StoredLogit make_logits(const GeneralScore& score, Scores& x, bool) const {
    flashattn_ext::make_logits<__nv_bfloat16>(score, x, of_products);
    return {};
  }
  // Tile n holds the even ones of 16 columns, and tile n + 1 the odd ones.
  template <int N>
  static __device__ __forceinline__ void store_sums(float* to, const float (&x)[N][4], int r) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      const float (&even)[4] = x[n], (&odd)[4] = x[n + 1];
      *reinterpret_cast<float4*>(to + n * 8 + 4 * lane_in_quad()) =
          make_float4(even[2 * r], odd[2 * r], even[2 * r + 1], odd[2 * r + 1]);
    }
  }
  static __device__ __forceinline__ float value_factor(const DecodeParams& p, int b, int key_head) {
    return p.descale_v.of(b, key_head) * kOperandUnit;
  }
  static __device__ __forceinline__ void store(const DecodeParams& p, const float (&x)[4], int b, int head, int64_t row,
                                               int column, int columns) {
    if (p.out_dtype == DType::kBFloat16) {
      store_columns<__nv_bfloat16>(p.out, x, b, head, row, column, columns);
    } else if (p.out_dtype == DType::kFloat16) {
      store_columns<__half>(p.out, x, b, head, row, column, columns);
    } else {
      store_columns<float>(p.out, x, b, head, row, column, columns);
    }
  }

 private:
  // The operands that `load` reads, as words of four elements.
  template <class Load>
  static __device__ __forceinline__ auto words_of(const Load& load) {
    return [&](uint32_t (&words)[2][2], int n, int d) {
      Core::B pair[2];
      load(pair, n, d);
#pragma unroll
      for (int m = 0; m < 2; ++m) words[m][0] = pair[m].x[0], words[m][1] = pair[m].x[1];
    };
  }
};

}  // namespace flashattn_ext::decode
