// The backend "cuda-sm80": every feature, on every GPU of compute capability 8.0 and newer.
#include "../common/device.h"
#include "../common/dispatch.cuh"
#include "kernels.h"
#include "tiles.h"

namespace flashattn_ext {
namespace {

// The kernels take v with as many columns as q and k.
template <class T, int kHeadDim, Kind kKind, int kHeadDimV>
struct Sm80 {
  static constexpr Kernels kKernels = sm80::kernels<T, kHeadDim, kKind>();
};

// Empty on a GPU that can run the kernels.
std::string refuses_device() {
  if (compute_capability() >= 80) return {};
  return wrong_device("8.0 or newer", "use torch's scaled_dot_product_attention there");
}
std::string supports(const AttnParams& p, bool) {
  std::string reason = wrong_tensors(p, sm80::least_shared<4, 512>());
  if (reason.empty()) reason = refuses_origin(p, "CUDA");
  return reason.empty() ? refuses_device() : reason;
}
std::string supports_decode(const DecodeParams& p) {
  const std::string reason = decode::refuses(p);
  return reason.empty() ? refuses_device() : reason;
}

}  // namespace

const Backend& cuda_sm80_backend() {
  static const Backend backend = Dispatch<Sm80>::backend("cuda-sm80", supports, supports_decode);
  return backend;
}

}  // namespace flashattn_ext
