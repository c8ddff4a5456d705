#if defined(FLASHATTN_ASC)
#include <kernel_operator.h>  // before the shared headers: it defines what they compile to
#endif

#include "launch.h"

#if defined(FLASHATTN_ASC)
// The language of CANN 9: a file starts the kernels that it contains.
#include "../inst/backward_bf16.cpp"
#include "../inst/backward_bias_bf16.cpp"
#include "../inst/backward_bias_fp16.cpp"
#include "../inst/backward_dropout_bf16.cpp"
#include "../inst/backward_dropout_fp16.cpp"
#include "../inst/backward_dropout_fp32.cpp"
#include "../inst/backward_finish_bf16.cpp"
#include "../inst/backward_finish_fp16.cpp"
#include "../inst/backward_finish_fp32.cpp"
#include "../inst/backward_fp16.cpp"
#include "../inst/backward_fp32.cpp"
#include "../inst/backward_general_bf16.cpp"
#include "../inst/backward_general_fp16.cpp"
#include "../inst/backward_general_fp32.cpp"
#include "../inst/backward_mask_bf16.cpp"
#include "../inst/backward_mask_fp16.cpp"
#include "../inst/backward_mask_fp32.cpp"
#include "../inst/backward_prepare_bf16.cpp"
#include "../inst/backward_prepare_fp16.cpp"
#include "../inst/backward_prepare_fp32.cpp"
#include "../inst/dropout_mask.cpp"
#include "../inst/fix_rate.cpp"
#include "../inst/forward_bf16.cpp"
#include "../inst/forward_check_bf16.cpp"
#include "../inst/forward_check_fp16.cpp"
#include "../inst/forward_check_fp32.cpp"
#include "../inst/forward_dropout_bf16.cpp"
#include "../inst/forward_dropout_fp16.cpp"
#include "../inst/forward_dropout_fp32.cpp"
#include "../inst/forward_fp16.cpp"
#include "../inst/forward_fp32.cpp"
#include "../inst/forward_general_bf16.cpp"
#include "../inst/forward_general_fp16.cpp"
#include "../inst/forward_general_fp32.cpp"
#include "../inst/forward_long_bf16.cpp"
#include "../inst/forward_long_fp16.cpp"
#include "../inst/forward_mask_bf16.cpp"
#include "../inst/forward_mask_fp16.cpp"
#include "../inst/forward_mask_fp32.cpp"

#define FLASHATTN_START(name) (name<<<static_cast<uint32_t>(blocks), 0, stream>>>(arguments), 0)

#else
// The launchers that CANN 8 generates beside the kernel library; they take structs by address.
#include <aclrtlaunch_flash_backward_bf16.h>
#include <aclrtlaunch_flash_backward_bias_bf16.h>
#include <aclrtlaunch_flash_backward_bias_fp16.h>
#include <aclrtlaunch_flash_backward_dropout_bf16.h>
#include <aclrtlaunch_flash_backward_dropout_fp16.h>
#include <aclrtlaunch_flash_backward_dropout_fp32.h>
#include <aclrtlaunch_flash_backward_finish_bf16.h>
#include <aclrtlaunch_flash_backward_finish_fp16.h>
#include <aclrtlaunch_flash_backward_finish_fp32.h>
#include <aclrtlaunch_flash_backward_fp16.h>
#include <aclrtlaunch_flash_backward_fp32.h>
#include <aclrtlaunch_flash_backward_general_bf16.h>
#include <aclrtlaunch_flash_backward_general_fp16.h>
#include <aclrtlaunch_flash_backward_general_fp32.h>
#include <aclrtlaunch_flash_backward_mask_bf16.h>
#include <aclrtlaunch_flash_backward_mask_fp16.h>
#include <aclrtlaunch_flash_backward_mask_fp32.h>
#include <aclrtlaunch_flash_backward_prepare_bf16.h>
#include <aclrtlaunch_flash_backward_prepare_fp16.h>
#include <aclrtlaunch_flash_backward_prepare_fp32.h>
#include <aclrtlaunch_flash_dropout_mask.h>
#include <aclrtlaunch_flash_fix_rate.h>
#include <aclrtlaunch_flash_forward_bf16.h>
#include <aclrtlaunch_flash_forward_check_bf16.h>
#include <aclrtlaunch_flash_forward_check_fp16.h>
#include <aclrtlaunch_flash_forward_check_fp32.h>
#include <aclrtlaunch_flash_forward_dropout_bf16.h>
#include <aclrtlaunch_flash_forward_dropout_fp16.h>
#include <aclrtlaunch_flash_forward_dropout_fp32.h>
#include <aclrtlaunch_flash_forward_fp16.h>
#include <aclrtlaunch_flash_forward_fp32.h>
#include <aclrtlaunch_flash_forward_general_bf16.h>
#include <aclrtlaunch_flash_forward_general_fp16.h>
#include <aclrtlaunch_flash_forward_general_fp32.h>
#include <aclrtlaunch_flash_forward_long_bf16.h>
#include <aclrtlaunch_flash_forward_long_fp16.h>
#include <aclrtlaunch_flash_forward_mask_bf16.h>
#include <aclrtlaunch_flash_forward_mask_fp16.h>
#include <aclrtlaunch_flash_forward_mask_fp32.h>

#define FLASHATTN_START(name) \
  static_cast<int>(ACLRT_LAUNCH_KERNEL(name)(static_cast<uint32_t>(blocks), stream, &arguments))
#endif

namespace flashattn_ext {
namespace ascend {

#define FLASHATTN_DEFINE(cores, stage, type, options, name) \
  int launch_##name(int64_t blocks, void* stream, FlashattnBytes arguments) { return FLASHATTN_START(name); }
FLASHATTN_KERNELS(FLASHATTN_DEFINE)

}  // namespace ascend
}  // namespace flashattn_ext
