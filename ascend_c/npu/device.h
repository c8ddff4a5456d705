// What torch_npu knows of the device, without its headers: binding.cpp is the one file that includes them.
#pragma once

#include <functional>
#include <string>

#include "../../csrc/params.h"

namespace at {
class Tensor;
}

namespace flashattn_ext {
namespace ascend {

// The number of cube cores of the current device; throws std::runtime_error with the runtime's error.
int64_t cube_cores();

// Queues a launch after the operators that torch_npu has queued for its current stream: another thread may run it,
// when the caller has long returned. It returns 0 or the error of the Ascend runtime. Where a launch fails, that thread
// throws std::runtime_error; torch_npu's own thread prints the words and fails the next call that waits for the queue.
void enqueue(const char* kernel, std::function<int()> launch);

// The stream that torch uses now on its device of that index.
void* current_stream(int device_index);

// Empty, or that the tensor is in one of the NPU's own formats, which some of its operators leave behind.
std::string private_format(const at::Tensor& tensor);

}  // namespace ascend
}  // namespace flashattn_ext
