// The backend "cuda-sm80": every feature, on every GPU of compute capability 8.0 and newer.
#include "../common/device.h"
#include "../common/dispatch.cuh"
#include "kernels.h"

namespace flashattn_ext {
namespace {

template <class T, int kHeadDim, Kind kKind>
struct Sm80 {
  static constexpr Kind kRun = general_kind(kKind);
  static constexpr Kernels kKernels{0, sm80::forward<T, kHeadDim, kRun>, sm80::backward_bytes<T, kHeadDim, kRun>,
                                    sm80::backward<T, kHeadDim, kRun>};
};

std::string supports(const AttnParams& p, bool) {
  std::string reason = wrong_dtype(p);
  if (reason.empty()) reason = refuses_head_dims(p);
  if (reason.empty()) reason = refuses_origin(p, "CUDA");
  if (!reason.empty() || compute_capability() >= 80) return reason;
  return wrong_device("8.0 or newer", "use torch's scaled_dot_product_attention there");
}

}  // namespace

const Backend& cuda_sm80_backend() {
  static const Backend backend = Dispatch<Sm80>::backend("cuda-sm80", supports);
  return backend;
}

}  // namespace flashattn_ext
