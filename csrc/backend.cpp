#include "backend.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace flashattn_ext {
namespace {

std::atomic<const Backend*> forced{nullptr};

// FLASHATTN_EXT_CUDA_PATH=sm80 stands for "cuda-sm80", and so on; nullptr where it is not set or is of no concern.
const Backend* named_by_environment(const std::string& device) {
  const char* const path = std::getenv("FLASHATTN_EXT_CUDA_PATH");
  if (device != "cuda" || !path || !*path) return nullptr;
  std::string choices;
  for (const Backend* backend : backends()) {
    const std::string prefix = "cuda-", name = backend->name;
    if (name.compare(0, prefix.size(), prefix) != 0) continue;
    if (name.substr(prefix.size()) == path) return backend;
    choices += (choices.empty() ? "'" : ", '") + name.substr(prefix.size()) + "'";
  }
  throw std::runtime_error(std::string("FLASHATTN_EXT_CUDA_PATH: '") + path + "' is not in this build; choose one of " +
                           choices + " or unset it");
}

// What the caller insists on.
const Backend* chosen(const std::string& device) {
  const Backend* const backend = forced.load();
  return backend ? backend : named_by_environment(device);
}

std::vector<const Backend*>& mutable_backends() {
  static std::vector<const Backend*> all{
      &cpu_backend(),
#if defined(FLASHATTN_EXT_SM90)
      &cuda_sm90_backend(),
#endif
#if defined(FLASHATTN_EXT_CUDA)
      &cuda_sm80_backend(),
#endif
  };
  return all;
}

}  // namespace

const std::vector<const Backend*>& backends() { return mutable_backends(); }

void load_backend(const std::string& path) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw std::runtime_error("cannot load " + path + ": " + dlerror());
  void* const layout = dlsym(library, "flashattn_ext_backend_layout");
  void* const symbol = dlsym(library, "flashattn_ext_backend");
  if (!layout || !symbol || reinterpret_cast<uint64_t (*)()>(layout)() != kBackendLayout)
    throw std::runtime_error(path +
                             " was built from other sources than this package; build it again from the checkout");
  auto* const backend = new Backend(*reinterpret_cast<const Backend* (*)()>(symbol)());  // lives as long as the process
  if (!backend->dropout_mask) backend->dropout_mask = cpu_backend().dropout_mask;
  if (!backend->write_rng_state) backend->write_rng_state = cpu_backend().write_rng_state;
  mutable_backends().push_back(backend);
}

const Backend& backend_for(const std::string& device) {
  if (const Backend* backend = chosen(device)) {
    if (device == backend->device) return *backend;
    throw std::runtime_error(std::string("backend: use_backend('") + backend->name + "') takes tensors on '" +
                             backend->device + "', got '" + device + "'; move the tensors or call use_backend(None)");
  }
  for (const Backend* backend : backends()) {
    if (device == backend->device) return *backend;
  }
  throw std::runtime_error(
      "flashattn_ext was built without a backend for '" + device + "' tensors; see flashattn_ext.build_info() " +
      "and rebuild on a machine with that toolkit: pip install --no-build-isolation --force-reinstall --no-deps .");
}

const Backend& backend_for(const std::string& device, const AttnParams& params, bool backward, std::string* reason) {
  const Backend* last = &backend_for(device);
  *reason = last->supports(params, backward);
  if (reason->empty() || chosen(device)) return *last;
  for (const Backend* backend : backends()) {
    if (backend == last || device != backend->device) continue;
    last = backend;
    *reason = backend->supports(params, backward);
    if (reason->empty()) break;
  }
  return *last;
}

void force_backend(const std::string& name) {
  if (name.empty()) {
    forced.store(nullptr);
    return;
  }
  std::string choices;
  for (const Backend* backend : backends()) {
    if (name == backend->name) {
      forced.store(backend);
      return;
    }
    choices += std::string(choices.empty() ? "'" : ", '") + backend->name + "'";
  }
  throw std::invalid_argument("backend: '" + name + "' is not in this build; choose one of " + choices + " or None");
}

std::string forced_backend() {
  const Backend* backend = forced.load();
  return backend ? backend->name : "";
}

}  // namespace flashattn_ext
