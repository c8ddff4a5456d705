// The CPU backend: picks the kernels of the fastest instruction set that this machine has, and drives them.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "../backend.h"
#include "../dropout.h"
#include "forced_tile.h"
#include "isa.h"
#include "kernels.h"

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

// Fastest first.
std::vector<const CpuKernels*> available_kernels() {
  std::vector<const CpuKernels*> all;
#if defined(__x86_64__)
#if defined(FLASHATTN_HAVE_AVX512_BF16)
  all.push_back(&kAvx512Bf16Kernels);
#endif
  all.push_back(&kAvx512Kernels);
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

const CpuKernels& kernels() { return *selected().load(std::memory_order_relaxed); }

int64_t workers_of(const AttnParams& p) { return static_cast<const CpuExecutor*>(p.stream)->num_threads; }

std::string supports(const AttnParams&, bool) { return {}; }

size_t forward_workspace_bytes(const AttnParams& p) {
  return static_cast<size_t>(workers_of(p) * kernels().forward_scratch_bytes(p));
}
size_t backward_workspace_bytes(const AttnGradParams& p) {
  return static_cast<size_t>(kernels().backward_shared_bytes(p) + workers_of(p) * kernels().backward_scratch_bytes(p));
}
void forward(const AttnParams& p) { kernels().forward(p); }
void backward(const AttnGradParams& p) { kernels().backward(p); }

void dropout_mask(const AttnParams& p, bool* mask) {
  struct Call {
    const AttnParams& p;
    bool* mask;
    int workers;
    PhiloxKey key;
  } call{p, mask, static_cast<int>(workers_of(p)),
         philox_key(static_cast<uint64_t>(p.rng_state[0]), static_cast<uint64_t>(p.rng_state[1]))};
  auto body = [](void* context, int worker) {
    const Call& c = *static_cast<const Call*>(context);
    const AttnParams& p = c.p;
    const int64_t rows = p.batch * p.heads_q * p.seqlen_q;
    for (int64_t row = worker; row < rows; row += c.workers) {
      const int64_t b = row / (p.heads_q * p.seqlen_q), h = row / p.seqlen_q % p.heads_q, i = row % p.seqlen_q;
      for (int64_t j = 0; j < p.seqlen_k; ++j) {
        c.mask[row * p.seqlen_k + j] = dropout_keep(c.key, p.dropout_threshold, b, h, i, j);
      }
    }
  };
  static_cast<const CpuExecutor*>(p.stream)->run(call.workers, body, &call);
}

}  // namespace

const Backend& cpu_backend() {
  static const Backend backend{"cpu",   "cpu",    supports,    forward_workspace_bytes, backward_workspace_bytes,
                               forward, backward, dropout_mask};
  return backend;
}

std::vector<std::string> cpu_isas() {
  std::vector<std::string> names;
  for (const CpuKernels* kernels : available_kernels()) names.push_back(kernels->name);
  return names;
}
std::string cpu_isa() { return kernels().name; }
void set_cpu_isa(const std::string& name) { selected().store(find_kernels(name)); }

namespace {
std::atomic<CpuTile> forced_tile{CpuTile{}};
}  // namespace

CpuTile forced_cpu_tile() { return forced_tile.load(std::memory_order_relaxed); }
void force_cpu_tile(int64_t queries, int64_t keys) {
  auto fits = [](int64_t length) { return length > 0 && length <= 1024 && length % 64 == 0; };
  if (!(fits(queries) && fits(keys)) && !(queries == 0 && keys == 0)) {
    throw std::invalid_argument(
        "force_cpu_tile: expected multiples of 64 up to 1024, or 0 and 0 for the default, got " +
        std::to_string(queries) + " queries and " + std::to_string(keys) + " keys");
  }
  forced_tile.store({static_cast<int32_t>(queries), static_cast<int32_t>(keys)}, std::memory_order_relaxed);
}

std::pair<int64_t, int64_t> cpu_tile() {
  const CpuTile forced = forced_cpu_tile(), tile = forced.queries ? forced : kernels().forward_tile;
  return {tile.queries, tile.keys};
}

int64_t cpu_scratch_bytes(int64_t head_dim) {
  CpuExecutor executor;
  executor.forward_tile = forced_cpu_tile();
  AttnParams p;
  p.head_dim = p.head_dim_v = head_dim;
  p.stream = &executor;
  return kernels().forward_scratch_bytes(p);
}

double cpu_peak_gflops(int threads) {
  using Clock = std::chrono::steady_clock;
  constexpr int64_t kIterations = 4000000;
  auto rate = [](double* gflops) {
    for (int attempt = 0; attempt < 5; ++attempt) {
      const auto begin = Clock::now();
      const double flop = kernels().multiply_add_flop(kIterations);
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
