// The part of an op that surrounds every kernel: device and stream, choice of the backend, workspace.
#pragma once

#include <ATen/DeviceGuard.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <string>
#include <utility>

#include "backend/backend.h"

namespace flashattn_ext {

// In a forked child, limits torch's own operators (copies, fills) to the calling thread during its lifetime: the
// threads of the OpenMP pool do not exist in the child, and waiting for them would deadlock.
class SerialInForkedChild {
 public:
  SerialInForkedChild();
  ~SerialInForkedChild();
  SerialInForkedChild(const SerialInForkedChild&) = delete;

 private:
  const int threads_;
};

// torch's name of the tensor's device type: "cpu", "cuda", ...
std::string device_name(const at::Tensor& t);

// Makes the device of a tensor the current device, and provides AttnParams::stream for it.
class Device {
 public:
  explicit Device(const at::Tensor& t);
  Device(const Device&) = delete;
  // A backend for a device that op_device.cpp does not know provides the stream (Backend::current_stream).
  void* stream(const Backend& backend) const {
    return backend.current_stream ? backend.current_stream(guard_.current_device().index()) : stream_;
  }

 private:
  at::DeviceGuard guard_;
  SerialInForkedChild serial_;
  CpuExecutor executor_;
  void* stream_ = nullptr;
};

// Throws, naming the fix, if this build has no backend for the device of a tensor. Ops that begin with torch operators
// call this first: otherwise, on a device without torch kernels, the user would get torch's message.
void check_device_is_known(const at::Tensor& device_of);

// The backend that runs a call; sets params->stream. `refusal` says why a backend cannot run it (backend_for); throws
// NotImplementedError if no backend can.
const Backend& backend_supporting(const Device& device, const at::Tensor& device_of, AttnParams* params,
                                  const std::function<std::string(const Backend&)>& refusal);

// Throws for a tensor in a memory format that strides do not describe (Backend::private_format).
void check_formats(const Backend& backend, std::initializer_list<std::pair<const char*, const at::Tensor*>> tensors);

// Uninitialised memory of the device of a tensor, for AttnParams::workspace; valid as long as the returned tensor.
// Undefined if the backend needs none, because an allocation costs small calls microseconds.
at::Tensor workspace_for(const at::Tensor& device_of, size_t bytes, AttnParams* params);

}  // namespace flashattn_ext
