// Makes a Backend of the rows of the table of kernels that it may run: a call runs the first row that serves it, with
// its inputs aligned.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>
#include <utility>

#include "backend/backend.h"
#include "cuda/decode/few_rows/few_rows.h"
#include "cuda/decode/few_rows/packed.h"
#include "cuda/decode/prefill/chunks.h"
#include "cuda/decode/prefill/prefill.h"
#include "cuda/decode/split/decode.h"
#include "cuda/host/device.h"
#include "cuda/passes/aligned_rows.h"
#include "cuda/passes/dropout_mask.h"
#include "cuda/passes/mask_extremes.h"
#include "cuda/passes/max_logits.h"
#include "cuda/passes/unowned_rows.h"
#include "cuda/passes/widened_inputs.h"
#include "cuda/table/kernels.h"
#include "cuda/table/options.h"

namespace flashattn_ext {

// The kernels of a table's rows. Rows: kTable; Kernel, the type of its entry points; and kernel<T, head dim, head dim
// of v, options>(), those of one row; and needed(call), what a row must have for it.
template <class Rows>
class RowKernels {
 public:
  using Kernel = typename Rows::Kernel;

  // The kernel of the first row that serves the call; nullptr: no row does. on_hopper: of the rows for that GPU.
  static const Kernel* first(const KernelCall& call, bool on_hopper) {
    const Kernels& kernels = call.type == kFp16   ? kHalf
                             : call.type == kBf16 ? kBfloat
                             : call.type == kFp32 ? kFloat
                                                  : kFloat8;
    for (size_t i = 0; i < kRows; ++i) {
      const auto& row = Rows::kTable[i];
      if (serves(row, Rows::needed(call)) && !(on_hopper && row.gpus == kOtherGpus)) return &kernels[i];
    }
    return nullptr;
  }

 private:
  static constexpr size_t kRows = std::size(Rows::kTable);
  using Kernels = std::array<Kernel, kRows>;

  template <class T, size_t kRow>
  static constexpr Kernel of_row() {
    constexpr const auto& row = Rows::kTable[kRow];
    if constexpr (row.types & kTypeOf<T>) {
      return Rows::template kernel<T, row.head_dims.qk, row.head_dims.v, row.options>();
    } else {
      return {};
    }
  }
  template <class T, size_t... kRow>
  static constexpr Kernels of_rows(std::index_sequence<kRow...>) {
    return {of_row<T, kRow>()...};
  }
  // In the order of the table, with empty entries for rows of other types.
  static constexpr Kernels kHalf = of_rows<__half>(std::make_index_sequence<kRows>());
  static constexpr Kernels kBfloat = of_rows<__nv_bfloat16>(std::make_index_sequence<kRows>());
  static constexpr Kernels kFloat = of_rows<float>(std::make_index_sequence<kRows>());
  static constexpr Kernels kFloat8 = of_rows<Float8>(std::make_index_sequence<kRows>());
};

// The same call with its inputs widened.
inline KernelCall widened_call(KernelCall call) {
  if (call.type == kE4m3) call.type = kBf16;
  return call;
}
// Invariant calls in fp8 have the bits of decoding, which widens its caches.
inline KernelCall forward_call(const AttnParams& p) {
  const Options options = p.invariant ? invariant_options(options_of(p)) : options_of(p);
  const KernelCall call{type_bit(p.dtype), p.head_dim, p.head_dim_v, options, p.row_maxima.data != nullptr,
                        p.invariant};
  return p.invariant ? widened_call(call) : call;
}
inline KernelCall backward_call(const AttnParams& p, Options options) {
  return {type_bit(p.dtype), p.head_dim, p.head_dim_v, options};
}

// Architecture: kName of the backend; kGpus, its GPUs in words; refuses_device(), empty on a GPU that can run the
// kernels; forward(call), packed(call), backward(call), few_rows_backward(call), jvp(call) and second(call), the
// kernels of a call or nullptr; special_backward(p, call), the kernel that comes before backward(call), or nullptr.
template <class Architecture>
class Dispatch {
 public:
  static Backend backend() {
    Backend backend{Architecture::kName,
                    "cuda",
                    supports,
                    forward_workspace_bytes,
                    backward_workspace_bytes,
                    forward,
                    backward,
                    cuda_dropout_mask,
                    supports_decode,
                    decode_workspace_bytes,
                    decode};
    backend.runs_few_queries = runs_few_queries;
    backend.mask_extremes = cuda_mask_extremes;
    backend.max_logits = cuda_max_logits;
    backend.writes_centres = backend.writes_lse_words = true;
    backend.sets_unowned_rows = true;
    backend.supports_derivatives = supports_derivatives;
    backend.jvp_workspace_bytes = jvp_workspace_bytes;
    backend.jvp = jvp;
    backend.second_workspace_bytes = second_workspace_bytes;
    backend.second = second;
    return backend;
  }

 private:
  static bool has_kernels(const AttnParams& p, bool backward) {
    return Architecture::forward(forward_call(p)) &&
           (!backward || Architecture::backward(backward_call(p, options_of(p))));
  }
  static std::string supports(const AttnParams& p, bool backward) {
    if (p.dtype == DType::kFloat64) return "float64 is supported on the CPU only; use float32";
    if (!backward && p.invariant && !lacks_for_invariant(p).empty()) return refuses_invariant_call(p);
    if (!has_kernels(p, backward)) return refuses_options(p, backward);
    const int shared = Architecture::forward(forward_call(p))->least_shared;
    const auto of_call = [](const AttnParams& near) {
      const ForwardKernel* const kernel = Architecture::forward(forward_call(near));
      return kernel ? kernel->least_shared : std::numeric_limits<int>::max();
    };
    std::string reason = most_shared_memory() < shared ? refuses_shared_memory(p, shared, "", of_call) : "";
    if (reason.empty()) reason = refuses_origin(p, Architecture::kGpus);
    return reason.empty() ? Architecture::refuses_device() : reason;
  }
  // `invariant` is about out and lse: derivatives, like gradients, are those of the call without it.
  static const JvpKernel* jvp_kernel(const AttnParams& p) { return Architecture::jvp(backward_call(p, options_of(p))); }
  static const SecondKernel* second_kernel(const AttnParams& p) {
    return Architecture::second(backward_call(p, options_of(p)));
  }
  static std::string supports_derivatives(const AttnParams& p) {
    if (p.dtype == DType::kFloat64) return "float64 is supported on the CPU only; use float32";
    if (p.is_fp8) return refuses_fp8(p, Architecture::kName);
    const JvpKernel* const kernel = jvp_kernel(p);
    if (!kernel || !second_kernel(p)) {
      return "forward mode and second derivatives of head dims above " +
             std::to_string(
                 nearest_head_dim(p, [](const AttnParams& near) { return jvp_kernel(near) && second_kernel(near); })) +
             " are not implemented by the CUDA kernels, got " + std::to_string(p.head_dim) + " and " +
             std::to_string(p.head_dim_v) +
             "; use flashattn_ext.attention_reference (plain PyTorch, differentiable any number of times), or the CPU "
             "backend";
    }
    if (most_shared_memory() < kernel->least_shared) {
      return refuses_shared_memory(p, kernel->least_shared, "forward mode and second derivatives with ",
                                   [](const AttnParams& near) { return jvp_kernel(near)->least_shared; });
    }
    const std::string reason = refuses_origin(p, Architecture::kGpus);
    return reason.empty() ? Architecture::refuses_device() : reason;
  }
  static std::string supports_decode(const DecodeParams& p) {
    if (p.invariant) return supports_invariant_decode(p);
    const std::string reason = decode::refuses(p);
    return reason.empty() ? Architecture::refuses_device() : reason;
  }
  static std::string supports_invariant_decode(const DecodeParams& p) {
    if (!lacks_for_invariant(p).empty()) return refuses_invariant_call(p);
    const std::string reason = decode::refuses_prefill(p);
    return reason.empty() ? supports(p, false) : reason;
  }

  // What an invariant call has that another kernel than that of the same rows without it would compute; empty: nothing.
  static std::string lacks_for_invariant(const AttnParams& p) {
    if (p.relative_bias) return "relative_bias";
    if (p.origin.key != 0) return "an origin whose key is not 0";
    AttnParams unplaced = p;
    unplaced.origin.length_mask = -1;
    const bool is_general = !includes(kIntervals, options_of(unplaced));
    if (p.origin.length_mask == 0 && !is_general) return "an origin that places rows, without dropout";
    const bool is_large = std::max(p.head_dim, p.head_dim_v) > 256 && p.dtype != DType::kFloat32;
    return is_large && p.has_intervals() && !is_general ? "a Mask and head dims above 256" : "";
  }
  static std::string refuses_invariant_call(const AttnParams& p) {
    return "invariant=True with " + lacks_for_invariant(p) + " is not implemented by the " + Architecture::kName +
           " kernels; leave one of the two out, or use the CPU backend";
  }

  // The largest head dim for which `accepts` holds for the same call; 0: none.
  template <class Accepts>
  static int64_t nearest_head_dim(AttnParams p, const Accepts& accepts) {
    for (int64_t head_dim = std::max(p.head_dim, p.head_dim_v); head_dim > 0; --head_dim) {
      p.head_dim = p.head_dim_v = head_dim;
      if (accepts(p)) return head_dim;
    }
    return 0;
  }
  // No row serves the call: the nearest that exists.
  static std::string refuses_options(const AttnParams& p, bool backward) {
    const int64_t nearest = nearest_head_dim(p, [&](const AttnParams& near) { return has_kernels(near, backward); });
    const std::string sizes = "head dims " + std::to_string(p.head_dim) + " and " + std::to_string(p.head_dim_v) +
                              " of a call with " + words(options_of(p)) + " have no kernel in " + Architecture::kName;
    if (nearest == 0) return sizes + ", and no other head dims have; leave that out, or use the CPU backend";
    return sizes + "; use head dims up to " + std::to_string(nearest) + ", or the CPU backend";
  }
  // what: the start of the message, before "head dims". least(call): the shared memory that a call needs.
  template <class Least>
  static std::string refuses_shared_memory(const AttnParams& p, int needed, const std::string& what,
                                           const Least& least) {
    const int most = most_shared_memory();
    const int64_t nearest = nearest_head_dim(p, [&](const AttnParams& near) { return least(near) < needed; });
    auto kilobytes = [](int bytes) { return std::to_string(bytes / 1024) + " KB"; };
    return what + "head dims above " + std::to_string(nearest) + " of float32 need a GPU that gives a thread block " +
           kilobytes(needed) + " of shared memory (A100, H100 and newer data centre GPUs), found " + kilobytes(most) +
           "; use float16 or bfloat16, or the CPU backend";
  }

  static const ForwardKernel& forward_of(const AttnParams& p) { return found(Architecture::forward(forward_call(p))); }
  static const BackwardKernel& backward_of(const AttnGradParams& p) {
    const KernelCall call = backward_call(p, options_of(p));
    const BackwardKernel* const special = Architecture::special_backward(p, call);
    return special ? *special : found(Architecture::backward(call));
  }
  template <class Kernel>
  static const Kernel& found(const Kernel* kernel) {
    return kernel ? *kernel : throw std::logic_error("a call without a kernel passed supports()");
  }

  // Whether q, k and v are still fp8: a prefill has already widened its keys and values.
  static bool is_narrow(const AttnParams& p) { return p.dtype == DType::kFloat8; }
  static bool widens(const AttnParams& p, const ForwardKernel& kernel) { return is_narrow(p) && !kernel.reads_fp8; }
  static size_t forward_workspace_bytes(const AttnParams& p) {
    if (runs_in_chunks(p)) return decode::chunk_bytes(cached_call(p), chunk_kernel(p));
    if (is_few_rows(p)) {
      return cached_bytes(cached_call(p), true) + (is_narrow(p) ? 0 : static_cast<size_t>(aligned_copy_bytes(p)));
    }
    const ForwardKernel& kernel = forward_of(p);
    const int64_t copies = widens(p, kernel) ? widened_bytes(p) : aligned_copy_bytes(p);
    return kernel.workspace_bytes + (kernel.more_bytes ? kernel.more_bytes(p) : 0) + static_cast<size_t>(copies);
  }
  static const decode::FewRowsKernel* few_rows_kernel(const AttnGradParams& p) {
    return Architecture::few_rows_backward(backward_call(p, options_of(p)));
  }
  static size_t backward_workspace_bytes(const AttnGradParams& p) {
    const decode::FewRowsKernel* const own = few_rows_kernel(p);
    const size_t bytes =
        decode::is_few_rows(p, own) ? decode::few_rows_bytes(p, own) : backward_of(p).workspace_bytes(p);
    return static_cast<size_t>(aligned_copy_bytes(p)) + bytes;
  }
  // The kernel of blocks of queries if the decoding call runs on it, else nullptr.
  // aligned: whether its rows are, or copies of them will be.
  static const decode::PackedKernel* packed_kernel(const DecodeParams& p, bool aligned) {
    const decode::PackedKernel* const kernel = aligned ? Architecture::packed(forward_call(p)) : nullptr;
    return decode::has_packed_rows(p, kernel) ? kernel : nullptr;
  }
  static bool is_few_rows(const AttnParams& p) { return decode::is_few_rows(p, Architecture::packed(forward_call(p))); }
  // A prefill aligns its rows. Its packed sequences, which may have any order, must not be forwards with few rows.
  static bool is_prefill(const DecodeParams& p) { return decode::is_prefill(p, packed_kernel(p, true) != nullptr); }
  // Calls with a KV cache that are no prefill, and forwards with few rows.
  static size_t cached_bytes(const DecodeParams& p, bool aligned) {
    const decode::PackedKernel* const kernel = packed_kernel(p, aligned);
    return kernel ? decode::packed_bytes(p, *kernel) : decode::workspace_bytes(p);
  }
  static void run_cached(const DecodeParams& p, bool aligned) {
    const decode::PackedKernel* const kernel = packed_kernel(p, aligned);
    kernel ? decode::run_packed(p, *kernel) : decode::run(p);
  }
  static ChunkKernel chunk_kernel(const AttnParams& p) {
    const ForwardKernel& kernel = forward_of(p);
    return kernel.chunks ? kernel.chunks() : ChunkKernel{};
  }
  static bool runs_in_chunks(const AttnParams& p) {
    return p.invariant && decode::has_few_queries(p) && decode::has_chunks(cached_call(p), chunk_kernel(p));
  }
  static bool runs_few_queries(const AttnParams& p) { return runs_in_chunks(p) || is_few_rows(p); }
  static void run_forward(const AttnParams& p) {
    if (runs_in_chunks(p)) return decode::run_chunks(cached_call(p), chunk_kernel(p));
    const bool is_few = is_few_rows(p);  // these kernels read fp8 as it is, with any alignment
    if (is_few) return run_cached(cached_call(is_narrow(p) ? p : align_inputs(p)), true);
    const ForwardKernel& kernel = forward_of(p);
    kernel.run(widens(p, kernel) ? widen_inputs(p) : align_inputs(p));
  }
  static void forward(const AttnParams& p) {
    set_unowned_rows(p);
    run_forward(p);
  }
  static bool has_chunks(const DecodeParams& p) { return p.invariant && decode::has_chunks(p, chunk_kernel(p)); }
  static size_t decode_workspace_bytes(const DecodeParams& p) {
    if (!is_prefill(p)) return cached_bytes(p, decode::has_aligned_rows(p));
    if (has_chunks(p)) return decode::chunk_bytes(p, chunk_kernel(p));
    return decode::prefill_bytes(p) + forward_workspace_bytes(decode::packed_call(p));
  }
  static void decode(const DecodeParams& p) {
    if (!is_prefill(p)) return run_cached(p, decode::has_aligned_rows(p));
    if (has_chunks(p)) return decode::run_chunks(p, chunk_kernel(p));
    const AttnParams packed = decode::begin_prefill(p);
    run_forward(packed);
    decode::finish_prefill(p, packed);
  }
  static void backward(const AttnGradParams& p) {
    set_unowned_rows(p);
    const AttnGradParams call = align_inputs(p);
    const decode::FewRowsKernel* const own = few_rows_kernel(p);
    decode::is_few_rows(p, own) ? decode::run_few_rows(call, own) : backward_of(p).run(call);
  }
  static size_t jvp_workspace_bytes(const JvpParams& p) {
    return static_cast<size_t>(aligned_copy_bytes(p)) + found(jvp_kernel(p)).workspace_bytes;
  }
  static void jvp(const JvpParams& p) { found(jvp_kernel(p)).run(align_inputs(p)); }
  static size_t second_workspace_bytes(const SecondParams& p) {
    return static_cast<size_t>(aligned_copy_bytes(p)) + found(second_kernel(p)).workspace_bytes(p);
  }
  static void second(const SecondParams& p) { found(second_kernel(p)).run(align_inputs(p)); }
};

}  // namespace flashattn_ext
