// Arithmetic instructions, one in each wrapper.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flashattn_ext::ptx {

// x, as a value that is opaque to the compiler: expressions of it are computed where they are used and not kept in
// registers.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// 2^x; exp2(-inf) = 0.
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// The logarithm of x to base 2; -inf for 0.
__device__ __forceinline__ float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// tanh(x), with a relative error of at most 2^-11.
__device__ __forceinline__ float tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, with a relative error of at most 2^-23.
__device__ __forceinline__ float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
// 1 / x, computed where it is used, in a branch say, and not kept in a register ahead of a loop.
__device__ __forceinline__ float rcp_here(float x) {
  float y;
  asm volatile("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// The smaller and the larger number; NaN when either is NaN.
__device__ __forceinline__ float min_nan(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;\n" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;\n" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
// Four e4m3 numbers as float16: bytes 0 and 1 of x as the low and the high half of `low`, bytes 2 and 3 as those of
// `high`. The two halves of x are named by mov, because the instruction reads either without a shift then.
__device__ __forceinline__ void halves_of_e4m3x4(uint32_t x, uint32_t* low, uint32_t* high) {
  asm("{\n.reg .b16 first, second;\n"
      "mov.b32 {first, second}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, first;\n"
      "cvt.rn.f16x2.e4m3x2 %1, second;\n}\n"
      : "=r"(*low), "=r"(*high)
      : "r"(x));
}
#endif

// Four numbers as e4m3, the first in the low byte, rounded to nearest even; NaN stays NaN. From 8.9 on.
__device__ __forceinline__ uint32_t e4m3x4(float x0, float x1, float x2, float x3) {
  uint32_t y;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}\n"
      : "=r"(y)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return y;
}

// The larger of each of two packed numbers; NaN when either is NaN.
__device__ __forceinline__ uint32_t max_f16x2(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("max.NaN.f16x2 %0, %1, %2;\n" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
__device__ __forceinline__ uint32_t max_bf16x2(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("max.NaN.bf16x2 %0, %1, %2;\n" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

// The smaller of each of two packed numbers; NaN only when both are NaN.
__device__ __forceinline__ uint32_t min_x2(uint32_t a, uint32_t b, __half) {
  uint32_t y;
  asm("min.f16x2 %0, %1, %2;\n" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
__device__ __forceinline__ uint32_t min_x2(uint32_t a, uint32_t b, __nv_bfloat16) {
  uint32_t y;
  asm("min.bf16x2 %0, %1, %2;\n" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

// 0 * a + b, of each number in a word.
__device__ __forceinline__ uint32_t fma_zero(uint32_t a, uint32_t b, __half) {
  asm("fma.rn.f16x2 %0, %1, %2, %0;\n" : "+r"(b) : "r"(a), "r"(0));
  return b;
}
__device__ __forceinline__ uint32_t fma_zero(uint32_t a, uint32_t b, __nv_bfloat16) {
  asm("fma.rn.bf16x2 %0, %1, %2, %0;\n" : "+r"(b) : "r"(a), "r"(0));
  return b;
}
__device__ __forceinline__ uint32_t fma_zero(uint32_t a, uint32_t b, float) {
  asm("fma.rn.f32 %0, %1, %2, %0;\n" : "+r"(b) : "r"(a), "r"(0));
  return b;
}

// Any function of three bits, for each bit of three words. kTable: its value for a = 0xF0, b = 0xCC and c = 0xAA.
template <int kTable>
__device__ __forceinline__ uint32_t of_bits(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, %4;\n" : "=r"(y) : "r"(a), "r"(b), "r"(c), "n"(kTable));
  return y;
}

// Four of the eight bytes of `low` and `high`: each hexadecimal digit of the selector names one, and with 8 added
// stands for the sign of that byte in all bits.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t y;
  asm("prmt.b32 %0, %1, %2, %3;\n" : "=r"(y) : "r"(low), "r"(high), "r"(selector));
  return y;
}

// d += a * b with fp32 accumulation, where a is 16 x k and b is k x 8: k is 16 for 16-bit types and 8 for TF32.
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace flashattn_ext::ptx
