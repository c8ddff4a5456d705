// What the kernel of decoding (split.cuh) does differently for each type of keys and values. A format is a member of
// the kernel's object and may hold registers there.
//   kPack                     adjacent elements of keys and values that one element of a tile in shared memory holds
//   ValueCore                 the tensor cores for the product with the values
//   kSoftmaxHasSink           whether the sink is in the online softmax of a part, or the epilogue counts it
//   start_part(p, part)       called before the first product of a part
//   widen_query(...)          writes a vector of q to shared memory if q needs a conversion, and returns whether it
//   does query_operand, score_product, accumulate
//                             the products of products.cuh
//   score_rule(score)         the rule that makes products logits
//   store_sums(to, x, r)      writes a lane's columns of row r of accumulators to a row in shared memory
//   value_factor(p, part)     the factor of the output
//   store(p, x, ...)          writes columns of a row of the output
#pragma once

#include "../common/fp8.cuh"
#include "../common/fp8_products.cuh"
#include "../common/general_score.cuh"
#include "../common/products.cuh"
#include "plan.cuh"

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
template <class Key>
struct KeyFormat {
  using T = Key;
  using Core = TensorCore<T>;
  using ValueCore = Core;
  static constexpr int kPack = 1;
  static constexpr bool kSoftmaxHasSink = true;

  __device__ __forceinline__ void start_part(const DecodeParams&, const Part&) {}
  static __device__ __forceinline__ bool widen_query(const DecodeParams&, T*, int, int, int64_t, int, int) {
    return false;
  }
  static __device__ __forceinline__ typename Core::A query_operand(const T* tile, int stride, int row, int column) {
    return Core::load_a(tile, stride, row, column);
  }
  template <int kHeadDim, class Scores, class A, class B>
  static __device__ __forceinline__ void score_product(Scores& scores, const A& a, const B& b) {
    flashattn_ext::score_product<T, kHeadDim>(scores, a, b);
  }
  template <int kSteps, class Sums, class A, class B>
  static __device__ __forceinline__ void accumulate(Sums& sums, const A& a, const B& b) {
    flashattn_ext::accumulate<T, kSteps>(sums, a, b);
  }
  __device__ __forceinline__ const GeneralScore& score_rule(const GeneralScore& score) const { return score; }
  template <int N>
  static __device__ __forceinline__ void store_sums(float* to, const float (&x)[N][4], int r) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      *reinterpret_cast<float2*>(to + n * 8 + 2 * t()) = make_float2(x[n][2 * r], x[n][2 * r + 1]);
    }
  }
  static __device__ __forceinline__ float value_factor(const DecodeParams&, const Part&) { return 1.f; }
  static __device__ __forceinline__ void store(const DecodeParams& p, const float (&x)[4], int b, int head, int64_t row,
                                               int column, int columns) {
    store_columns<T>(p.out, x, b, head, row, column, columns);
  }
};

// Keys and values in fp8, q in bfloat16 or fp8 (fp8_products.cuh).
template <>
struct KeyFormat<Float8> {
  using T = __nv_bfloat16;
  using Core = TensorCore<T>;
  using ValueCore = TensorCore<__half>;
  static constexpr int kPack = 2;
  // Weights relative to a sink far above the logits would vanish in float16.
  static constexpr bool kSoftmaxHasSink = false;

  float of_products;  // descale_q * descale_k

  __device__ __forceinline__ void start_part(const DecodeParams& p, const Part& part) {
    of_products = p.descale_q.of(part.b, part.head_k) * p.descale_k.of(part.b, part.head_k);
  }
  static __device__ __forceinline__ bool widen_query(const DecodeParams& p, T* to, int b, int head, int64_t row,
                                                     int column, int elements) {
    if (p.dtype != DType::kFloat8) return false;
    *reinterpret_cast<uint4*>(to) = widen_vector(row_pointer<const Float8>(p.q, b, head, row) + column, elements);
    return true;
  }
  static __device__ __forceinline__ Core::A query_operand(const T* tile, int stride, int row, int column) {
    return load_query(tile + row * stride, stride, column);
  }
  template <int kHeadDim, class Scores, class A, class B>
  static __device__ __forceinline__ void score_product(Scores& scores, const A& a, const B& b) {
    score_product_fp8<kHeadDim>(scores, a, words_of(b));
  }
  template <int kSteps, class Sums, class A, class B>
  static __device__ __forceinline__ void accumulate(Sums& sums, const A& a, const B& b) {
    accumulate_fp8<kSteps>(sums, a, words_of(b));
  }
  __device__ __forceinline__ GeneralScore score_rule(const GeneralScore& score) const {
    return score.times(of_products);
  }
  // Tile n holds the even ones of 16 columns, and tile n + 1 the odd ones.
  template <int N>
  static __device__ __forceinline__ void store_sums(float* to, const float (&x)[N][4], int r) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      const float (&even)[4] = x[n], (&odd)[4] = x[n + 1];
      *reinterpret_cast<float4*>(to + n * 8 + 4 * t()) =
          make_float4(even[2 * r], odd[2 * r], even[2 * r + 1], odd[2 * r + 1]);
    }
  }
  static __device__ __forceinline__ float value_factor(const DecodeParams& p, const Part& part) {
    return p.descale_v.of(part.b, part.head_k);
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
