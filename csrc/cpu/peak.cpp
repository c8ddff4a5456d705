#include <algorithm>
#include <chrono>
#include <numeric>
#include <thread>
#include <vector>

#include "cpu/isa.h"
#include "cpu/kernels.h"

namespace flashattn_ext {

double cpu_peak_gflops(int threads) {
  using Clock = std::chrono::steady_clock;
  constexpr int64_t kIterations = 4000000;
  auto rate = [](double* gflops) {
    for (int attempt = 0; attempt < 5; ++attempt) {
      const auto begin = Clock::now();
      const double flop = cpu_kernels(DType::kFloat32).multiply_add_flop(kIterations);
      *gflops = std::max(*gflops, flop * 1e-9 / std::chrono::duration<double>(Clock::now() - begin).count());
    }
  };
  std::vector<double> gflops(static_cast<size_t>(threads), 0.0);
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(rate, &gflops[static_cast<size_t>(t)]);
  rate(&gflops[0]);
  for (std::thread& other : others) other.join();
  return std::accumulate(gflops.begin(), gflops.end(), 0.0);
}

}  // namespace flashattn_ext
