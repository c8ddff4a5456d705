// A warp: its lanes, exchanges between them, and its products, TensorCore<T>, for every input type with the same names.
//
// Layout of a 16x8 accumulator tile: lane l holds row g, columns 2t and 2t + 1 in [0] and [1], and row g + 8, the same
// columns, in [2] and [3], with g = l / 4 and t = l % 4 (PTX ISA, "Matrix Fragments for mma.m16n8k16"). Operands come
// from tiles in shared memory (operand_tile.cuh; here from padded ones) or from accumulators.
//
// fp32 products are sums of three TF32 products of the leading and trailing parts of both operands, which keeps fp32
// accuracy (Ootomo and Yokota 2022, "Recovering single precision accuracy from Tensor Cores"). Where A comes from
// accumulators, slot t of the contracted axis stands for index 2t and slot t + 4 for 2t + 1, so that accumulators are
// operands as they are; B from a transposed tile has the same order.
#pragma once

#include <cstdint>

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/memory.cuh"

namespace flashattn_ext {

// A lane's number, its quad, which comments call g, and its number there, t. Of a 16x8 tile it holds rows g and g + 8
// and columns 2t and 2t + 1. The PTX ISA names them groupID and threadID_in_group.
__device__ __forceinline__ int lane() { return threadIdx.x % 32; }
__device__ __forceinline__ int quad() { return threadIdx.x % 32 / 4; }
__device__ __forceinline__ int lane_in_quad() { return threadIdx.x % 4; }

// The value of lane 0, in all lanes: the compiler then knows that it is warp-uniform.
template <class X>
__device__ __forceinline__ X uniform(X x) {
  return __shfl_sync(~0u, x, 0);
}

// An address in shared memory as lane 0 has it. Where control flow is too involved for the compiler to infer that, the
// values that depend on such an address (stages and operands of products) are then in uniform registers.
template <class X>
__device__ __forceinline__ X& uniform_shared(X& x) {
  return *static_cast<X*>(ptx::shared_pointer(uniform(ptx::shared_address(&x))));
}

// Over the four lanes that share an accumulator row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Four sums over these lanes; lane t gets the sum of x[t].
__device__ __forceinline__ float quad_sum_of_own(const float (&x)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  float pair[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    pair[i] = (odd ? x[2 * i + 1] : x[2 * i]) + __shfl_xor_sync(~0u, odd ? x[2 * i] : x[2 * i + 1], 1);
  }
  return (upper ? pair[1] : pair[0]) + __shfl_xor_sync(~0u, upper ? pair[0] : pair[1], 2);
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}

// Transposes four words in each of four lanes: lane t gets word t of every lane, in the order of lanes. kLanes: 1 for
// neighbouring lanes; or how far apart the lanes are, a power of two, with t the number among the four.
template <int kLanes = 1, class Word>
__device__ __forceinline__ void transpose_quad(Word (&x)[4]) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = threadIdx.x & step * kLanes;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const Word received = __shfl_xor_sync(~0u, upper ? x[i] : x[i + step], step * kLanes);
      (upper ? x[i] : x[i + step]) = received;
    }
  }
}

// Calls body(i, n) for all i < kFirst and n < kSecond. The loops are unrolled, so that both are constants there:
// indices of values in registers have to be.
template <int kFirst, int kSecond, class Body>
__device__ __forceinline__ void unrolled(const Body& body) {
#pragma unroll
  for (int i = 0; i < kFirst; ++i) {
#pragma unroll
    for (int n = 0; n < kSecond; ++n) body(i, n);
  }
}

// Calls body(row tile, column tile, element) for all elements of kRowTiles x kColumnTiles accumulator tiles.
template <int kRowTiles, int kColumnTiles, class Body>
__device__ __forceinline__ void each_element(const Body& body) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) body(i, n, e);
    }
  }
}

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void narrow(float x, float* to) { *to = x; }
__device__ __forceinline__ void narrow(float x, __half* to) { *to = __float2half_rn(x); }
__device__ __forceinline__ void narrow(float x, __nv_bfloat16* to) { *to = __float2bfloat16_rn(x); }

template <int N>
__device__ __forceinline__ void set_zero(float (&accumulators)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) accumulators[n][e] = 0;
  }
}

template <class T>
struct TensorCore {  // __half, __nv_bfloat16
  static constexpr int kK = 16;
  struct A {
    uint32_t x[4];
  };
  struct B {
    uint32_t x[2];
  };

  // A(m, k) = tile[row + m][k0 + k]
  static __device__ __forceinline__ A load_a(const T* tile, int stride, int row, int k0) {
    const int lane = threadIdx.x % 32;
    A a;
    ptx::ldmatrix(a.x, tile + (row + lane % 16) * stride + k0 + lane / 16 * 8);
    return a;
  }
  // A with k in the order of accumulators, which B from a transposed tile has.
  static __device__ __forceinline__ A load_a_paired(const T* tile, int stride, int row, int k0) {
    return load_a(tile, stride, row, k0);
  }
  // A(m, k) = tile[k0 + k][row + m]
  static __device__ __forceinline__ A load_a_transposed(const T* tile, int stride, int k0, int row) {
    const int lane = threadIdx.x % 32;
    A a;
    ptx::ldmatrix_transposed(a.x, tile + (k0 + lane % 8 + lane / 16 * 8) * stride + row + lane / 8 % 2 * 8);
    return a;
  }
  // A from accumulators of columns [kK * step, kK * (step + 1)).
  template <int N>
  static __device__ __forceinline__ A from_accumulators(const float (&c)[N][4], int step) {
    const float (&low)[4] = c[2 * step], (&high)[4] = c[2 * step + 1];
    return {{pack(low[0], low[1]), pack(low[2], low[3]), pack(high[0], high[1]), pack(high[2], high[3])}};
  }
  // a: accumulators as A. Zeroes elements of columns [16 * block, 16 * block + 16) whose byte has its top bit clear:
  // byte 2 * (column / 8 % 2) + row / 8 of `even` or `odd`, as the column is.
  template <int N>
  static __device__ __forceinline__ void mask(A (&a)[N], int block, uint32_t even, uint32_t odd) {
#pragma unroll
    for (int byte = 0; byte < 4; ++byte) a[block].x[byte] &= ptx::permute_bytes(even, odd, 0xCC88 + 0x1111 * byte);
  }
  // kTransposed: the transposed product has the same bits.
  template <bool kTransposed = false>
  static __device__ __forceinline__ void mma(float (&d)[4], const A& a, const B& b) {
    ptx::mma(d, a.x, b.x, T());
  }

  static __device__ __forceinline__ uint32_t pack(float low, float high);
  static __device__ __forceinline__ float2 unpack(uint32_t pair);
  static __device__ __forceinline__ uint32_t not_negative(uint32_t pair);  // negative numbers become 0, NaN stays
  // Stores two neighbouring elements, 4-byte aligned.
  static __device__ __forceinline__ void store_pair(T* to, float x, float y) {
    *reinterpret_cast<uint32_t*>(to) = pack(x, y);
  }
};

template <>
__device__ __forceinline__ uint32_t TensorCore<__half>::pack(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ float2 TensorCore<__half>::unpack(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}
template <>
__device__ __forceinline__ uint32_t TensorCore<__half>::not_negative(uint32_t pair) {
  return ptx::max_f16x2(pair, 0);
}
template <>
__device__ __forceinline__ uint32_t TensorCore<__nv_bfloat16>::pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ float2 TensorCore<__nv_bfloat16>::unpack(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
}
template <>
__device__ __forceinline__ uint32_t TensorCore<__nv_bfloat16>::not_negative(uint32_t pair) {
  return ptx::max_bf16x2(pair, 0);
}

template <>
struct TensorCore<float> {
  static constexpr int kK = 8;
  struct A {
    float x[4];
  };
  struct B {
    float x[2];
  };

  static __device__ __forceinline__ A load_a(const float* tile, int stride, int row, int k0) {
    const int lane = threadIdx.x % 32;
    uint32_t r[4];
    ptx::ldmatrix(r, tile + (row + lane % 16) * stride + k0 + lane / 16 * 4);
    return {{__uint_as_float(r[0]), __uint_as_float(r[1]), __uint_as_float(r[2]), __uint_as_float(r[3])}};
  }
  static __device__ __forceinline__ A load_a_paired(const float* tile, int stride, int row, int k0) {
    const float* at = tile + (row + quad()) * stride + k0 + 2 * lane_in_quad();
    const float2 low = *reinterpret_cast<const float2*>(at), high = *reinterpret_cast<const float2*>(at + 8 * stride);
    return {{low.x, high.x, low.y, high.y}};
  }
  static __device__ __forceinline__ A load_a_transposed(const float* tile, int stride, int k0, int row) {
    const float* even = tile + (k0 + 2 * lane_in_quad()) * stride + row + quad();
    return {{even[0], even[8], even[stride], even[stride + 8]}};
  }
  template <int N>
  static __device__ __forceinline__ A from_accumulators(const float (&c)[N][4], int step) {
    return {{c[step][0], c[step][2], c[step][1], c[step][3]}};
  }
  template <int N>
  static __device__ __forceinline__ void mask(A (&a)[N], int block, uint32_t even, uint32_t odd) {
#pragma unroll
    for (int byte = 0; byte < 4; ++byte) {
      float (&x)[4] = a[2 * block + byte / 2].x;
      x[byte % 2] = __uint_as_float(__float_as_uint(x[byte % 2]) & ptx::permute_bytes(even, 0, 0x8888 + 0x1111 * byte));
      x[2 + byte % 2] =
          __uint_as_float(__float_as_uint(x[2 + byte % 2]) & ptx::permute_bytes(odd, 0, 0x8888 + 0x1111 * byte));
    }
  }
  // kTransposed: the product has the bits of that of b and a, with its terms in the same order.
  template <bool kTransposed = false>
  static __device__ __forceinline__ void mma(float (&d)[4], const A& a, const B& b) {
    uint32_t a_lead[4], a_trail[4], b_lead[2], b_trail[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) split(a.x[i], &a_lead[i], &a_trail[i]);
#pragma unroll
    for (int i = 0; i < 2; ++i) split(b.x[i], &b_lead[i], &b_trail[i]);
    // Tensor cores truncate the bits of products below those of their sum. So they add only the products of this step,
    // and an ordinary addition adds the sum.
    float part[4] = {};
    if constexpr (kTransposed) ptx::mma_tf32(part, a_lead, b_trail);
    ptx::mma_tf32(part, a_trail, b_lead);
    if constexpr (!kTransposed) ptx::mma_tf32(part, a_lead, b_trail);
    ptx::mma_tf32(part, a_lead, b_lead);
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] += part[i];
  }
  static __device__ __forceinline__ void store_pair(float* to, float x, float y) {
    *reinterpret_cast<float2*>(to) = make_float2(x, y);
  }

 private:
  // x as a sum of two TF32 numbers. The product ignores the low 13 bits of an operand. The leading number is rounded to
  // nearest by hand, which is quicker than cvt.rna. The remainder has 12 bits at most, of which the product drops at
  // most the last: rounding it would gain nothing, and would turn the NaN that arithmetic makes, 0x7FFFFFFF, into -0.
  static __device__ __forceinline__ void split(float x, uint32_t* lead, uint32_t* trail) {
    constexpr uint32_t kHalf = 0x1000u, kIgnored = 0x1FFFu;
    *lead = (__float_as_uint(x) + kHalf) & ~kIgnored;
    *trail = __float_as_uint(x - __uint_as_float(*lead));
  }
};

}  // namespace flashattn_ext
