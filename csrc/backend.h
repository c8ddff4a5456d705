// Backend: what one kind of device offers to ops.cpp. Each backend defines one constant table of this type.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "params.h"

namespace at {
class Tensor;
}

namespace flashattn_ext {

struct Backend {
  const char* name;    // as in build_info() and use_backend(): "cpu", "cuda-sm80", ...
  const char* device;  // torch's name of the device whose tensors it takes: "cpu", "cuda", "npu"

  // Empty when the call can run; otherwise the reason in words, with the nearest thing that works.
  std::string (*supports)(const AttnParams& params, bool backward);

  // Bytes of scratch memory that the call needs; ops.cpp allocates them and sets params.workspace.
  size_t (*forward_workspace_bytes)(const AttnParams& params);
  size_t (*backward_workspace_bytes)(const AttnGradParams& params);

  void (*forward)(const AttnParams& params);
  void (*backward)(const AttnGradParams& params);

  // mask[b, h, i, j] = 1 where dropout keeps the score; bool [B, Hq, Sq, Sk] contiguous. Uses batch, heads_q, seqlens
  // and rng_state.
  void (*dropout_mask)(const AttnParams& params, bool* mask);

  // Calls with a cache, likewise. nullptr in a backend that has none of them.
  std::string (*supports_decode)(const DecodeParams& params) = nullptr;
  size_t (*decode_workspace_bytes)(const DecodeParams& params) = nullptr;
  void (*decode)(const DecodeParams& params) = nullptr;

  // Torch's current stream on its device of that index; nullptr where ops.cpp knows the device itself (CPU, CUDA).
  void* (*current_stream)(int device_index) = nullptr;
  // Where a tensor can lie in memory as no strides say: how, and what to do; empty when it lies in rows.
  std::string (*private_format)(const at::Tensor& tensor) = nullptr;
  // Whether rows of an input may overlap in memory, as those of an expanded tensor do. Otherwise ops.cpp copies them.
  bool reads_overlapping_rows = false;
  // Writes the extremes of intervals (mask_extremes.h). Uses seqlen_k and the data and heads of `intervals`, which are
  // contiguous; the heads are those of all batch entries. nullptr: torch's own operators find them.
  void (*mask_extremes)(const AttnParams& params, int32_t* extremes) = nullptr;
  // Whether the forward writes AttnParams::centres. Otherwise ops.cpp fills them with 0.
  bool writes_centres = false;
  // Whether forward and backward set the unowned rows of packed tensors, which belong to no sequence. Otherwise ops.cpp
  // does.
  bool sets_unowned_rows = false;
};

// Why a backend whose dropout is drawn for whole calls of the generator, 16 rows and 64 keys, refuses an origin.
inline std::string refuses_origin(const AttnParams& p, const std::string& kernels) {
  if (!p.has_dropout() || (p.origin.row % 16 == 0 && p.origin.key % 64 == 0)) return {};
  return "dropout with an origin whose row is no multiple of 16 or whose key is no multiple of 64 is not implemented "
         "by "
         "the " +
         kernels + " kernels, got row " + std::to_string(p.origin.row) + " and key " + std::to_string(p.origin.key) +
         "; cut the call at such multiples, or use the CPU backend";
}

const Backend& cpu_backend();
const Backend& cuda_sm80_backend();  // in builds with FLASHATTN_EXT_CUDA
const Backend& cuda_sm90_backend();  // in builds with FLASHATTN_EXT_SM90, for architecture 9.0a

// Every backend that is loaded; among those of one device the preferred one comes first.
std::vector<const Backend*> backends();

// Adds the backend of a library, as the last one of its device. The library exports, in extern "C", `const Backend*
// flashattn_ext_backend()`, which may throw std::runtime_error to say why it cannot run here, and `uint64_t
// flashattn_ext_backend_layout()`, which returns kBackendLayout. load_backend throws std::runtime_error also when the
// library cannot be loaded or was compiled with other structs.
constexpr uint64_t kBackendLayout = (uint64_t{sizeof(Backend)} << 48) + (uint64_t{sizeof(AttnGradParams)} << 32) +
                                    (uint64_t{sizeof(DecodeParams)} << 16) + sizeof(CpuExecutor);
void load_backend(const std::string& path);

// Names a library for a device that has no backend yet. It is loaded once, when the first tensor of that device comes
// or when load_announced_backend() is called: earlier, the libraries that it needs may not be in the process.
void announce_backend(const std::string& device, const std::string& path);
void load_announced_backend(const std::string& device);

// The forced backend, or the preferred one of the device. Throws std::runtime_error, naming the fix, when there is none
// or the forced one takes tensors of another device.
const Backend& backend_for(const std::string& device);

// The first backend of the device that can run this call, in the order of backends(); the forced one is the only one
// asked. Where none can, `reason` is what the last one says, and it is returned. `refusal` is what a backend says of
// the call, empty where it can run it.
const Backend& backend_for(const std::string& device, const std::function<std::string(const Backend&)>& refusal,
                           std::string* reason);

// What a backend says of a call with a cache.
std::string refuses_decode(const Backend& backend, const DecodeParams& params);

// Process-wide (the autograd engine runs the backward in threads of its own); an empty name chooses by device again.
// Throws std::invalid_argument naming the choices.
void force_backend(const std::string& name);
std::string forced_backend();

// Throws std::runtime_error, naming the choices, when FLASHATTN_EXT_CUDA_PATH is set to what is in no build at all.
// Every call checks that, whatever its device; whether this build has the backend concerns only CUDA tensors.
void check_cuda_path();

}  // namespace flashattn_ext
