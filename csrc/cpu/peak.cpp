#include <algorithm>
#include <chrono>
#include <future>
#include <vector>

#include "cpu/isa.h"
#include "cpu/kernels.h"

namespace flashattn_ext {

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
