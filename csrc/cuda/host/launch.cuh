// What host code asks of CUDA: properties of the current device, tensor maps, and launches of kernels on the caller's
// stream; the error of a failed launch names the kernel and the sizes of the call. Templates and functions of
// one line are defined here, the others in runtime.cu, so that the sources of kernels need no headers for them.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <limits>
#include <type_traits>
#include <utility>

#include "cuda/host/call.h"
#include "params.h"

namespace flashattn_ext {

inline int current_device() {
  int device = 0;
  cudaGetDevice(&device);
  return device;
}

int multiprocessors();

// Bytes of shared memory that a thread block may have, and bytes of a multiprocessor.
int most_shared_memory();
int shared_memory_of_multiprocessor();
inline bool has_large_shared_memory() { return most_shared_memory() >= 227 * 1024; }

// The compute capability of the current device as one number: 90 for 9.0.
int compute_capability();

// --- tensor maps ---------------------------------------------------------------------------------------------------
//
// Descriptions of tensors for TMA copies are encoded on the host and passed as kernel arguments.

// A map of [batch][heads][rows][columns] whose copies are boxes of `box_rows` rows of 128 bytes, 128-byte swizzled: 64
// columns of 16-bit elements, or 32 of fp32. They have the rows of `box_heads` heads. Pointer and strides are
// multiples of 16 bytes, which passes.h ensures for inputs.
CUtensorMap tensor_map(const AttnParams& p, const TensorView& t, int64_t columns, int64_t rows, int64_t heads,
                       int64_t batch, int box_rows, DType type, int box_heads = 1);

inline CUtensorMap query_map(const AttnParams& p, const TensorView& t, int64_t columns, int box_rows) {
  return tensor_map(p, t, columns, query_rows(p), p.heads_q, batch_entries(p), box_rows, p.dtype);
}
inline CUtensorMap key_map(const AttnParams& p, const TensorView& t, int64_t columns, int box_rows) {
  return tensor_map(p, t, columns, key_rows(p), p.heads_k, batch_entries(p), box_rows, p.dtype);
}
// A map of a tensor of bytes whose elements are pairs of them: 128 columns of bytes are as many bytes as 64 of 16 bits.
// Strides are even; where the columns are not, a byte follows each row.
inline CUtensorMap pair_map(const AttnParams& p, const TensorView& t, int64_t columns, int64_t rows, int64_t heads,
                            int64_t batch, int box_rows) {
  const TensorView pairs{t.data, t.batch_stride / 2, t.row_stride / 2, t.head_stride / 2};
  return tensor_map(p, pairs, (columns + 1) / 2, rows, heads, batch, box_rows, DType::kFloat16);
}
// A bias or its gradient: rows are queries, columns are keys.
inline CUtensorMap bias_map(const AttnParams& p, const BiasView& bias, int box_rows) {
  const TensorView view{bias.data, bias.batch_stride, bias.row_stride, bias.head_stride};
  return tensor_map(p, view, p.seqlen_k, p.seqlen_q, p.heads_q, batch_entries(p), box_rows, bias.dtype);
}

// --- launches ------------------------------------------------------------------------------------------------------

// The shared memory of a thread block of a kernel, and its bytes.
template <class Kernel>
using SharedOf = typename Kernel::Shared;
template <class Kernel>
constexpr int kSharedBytesOf = static_cast<int>(sizeof(SharedOf<Kernel>));

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
// must have been compiled to the instructions of ptx/async.cuh, and a Hopper GPU may also run code that was compiled
// for an older architecture. Such kernels are resident on a multiprocessor together, so all of them set the same shared
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
