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

void start(Stage stage, int64_t blocks, void* stream, const Arguments& arguments) {
  if (!blocks) return;
#define FLASHATTN_LAUNCH(cores, stage, type, options, name) launch_##name,
#define FLASHATTN_NAME(cores, stage, type, options, name) #name,
  static constexpr Launch kLaunches[] = {FLASHATTN_KERNELS(FLASHATTN_LAUNCH)};
  static constexpr const char* kNames[] = {FLASHATTN_KERNELS(FLASHATTN_NAME)};
#undef FLASHATTN_LAUNCH
#undef FLASHATTN_NAME
  const size_t kernel = kernel_of(stage, arguments);
  enqueue(kNames[kernel],
          [=, launch = kLaunches[kernel], bytes = to_bytes(arguments)] { return launch(blocks, stream, bytes); });
}

size_t forward_bytes(const AttnParams& p) { return forward_workspace_bytes(p, cube_cores()); }
size_t backward_bytes(const AttnGradParams& p) { return backward_workspace_bytes(p, cube_cores()); }

void forward(const AttnParams& p) {
  const int64_t cores = cube_cores(), used = forward_cores(p, cores);
  const Arguments arguments = forward_arguments(p, cores);
  if (used && p.has_intervals()) start(Stage::kForwardCheck, kVectorCores * cores, p.stream, arguments);
  start(Stage::kForward, used, p.stream, arguments);
}

void backward(const AttnGradParams& p) {
  const int64_t cores = cube_cores(), vector_cores = kVectorCores * cores;
  const Arguments arguments = backward_arguments(p, cores);
  start(Stage::kPrepare, vector_cores, p.stream, arguments);
  start(Stage::kBackward, backward_cores(p, cores), p.stream, arguments);
  start(Stage::kFinish, vector_cores, p.stream, arguments);
}

void dropout_mask(const AttnParams& p, bool* mask) {
  const int64_t scores = p.batch * p.heads_q * p.seqlen_q * p.seqlen_k;
  start(Stage::kDropoutMask, scores ? kVectorCores * cube_cores() : 0, p.stream, dropout_mask_arguments(p, mask));
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
