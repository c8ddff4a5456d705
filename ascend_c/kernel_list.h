// Every kernel of the library: the cores that it runs on, and its name. `<stage>_<type>.cpp` in inst/ defines it; those
// that see no tensor of q's type have no type in their name.
#pragma once

#define FLASHATTN_KERNELS(KERNEL)                       \
  KERNEL(FLASHATTN_MIXED, flash_forward_fp16)           \
  KERNEL(FLASHATTN_MIXED, flash_forward_bf16)           \
  KERNEL(FLASHATTN_MIXED, flash_forward_fp32)           \
  KERNEL(FLASHATTN_VECTOR, flash_backward_prepare_fp16) \
  KERNEL(FLASHATTN_VECTOR, flash_backward_prepare_bf16) \
  KERNEL(FLASHATTN_VECTOR, flash_backward_prepare_fp32) \
  KERNEL(FLASHATTN_MIXED, flash_backward_fp16)          \
  KERNEL(FLASHATTN_MIXED, flash_backward_bf16)          \
  KERNEL(FLASHATTN_MIXED, flash_backward_fp32)          \
  KERNEL(FLASHATTN_VECTOR, flash_backward_finish_fp16)  \
  KERNEL(FLASHATTN_VECTOR, flash_backward_finish_bf16)  \
  KERNEL(FLASHATTN_VECTOR, flash_backward_finish_fp32)  \
  KERNEL(FLASHATTN_VECTOR, flash_dropout_mask)          \
  KERNEL(FLASHATTN_VECTOR, flash_rng_state)
