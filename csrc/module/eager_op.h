// Ops as Python functions that skip torch's argument parser.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace flashattn_ext {

// The overload `call` of an op, as a function of its positional arguments: exact Tensors, None, bool, int, float and
// lists of int. It returns None without running anything where torch's own parser is needed: Tensor subclasses,
// symbolic numbers, modes that override torch functions, another number of arguments.
//
// torch's parser takes a tenth of a microsecond per argument; an attention op has two dozen arguments.
pybind11::object eager_op(const std::string& name);

}  // namespace flashattn_ext
