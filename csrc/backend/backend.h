// Backend: the entry points that a device backend offers to ops.cpp. Each backend defines one constant table of this
// type.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "derivative_params.h"

namespace at {
class Tensor;
}

namespace flashattn_ext {

struct Backend {
  const char* name;    // as in build_info() and use_backend(): "cpu", "cuda-sm80", ...
  const char* device;  // torch's name of the device whose tensors it takes: "cpu", "cuda", "npu"

  // Empty if the backend can run the call; otherwise the reason in words, with the nearest alternative that works.
  std::string (*supports)(const AttnParams& params, bool backward);

  // Bytes of scratch memory that the call needs; ops.cpp allocates them and sets params.workspace.
  size_t (*forward_workspace_bytes)(const AttnParams& params);
  size_t (*backward_workspace_bytes)(const AttnGradParams& params);

  void (*forward)(const AttnParams& params);
  void (*backward)(const AttnGradParams& params);

  // mask[b, h, i, j] = 1 where dropout keeps the score; bool [B, Hq, Sq, Sk] contiguous. Uses batch, heads_q, seqlens
  // and rng_state.
  void (*dropout_mask)(const AttnParams& params, bool* mask);

  // supports, forward_workspace_bytes and forward of decoding with a KV cache; nullptr in a backend without decoding.
  std::string (*supports_decode)(const DecodeParams& params) = nullptr;
  size_t (*decode_workspace_bytes)(const DecodeParams& params) = nullptr;
  void (*decode)(const DecodeParams& params) = nullptr;

  // Whether the kernels for few queries and many keys run a forward that the backend supports; its own dispatch
  // asks this too. Uses sizes, options and, of tensors on the host, cu_seqlens. nullptr in a backend without such
  // kernels.
  bool (*runs_few_queries)(const AttnParams& params) = nullptr;

  // Forward mode and second derivatives (derivative_params.h). All nullptr in a backend without them.
  // supports_derivatives: as `supports`, for both of them; nullptr if they support whatever `backward` supports.
  std::string (*supports_derivatives)(const AttnParams& params) = nullptr;
  size_t (*jvp_workspace_bytes)(const JvpParams& params) = nullptr;
  void (*jvp)(const JvpParams& params) = nullptr;
  size_t (*second_workspace_bytes)(const SecondParams& params) = nullptr;
  void (*second)(const SecondParams& params) = nullptr;

  // Torch's current stream on the device with that index; nullptr where op_device.cpp knows the stream itself (CPU,
  // CUDA).
  void* (*current_stream)(int device_index) = nullptr;
  // For devices with memory formats that strides do not describe: names the format of the tensor and what to do about
  // it; empty for a strided tensor.
  std::string (*private_format)(const at::Tensor& tensor) = nullptr;
  // Whether the kernels accept inputs whose rows overlap in memory, such as expanded tensors. Otherwise ops.cpp copies
  // them.
  bool reads_overlapping_rows = false;
  // Writes the extremes of intervals (mask_extremes.h). Uses seqlen_k and the data and heads of `intervals`, which are
  // contiguous; batch entries are folded into the heads. nullptr: mask_extremes.cpp uses torch operators.
  void (*mask_extremes)(const AttnParams& params, int32_t* extremes) = nullptr;
  // Writes the largest of the row maxima of each head, fp32 [B, Hq] contiguous. Uses batch, heads_q, the query lengths,
  // row_maxima and the stream. nullptr: call_params.cpp uses torch operators.
  void (*max_logits)(const AttnParams& params, float* results) = nullptr;
  // Whether the forward writes AttnParams::centres. Where it does not, ops.cpp fills them with 0.
  bool writes_centres = false;
  // Whether the backward of a call writes every element of the gradient of a bias that is not broadcast. Otherwise, or
  // with nullptr, ops.cpp zeroes it before.
  bool (*writes_bias_gradient)(const AttnGradParams& params) = nullptr;
  // Whether the forward writes AttnParams::lse_words. Where it does not, ops.cpp makes them from lse.
  bool writes_lse_words = false;
  // Whether forward and backward set the unowned rows of packed tensors, which belong to no sequence. Otherwise ops.cpp
  // does.
  bool sets_unowned_rows = false;
};

// Why a backend refuses an origin if it draws dropout in whole blocks of the generator, 16 rows x 64 keys; empty if it
// accepts the origin.
inline std::string refuses_origin(const AttnParams& p, const std::string& kernels) {
  if (!p.has_dropout() || (p.origin.row % 16 == 0 && p.origin.key % 64 == 0)) return {};
  return "dropout with an origin whose row is no multiple of 16 or whose key is no multiple of 64 is not implemented "
         "by the " +
         kernels + " kernels, got row " + std::to_string(p.origin.row) + " and key " + std::to_string(p.origin.key) +
         "; cut the call at such multiples, or use the CPU backend";
}

// Why a backend refuses an option of a score that is not among those that it computes, by name; empty if the call has
// none.
inline std::string refuses_score_options(const AttnParams& p, std::initializer_list<std::string> computed,
                                         const std::string& kernels) {
  const auto lacks = [&](const std::string& name) {
    return std::find(computed.begin(), computed.end(), name) == computed.end();
  };
#define CALL_SCORE(name, off, ...)   \
  if (p.name != off && lacks(#name)) \
    return #name " is not implemented by the " + kernels + " kernels; leave it out, or use the CPU or CUDA backend";
  FLASHATTN_SCORE_OPTIONS(CALL_SCORE)
#undef CALL_SCORE
  return {};
}

// Why a backend without kernels for fp8 inputs refuses a call; empty if the call has none.
inline std::string refuses_fp8(const AttnParams& p, const std::string& kernels) {
  if (!p.is_fp8) return {};
  return "float8_e4m3fn inputs are not implemented by the " + kernels +
         " kernels; convert the values to bfloat16, or use the CPU backend";
}

// Why a backend without invariant kernels refuses a call; empty if the call is not invariant.
inline std::string refuses_invariant(const AttnParams& p, const std::string& kernels) {
  if (!p.invariant) return {};
  return "invariant=True is not implemented by the " + kernels +
         " kernels; leave it out (bits may then depend on the rest of the call), or use the CPU backend";
}

// Why a backend without kernels for a BlockMask refuses a call; empty if the call has none.
inline std::string refuses_blocks(const AttnParams& p, const std::string& kernels) {
  if (!p.has_blocks()) return {};
  return "mask: a BlockMask is not implemented by the " + kernels +
         " kernels; pass torch.where(mask.dense(), 0.0, -math.inf) as bias, a Mask where the rows that see a key are "
         "one interval, or use the CPU or CUDA backend";
}

const Backend& cpu_backend();
const Backend& cuda_sm80_backend();  // in builds with FLASHATTN_EXT_CUDA
const Backend& cuda_sm90_backend();  // in builds with FLASHATTN_EXT_SM90, for architecture 9.0a

// All loaded backends; among the backends of one device the preferred one comes first.
std::vector<const Backend*> backends();

// Adds the backend of a library, as the last one of its device. The library exports, in extern "C", `const Backend*
// flashattn_ext_backend()`, which may throw std::runtime_error to say why it cannot run here, and `uint64_t
// flashattn_ext_backend_layout()`, which returns kBackendLayout. load_backend throws std::runtime_error also when the
// library cannot be loaded or was compiled with other structs.
constexpr uint64_t kBackendLayout = (uint64_t{sizeof(Backend)} << 48) + (uint64_t{sizeof(AttnGradParams)} << 32) +
                                    (uint64_t{sizeof(DecodeParams)} << 16) + sizeof(CpuExecutor);
void load_backend(const std::string& path);

// Names a library for a device that has no backend yet. It is loaded once, at the first tensor of that device or when
// load_announced_backend() is called, because the libraries that it needs may not be in the process earlier.
void announce_backend(const std::string& device, const std::string& path);
void load_announced_backend(const std::string& device);

// The forced backend, or the preferred one of the device. Throws std::runtime_error, naming the fix, when there is none
// or the forced one takes tensors of another device.
const Backend& backend_for(const std::string& device);

// The first backend of the device that can run this call, in the order of backends(); a forced backend is the only
// candidate. If no backend can run the call, the last candidate is returned and `reason` is its refusal.
// `refusal(backend)` is the reason why a backend cannot run the call, or empty.
const Backend& backend_for(const std::string& device, const std::function<std::string(const Backend&)>& refusal,
                           std::string* reason);

// Why a backend cannot run a decoding call; empty if it can.
std::string refuses_decode(const Backend& backend, const DecodeParams& params);
// Why a backend cannot compute the ops `jvp` and `second` of a call; empty if it can.
std::string refuses_derivatives(const Backend& backend, const AttnParams& params);

// Process-wide (the autograd engine runs the backward in threads of its own); an empty name chooses by device again.
// Throws std::invalid_argument naming the choices.
void force_backend(const std::string& name);
std::string forced_backend();

// Throws std::runtime_error, naming the choices, when FLASHATTN_EXT_CUDA_PATH names a backend that no build has. Every
// call checks that on every device; whether this build has the backend matters only to CUDA tensors.
void check_cuda_path();

}  // namespace flashattn_ext
