// Shared and global memory instructions, one in each wrapper (PTX ISA, "Data Movement and Conversion Instructions").
#pragma once

#include <cstdint>

namespace flashattn_ext::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void* shared_pointer(uint32_t address) { return __cvta_shared_to_generic(address); }

// Loads four 8x8 matrices of 16-bit elements (or 8x4 of 32-bit ones). Lane l gives the address of row l % 8 of matrix l
// / 8.
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}
__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row)));
}

// Stores what ldmatrix loads, for 16-bit elements; Hopper only.
__device__ __forceinline__ void stmatrix(void* row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(shared_address(row)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
// Stores what ldmatrix_transposed loads.
__device__ __forceinline__ void stmatrix_transposed(void* row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(shared_address(row)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// Transposes an 8x8 matrix of 16-bit elements: lane l holds two elements of row l / 4 and gets two of column l / 4.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(y) : "r"(x));
  return y;
}

// Starts copying 16 bytes; zeros when not valid, and then `from` is not read.
__device__ __forceinline__ void cp_async(void* to, const void* from, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(to)), "l"(from), "r"(bytes));
}
// Starts copying the first `bytes` of 16, 0 to 16: zeros follow them, and the other bytes are not read.
__device__ __forceinline__ void cp_async_part(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(to)), "l"(from), "r"(bytes));
}
// Starts copying 8 bytes; zeros when not valid.
__device__ __forceinline__ void cp_async_8(void* to, const void* from, bool valid) {
  const int bytes = valid ? 8 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;\n" ::"r"(shared_address(to)), "l"(from), "r"(bytes));
}
// Starts copying 4 bytes; zeros when not valid.
__device__ __forceinline__ void cp_async_4(void* to, const void* from, bool valid) {
  const int bytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(shared_address(to)), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n"); }
// Waits until at most `kPending` of the newest groups are still in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending));
}

// A fragment is four floats of each lane of a warp: 512 bytes of global memory, in the order that adds them fastest.
// The place of a lane in it is where its floats begin.
__device__ __forceinline__ float* place_in_fragment(float* fragment) {
#if __CUDA_ARCH__ >= 900
  return fragment + 4 * (threadIdx.x % 32);
#else
  return fragment + threadIdx.x % 32;
#endif
}
// place_in_fragment, hidden from the compiler: it adds the offsets of further fragments to it in the instructions. It
// would otherwise compute each address from its parts, with four instructions and two registers.
__device__ __forceinline__ float* opaque_place_in_fragment(float* fragment) {
  float* place = place_in_fragment(fragment);
  asm volatile("" : "+l"(place));
  return place;
}
__device__ __forceinline__ void add_fragment_at(float* place, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(place), "f"(x[0]), "f"(x[1]), "f"(x[2]),
               "f"(x[3])
               : "memory");
#else
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    asm volatile("red.global.add.f32 [%0], %1;\n" ::"l"(place + 32 * e), "f"(x[e]) : "memory");
  }
#endif
}
__device__ __forceinline__ void add_fragment(float* fragment, const float (&x)[4]) {
  add_fragment_at(place_in_fragment(fragment), x);
}
// Adds four numbers, 16-byte aligned; Hopper only.
__device__ __forceinline__ void add_vector(float* to, const float (&x)[4]) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}
// Adds a fragment if `wanted`, without a branch; Hopper only.
__device__ __forceinline__ void add_fragment_if(bool wanted, float* fragment, const float (&x)[4]) {
  asm volatile(
      "{\n.reg .pred wanted;\n"
      "setp.ne.b32 wanted, %5, 0;\n"
      "@wanted red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n}\n" ::"l"(fragment + 4 * (threadIdx.x % 32)),
      "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(static_cast<int>(wanted))
      : "memory");
}
// Adds a number if `wanted`, without a branch.
__device__ __forceinline__ void add_if(bool wanted, float* to, float x) {
  asm volatile(
      "{\n.reg .pred wanted;\n"
      "setp.ne.b32 wanted, %2, 0;\n"
      "@wanted red.global.add.f32 [%0], %1;\n}\n" ::"l"(to),
      "f"(x), "r"(static_cast<int>(wanted))
      : "memory");
}
__device__ __forceinline__ void add_if(bool wanted, int64_t* to, int64_t x) {
  asm volatile(
      "{\n.reg .pred wanted;\n"
      "setp.ne.b32 wanted, %2, 0;\n"
      "@wanted red.global.add.u64 [%0], %1;\n}\n" ::"l"(to),
      "l"(x), "r"(static_cast<int>(wanted))
      : "memory");
}
// Stores an element if `wanted`, without a branch.
__device__ __forceinline__ void store_if(bool wanted, float* to, float x) {
  asm volatile(
      "{\n.reg .pred wanted;\n"
      "setp.ne.b32 wanted, %2, 0;\n"
      "@wanted st.global.f32 [%0], %1;\n}\n" ::"l"(to),
      "f"(x), "r"(static_cast<int>(wanted))
      : "memory");
}
__device__ __forceinline__ void store_if(bool wanted, void* to, uint16_t x) {
  asm volatile(
      "{\n.reg .pred wanted;\n"
      "setp.ne.b32 wanted, %2, 0;\n"
      "@wanted st.global.u16 [%0], %1;\n}\n" ::"l"(to),
      "h"(x), "r"(static_cast<int>(wanted))
      : "memory");
}
__device__ __forceinline__ void load_fragment(float (&x)[4], const float* fragment) {
  const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
  const float4 all = *reinterpret_cast<const float4*>(fragment + 4 * lane);
  x[0] = all.x, x[1] = all.y, x[2] = all.z, x[3] = all.w;
#else
#pragma unroll
  for (int e = 0; e < 4; ++e) x[e] = fragment[32 * e + lane];
#endif
}

// Stores a fragment in shared memory, in the order of load_fragment; Hopper only.
__device__ __forceinline__ void store_fragment(float* fragment, const float (&x)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"r"(shared_address(fragment + 4 * (threadIdx.x % 32))),
               "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

__device__ __forceinline__ int load_acquire(const int* p) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ void store_release(int* p, int x) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;\n" ::"l"(p), "r"(x) : "memory");
}

}  // namespace flashattn_ext::ptx
