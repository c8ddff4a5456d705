// Runs the CPU kernels without torch, for tools/check_arm64.sh: forward, backward and a call with few queries of every
// dtype with each instruction set of this machine, against the portable kernels in fp64. The bits must not depend on
// the number of threads or on the other entries of a batch, and in invariant calls not on the number of queries.
//
//   instruction_sets [NAME...]            fails unless exactly these sets are there, fastest first, and all results are
//                                         right
//   instruction_sets --list [NAME...]     the same without running a kernel
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "backend/backend.h"
#include "cpu/isa.h"

namespace {

using namespace flashattn_ext;

struct Format {
  const char* name;
  DType dtype;
  int bytes, exponent_bits, mantissa_bits;
  double tolerance;  // of the error, relative to the largest element
};
// e4m3 has 7 as its bias like IEEE formats; the largest exponent, where it differs, does not occur here.
constexpr Format kFormats[] = {
    {"fp64", DType::kFloat64, 8, 11, 52, 1e-14}, {"fp32", DType::kFloat32, 4, 8, 23, 3e-6},
    {"fp16", DType::kFloat16, 2, 5, 10, 2e-3},   {"bf16", DType::kBFloat16, 2, 8, 7, 2e-2},
    {"fp8", DType::kFloat8, 1, 4, 3, 2e-2},
};
const Format& kDouble = kFormats[0];
const Format& kBFloat = kFormats[3];

// Values that the format represents exactly.
void encode(double x, const Format& format, void* to) {
  uint64_t bits = 0;
  if (x != 0) {
    int exponent;
    const double fraction = std::frexp(std::abs(x), &exponent);
    const int64_t biased = exponent - 1 + (1 << (format.exponent_bits - 1)) - 1;
    const auto mantissa = static_cast<uint64_t>(std::ldexp(2 * fraction - 1, format.mantissa_bits));
    bits = static_cast<uint64_t>(biased) << format.mantissa_bits | mantissa;
    if (x < 0) bits |= uint64_t{1} << (8 * format.bytes - 1);
  }
  std::memcpy(to, &bits, static_cast<size_t>(format.bytes));
}
double decode(const void* from, const Format& format) {
  uint64_t bits = 0;
  std::memcpy(&bits, from, static_cast<size_t>(format.bytes));
  const int64_t biased = static_cast<int64_t>(bits >> format.mantissa_bits & ((1u << format.exponent_bits) - 1));
  const auto mantissa = static_cast<double>(bits & ((uint64_t{1} << format.mantissa_bits) - 1));
  const int64_t bias = (1 << (format.exponent_bits - 1)) - 1;
  const double fraction = std::ldexp(mantissa, -format.mantissa_bits) + (biased ? 1 : 0);
  const double size = biased == (1 << format.exponent_bits) - 1
                          ? std::nan("")
                          : std::ldexp(fraction, static_cast<int>(std::max<int64_t>(biased, 1) - bias));
  return bits >> (8 * format.bytes - 1) ? -size : size;
}

struct Case {
  const char* name;
  int64_t batch, queries, keys, heads, heads_k, head_dim, head_dim_v;
  int64_t left, right;
  bool sink;
  double softcap;
  int32_t dropout_threshold;
};
constexpr Case kCases[] = {
    {"causal", 2, 75, 203, 4, 2, 64, 64, kUnbounded, 0, true, 0, 256},
    {"window", 1, 210, 199, 2, 1, 40, 24, 37, 11, false, 0, 200},
    {"softcap, odd head dims", 1, 33, 30, 2, 2, 13, 7, kUnbounded, kUnbounded, false, 3, 256},
    {"head dims 128, 136", 1, 130, 66, 1, 1, 128, 136, kUnbounded, kUnbounded, true, 0, 256},
};

using Bytes = std::vector<char>;
struct Results {
  Bytes out, lse, dq, dk, dv;
};

void run_threads(int workers, void (*body)(void* context, int worker), void* context) {
  std::vector<std::thread> others;
  for (int worker = 1; worker < workers; ++worker) others.emplace_back(body, context, worker);
  body(context, 0);
  for (std::thread& other : others) other.join();
}

// Inputs are multiples of 1/8 below 2, which every format represents. `entry` shifts the generator's seed, so that a
// call with one batch entry can repeat an entry of a larger one.
Bytes inputs(const Format& format, int64_t batch, int64_t elements, unsigned seed, int64_t entry) {
  Bytes all(static_cast<size_t>(batch * elements * format.bytes));
  for (int64_t b = 0; b < batch; ++b) {
    std::mt19937 generator(seed + 100 * static_cast<unsigned>(b + entry));
    for (int64_t i = 0; i < elements; ++i) {
      const double x = (static_cast<int>(generator() % 31) - 15) / 8.0;
      encode(x, format, all.data() + (b * elements + i) * format.bytes);
    }
  }
  return all;
}

TensorView view(Bytes& bytes, int64_t rows, int64_t heads, int64_t head_dim) {
  return {bytes.data(), rows * heads * head_dim, heads * head_dim, head_dim};
}

Results run(const Case& c, const Format& format, int threads, bool invariant, int64_t entry) {
  const bool is_fp8 = format.dtype == DType::kFloat8;
  const Format& of_out = is_fp8 ? kBFloat : format;
  const auto bytes_of = [](int64_t elements, int bytes) { return Bytes(static_cast<size_t>(elements * bytes)); };
  const int64_t of_q = c.queries * c.heads * c.head_dim, of_k = c.keys * c.heads_k * c.head_dim;
  const int64_t of_v = c.keys * c.heads_k * c.head_dim_v, of_out_elements = c.queries * c.heads * c.head_dim_v;
  const int real = format.bytes == 8 ? 8 : 4;
  Bytes q = inputs(format, c.batch, of_q, 1, entry), k = inputs(format, c.batch, of_k, 2, entry);
  Bytes v = inputs(format, c.batch, of_v, 3, entry), dout = inputs(format, c.batch, of_out_elements, 4, entry);
  Results results{bytes_of(c.batch * of_out_elements, of_out.bytes), bytes_of(c.batch * c.heads * c.queries, real),
                  bytes_of(c.batch * of_q, format.bytes), bytes_of(c.batch * of_k, format.bytes),
                  bytes_of(c.batch * of_v, format.bytes)};
  const int64_t rng_state[2] = {5, 7};
  CpuExecutor executor{threads, run_threads};
  AttnGradParams p;
  p.dtype = format.dtype;
  p.is_fp8 = is_fp8;
  p.batch = c.batch;
  p.seqlen_q = c.queries;
  p.seqlen_k = c.keys;
  p.heads_q = c.heads;
  p.heads_k = c.heads_k;
  p.head_dim = c.head_dim;
  p.head_dim_v = c.head_dim_v;
  p.q = view(q, c.queries, c.heads, c.head_dim);
  p.k = view(k, c.keys, c.heads_k, c.head_dim);
  p.v = view(v, c.keys, c.heads_k, c.head_dim_v);
  p.out = view(results.out, c.queries, c.heads, c.head_dim_v);
  p.lse = {results.lse.data(), c.heads * c.queries, c.queries};
  p.window_left = c.left;
  p.window_right = c.right;
  p.softmax_scale = 1 / std::sqrt(static_cast<double>(c.head_dim));
  p.softcap = c.softcap;
  p.has_sink = c.sink;
  p.dropout_threshold = is_fp8 ? 256 : c.dropout_threshold;
  p.rng_state = rng_state;
  p.origin.batch = entry;
  p.invariant = invariant;
  p.stream = &executor;
  const auto with_workspace = [&](size_t size, auto body) {
    std::vector<char> memory(size + 64, char(0xA5));
    p.workspace = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
    body();
  };
  const Backend& backend = cpu_backend();
  with_workspace(backend.forward_workspace_bytes(p), [&] { backend.forward(p); });
  if (is_fp8 || invariant) return results;
  p.dout = view(dout, c.queries, c.heads, c.head_dim_v);
  p.dq = view(results.dq, c.queries, c.heads, c.head_dim);
  p.dk = view(results.dk, c.keys, c.heads_k, c.head_dim);
  p.dv = view(results.dv, c.keys, c.heads_k, c.head_dim_v);
  with_workspace(backend.backward_workspace_bytes(p), [&] { backend.backward(p); });
  return results;
}

int failures = 0;
void expect(bool holds, const char* what, const std::string& isa, const Case& c, const Format& format) {
  if (holds) return;
  ++failures;
  std::printf("FAILS: %s, %s, %s: %s\n", isa.c_str(), format.name, c.name, what);
}

// The largest error, relative to the largest element of the reference.
double error_of(const Bytes& found, const Format& format, const Bytes& reference) {
  double error = 0, size = 0;
  for (size_t i = 0; i * 8 < reference.size(); ++i) {
    const double x = decode(found.data() + i * static_cast<size_t>(format.bytes), format);
    const double y = decode(reference.data() + i * 8, kDouble);
    error = std::isnan(x) ? INFINITY : std::max(error, std::abs(x - y));
    size = std::max(size, std::abs(y));
  }
  return error / size;
}

bool same_bits(const Results& a, const Results& b) {
  return a.out == b.out && a.lse == b.lse && a.dq == b.dq && a.dk == b.dk && a.dv == b.dv;
}
// Whether `all` ends with the elements of `last`.
bool ends_with(const Results& all, const Results& last) {
  const auto ends = [](const Bytes& x, const Bytes& end) { return std::equal(end.rbegin(), end.rend(), x.rbegin()); };
  return ends(all.out, last.out) && ends(all.dq, last.dq) && ends(all.dk, last.dk) && ends(all.dv, last.dv);
}

void check_case(const std::string& isa, const Case& c, const Format& format) {
  set_cpu_isa("generic");
  const Results reference = run(c, kDouble, 1, false, 0);
  set_cpu_isa(isa);
  const Results one = run(c, format, 1, false, 0);
  const bool is_fp8 = format.dtype == DType::kFloat8;
  const bool comparable = !is_fp8 || c.dropout_threshold == 256;
  const double out = comparable ? error_of(one.out, is_fp8 ? kBFloat : format, reference.out) : 0;
  double gradients = 0;
  if (!is_fp8) {
    gradients = std::max({error_of(one.dq, format, reference.dq), error_of(one.dk, format, reference.dk),
                          error_of(one.dv, format, reference.dv)});
  }
  std::printf("%-12s %s  out %.1e  gradients %.1e  %s\n", isa.c_str(), format.name, out, gradients, c.name);
  expect(out <= format.tolerance, "out is wrong", isa, c, format);
  expect(gradients <= 2 * format.tolerance, "gradients are wrong", isa, c, format);
  expect(same_bits(one, run(c, format, 3, false, 0)), "bits depend on the threads", isa, c, format);
  if (c.batch > 1) {
    Case last = c;
    last.batch = 1;
    expect(ends_with(one, run(last, format, 1, false, c.batch - 1)), "bits depend on the batch", isa, c, format);
  }
}

// Calls that the kernels for few queries run. Their first queries and all keys are those of a longer call.
void check_few_queries(const std::string& isa, const Format& format) {
  const Format& of_out = format.dtype == DType::kFloat8 ? kBFloat : format;
  Case whole = kCases[0];
  whole.batch = 1;
  whole.queries = 70;
  whole.right = kUnbounded;
  const Results of_whole = run(whole, format, 1, true, 0);
  for (const int64_t queries : {1, 2, 3, 4}) {
    Case few = whole;
    few.queries = queries;
    const Results invariant = run(few, format, 1, true, 0);
    expect(std::equal(invariant.out.begin(), invariant.out.end(), of_whole.out.begin()),
           "bits of an invariant call depend on the number of queries", isa, few, format);
    set_cpu_isa("generic");
    const Results exact = run(few, kDouble, 1, false, 0);
    set_cpu_isa(isa);
    expect(error_of(run(few, format, 2, false, 0).out, of_out, exact.out) <= format.tolerance,
           "out of few queries is wrong", isa, few, format);
  }
}

}  // namespace

int main(int count, char** arguments) {
  std::vector<std::string> wanted(arguments + 1, arguments + count);
  const std::vector<std::string> found = cpu_isas();
  const bool lists = !wanted.empty() && wanted.front() == "--list";
  if (lists) wanted.erase(wanted.begin());
  std::printf("instruction sets:");
  for (const std::string& isa : found) std::printf(" %s", isa.c_str());
  std::printf("\n");
  if (wanted != found) return std::printf("FAILS: other instruction sets than the arguments name\n"), 1;
  for (const std::string& isa : lists ? std::vector<std::string>() : found) {
    for (const Format& format : kFormats) {
      for (const Case& c : kCases) check_case(isa, c, format);
      check_few_queries(isa, format);
    }
  }
  std::printf("%d failures\n", failures);
  return failures != 0;
}
