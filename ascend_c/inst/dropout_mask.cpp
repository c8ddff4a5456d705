#include "../dropout_mask.h"

#include "../entry.h"

FLASHATTN_KERNEL(FLASHATTN_VECTOR, flash_dropout_mask) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  flashattn_ext::ascend::RunPart<flashattn_ext::ascend::DropoutMask>(FLASHATTN_ARGUMENTS(flash_dropout_mask));
}
