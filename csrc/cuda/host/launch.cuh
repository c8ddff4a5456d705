// Launches a kernel on the caller's stream; the error of a failed launch names the kernel and the sizes of the call.
// Templates are defined here, other functions in runtime.cu.
#pragma once

#include <cuda_runtime.h>

#include <limits>
#include <type_traits>
#include <utility>

#include "cuda/host/device.h"
#include "params.h"

namespace flashattn_ext {

// The shared memory of a thread block of a kernel, in bytes.
template <class Kernel>
constexpr int kSharedBytesOf = static_cast<int>(sizeof(typename Kernel::Shared));

// Throws a std::runtime_error that names the kernel, the reason and the sizes of the call.
[[noreturn]] void launch_fails(const char* kernel, const char* reason, const AttnParams& p);

inline void check_launch(cudaError_t error, const char* kernel, const AttnParams& p) {
  if (error != cudaSuccess) launch_fails(kernel, cudaGetErrorString(error), p);
}

// A grid of one dimension; throws if it has too many thread blocks.
inline dim3 row_of_blocks(int64_t blocks, const char* kernel, const AttnParams& p) {
  if (blocks > std::numeric_limits<int>::max()) check_launch(cudaErrorInvalidConfiguration, kernel, p);
  return dim3(static_cast<unsigned>(blocks));
}

// Allows the blocks of a kernel more than 48 KB of shared memory on the current device. The call of the runtime takes
// two microseconds, so it is not repeated.
cudaError_t allow_shared_memory(const void* kernel, int bytes);

// How many thread blocks of a kernel the current device runs at a time. The answer of the runtime is kept, as above.
int64_t resident_blocks(const void* kernel, const char* name, const AttnParams& p, int threads, int shared_bytes);

// Whether a kernel may start before the previous kernel of the stream has ended (programmatic dependent launch): it
// must have been compiled to the instructions of ptx/grid.cuh, and a Hopper GPU may also run code that was compiled for
// an older architecture. Such kernels are resident on a multiprocessor together, so all of them set the same shared
// memory carveout.
bool can_start_early(const void* kernel);

// Launches a kernel that calls ptx::wait_for_previous_kernel before it reads or writes global memory. Where the GPU
// supports it, its thread blocks become resident while the previous kernel of the stream ends, which hides the launch
// latency. All of its thread blocks have to wait, also those without work: a kernel that waits for this one relies on
// all earlier kernels too.
template <class... Arguments>
void launch_early(void (*kernel)(Arguments...), const char* name, const AttnParams& p, dim3 grid, int threads,
                  int shared_bytes, std::common_type_t<Arguments>... arguments) {
  if (grid.x == 0) return;
  const void* const address = reinterpret_cast<const void*>(kernel);
  if (shared_bytes > 48 * 1024) check_launch(allow_shared_memory(address, shared_bytes), name, p);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = static_cast<cudaStream_t>(p.stream);
  config.attrs = &early;
  config.numAttrs = can_start_early(address) ? 1 : 0;
  check_launch(cudaLaunchKernelEx(&config, kernel, std::move(arguments)...), name, p);
}

template <class Params, class... Arguments>
void launch(void (*kernel)(const Params, Arguments...), const char* name, const Params& p, int64_t blocks, int threads,
            int shared_bytes, std::common_type_t<Arguments>... arguments) {
  if (blocks == 0) return;
  const dim3 grid = row_of_blocks(blocks, name, p);
  if (shared_bytes > 48 * 1024) {
    check_launch(allow_shared_memory(reinterpret_cast<const void*>(kernel), shared_bytes), name, p);
  }
  kernel<<<grid, threads, shared_bytes, static_cast<cudaStream_t>(p.stream)>>>(p, arguments...);
  check_launch(cudaGetLastError(), name, p);
}

}  // namespace flashattn_ext
