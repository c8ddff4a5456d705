#include "module/eager_op.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <vector>

namespace flashattn_ext {
namespace {

using torch::jit::Stack;

// Pushes a value as an argument of a boxed op; false if eager_op() does not support its type.
bool push(PyObject* value, Stack* stack) {
  if (value == Py_None) {
    stack->emplace_back();
  } else if (THPVariable_CheckExact(value)) {
    stack->emplace_back(THPVariable_Unpack(value));
  } else if (PyBool_Check(value)) {
    stack->emplace_back(value == Py_True);
  } else if (PyFloat_CheckExact(value)) {
    stack->emplace_back(PyFloat_AS_DOUBLE(value));
  } else if (PyLong_CheckExact(value)) {
    int overflow = 0;
    stack->emplace_back(static_cast<int64_t>(PyLong_AsLongLongAndOverflow(value, &overflow)));
    return overflow == 0;
  } else if (PyList_CheckExact(value)) {
    std::vector<int64_t> numbers;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) {
      PyObject* const number = PyList_GET_ITEM(value, i);
      int overflow = 0;
      if (!PyLong_CheckExact(number)) return false;
      numbers.push_back(PyLong_AsLongLongAndOverflow(number, &overflow));
      if (overflow != 0) return false;
    }
    stack->emplace_back(std::move(numbers));
  } else if (THPDtype_Check(value)) {
    stack->emplace_back(reinterpret_cast<THPDtype*>(value)->scalar_type);
  } else {
    return false;
  }
  return true;
}

PyObject* call(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const auto& op = *static_cast<const c10::OperatorHandle*>(PyCapsule_GetPointer(self, nullptr));
  if (static_cast<size_t>(count) != op.schema().arguments().size() || at::impl::torch_function_mode_enabled())
    Py_RETURN_NONE;
  Stack stack;
  stack.reserve(count + 2);  // ops append arguments
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!push(arguments[i], &stack)) Py_RETURN_NONE;
  }
  {
    const pybind11::gil_scoped_release others_may_run;
    op.callBoxed(&stack);
  }
  if (stack.size() == 1) return THPVariable_Wrap(stack[0].toTensor());
  const pybind11::tuple results(stack.size());
  for (size_t i = 0; i < stack.size(); ++i) PyTuple_SET_ITEM(results.ptr(), i, THPVariable_Wrap(stack[i].toTensor()));
  return results.inc_ref().ptr();
  END_HANDLE_TH_ERRORS
}

}  // namespace

pybind11::object eager_op(const std::string& name) {
  static PyMethodDef method{"eager_op", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call)),
                            METH_FASTCALL, nullptr};
  auto* const op = new c10::OperatorHandle(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "call"));
  const pybind11::capsule self(op, [](void* made) { delete static_cast<c10::OperatorHandle*>(made); });
  return pybind11::reinterpret_steal<pybind11::object>(PyCFunction_New(&method, self.ptr()));
}

}  // namespace flashattn_ext
