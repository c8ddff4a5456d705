// torch_npu's side of the backend "ascend": stream, queue, and the check of the device when the library is loaded. The
// one file of the binding that sees torch; the ops themselves are csrc/ops/ops.cpp's, for NPU tensors too.
#include <ATen/core/Tensor.h>
#include <acl/acl.h>
#include <torch_npu/csrc/core/npu/NPUFormat.h>
#include <torch_npu/csrc/core/npu/NPUStream.h>
#include <torch_npu/csrc/framework/OpCommand.h>

#include <stdexcept>

#include "../dispatch.h"
#include "../fix_rate_arguments.h"
#include "architecture.h"
#include "backend.h"
#include "device.h"
#include "launch.h"

namespace flashattn_ext {
namespace ascend {
namespace {

int64_t cores_of(int32_t device) {
  int64_t cores = 0;
  const aclError error = aclGetDeviceCapability(static_cast<uint32_t>(device), ACL_DEVICE_INFO_AI_CORE_NUM, &cores);
  if (error != ACL_SUCCESS || cores <= 0)
    throw std::runtime_error("flashattn_ext: the Ascend runtime does not tell the number of cores of device " +
                             std::to_string(device) + " (error " + std::to_string(error) + ")");
  return cores;
}

// The launchers of CANN return 0 for a kernel that the runtime does not find, and a launch in the language of CANN 9
// returns nothing at all: the error is in the runtime's last one of the thread. What an earlier operator left there has
// been returned to its own caller.
void start_now(const std::string& kernel, const std::function<int()>& launch) {
  aclrtGetLastError(ACL_RT_THREAD_LEVEL);
  const int returned = launch();
  const int last = aclrtGetLastError(ACL_RT_THREAD_LEVEL);
  if (!returned && !last) return;
  const char* const message = aclGetRecentErrMsg();
  throw std::runtime_error("flashattn_ext: the kernel " + kernel +
                           " was not started: the Ascend runtime reports error " +
                           std::to_string(returned ? returned : last) + (message ? std::string(": ") + message : "") +
                           "; python -m flashattn_ext doctor tries every kernel");
}

}  // namespace

// Asked once: the devices of a machine are alike.
int64_t cube_cores() {
  static const int64_t cores = [] {
    int32_t device = 0;
    if (aclrtGetDevice(&device) != ACL_SUCCESS) device = 0;
    return cores_of(device);
  }();
  return cores;
}

void enqueue(const char* kernel, std::function<int()> launch) {
  at_npu::native::OpCommand::RunOpApiV2(kernel, [name = std::string(kernel), launch = std::move(launch)] {
    start_now(name, launch);
    return 0;
  });
}

// Not emptying torch_npu's queue: enqueue() stands in line.
void* current_stream(int device_index) {
  return c10_npu::getCurrentNPUStream(static_cast<c10::DeviceIndex>(device_index)).stream(false);
}

std::string private_format(const at::Tensor& tensor) {
  const int64_t format = at_npu::native::get_npu_format(tensor);
  for (const int64_t rows : {ACL_FORMAT_UNDEFINED, ACL_FORMAT_NCHW, ACL_FORMAT_NHWC, ACL_FORMAT_ND, ACL_FORMAT_NCDHW}) {
    if (format == rows) return {};
  }
  return "the NPU's own format " + std::to_string(format) + "; convert it: torch_npu.npu_format_cast(tensor, 2)";
}

}  // namespace ascend
}  // namespace flashattn_ext

#define FLASHATTN_EXPORT extern "C" __attribute__((visibility("default")))

FLASHATTN_EXPORT const char* flashattn_ext_ascend_soc() { return FLASHATTN_SOC; }

// A function of CANN that the acl_rt.h inside torch-npu 2.6 to 2.9 does not declare. The compiler may find that header
// before the one of CANN.
extern "C" aclError aclrtGetDeviceSatMode(aclrtFloatOverflowMode* mode);

// Whether the device makes results that are not finite finite: 1 or 0, or -1 where the runtime does not say.
FLASHATTN_EXPORT int flashattn_ext_ascend_saturates() {
  aclrtFloatOverflowMode mode = ACL_RT_OVERFLOW_MODE_UNDEF;
  if (aclrtGetDeviceSatMode(&mode) != ACL_SUCCESS || mode >= ACL_RT_OVERFLOW_MODE_UNDEF) return -1;
  return mode == ACL_RT_OVERFLOW_MODE_SATURATION;
}

// The measurement of fix_rate.h on the current stream. `to`: so many bytes of device memory. Returns the error, or
// null.
FLASHATTN_EXPORT int64_t flashattn_ext_ascend_fix_rate_bytes() {
  return flashattn_ext::ascend::cube_cores() * flashattn_ext::ascend::FixRateArguments::kCoreBytes;
}
FLASHATTN_EXPORT const char* flashattn_ext_ascend_fix_rate(void* to, int32_t columns, int32_t times,
                                                           bool fractals) try {
  using namespace flashattn_ext::ascend;
  const FlashattnBytes bytes = to_bytes(FixRateArguments{to, columns, times, fractals});
  enqueue("flash_fix_rate", [=, cores = cube_cores(), stream = current_stream(-1)] {
    return launch_flash_fix_rate(cores, stream, bytes);
  });
  return nullptr;
} catch (const std::exception& error) {
  thread_local std::string text;
  text = error.what();
  return text.c_str();
}

FLASHATTN_EXPORT uint64_t flashattn_ext_backend_layout() { return flashattn_ext::kBackendLayout; }

FLASHATTN_EXPORT const flashattn_ext::Backend* flashattn_ext_backend() {
  const char* const device = aclrtGetSocName();
  const std::string wrong = flashattn_ext::ascend::wrong_device(flashattn_ext_ascend_soc(), device ? device : "");
  if (!wrong.empty()) throw std::runtime_error("flashattn_ext: " + wrong);
  return &flashattn_ext::ascend::npu_backend();
}
