// Prints the kernel of the table (ascend_c/kernel_list.h) that runs a call of each type with each set of options:
// a line with the stage, the options as bits, and the name of the kernel.
#include <cstdio>

#include "ascend_c/dispatch.h"

using namespace flashattn_ext;
using namespace flashattn_ext::ascend;

#define NAME(cores, stage, type, options, name) #name,
static const char* const kNames[] = {FLASHATTN_KERNELS(NAME)};

int main() {
  const float number = 0;
  const int32_t pair[2] = {0, 1};
  for (DType type : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    for (uint32_t options = 0; options <= kEveryOption; ++options) {
      AttnGradParams p;
      p.dtype = type;
      p.batch = p.heads_q = p.heads_k = p.seqlen_q = 1;
      p.seqlen_k = options & kShortSteps ? 1024 : 1025;
      p.head_dim = p.head_dim_v = 64;
      p.softcap = options & kScoreOption ? 30 : 0;
      p.alibi_slopes = options & kBiases ? &number : nullptr;
      p.intervals.data = options & kMask ? pair : nullptr;
      p.dropout_threshold = options & kDropout ? 128 : 256;
      const Arguments forward = forward_arguments(p, 1), backward = backward_arguments(p, 1);
      std::printf("check %u %s\n", options, kNames[kernel_of(Stage::kForwardCheck, forward)]);
      std::printf("forward %u %s\n", options, kNames[kernel_of(Stage::kForward, forward)]);
      std::printf("prepare %u %s\n", options, kNames[kernel_of(Stage::kPrepare, backward)]);
      std::printf("backward %u %s\n", options, kNames[kernel_of(Stage::kBackward, backward)]);
      std::printf("finish %u %s\n", options, kNames[kernel_of(Stage::kFinish, backward)]);
      std::printf("mask %u %s\n", options, kNames[kernel_of(Stage::kDropoutMask, dropout_mask_arguments(p, nullptr))]);
    }
  }
}
