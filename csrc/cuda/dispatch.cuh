// Makes a Backend of the rows of the table of kernels that it may run: a call runs what choose.h chooses, with its
// inputs aligned.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "backend/backend.h"
#include "cuda/choose.h"
#include "cuda/decode/few_queries/backward.h"
#include "cuda/decode/few_queries/pack_gqa.h"
#include "cuda/decode/prefill/chunks.h"
#include "cuda/decode/prefill/prefill.h"
#include "cuda/decode/split/decode.h"
#include "cuda/host/launch.cuh"
#include "cuda/passes/passes.h"
#include "cuda/table/stages.h"

namespace flashattn_ext {

// For Backend::supports: "needs a GPU of compute capability ..., found ...; ...".
inline std::string wrong_device(const std::string& needed, const std::string& instead) {
  const int capability = compute_capability();
  return "needs a GPU of compute capability " + needed + ", found " + std::to_string(capability / 10) + "." +
         std::to_string(capability % 10) + "; " + instead;
}

// The functions of a stage's rows.
template <Stage kStage>
class KernelsOf {
 public:
  using Entries = EntriesOf<kStage>;

  static const Entries& at(const TableRow& row) {
    const All& all = row.type == kFp16 ? kHalf : row.type == kBf16 ? kBfloat : row.type == kFp32 ? kFloat : kFloat8;
    return all[static_cast<size_t>(row.row)];
  }

 private:
  static constexpr size_t kRows = std::size(RowsOf<kStage>::kTable);
  using All = std::array<Entries, kRows>;

  template <class T, size_t kRow>
  static constexpr Entries of_row() {
    if constexpr (RowsOf<kStage>::kTable[kRow].types & kTypeOf<T>) {
      return RowsOf<kStage>::template entries_of<T, kRow>();
    } else {
      return {};
    }
  }
  template <class T, size_t... kRow>
  static constexpr All of_rows(std::index_sequence<kRow...>) {
    return {of_row<T, kRow>()...};
  }
  // In the order of the table, with empty entries for rows of other types.
  static constexpr All kHalf = of_rows<__half>(std::make_index_sequence<kRows>());
  static constexpr All kBfloat = of_rows<__nv_bfloat16>(std::make_index_sequence<kRows>());
  static constexpr All kFloat = of_rows<float>(std::make_index_sequence<kRows>());
  static constexpr All kFloat8 = of_rows<Float8>(std::make_index_sequence<kRows>());
};

template <Stage kStage>
const EntriesOf<kStage>& kernel_of(const TableRow& row) {
  return KernelsOf<kStage>::at(row);
}

// How the rows of a choice run that every architecture has.
struct EveryGpu {
  static void run_forward(const Choice& choice, const AttnParams& p) {
    const TableRow& row = choice.row;
    if (row.stage == Stage::kSm80HeadsForward) return kernel_of<Stage::kSm80HeadsForward>(row).heads_forward(p);
    kernel_of<Stage::kSm80Forward>(row).forward(p);
  }
  // Workspace beside copies of inputs.
  static size_t forward_bytes(const Choice&, const AttnParams&) { return 0; }
  static ChunkKernel chunk_kernel(const TableRow&) { return {}; }
  static decode::PackGqaKernel pack_gqa_kernel(const TableRow&) { return {}; }
  static decode::FewQueriesKernel few_queries_kernel(const TableRow& row) {
    const FewQueriesRow& kernel = table_row<Stage::kFewQueriesBackward>(row);
    return {kernel_of<Stage::kFewQueriesBackward>(row).backward, kernel.head_dim, decode::shared_bytes_of(kernel)};
  }
  static void run_backward(const TableRow& row, const AttnGradParams& p) {
    if (row.stage == Stage::kSm80HeadsBackward) return kernel_of<Stage::kSm80HeadsBackward>(row).heads_backward(p);
    kernel_of<Stage::kSm80Backward>(row).backward(p);
  }
  static size_t backward_bytes(const TableRow& row, const AttnGradParams& p) {
    if (row.stage == Stage::kSm80HeadsBackward)
      return kernel_of<Stage::kSm80HeadsBackward>(row).heads_backward_bytes(p);
    return kernel_of<Stage::kSm80Backward>(row).backward_bytes(p);
  }
  static void run_jvp(const TableRow& row, const JvpParams& p) { kernel_of<Stage::kSm80Jvp>(row).jvp(p); }
  static size_t jvp_bytes(const TableRow&) { return 0; }
  static void run_second(const TableRow& row, const SecondParams& p) { kernel_of<Stage::kSm80Second>(row).second(p); }
  static size_t second_bytes(const TableRow& row, const SecondParams& p) {
    return kernel_of<Stage::kSm80Second>(row).second_bytes(p);
  }
};

// Architecture: kName of the backend; kGpus, its GPUs in words; kFamily; refuses_device(), empty on a GPU that can run
// the kernels; and the functions of EveryGpu.
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
    backend.writes_bias_gradient = writes_bias_gradient;
    backend.sets_unowned_rows = true;
    backend.supports_derivatives = supports_derivatives;
    backend.jvp_workspace_bytes = jvp_workspace_bytes;
    backend.jvp = jvp;
    backend.second_workspace_bytes = second_workspace_bytes;
    backend.second = second;
    return backend;
  }

 private:
  static Chooser chooser() { return Chooser(Architecture::kFamily, {multiprocessors(), most_shared_memory()}); }

  static TableRow forward_row(const AttnParams& p) { return chooser().forward_row(forward_call(p)); }
  static bool has_kernels(const AttnParams& p, bool backward) {
    return forward_row(p) && (!backward || chooser().backward_row(backward_call(p, options_of(p))));
  }
  static std::string supports(const AttnParams& p, bool backward) {
    if (p.dtype == DType::kFloat64) return kRefusesFloat64;
    if (!backward && p.invariant && !lacks_for_invariant(p).empty()) return refuses_invariant_call(p);
    if (!has_kernels(p, backward)) return refuses_options(p, backward);
    const int shared = least_shared(forward_row(p));
    const auto of_call = [](const AttnParams& near) {
      const TableRow row = forward_row(near);
      return row ? least_shared(row) : std::numeric_limits<int>::max();
    };
    std::string reason = most_shared_memory() < shared ? refuses_shared_memory(p, shared, "", of_call) : "";
    if (reason.empty()) reason = refuses_origin(p, Architecture::kGpus);
    return reason.empty() ? Architecture::refuses_device() : reason;
  }
  static bool has_derivatives(const AttnParams& p) { return chooser().jvp_row(p) && chooser().second_row(p); }
  static std::string supports_derivatives(const AttnParams& p) {
    if (p.dtype == DType::kFloat64) return kRefusesFloat64;
    if (p.is_fp8) return refuses_fp8(p, Architecture::kName);
    if (!has_derivatives(p)) {
      return "forward mode and second derivatives of head dims above " +
             std::to_string(nearest_head_dim(p, has_derivatives)) + " are not implemented by the CUDA kernels, got " +
             std::to_string(p.head_dim) + " and " + std::to_string(p.head_dim_v) +
             "; use flashattn_ext.attention_reference (plain PyTorch, differentiable any number of times), or the CPU "
             "backend";
    }
    const auto of_call = [](const AttnParams& near) { return least_shared(chooser().jvp_row(near)); };
    if (most_shared_memory() < of_call(p)) {
      return refuses_shared_memory(p, of_call(p), "forward mode and second derivatives with ", of_call);
    }
    const std::string reason = refuses_origin(p, Architecture::kGpus);
    return reason.empty() ? Architecture::refuses_device() : reason;
  }
  // decode_call.cpp rejects head dims above 512, and page sizes that are not a multiple of 16 keys, for every device.
  static std::string supports_decode(const DecodeParams& p) {
    if (p.invariant) return supports_invariant_decode(p);
    if (p.dtype == DType::kFloat64) return kRefusesFloat64;
    if (!chooser().has_shared_memory(p)) {
      return "float32 with head dims above 256 needs a GPU whose thread blocks may have 168 KB of shared memory; use "
             "float16 or bfloat16";
    }
    return Architecture::refuses_device();
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

  // A choice that has a kernel.
  static Choice checked(const Choice& choice) {
    return choice.row ? choice : throw std::logic_error("a call without a kernel passed supports()");
  }
  static Choice choice_of(const AttnParams& p) { return checked(chooser().forward(p)); }
  static Choice choice_of(const DecodeParams& p) { return checked(chooser().decode(p)); }
  static Choice choice_of(const AttnGradParams& p) { return checked(chooser().backward(p)); }
  static TableRow jvp_row(const AttnParams& p) { return checked({chooser().jvp_row(p)}).row; }
  static TableRow second_row(const AttnParams& p) { return checked({chooser().second_row(p)}).row; }

  // A call that a choice of split-KV or chunks runs, with rows that the kernel can read.
  static size_t split_bytes(const Choice& choice, const DecodeParams& p) {
    if (choice.way == Way::kChunks) return decode::chunk_bytes(p, Architecture::chunk_kernel(choice.row));
    if (choice.way == Way::kPackGqa) return decode::pack_gqa_bytes(p, Architecture::pack_gqa_kernel(choice.row));
    return decode::workspace_bytes(p, split_kernel(choice.row));
  }
  static void run_split(const Choice& choice, const DecodeParams& p) {
    if (choice.way == Way::kChunks) return decode::run_chunks(p, Architecture::chunk_kernel(choice.row));
    if (choice.way == Way::kPackGqa) return decode::run_pack_gqa(p, Architecture::pack_gqa_kernel(choice.row));
    decode::run(p, split_kernel(choice.row));
  }
  static decode::SplitKernel split_kernel(const TableRow& row) {
    const DecodeRow& kernel = table_row<Stage::kDecode>(row);
    return {kernel_of<Stage::kDecode>(row).split, decode::sizes_of(row.type, kernel), kernel.head_dim};
  }

  static size_t forward_workspace_bytes(const AttnParams& p) {
    const Choice choice = choice_of(p);
    if (choice.way == Way::kChunks) return split_bytes(choice, cached_call(p));  // it aligns its rows itself
    const int64_t copies = choice.inputs == Inputs::kWidened   ? widened_bytes(p)
                           : choice.inputs == Inputs::kAligned ? aligned_copy_bytes(p)
                                                               : 0;
    return static_cast<size_t>(copies) +
           (choice.way == Way::kTiles ? Architecture::forward_bytes(choice, p) : split_bytes(choice, cached_call(p)));
  }
  static bool runs_few_queries(const AttnParams& p) { return chooser().forward(p).way != Way::kTiles; }
  static void run_forward(const AttnParams& p) {
    const Choice choice = choice_of(p);
    if (choice.way == Way::kChunks) return run_split(choice, cached_call(p));
    const AttnParams call = choice.inputs == Inputs::kWidened   ? widen_inputs(p)
                            : choice.inputs == Inputs::kAligned ? align_inputs(p)
                                                                : p;
    choice.way == Way::kTiles ? Architecture::run_forward(choice, call) : run_split(choice, cached_call(call));
  }
  static void forward(const AttnParams& p) {
    set_unowned_rows(p);
    run_forward(p);
  }

  static size_t decode_workspace_bytes(const DecodeParams& p) {
    const Choice choice = choice_of(p);
    if (choice.way != Way::kPrefill) return split_bytes(choice, p);
    return decode::prefill_bytes(p) + forward_workspace_bytes(decode::packed_call(p));
  }
  static void decode(const DecodeParams& p) {
    const Choice choice = choice_of(p);
    if (choice.way != Way::kPrefill) return run_split(choice, p);
    const AttnParams packed = decode::begin_prefill(p);
    run_forward(packed);
    decode::finish_prefill(p, packed);
  }

  static size_t backward_workspace_bytes(const AttnGradParams& p) {
    const Choice choice = choice_of(p);
    const size_t bytes = choice.way == Way::kFewQueriesBackward
                             ? decode::few_queries_backward_bytes(p, Architecture::few_queries_kernel(choice.row))
                             : Architecture::backward_bytes(choice.row, p);
    return static_cast<size_t>(aligned_copy_bytes(p)) + bytes;
  }
  static void backward(const AttnGradParams& p) {
    set_unowned_rows(p);
    const Choice choice = choice_of(p);
    const AttnGradParams call = align_inputs(p);
    choice.way == Way::kFewQueriesBackward
        ? decode::run_few_queries_backward(call, Architecture::few_queries_kernel(choice.row))
        : Architecture::run_backward(choice.row, call);
  }
  static bool writes_bias_gradient(const AttnGradParams& p) {
    const TableRow row = choice_of(p).row;
    return row.stage == Stage::kSm80HeadsBackward && table_row<Stage::kSm80HeadsBackward>(row).options == kAnyBias;
  }
  static size_t jvp_workspace_bytes(const JvpParams& p) {
    return static_cast<size_t>(aligned_copy_bytes(p)) + Architecture::jvp_bytes(jvp_row(p));
  }
  static void jvp(const JvpParams& p) { Architecture::run_jvp(jvp_row(p), align_inputs(p)); }
  static size_t second_workspace_bytes(const SecondParams& p) {
    return static_cast<size_t>(aligned_copy_bytes(p)) + Architecture::second_bytes(second_row(p), p);
  }
  static void second(const SecondParams& p) { Architecture::run_second(second_row(p), align_inputs(p)); }

  static constexpr const char* kRefusesFloat64 = "float64 is supported on the CPU only; use float32";
};

}  // namespace flashattn_ext
