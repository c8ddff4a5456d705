// Lets the shared definitions (mask, score, dropout, seqlen) compile as host C++, CUDA and Ascend C alike. On the host
// they are always inlined: the CPU kernels compile them once for each instruction set, and the linker must not merge
// those copies.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FLASHATTN_HOST_DEVICE __host__ __device__ __forceinline__
#elif defined(__CCE_AICORE__) || defined(__NPU_ARCH__)
#define FLASHATTN_HOST_DEVICE __aicore__ inline
#define FLASHATTN_NO_DOUBLE  // the scalar unit has no fp64
#else
#define FLASHATTN_HOST_DEVICE inline __attribute__((always_inline))
#endif
