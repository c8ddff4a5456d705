// The table of kernels, one row for each: the cores that it runs on, its stage, the type of its inputs, the options
// that it is compiled with (arguments.h), and its name. `<name without flash_>.cpp` in inst/ defines it. A call takes
// the first row of a stage and type that has all of its options (kernel_of in dispatch.h). The first rows are small
// enough for the instruction cache of a vector core; tests/ascend/test_ascend_code_size.py measures all of them.
#pragma once

#define FLASHATTN_KERNELS(KERNEL)                                                             \
  KERNEL(FLASHATTN_VECTOR, kForwardCheck, kFloat16, kEveryOption, flash_forward_check_fp16)   \
  KERNEL(FLASHATTN_VECTOR, kForwardCheck, kBFloat16, kEveryOption, flash_forward_check_bf16)  \
  KERNEL(FLASHATTN_VECTOR, kForwardCheck, kFloat32, kEveryOption, flash_forward_check_fp32)   \
  KERNEL(FLASHATTN_MIXED, kForward, kFloat16, kLongOptions, flash_forward_long_fp16)          \
  KERNEL(FLASHATTN_MIXED, kForward, kBFloat16, kLongOptions, flash_forward_long_bf16)         \
  KERNEL(FLASHATTN_MIXED, kForward, kFloat16, kPlainOptions, flash_forward_fp16)              \
  KERNEL(FLASHATTN_MIXED, kForward, kBFloat16, kPlainOptions, flash_forward_bf16)             \
  KERNEL(FLASHATTN_MIXED, kForward, kFloat32, kPlainOptions, flash_forward_fp32)              \
  KERNEL(FLASHATTN_MIXED, kForward, kFloat16, kDropoutOptions, flash_forward_dropout_fp16)    \
  KERNEL(FLASHATTN_MIXED, kForward, kBFloat16, kDropoutOptions, flash_forward_dropout_bf16)   \
  KERNEL(FLASHATTN_MIXED, kForward, kFloat32, kDropoutOptions, flash_forward_dropout_fp32)    \
  KERNEL(FLASHATTN_MIXED, kForward, kFloat16, kMaskOptions, flash_forward_mask_fp16)          \
  KERNEL(FLASHATTN_MIXED, kForward, kBFloat16, kMaskOptions, flash_forward_mask_bf16)         \
  KERNEL(FLASHATTN_MIXED, kForward, kFloat32, kMaskOptions, flash_forward_mask_fp32)          \
  KERNEL(FLASHATTN_MIXED, kForward, kFloat16, kEveryOption, flash_forward_general_fp16)       \
  KERNEL(FLASHATTN_MIXED, kForward, kBFloat16, kEveryOption, flash_forward_general_bf16)      \
  KERNEL(FLASHATTN_MIXED, kForward, kFloat32, kEveryOption, flash_forward_general_fp32)       \
  KERNEL(FLASHATTN_VECTOR, kPrepare, kFloat16, kEveryOption, flash_backward_prepare_fp16)     \
  KERNEL(FLASHATTN_VECTOR, kPrepare, kBFloat16, kEveryOption, flash_backward_prepare_bf16)    \
  KERNEL(FLASHATTN_VECTOR, kPrepare, kFloat32, kEveryOption, flash_backward_prepare_fp32)     \
  KERNEL(FLASHATTN_MIXED, kBackward, kFloat16, kPlainOptions, flash_backward_fp16)            \
  KERNEL(FLASHATTN_MIXED, kBackward, kBFloat16, kPlainOptions, flash_backward_bf16)           \
  KERNEL(FLASHATTN_MIXED, kBackward, kFloat32, kPlainOptions, flash_backward_fp32)            \
  KERNEL(FLASHATTN_MIXED, kBackward, kFloat16, kDropoutOptions, flash_backward_dropout_fp16)  \
  KERNEL(FLASHATTN_MIXED, kBackward, kBFloat16, kDropoutOptions, flash_backward_dropout_bf16) \
  KERNEL(FLASHATTN_MIXED, kBackward, kFloat32, kDropoutOptions, flash_backward_dropout_fp32)  \
  KERNEL(FLASHATTN_MIXED, kBackward, kFloat16, kMaskOptions, flash_backward_mask_fp16)        \
  KERNEL(FLASHATTN_MIXED, kBackward, kBFloat16, kMaskOptions, flash_backward_mask_bf16)       \
  KERNEL(FLASHATTN_MIXED, kBackward, kFloat32, kMaskOptions, flash_backward_mask_fp32)        \
  KERNEL(FLASHATTN_MIXED, kBackward, kFloat16, kBiasOptions, flash_backward_bias_fp16)        \
  KERNEL(FLASHATTN_MIXED, kBackward, kBFloat16, kBiasOptions, flash_backward_bias_bf16)       \
  KERNEL(FLASHATTN_MIXED, kBackward, kFloat16, kEveryOption, flash_backward_general_fp16)     \
  KERNEL(FLASHATTN_MIXED, kBackward, kBFloat16, kEveryOption, flash_backward_general_bf16)    \
  KERNEL(FLASHATTN_MIXED, kBackward, kFloat32, kEveryOption, flash_backward_general_fp32)     \
  KERNEL(FLASHATTN_VECTOR, kFinish, kFloat16, kEveryOption, flash_backward_finish_fp16)       \
  KERNEL(FLASHATTN_VECTOR, kFinish, kBFloat16, kEveryOption, flash_backward_finish_bf16)      \
  KERNEL(FLASHATTN_VECTOR, kFinish, kFloat32, kEveryOption, flash_backward_finish_fp32)       \
  KERNEL(FLASHATTN_VECTOR, kDropoutMask, kFloat32, kEveryOption, flash_dropout_mask)          \
  KERNEL(FLASHATTN_MIXED, kFixRate, kFloat32, kEveryOption, flash_fix_rate)
