// The backend "cuda-sm90": kernels of their own for 16-bit types on Hopper, and those of sm80/ for fp32.
#include "../common/device.h"
#include "../common/dispatch.cuh"
#include "../sm80/kernels.h"
#include "kernels.h"

namespace flashattn_ext {
namespace {

// Hopper's own backward of kGeneral lacks the exact sums of a relative bias's gradient: with the code for them ptxas
// serialises all products (C7510).
bool needs_exact_sums(const AttnGradParams& p) { return p.deterministic && p.drelative_bias; }

template <class T, int kHeadDim>
size_t general_backward_bytes(const AttnGradParams& p) {
  return needs_exact_sums(p) ? sm80::backward_bytes<T, kHeadDim, Kind::kGeneral>(p)
                             : sm90::backward_bytes<T, kHeadDim, Kind::kGeneral>(p);
}
template <class T, int kHeadDim>
void general_backward(const AttnGradParams& p) {
  needs_exact_sums(p) ? sm80::backward<T, kHeadDim, Kind::kGeneral>(p) : sm90::backward<T, kHeadDim, Kind::kGeneral>(p);
}

template <class T, int kHeadDim, Kind kKind>
constexpr Kernels sm90_kernels() {
  if constexpr (kKind == Kind::kGeneral && sm90::has_backward(kHeadDim, kKind)) {
    return {sm90::kForwardBytes, sm90::forward<T, kHeadDim, kKind>, general_backward_bytes<T, kHeadDim>,
            general_backward<T, kHeadDim>};
  } else if constexpr (sm90::has_backward(kHeadDim, kKind)) {
    return {sm90::kForwardBytes, sm90::forward<T, kHeadDim, kKind>, sm90::backward_bytes<T, kHeadDim, kKind>,
            sm90::backward<T, kHeadDim, kKind>};
  } else {
    return {sm90::kForwardBytes, sm90::forward<T, kHeadDim, kKind>, sm80::backward_bytes<T, kHeadDim, kKind>,
            sm80::backward<T, kHeadDim, kKind>};
  }
}

template <class T, int kHeadDim, Kind kKind>
struct Sm90 {
  static constexpr Kernels kKernels = sm90_kernels<T, kHeadDim, kKind>();
};
template <int kHeadDim, Kind kKind>
struct Sm90<float, kHeadDim, kKind> {
  static constexpr Kernels kKernels{0, sm80::forward<float, kHeadDim, kKind>,
                                    sm80::backward_bytes<float, kHeadDim, kKind>,
                                    sm80::backward<float, kHeadDim, kKind>};
};

std::string supports(const AttnParams& p, bool) {
  std::string reason = wrong_dtype(p);
  if (reason.empty()) reason = refuses_origin(p, "Hopper");
  if (!reason.empty() || compute_capability() == 90) return reason;
  return wrong_device("9.0", "use 'cuda-sm80' there");
}

}  // namespace

const Backend& cuda_sm90_backend() {
  static const Backend backend = Dispatch<Sm90>::backend("cuda-sm90", supports);
  return backend;
}

}  // namespace flashattn_ext
