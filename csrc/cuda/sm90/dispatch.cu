// The backend "cuda-sm90": kernels of their own for 16-bit types on Hopper, and those of sm80/ for fp32.
#include "../common/device.h"
#include "../common/dispatch.cuh"
#include "../sm80/kernels.h"
#include "kernels.h"

namespace flashattn_ext {
namespace {

template <class T, int kHeadDim, Kind kKind>
struct Sm90 {
  static constexpr Kind kCompiled = sm90::compiled_kind(kKind);
  static constexpr Kernels kKernels{sm90::kForwardBytes, sm90::forward<T, kHeadDim, kCompiled>,
                                    sm90::backward_bytes<T, kHeadDim, kCompiled>,
                                    sm90::backward<T, kHeadDim, kCompiled>};
};
template <int kHeadDim, Kind kKind>
struct Sm90<float, kHeadDim, kKind> {
  static constexpr Kernels kKernels{0, sm80::forward<float, kHeadDim, kKind>,
                                    sm80::backward_bytes<float, kHeadDim, kKind>,
                                    sm80::backward<float, kHeadDim, kKind>};
};

std::string supports(const AttnParams& p, bool backward) {
  std::string reason = wrong_dtype(p);
  if (reason.empty()) reason = refuses_biases(p, backward);
  if (reason.empty() && p.dtype != DType::kFloat32 && kind_of(p) == Kind::kGeneral) {
    reason = refuses_scores_and_masks(p, "Hopper");
  }
  if (reason.empty()) reason = refuses_dropout_of_a_part(p, "Hopper");
  if (!reason.empty() || compute_capability() == 90) return reason;
  return wrong_device("9.0", "use 'cuda-sm80' there");
}

}  // namespace

const Backend& cuda_sm90_backend() {
  static const Backend backend = Dispatch<Sm90>::backend("cuda-sm90", supports);
  return backend;
}

}  // namespace flashattn_ext
