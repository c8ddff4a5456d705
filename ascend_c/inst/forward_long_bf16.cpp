#include "../entry.h"
#include "../forward.h"

FLASHATTN_KERNEL(FLASHATTN_MIXED, flash_forward_long_bf16) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  flashattn_ext::ascend::Forward<bfloat16_t>(FLASHATTN_ARGUMENTS(flash_forward_long_bf16));
}
