#include "tensors/op_device.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <atomic>

#if defined(FLASHATTN_EXT_CUDA)
#include <c10/cuda/CUDAStream.h>
#endif

namespace flashattn_ext {
namespace {

std::atomic<bool> in_forked_child{false};
const int at_fork_registered = pthread_atfork(nullptr, nullptr, [] { in_forked_child.store(true); });

// The caller's thread pool.
CpuExecutor cpu_executor() {
  CpuExecutor executor;
  executor.num_threads = in_forked_child.load() || at::in_parallel_region() ? 1 : at::get_num_threads();
  executor.run = [](int workers, void (*body)(void*, int), void* context) {
    if (workers == 1) return body(context, 0);
    at::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
      for (int64_t worker = begin; worker < end; ++worker) body(context, static_cast<int>(worker));
    });
  };
  return executor;
}

}  // namespace

SerialInForkedChild::SerialInForkedChild() : threads_(in_forked_child.load() ? at::get_num_threads() : 1) {
  if (threads_ > 1) at::set_num_threads(1);
}
SerialInForkedChild::~SerialInForkedChild() {
  if (threads_ > 1) at::set_num_threads(threads_);
}

std::string device_name(const at::Tensor& t) { return c10::DeviceTypeName(t.device().type(), true); }

Device::Device(const at::Tensor& t) : guard_(t.device()) {
  if (t.is_cpu()) {
    executor_ = cpu_executor();
    stream_ = &executor_;
  }
#if defined(FLASHATTN_EXT_CUDA)
  if (t.is_cuda()) stream_ = c10::cuda::getCurrentCUDAStream().stream();
#endif
}

void check_device_is_known(const at::Tensor& device_of) {
  if (device_of.is_cpu() || device_of.is_cuda() || device_of.is_meta()) return;
  backend_for(device_name(device_of));
}

const Backend& backend_supporting(const Device& device, const at::Tensor& device_of, AttnParams* params,
                                  const std::function<std::string(const Backend&)>& refusal) {
  std::string reason;
  const Backend& backend = backend_for(device_name(device_of), refusal, &reason);
  TORCH_CHECK_NOT_IMPLEMENTED(reason.empty(), "backend '", backend.name, "': ", reason);
  params->stream = device.stream(backend);
  return backend;
}

void check_formats(const Backend& backend, std::initializer_list<std::pair<const char*, const at::Tensor*>> tensors) {
  if (!backend.private_format) return;
  for (const auto& [name, t] : tensors) {
    const std::string format = backend.private_format(*t);
    TORCH_CHECK_VALUE(format.empty(), name, ": expected a tensor in rows, got one in ", format);
  }
}

at::Tensor workspace_for(const at::Tensor& device_of, size_t bytes, AttnParams* params) {
  constexpr size_t kAlignment = 64;
  if (bytes == 0) return {};
  at::Tensor workspace = at::empty({static_cast<int64_t>(bytes + kAlignment)}, device_of.options().dtype(at::kByte));
  const auto address = reinterpret_cast<uintptr_t>(workspace.data_ptr());
  params->workspace = reinterpret_cast<void*>((address + kAlignment - 1) / kAlignment * kAlignment);
  return workspace;
}

}  // namespace flashattn_ext
