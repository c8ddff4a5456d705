#include "../rng_state.h"

#include "../entry.h"

FLASHATTN_KERNEL(FLASHATTN_VECTOR, flash_rng_state) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  flashattn_ext::ascend::WriteRngState(FLASHATTN_ARGUMENTS(RngStateArguments));
}
