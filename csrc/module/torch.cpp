// One compilation of everything that includes torch's headers: reading them takes most of the time of each of these
// sources. With this macro they include the operators that they call, in place of all.
#define AT_PER_OPERATOR_HEADERS

#include "autograd/autograd.cpp"
#include "autograd/derivative_autograd.cpp"
#include "autograd/recorded_call.cpp"
#include "backend/slow_call.cpp"
#include "call/block_mask_check.cpp"
#include "call/call_params.cpp"
#include "call/decode_call.cpp"
#include "call/derivative_call.cpp"
#include "call/validate.cpp"
#include "module/eager_op.cpp"
#include "module/module.cpp"
#include "ops/decode_op.cpp"
#include "ops/derivative_ops.cpp"
#include "ops/ops.cpp"
#include "ops/supports_op.cpp"
#include "tensors/mask_extremes.cpp"
#include "tensors/op_device.cpp"
