// What every op does around a kernel: the device and stream of the call, who runs it, and its workspace.
#pragma once

#include <ATen/DeviceGuard.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <string>
#include <utility>

#include "backend.h"

namespace flashattn_ext {

// While it lives, torch's own operators (copies, fills) keep to the calling thread if this is a forked child: the
// threads of an OpenMP pool do not exist there, and would be waited for forever.
class SerialInForkedChild {
 public:
  SerialInForkedChild();
  ~SerialInForkedChild();
  SerialInForkedChild(const SerialInForkedChild&) = delete;

 private:
  const int threads_;
};

// torch's name of the tensor's kind of device: "cpu", "cuda", ...
std::string device_name(const at::Tensor& t);

// Makes the device of a tensor the current one, and knows what AttnParams::stream is there.
class Device {
 public:
  explicit Device(const at::Tensor& t);
  Device(const Device&) = delete;
  // A backend for a device that op_device.cpp does not know brings the stream itself.
  void* stream(const Backend& backend) const {
    return backend.current_stream ? backend.current_stream(guard_.current_device().index()) : stream_;
  }

 private:
  at::DeviceGuard guard_;
  SerialInForkedChild serial_;
  CpuExecutor executor_;
  void* stream_ = nullptr;
};

// Throws, naming the fix, where this build has nothing for the device of a tensor. An op that begins with torch's own
// operators asks first: on a device that torch has no kernels for either, its message would be torch's.
void check_device_is_known(const at::Tensor& device_of);

// The backend that runs a call, on its stream, which it puts into the params. `refusal` says why a backend cannot run
// it (backend_for); throws NotImplementedError where none can.
const Backend& backend_supporting(const Device& device, const at::Tensor& device_of, AttnParams* params,
                                  const std::function<std::string(const Backend&)>& refusal);

// Throws where a tensor is in memory as no strides say.
void check_formats(const Backend& backend, std::initializer_list<std::pair<const char*, const at::Tensor*>> tensors);

// Uninitialised memory of the device of a tensor, for AttnParams::workspace; lives as long as the result. An
// undefined tensor where a backend needs none: every allocation costs a call of a short row microseconds.
at::Tensor workspace_for(const at::Tensor& device_of, size_t bytes, AttnParams* params);

}  // namespace flashattn_ext
