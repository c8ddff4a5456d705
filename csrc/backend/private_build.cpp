// A backend in a library of its own, compiled with other tiles than the package's for comparison measurements.
// Builds of the package exclude this file: private_build.py compiles it with the kernels of one backend.
//   FLASHATTN_EXT_PRIVATE_NAME     the backend's name for use_backend(), a string
//   FLASHATTN_EXT_PRIVATE_BACKEND  the function that returns its table: cuda_sm90_backend, ...
#include "backend/backend.h"

// The symbols that load_backend() looks up.
extern "C" {

__attribute__((visibility("default"))) uint64_t flashattn_ext_backend_layout() { return flashattn_ext::kBackendLayout; }

__attribute__((visibility("default"))) const flashattn_ext::Backend* flashattn_ext_backend() {
  static const flashattn_ext::Backend backend = [] {
    flashattn_ext::Backend renamed = flashattn_ext::FLASHATTN_EXT_PRIVATE_BACKEND();
    renamed.name = FLASHATTN_EXT_PRIVATE_NAME;
    return renamed;
  }();
  return &backend;
}

}  // extern "C"
