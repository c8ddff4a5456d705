#include "../fix_rate.h"

#include "../entry.h"

FLASHATTN_KERNEL(FLASHATTN_MIXED, flash_fix_rate) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  if ASCEND_IS_AIC {
    using flashattn_ext::ascend::FixRate;
    using flashattn_ext::ascend::FixRateArguments;
    flashattn_ext::ascend::RunPart<FixRate>(reinterpret_cast<const FixRateArguments&>(arguments));
  }
}
