// One compilation of the autograd nodes and the Python module: torch_ops.cpp says why.
#include "autograd.cpp"
#include "derivative_autograd.cpp"
#include "eager_op.cpp"
#include "layout_warning.cpp"
#include "module.cpp"
#include "recorded_call.cpp"
