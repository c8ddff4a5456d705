// Makes a Backend of a folder of kernels (sm80/, sm90/): the kernels of a call by element type and head dim, on inputs
// that they can read.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "../../backend.h"
#include "../decode/decode.h"
#include "../decode/prefill.h"
#include "../dropout_mask.h"
#include "../mask_extremes.h"
#include "aligned_rows.h"
#include "kernels.h"
#include "kind.h"
#include "unowned_rows.h"

namespace flashattn_ext {

// Architecture<T, kHeadDim, kKind, kHeadDimV>::kKernels: the folder's Kernels for head dims of q and k up to kHeadDim,
// and of v up to kHeadDimV.
template <template <class, int, Kind, int> class Architecture>
class Dispatch {
 public:
  static Backend backend(const char* name, std::string (*supports)(const AttnParams&, bool),
                         std::string (*supports_decode)(const DecodeParams&)) {
    Backend backend{name,     "cuda",    supports,          &forward_workspace_bytes, &backward_workspace_bytes,
                    &forward, &backward, cuda_dropout_mask, supports_decode,          &decode_workspace_bytes,
                    &decode};
    backend.mask_extremes = cuda_mask_extremes;
    backend.writes_centres = true;
    backend.sets_unowned_rows = true;
    return backend;
  }

 private:
  template <class T, int kHeadDim, Kind kKind, int kHeadDimV = kHeadDim>
  static constexpr const Kernels& kKernels = Architecture<T, kHeadDim, kKind, kHeadDimV>::kKernels;

  template <class T, Kind kKind>
  static Kernels kernels_of(int64_t head_dim, int64_t head_dim_v) {
    const int64_t most = std::max(head_dim, head_dim_v);
    if (most <= 64) return kKernels<T, 64, kKind>;
    if (most <= 96) return kKernels<T, 96, kKind>;
    if (most <= 128) return kKernels<T, 128, kKind>;
    if (most <= 144) return kKernels<T, 144, kKind>;
    // With 144 columns and fewer the class 144 multiplies less than one of 192 with a narrower v.
    if (most <= 192) return head_dim_v <= 128 ? kKernels<T, 192, kKind, 128> : kKernels<T, 192, kKind>;
    if (most <= 256) return kKernels<T, 256, kKind>;
    if (most <= 384) return kKernels<T, 384, kKind>;
    return kKernels<T, 512, kKind>;
  }
  static Kernels kernels_of(const AttnParams& p) {
    return with_kind(kind_of(p), [&p](auto kind) {
      if (p.dtype == DType::kFloat16) return kernels_of<__half, kind.value>(p.head_dim, p.head_dim_v);
      if (p.dtype == DType::kBFloat16) return kernels_of<__nv_bfloat16, kind.value>(p.head_dim, p.head_dim_v);
      return kernels_of<float, kind.value>(p.head_dim, p.head_dim_v);
    });
  }

  static size_t forward_workspace_bytes(const AttnParams& p) {
    return static_cast<size_t>(aligned_copy_bytes(p)) + kernels_of(p).forward_bytes;
  }
  static size_t backward_workspace_bytes(const AttnGradParams& p) {
    return static_cast<size_t>(aligned_copy_bytes(p)) + kernels_of(p).backward_bytes(p);
  }
  static void run_forward(const AttnParams& p) { kernels_of(p).forward(align_inputs(p)); }
  static void forward(const AttnParams& p) {
    set_unowned_rows(p);
    run_forward(p);
  }
  static size_t decode_workspace_bytes(const DecodeParams& p) {
    if (!decode::is_prefill(p)) return decode::workspace_bytes(p);
    return decode::prefill_bytes(p) + forward_workspace_bytes(decode::packed_call(p));
  }
  static void decode(const DecodeParams& p) {
    if (!decode::is_prefill(p)) return decode::run(p);
    const AttnParams packed = decode::begin_prefill(p);
    run_forward(packed);
    decode::finish_prefill(p, packed);
  }
  static void backward(const AttnGradParams& p) {
    set_unowned_rows(p);
    kernels_of(p).backward(align_inputs(p));
  }
};

}  // namespace flashattn_ext
