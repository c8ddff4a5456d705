// The host side of the Ascend C backends: what they can do, how much workspace a call needs, on how many cores it runs.
// The NPU build and the emulator differ only in how they launch a kernel.
#pragma once

#include <cstring>
#include <string>
#include <type_traits>

#include "../csrc/params.h"
#include "arguments.h"

namespace flashattn_ext {
namespace ascend {

constexpr int64_t kVectorCores = 2;  // beside each cube core

// Empty, or the reason why the call cannot run.
std::string supports(const AttnParams& p, bool backward);

// How many of `cores` get any work.
int64_t forward_cores(const AttnParams& p, int64_t cores);
int64_t backward_cores(const AttnGradParams& p, int64_t cores);

// What one core takes of the workspace for what its cube and vector cores hand to each other.
int64_t forward_slot_bytes(DType dtype);
int64_t backward_slot_bytes(DType dtype);

// The bytes that all `cores` need together.
size_t forward_workspace_bytes(const AttnParams& p, int64_t cores);
size_t backward_workspace_bytes(const AttnGradParams& p, int64_t cores);

// The workspace is divided up: the slots of the cores come first, then what a Mask takes (isolation.h), then, in the
// backward, delta and the sums. `cores`: those of the device.
Arguments forward_arguments(const AttnParams& p, int64_t cores);
Arguments backward_arguments(const AttnGradParams& p, int64_t cores);
Arguments dropout_mask_arguments(const AttnParams& p, bool* mask);

// Chooses the kernel or function for the type of a call's inputs.
template <class T>
T of_type(DType dtype, T fp16, T bf16, T fp32) {
  return dtype == DType::kFloat16 ? fp16 : dtype == DType::kBFloat16 ? bf16 : fp32;
}

// As a kernel takes them.
template <class T>
FlashattnBytes to_bytes(const T& arguments) {
  static_assert(std::is_trivially_copyable<T>::value && sizeof(T) <= sizeof(FlashattnBytes), "fits into a parameter");
  FlashattnBytes packed = {};
  std::memcpy(packed.bytes, &arguments, sizeof(T));
  return packed;
}

}  // namespace ascend
}  // namespace flashattn_ext
