// The backend "cuda-sm90": kernels of their own for 16-bit types on Hopper, and those of sm80/ for fp32.
#include "../common/device.h"
#include "../common/dispatch.cuh"
#include "../sm80/kernels.h"
#include "../sm80/tiles.h"
#include "kernels.h"

namespace flashattn_ext {
namespace {

// What Hopper's own backward of softcap and biases lacks: exact sums of a relative bias's gradient (RelativeGradient),
// and the gradient of a bias whose tiles TMA cannot add or store.
bool left_to_sm80(const AttnGradParams& p) {
  return (p.drelative_bias && p.deterministic) || (p.dbias.data && !has_copyable_bias_gradient(p));
}

template <class T, int kHeadDim, Kind kKind>
size_t scored_backward_bytes(const AttnGradParams& p) {
  return left_to_sm80(p) ? sm80::kernels<T, kHeadDim, kKind>().backward_bytes(p)
                         : sm90::backward_bytes<T, sm90::backward_class(kHeadDim, kKind), kKind>(p);
}
template <class T, int kHeadDim, Kind kKind>
void scored_backward(const AttnGradParams& p) {
  left_to_sm80(p) ? sm80::kernels<T, kHeadDim, kKind>().backward(p)
                  : sm90::backward<T, sm90::backward_class(kHeadDim, kKind), kKind>(p);
}

template <class T, int kHeadDim, Kind kKind, int kHeadDimV>
struct Sm90 {
  static constexpr Kernels kKernels = [] {
    Kernels kernels = sm80::kernels<T, kHeadDim, kKind>();
    if constexpr (sm90::has_forward(kHeadDim, kKind)) {
      kernels.forward_bytes = sm90::kForwardBytes;
      constexpr bool kIsRare = kKind == Kind::kGeneral || kKind == Kind::kBias;
      constexpr int kClass = kIsRare ? rare_class(kHeadDim) : kHeadDim;
      kernels.forward = sm90::forward<T, kClass, kKind, sm90::value_class(kClass, kHeadDimV, kKind)>;
    }
    if constexpr (sm90::has_backward(kHeadDim, kKind)) {
      constexpr bool kScores = can_score(kKind);
      constexpr int kClassV = sm90::value_class(kHeadDim, kHeadDimV, kKind);
      kernels.backward_bytes =
          kScores ? scored_backward_bytes<T, kHeadDim, kKind> : sm90::backward_bytes<T, kHeadDim, kKind, kClassV>;
      kernels.backward = kScores ? scored_backward<T, kHeadDim, kKind> : sm90::backward<T, kHeadDim, kKind, kClassV>;
    }
    return kernels;
  }();
};
template <int kHeadDim, Kind kKind, int kHeadDimV>
struct Sm90<float, kHeadDim, kKind, kHeadDimV> {
  static constexpr Kernels kKernels = sm80::kernels<float, kHeadDim, kKind>();
};

// Empty on a GPU that can run the kernels.
std::string refuses_device() {
  if (compute_capability() == 90) return {};
  return wrong_device("9.0", "use 'cuda-sm80' there");
}
std::string supports(const AttnParams& p, bool) {
  std::string reason = wrong_tensors(p, sm80::least_shared<4, 512>());
  if (reason.empty()) reason = refuses_origin(p, "Hopper");
  return reason.empty() ? refuses_device() : reason;
}
// Reading a cache takes nothing that only Hopper has: both backends have the same kernels for it.
std::string supports_decode(const DecodeParams& p) {
  const std::string reason = decode::refuses(p);
  return reason.empty() ? refuses_device() : reason;
}

}  // namespace

const Backend& cuda_sm90_backend() {
  static const Backend backend = Dispatch<Sm90>::backend("cuda-sm90", supports, supports_decode);
  return backend;
}

}  // namespace flashattn_ext
