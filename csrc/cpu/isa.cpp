#include "cpu/isa.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <future>
#include <stdexcept>

#include "cpu/kernels.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace flashattn_ext {
namespace {

// The kernels that this machine can run, fastest first.
std::vector<const CpuKernels*> available_kernels() {
  std::vector<const CpuKernels*> all;
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512) all.push_back(&kAvx512Kernels);
#if defined(FLASHATTN_HAVE_AVX512_BF16)
  // On Intel's cores VDPBF16PS has so low a rate that fp32 products are faster.
  if (avx512 && __builtin_cpu_supports("avx512bf16"))
    all.insert(__builtin_cpu_is("intel") ? all.end() : all.begin(), &kAvx512Bf16Kernels);
#endif
  if (avx2) all.push_back(&kAvx2Kernels);
#elif defined(__aarch64__)
#if defined(FLASHATTN_HAVE_NEON_BF16)
  constexpr unsigned long kHasBf16 = 1ul << 14;  // HWCAP2_BF16, which old headers lack
  if (getauxval(AT_HWCAP2) & kHasBf16) all.push_back(&kNeonBf16Kernels);
#endif
  all.push_back(&kNeonKernels);
#endif
  all.push_back(&kGenericKernels);
  return all;
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
  [[maybe_unused]] const bool is_bf16 = dtype == DType::kBFloat16 || dtype == DType::kFloat8;
#if defined(FLASHATTN_HAVE_AVX512_BF16)
  if (kernels == &kAvx512Bf16Kernels && !is_bf16) return kAvx512Kernels;
#elif defined(FLASHATTN_HAVE_NEON_BF16)
  if (kernels == &kNeonBf16Kernels && !is_bf16) return kNeonKernels;
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

double cpu_peak_gflops(int threads) {
  using Clock = std::chrono::steady_clock;
  constexpr int64_t kIterations = 4000000;
  const auto rate = [] {
    double gflops = 0;
    for (int attempt = 0; attempt < 5; ++attempt) {
      const auto begin = Clock::now();
      const double flop = cpu_kernels(DType::kFloat32).multiply_add_flop(kIterations);
      gflops = std::max(gflops, flop * 1e-9 / std::chrono::duration<double>(Clock::now() - begin).count());
    }
    return gflops;
  };
  std::vector<std::future<double>> others;
  for (int t = 1; t < threads; ++t) others.push_back(std::async(std::launch::async, rate));
  double sum = rate();
  for (std::future<double>& other : others) sum += other.get();
  return sum;
}

}  // namespace flashattn_ext
