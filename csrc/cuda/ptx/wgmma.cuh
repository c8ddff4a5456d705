// wgmma: products of one warpgroup (four warps), asynchronous, with fp32 accumulators (PTX ISA, "Asynchronous Warpgroup
// Level Matrix Instructions"). A is 64 x 16, B is 16 x N; in e4m3 A is 64 x 32 and B is 32 x N.
//
// Accumulators d[n][2 * h + c] of lane l of warp w: row 16 * w + l / 4 + 8 * h, column 8 * n + 2 * (l % 4) + c. The
// accumulators of columns [16 * k, 16 * k + 16), packed into pairs of 16-bit numbers, are the A operand of step k.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/ptx/memory.cuh"

namespace flashattn_ext::ptx {

// Two adjacent elements in e4m3. Tiles of such pairs have the sizes of tiles of 16-bit elements, and a product takes as
// many bytes of a row.
struct E4m3Pair {
  uint16_t bits;
};

// The contiguous axis of an operand in shared memory: K, which is summed over, or the other one (M or N).
enum Major { kMajorK = 0, kMajorMN = 1 };

// Has to come between other accesses to registers of accumulators or A and the first product that uses them.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
// Waits until at most `kPending` of the newest groups are still in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving accesses to these registers across it: the compiler does not know that products in
// flight write them. It has to follow a wait and precede a product.
template <int N>
__device__ __forceinline__ void hold(float (&d)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n) asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
}
// Keeps writes to the registers of A behind it, which products in flight read.
template <int N>
__device__ __forceinline__ void hold(uint32_t (&a)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n) asm volatile("" : "+r"(a[n][0]), "+r"(a[n][1]), "+r"(a[n][2]), "+r"(a[n][3])::"memory");
}

// The address of an operand in shared memory: a 1024-byte aligned tile of 128-byte rows, whose 16-byte chunks TMA's
// 128-byte swizzle exchanges: chunk c of row r is at c ^ (r % 8). A step of 16 elements along a row adds 2 to a
// descriptor, one of 16 rows 128.
struct Descriptor {
  uint32_t low, high;  // steps change `low` alone, and need no 64-bit additions
  __device__ __forceinline__ Descriptor operator+(int step) const { return {low + step, high}; }
  __device__ __forceinline__ operator uint64_t() const {
    uint64_t both;
    asm("mov.b64 %0, {%1, %2};\n" : "=l"(both) : "r"(low), "r"(high));
    return both;
  }
};
// A descriptor in uniform registers. Where the compiler holds the address in a vector register, each product of a step
// would otherwise move its own descriptor. All lanes of a warp make it together, from the same address.
struct UniformDescriptor : Descriptor {
  __device__ __forceinline__ UniformDescriptor(const Descriptor& descriptor)
      : Descriptor{__reduce_or_sync(~0u, descriptor.low), descriptor.high} {}
};
// panel_bytes: from one panel of 64 columns to the next; K-major operands do not use it.
__device__ __forceinline__ Descriptor swizzled_descriptor(const void* tile, int panel_bytes) {
  constexpr uint32_t kEightRows = 1024, kSwizzle128 = 1;
  return {(shared_address(tile) >> 4 & 0x3FFF) | static_cast<uint32_t>(panel_bytes >> 4) << 16,
          kEightRows >> 4 | kSwizzle128 << 30};
}

// The N / 2 accumulators of a lane: FLASHATTN_R as operands of the statement, FLASHATTN_D as their names in the
// instruction.
#define FLASHATTN_PAIR(n)                                                                                              \
  "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3]), "+f"(d[n + 1][0]), "+f"(d[n + 1][1]), "+f"(d[n + 1][2]), \
      "+f"(d[n + 1][3])
#define FLASHATTN_R16 FLASHATTN_PAIR(0)
#define FLASHATTN_R32 FLASHATTN_R16, FLASHATTN_PAIR(2)
#define FLASHATTN_R48 FLASHATTN_R32, FLASHATTN_PAIR(4)
#define FLASHATTN_R64 FLASHATTN_R48, FLASHATTN_PAIR(6)
#define FLASHATTN_R72 FLASHATTN_R64, "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3])
#define FLASHATTN_R80 FLASHATTN_R64, FLASHATTN_PAIR(8)
#define FLASHATTN_R96 FLASHATTN_R80, FLASHATTN_PAIR(10)
#define FLASHATTN_R112 FLASHATTN_R96, FLASHATTN_PAIR(12)
#define FLASHATTN_R128 FLASHATTN_R112, FLASHATTN_PAIR(14)
#define FLASHATTN_R144 FLASHATTN_R128, FLASHATTN_PAIR(16)
#define FLASHATTN_R160 FLASHATTN_R144, FLASHATTN_PAIR(18)
#define FLASHATTN_R176 FLASHATTN_R160, FLASHATTN_PAIR(20)
#define FLASHATTN_R192 FLASHATTN_R176, FLASHATTN_PAIR(22)
#define FLASHATTN_R208 FLASHATTN_R192, FLASHATTN_PAIR(24)
#define FLASHATTN_R224 FLASHATTN_R208, FLASHATTN_PAIR(26)
#define FLASHATTN_R240 FLASHATTN_R224, FLASHATTN_PAIR(28)
#define FLASHATTN_R256 FLASHATTN_R240, FLASHATTN_PAIR(30)
#define FLASHATTN_D16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FLASHATTN_D32 FLASHATTN_D16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FLASHATTN_D48 FLASHATTN_D32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FLASHATTN_D64 FLASHATTN_D48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FLASHATTN_D72 FLASHATTN_D64 ", %32, %33, %34, %35"
#define FLASHATTN_D80 FLASHATTN_D64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FLASHATTN_D96 FLASHATTN_D80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FLASHATTN_D112 FLASHATTN_D96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FLASHATTN_D128 FLASHATTN_D112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FLASHATTN_D144 FLASHATTN_D128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define FLASHATTN_D160 FLASHATTN_D144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define FLASHATTN_D176 FLASHATTN_D160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define FLASHATTN_D192 FLASHATTN_D176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define FLASHATTN_D208 FLASHATTN_D192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define FLASHATTN_D224 FLASHATTN_D208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define FLASHATTN_D240 FLASHATTN_D224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define FLASHATTN_D256 FLASHATTN_D240 ", %120, %121, %122, %123, %124, %125, %126, %127"

//   wgmma<major of A, major of B>(d, descriptor of A, descriptor of B, add, T()): d = A B + (add ? d : 0)
//   wgmma<major of B>(d, A in registers, descriptor of B, T()):                   d += A B
//
// I0 to I5: numbers of the operands that come after the accumulators.
#define FLASHATTN_WGMMA(N, T, TYPE, I0, I1, I2, I3, I4, I5)                                                           \
  template <Major kA, Major kB>                                                                                       \
  __device__ __forceinline__ void wgmma(float (&d)[N / 8][4], uint64_t a, uint64_t b, bool add, T) {                  \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #I2                                                         \
                 ", 0;\n"                                                                                             \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" FLASHATTN_D##N                  \
                 "}, %" #I0 ", %" #I1 ", add, 1, 1, %" #I3 ", %" #I4 ";\n}\n"                                         \
                 : FLASHATTN_R##N                                                                                     \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(static_cast<int>(kA)), "n"(static_cast<int>(kB))); \
  }                                                                                                                   \
  template <Major kB>                                                                                                 \
  __device__ __forceinline__ void wgmma(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b, T) {                \
    asm volatile(                                                                                                     \
        "{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\n"                                                                \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" FLASHATTN_D##N                           \
        "}, {%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4 ", add, 1, 1, %" #I5 ";\n}\n"                            \
        : FLASHATTN_R##N                                                                                              \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(static_cast<int>(kB)));                             \
  }
#define FLASHATTN_WGMMA_TYPES(N, ...)            \
  FLASHATTN_WGMMA(N, __half, "f16", __VA_ARGS__) \
  FLASHATTN_WGMMA(N, __nv_bfloat16, "bf16", __VA_ARGS__)

FLASHATTN_WGMMA_TYPES(32, 16, 17, 18, 19, 20, 21)
FLASHATTN_WGMMA_TYPES(48, 24, 25, 26, 27, 28, 29)
FLASHATTN_WGMMA_TYPES(64, 32, 33, 34, 35, 36, 37)
FLASHATTN_WGMMA_TYPES(72, 36, 37, 38, 39, 40, 41)
FLASHATTN_WGMMA_TYPES(80, 40, 41, 42, 43, 44, 45)
FLASHATTN_WGMMA_TYPES(96, 48, 49, 50, 51, 52, 53)
FLASHATTN_WGMMA_TYPES(112, 56, 57, 58, 59, 60, 61)
FLASHATTN_WGMMA_TYPES(128, 64, 65, 66, 67, 68, 69)
FLASHATTN_WGMMA_TYPES(144, 72, 73, 74, 75, 76, 77)
FLASHATTN_WGMMA_TYPES(160, 80, 81, 82, 83, 84, 85)
FLASHATTN_WGMMA_TYPES(176, 88, 89, 90, 91, 92, 93)
FLASHATTN_WGMMA_TYPES(192, 96, 97, 98, 99, 100, 101)
FLASHATTN_WGMMA_TYPES(208, 104, 105, 106, 107, 108, 109)
FLASHATTN_WGMMA_TYPES(224, 112, 113, 114, 115, 116, 117)
FLASHATTN_WGMMA_TYPES(240, 120, 121, 122, 123, 124, 125)
FLASHATTN_WGMMA_TYPES(256, 128, 129, 130, 131, 132, 133)

// Products in e4m3, whose operands in shared memory are K-major: d = A B + (add ? d : 0) in both. Sums of products
// keep about 14 bits of mantissa. Lane l of warp w has of A the rows 16 * w + l / 4 + 8 * (i % 2), i = 0 ... 3, and of
// each the columns 4 * (l % 4) + 16 * (i / 2) + (0 ... 3), from the low byte on.
#define FLASHATTN_WGMMA_E4M3(N, I0, I1, I2, I3, I4, I5)                                                           \
  template <Major kA, Major kB>                                                                                   \
  __device__ __forceinline__ void wgmma(float (&d)[N / 8][4], uint64_t a, uint64_t b, bool add, E4m3Pair) {       \
    static_assert(kA == kMajorK && kB == kMajorK);                                                                \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #I2                                                     \
                 ", 0;\n"                                                                                         \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" FLASHATTN_D##N "}, %" #I0 ", %" #I1 \
                                                                                             ", add, 1, 1;\n}\n"  \
                 : FLASHATTN_R##N                                                                                 \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                                   \
  }                                                                                                               \
  __device__ __forceinline__ void wgmma(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b, bool add) {     \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #I5                                                     \
                 ", 0;\n"                                                                                         \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" FLASHATTN_D##N                      \
                 "}, {%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4 ", add, 1, 1;\n}\n"                         \
                 : FLASHATTN_R##N                                                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));               \
  }
FLASHATTN_WGMMA_E4M3(64, 32, 33, 34, 35, 36, 37)
FLASHATTN_WGMMA_E4M3(96, 48, 49, 50, 51, 52, 53)
FLASHATTN_WGMMA_E4M3(128, 64, 65, 66, 67, 68, 69)

}  // namespace flashattn_ext::ptx
