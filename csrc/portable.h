// Lets the shared definitions (mask, score, dropout, seqlen) compile as host C++, CUDA and Ascend C alike. On the host
// they are always inlined: the CPU kernels compile some of them for one instruction set, and no linker may use that
// copy where another one runs.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FLASHATTN_HOST_DEVICE __host__ __device__ __forceinline__
#elif defined(__CCE_AICORE__) || defined(__NPU_ARCH__)
#define FLASHATTN_HOST_DEVICE __aicore__ inline
#define FLASHATTN_NO_DOUBLE  // its scalar unit has none
#else
#define FLASHATTN_HOST_DEVICE inline __attribute__((always_inline))
#endif
