// The backend "ascend": the stages of a call as kernels on torch's current stream. They are queued, never waited for;
// a kernel's arguments are copied, and what they point to outlives it, because torch's allocator hands out memory in
// the order of the stream.
#include "backend.h"

#include "../dispatch.h"
#include "device.h"
#include "launch.h"

namespace flashattn_ext {
namespace ascend {
namespace {

using Launch = int (*)(int64_t blocks, void* stream, FlashattnBytes arguments);

template <class T>
void start(const char* name, Launch launch, int64_t blocks, void* stream, const T& arguments) {
  if (!blocks) return;
  enqueue(name, [=, bytes = to_bytes(arguments)] { return launch(blocks, stream, bytes); });
}

size_t forward_bytes(const AttnParams& p) { return forward_workspace_bytes(p, cube_cores()); }
size_t backward_bytes(const AttnGradParams& p) { return backward_workspace_bytes(p, cube_cores()); }

void forward(const AttnParams& p) {
  const Launch launch =
      of_type(p.dtype, launch_flash_forward_fp16, launch_flash_forward_bf16, launch_flash_forward_fp32);
  start("flash_forward", launch, forward_cores(p, cube_cores()), p.stream, forward_arguments(p, cube_cores()));
}

void backward(const AttnGradParams& p) {
  const int64_t cores = cube_cores(), vector_cores = kVectorCores * cores;
  const Arguments arguments = backward_arguments(p, cores);
  const Launch prepare = of_type(p.dtype, launch_flash_backward_prepare_fp16, launch_flash_backward_prepare_bf16,
                                 launch_flash_backward_prepare_fp32);
  const Launch main =
      of_type(p.dtype, launch_flash_backward_fp16, launch_flash_backward_bf16, launch_flash_backward_fp32);
  const Launch finish = of_type(p.dtype, launch_flash_backward_finish_fp16, launch_flash_backward_finish_bf16,
                                launch_flash_backward_finish_fp32);
  start("flash_backward_prepare", prepare, vector_cores, p.stream, arguments);
  start("flash_backward", main, backward_cores(p, cores), p.stream, arguments);
  start("flash_backward_finish", finish, vector_cores, p.stream, arguments);
}

void dropout_mask(const AttnParams& p, bool* mask) {
  const int64_t scores = p.batch * p.heads_q * p.seqlen_q * p.seqlen_k;
  start("flash_dropout_mask", launch_flash_dropout_mask, scores ? kVectorCores * cube_cores() : 0, p.stream,
        dropout_mask_arguments(p, mask));
}

}  // namespace

const Backend& npu_backend() {
  static const Backend backend = [] {
    Backend npu{"ascend", "npu", supports, forward_bytes, backward_bytes, forward, backward, dropout_mask};
    npu.current_stream = current_stream;
    npu.private_format = private_format;
    return npu;
  }();
  return backend;
}

}  // namespace ascend
}  // namespace flashattn_ext
