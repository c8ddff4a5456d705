// The backend "cuda-sm80": every feature, on every GPU of compute capability 8.0 and newer.
#include "cuda/dispatch.cuh"
#include "cuda/sm80/kernels.h"

namespace flashattn_ext {
namespace {

struct Sm80 {
  static constexpr const char *kName = "cuda-sm80", *kGpus = "CUDA";

  static std::string refuses_device() {
    if (compute_capability() >= 80) return {};
    return wrong_device("8.0 or newer", "use torch's scaled_dot_product_attention there");
  }
  static const ForwardKernel* forward(const KernelCall& call) {
    return RowKernels<sm80::ForwardRows>::first(widened_call(call), false);
  }
  static const decode::PackedKernel* packed(const KernelCall&) { return nullptr; }
  static const decode::FewRowsKernel* few_rows_backward(const KernelCall&) { return nullptr; }
  static const BackwardKernel* special_backward(const AttnGradParams&, const KernelCall&) { return nullptr; }
  static const BackwardKernel* backward(const KernelCall& call) {
    return RowKernels<sm80::BackwardRows>::first(call, false);
  }
  static const JvpKernel* jvp(const KernelCall& call) { return RowKernels<sm80::JvpRows>::first(call, false); }
  static const SecondKernel* second(const KernelCall& call) { return RowKernels<sm80::SecondRows>::first(call, false); }
};

}  // namespace

const Backend& cuda_sm80_backend() {
  static const Backend backend = Dispatch<Sm80>::backend();
  return backend;
}

}  // namespace flashattn_ext
