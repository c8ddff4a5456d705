// Ops as Python functions that skip torch's parser of arguments.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace flashattn_ext {

// The overload `call` of an op, as a function of its positional arguments: exact Tensors, None, bool, int, float and
// lists of int. It returns None, and nothing has run, where torch has to look at the arguments itself: subclasses of
// Tensor, symbolic numbers, modes that override functions of torch, another number of arguments.
//
// torch takes a tenth of a microsecond for an argument, of which an op of attention has two dozen.
pybind11::object eager_op(const std::string& name);

}  // namespace flashattn_ext
