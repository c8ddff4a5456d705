// The order of kernels in a stream, one instruction in each wrapper (PTX ISA, "griddepcontrol"). GPUs before Hopper
// lack these instructions: there a kernel begins when the previous one has ended.
#pragma once

namespace flashattn_ext::ptx {

// Returns when all earlier kernels of the stream have ended and what they wrote is visible. Until then a kernel that
// launch_early has started reads and writes nothing in global memory; it may prefetch.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}
// Lets thread blocks of the next kernel become resident, once every thread block of this one has called it.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n");
#endif
}

}  // namespace flashattn_ext::ptx
