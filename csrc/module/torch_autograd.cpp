// One compilation of the autograd nodes and the Python module: torch_ops.cpp says why.
#include "autograd/autograd.cpp"
#include "autograd/derivative_autograd.cpp"
#include "autograd/recorded_call.cpp"
#include "call/layout_warning.cpp"
#include "module/eager_op.cpp"
#include "module/module.cpp"
