// A backend of its own library, compiled with other tiles than the package's to be measured beside it. No build of the
// package has this file: flashattn_ext/cli/private_build.py compiles it with the kernels of one backend.
//   FLASHATTN_EXT_PRIVATE_NAME     the backend's name for use_backend(), a string
//   FLASHATTN_EXT_PRIVATE_BACKEND  the function that returns its table: cuda_sm90_backend, ...
#include "backend.h"

// What load_backend() looks for.
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
