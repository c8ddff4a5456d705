// The host side of the Ascend C backends: supported calls, workspace size, number of cores.
// The NPU build and the emulator differ only in how they launch a kernel.
#pragma once

#include <cstring>
#include <string>
#include <type_traits>

#include "../csrc/params.h"
#include "arguments.h"
#include "kernel_list.h"

namespace flashattn_ext {
namespace ascend {

constexpr int64_t kVectorCores = 2;  // beside each cube core

// Empty, or the reason why the call cannot run.
std::string supports(const AttnParams& p, bool backward);

// The number of `cores` that get work.
int64_t forward_cores(const AttnParams& p, int64_t cores);
int64_t backward_cores(const AttnGradParams& p, int64_t cores);

// Whether a forward takes steps of 1024 keys: 16 bits, head dims up to 128, no option, and a row that sees more keys in
// the middle of the average sequence. The short steps of short rows are slower there.
bool has_long_steps(const AttnParams& p);

// The workspace bytes of one core for the data that its cube and vector cores exchange.
int64_t forward_slot_bytes(const AttnParams& p);
int64_t backward_slot_bytes(DType dtype);

// The workspace bytes of all `cores` together.
size_t forward_workspace_bytes(const AttnParams& p, int64_t cores);
size_t backward_workspace_bytes(const AttnGradParams& p, int64_t cores);

// Divides the workspace: first the slots of the cores, then the memory of isolation.h for a Mask, then, in the
// backward, delta and the sums. `cores`: all cores of the device.
Arguments forward_arguments(const AttnParams& p, int64_t cores);
Arguments backward_arguments(const AttnGradParams& p, int64_t cores);
Arguments dropout_mask_arguments(const AttnParams& p, bool* mask);

enum class Stage { kForwardCheck, kForward, kPrepare, kBackward, kFinish, kDropoutMask, kFixRate };

// The row of the table of kernels (kernel_list.h) that runs a stage of a call, counted from 0.
size_t kernel_of(Stage stage, const Arguments& a);

// The parameters as a kernel takes them.
template <class T>
FlashattnBytes to_bytes(const T& arguments) {
  static_assert(std::is_trivially_copyable<T>::value && sizeof(T) <= sizeof(FlashattnBytes), "fits into a parameter");
  FlashattnBytes packed = {};
  std::memcpy(packed.bytes, &arguments, sizeof(T));
  return packed;
}

}  // namespace ascend
}  // namespace flashattn_ext
