#include "backend/backend.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <stdexcept>

namespace flashattn_ext {
namespace {

std::atomic<const Backend*> forced{nullptr};

// Architectures with a CUDA backend. A build may have only some of them.
constexpr const char* kCudaPaths[] = {"sm80", "sm90"};

// The value of FLASHATTN_EXT_CUDA_PATH; nullptr if unset.
const char* cuda_path() {
  const char* const path = std::getenv("FLASHATTN_EXT_CUDA_PATH");
  if (!path || !*path) return nullptr;
  std::string choices;
  for (const char* known : kCudaPaths) {
    if (std::string(known) == path) return path;
    choices += std::string(choices.empty() ? "'" : ", '") + known + "'";
  }
  throw std::runtime_error(std::string("FLASHATTN_EXT_CUDA_PATH: '") + path +
                           "' is not the name of a CUDA backend; choose one of " + choices + " or unset it");
}

// FLASHATTN_EXT_CUDA_PATH=sm80 stands for "cuda-sm80", and so on; nullptr if it is unset or the device is not CUDA.
const Backend* named_by_environment(const std::string& device) {
  const char* const path = cuda_path();
  if (device != "cuda" || !path) return nullptr;
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

// The backend that use_backend() or the environment forces; nullptr if neither does.
const Backend* chosen(const std::string& device) {
  const Backend* const backend = forced.load();
  return backend ? backend : named_by_environment(device);
}

struct Registry {
  std::mutex mutex;
  std::vector<const Backend*> all{
      &cpu_backend(),
#if defined(FLASHATTN_EXT_SM90)
      &cuda_sm90_backend(),
#endif
#if defined(FLASHATTN_EXT_CUDA)
      &cuda_sm80_backend(),
#endif
  };
  std::map<std::string, std::string> announced;  // device: path
};

Registry& registry() {
  static Registry registry;
  return registry;
}

const Backend* preferred_of(const std::string& device) {
  for (const Backend* backend : backends()) {
    if (device == backend->device) return backend;
  }
  return nullptr;
}

}  // namespace

std::vector<const Backend*> backends() {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  return registry().all;
}

void load_backend(const std::string& path) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library)
    throw std::runtime_error("cannot load " + path + ": " + dlerror() +
                             "; build it again from the checkout, with build.sh");
  void* const layout = dlsym(library, "flashattn_ext_backend_layout");
  void* const symbol = dlsym(library, "flashattn_ext_backend");
  if (!layout || !symbol || reinterpret_cast<uint64_t (*)()>(layout)() != kBackendLayout)
    throw std::runtime_error(path +
                             " was built from other sources than this package; build it again from the checkout");
  const Backend* const backend = reinterpret_cast<const Backend* (*)()>(symbol)();
  const std::lock_guard<std::mutex> lock(registry().mutex);
  for (const Backend* known : registry().all) {
    if (known == backend) return;
  }
  registry().all.push_back(backend);
}

void announce_backend(const std::string& device, const std::string& path) {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().announced[device] = path;
}

void load_announced_backend(const std::string& device) {
  std::string path;
  {
    const std::lock_guard<std::mutex> lock(registry().mutex);
    const auto found = registry().announced.find(device);
    if (found == registry().announced.end()) return;
    path = found->second;
  }
  if (!preferred_of(device)) load_backend(path);
}

const Backend& backend_for(const std::string& device) {
  if (const Backend* backend = chosen(device)) {
    if (device == backend->device) return *backend;
    throw std::runtime_error(std::string("backend: use_backend('") + backend->name + "') takes tensors on '" +
                             backend->device + "', got '" + device + "'; move the tensors or call use_backend(None)");
  }
  if (const Backend* backend = preferred_of(device)) return *backend;
  load_announced_backend(device);
  if (const Backend* backend = preferred_of(device)) return *backend;
  throw std::runtime_error("flashattn_ext was built without a backend for '" + device +
                           "' tensors; see flashattn_ext.build_info() and build it from the checkout on a machine " +
                           (device == "npu" ? "with CANN and torch_npu: bash build.sh -arch 910b (Atlas A2), or "
                                              "bash build.sh -arch 910_93 (Atlas A3)"
                                            : "with that toolkit: pip install --no-build-isolation --force-reinstall "
                                              "--no-deps ."));
}

const Backend& backend_for(const std::string& device, const std::function<std::string(const Backend&)>& refusal,
                           std::string* reason) {
  const Backend* last = &backend_for(device);
  *reason = refusal(*last);
  if (reason->empty() || chosen(device)) return *last;
  for (const Backend* backend : backends()) {
    if (backend == last || device != backend->device) continue;
    last = backend;
    *reason = refusal(*backend);
    if (reason->empty()) break;
  }
  return *last;
}

std::string refuses_decode(const Backend& backend, const DecodeParams& params) {
  if (backend.supports_decode) return backend.supports_decode(params);
  return "attention to a key-value cache is not implemented here; gather the keys and values of each sequence and call "
         "flashattn_ext.varlen_forward, or use the CPU backend";
}

std::string refuses_derivatives(const Backend& backend, const AttnParams& params) {
  if (backend.supports_derivatives) return backend.supports_derivatives(params);
  if (backend.jvp && backend.second) return backend.supports(params, /*backward=*/true);
  return "the ops jvp (forward mode) and second (second derivatives) are not implemented here; use "
         "flashattn_ext.attention_reference (plain PyTorch, differentiable any number of times), or the CPU backend";
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

void check_cuda_path() { cuda_path(); }

std::string forced_backend() {
  const Backend* backend = forced.load();
  return backend ? backend->name : "";
}

}  // namespace flashattn_ext
