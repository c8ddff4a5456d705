#include "call/layout_warning.h"

#include <pybind11/pybind11.h>

namespace flashattn_ext {
namespace {

PyObject* warning = nullptr;

}  // namespace

void warn_of_layout(int64_t rows, int64_t keys) {
  if (!warning) return;
  const pybind11::gil_scoped_acquire held;
  pybind11::reinterpret_borrow<pybind11::object>(warning)(rows, keys);
}

void set_layout_warning(void* function) { warning = static_cast<PyObject*>(function); }

}  // namespace flashattn_ext
