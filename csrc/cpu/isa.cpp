#include "cpu/isa.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "cpu/kernels.h"

namespace flashattn_ext {
namespace {

bool machine_has(const CpuKernels& kernels) {
  const std::string name = kernels.name;
  if (name == "generic") return true;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (name == "avx2") return avx2;
  if (name == "avx512") return avx512;
#if defined(FLASHATTN_HAVE_AVX512_BF16)
  if (name == "avx512_bf16") return avx512 && __builtin_cpu_supports("avx512bf16");
#endif
#endif
  return false;
}

// Fastest first. On Intel's cores VDPBF16PS has so low a rate that fp32 products are faster.
std::vector<const CpuKernels*> available_kernels() {
  std::vector<const CpuKernels*> all;
#if defined(__x86_64__)
  all.push_back(&kAvx512Kernels);
#if defined(FLASHATTN_HAVE_AVX512_BF16)
  all.insert(__builtin_cpu_is("intel") ? all.end() : all.begin(), &kAvx512Bf16Kernels);
#endif
  all.push_back(&kAvx2Kernels);
#endif
  all.push_back(&kGenericKernels);
  std::vector<const CpuKernels*> available;
  for (const CpuKernels* kernels : all) {
    if (machine_has(*kernels)) available.push_back(kernels);
  }
  return available;
}

const CpuKernels* find_kernels(const std::string& name) {
  std::string choices;
  for (const CpuKernels* kernels : available_kernels()) {
    if (name == kernels->name) return kernels;
    choices += std::string(choices.empty() ? "" : ", ") + kernels->name;
  }
  throw std::invalid_argument("FLASHATTN_EXT_ISA: '" + name +
                              "' is not an instruction set of this build on this machine; choose one of " + choices);
}

std::atomic<const CpuKernels*>& selected() {
  static std::atomic<const CpuKernels*> kernels{[] {
    const char* forced = std::getenv("FLASHATTN_EXT_ISA");
    return forced && *forced ? find_kernels(forced) : available_kernels().front();
  }()};
  return kernels;
}

}  // namespace

const CpuKernels& cpu_kernels(DType dtype) {
  const CpuKernels* const kernels = selected().load(std::memory_order_relaxed);
#if defined(FLASHATTN_HAVE_AVX512_BF16)
  const bool has_own = dtype == DType::kBFloat16 || dtype == DType::kFloat8;
  if (kernels == &kAvx512Bf16Kernels && !has_own) return kAvx512Kernels;
#endif
  return *kernels;
}

std::vector<std::string> cpu_isas() {
  std::vector<std::string> names;
  for (const CpuKernels* kernels : available_kernels()) names.push_back(kernels->name);
  return names;
}
std::string cpu_isa() { return selected().load(std::memory_order_relaxed)->name; }
void set_cpu_isa(const std::string& name) { selected().store(find_kernels(name)); }
std::pair<int64_t, int64_t> cpu_tile(DType dtype, int64_t head_dim) {
  AttnParams params;
  params.dtype = dtype;
  params.head_dim = params.head_dim_v = head_dim;
  const TileSize size = cpu_kernels(dtype).tile_size(params);
  return {size.queries, size.keys};
}

}  // namespace flashattn_ext
