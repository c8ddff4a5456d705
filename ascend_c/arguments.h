// What a kernel is told about one call, passed by value: the parameters of every backend, and what the scalar unit
// cannot compute from them because it has no double.
#pragma once

#include "../csrc/params.h"

namespace flashattn_ext {
namespace ascend {

struct Arguments : AttnGradParams {
  float scale = 1.0f;         // softmax_scale
  float inverse_keep = 1.0f;  // 1 / p_keep of dropout
};

}  // namespace ascend
}  // namespace flashattn_ext
