// The backend "cuda-sm80": every feature, on every GPU of compute capability 8.0 and newer.
#include "cuda/dispatch.cuh"

namespace flashattn_ext {
namespace {

struct Sm80 : EveryGpu {
  static constexpr const char *kName = "cuda-sm80", *kGpus = "CUDA";
  static constexpr Family kFamily = Family::kEveryGpu;

  static std::string refuses_device() {
    if (compute_capability() >= 80) return {};
    return wrong_device("8.0 or newer", "use torch's scaled_dot_product_attention there");
  }
};

}  // namespace

const Backend& cuda_sm80_backend() {
  static const Backend backend = Dispatch<Sm80>::backend();
  return backend;
}

}  // namespace flashattn_ext
