// JvpParams and SecondParams: the arguments of the kernels of forward mode and of second derivatives
// (docs/derivatives.md), as plain structs like those of params.h.
#pragma once

#include "params.h"

namespace flashattn_ext {

// A second AttnParams, `tangents`, holds the tangents of a call: it has the tangent of q in the place of q, and so on
// for k, v, sink, alibi_slopes, relative_bias and bias. A tangent without data (nullptr) is zero. out and lse of
// `tangents` are the tangents of out and lse. Sizes and strides of the biases are set; other fields are not.

// Reads out and lse, and writes tangents.out and tangents.lse.
struct JvpParams : AttnParams {
  AttnParams tangents;
};

// The gradients of <dout, tangents.out> + <dlse, tangents.lse> in q, k, v, sink and the biases, where dout, dlse and
// the tangents of the inputs are constants. Reads tangents.out and tangents.lse too. There are no centres.
struct SecondParams : AttnGradParams {
  AttnParams tangents;
};

}  // namespace flashattn_ext
