// The backend "ascend-emulator": CPU tensors through the Ascend C kernels on
// the emulator. A separate library, which flashattn_ext loads when the backend
// is selected.
//
// FLASHATTN_EXT_ASCEND_EMULATOR, "key=value,...", chooses how: mode (eager,
// late, random), seed, cores, nan (refuse: none in a product).
#include "../../csrc/backend/backend.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "../../csrc/rules/mask.h"
#include "../dispatch.h"
#include "../kernels.h"
#include "../tiles.h"

namespace flashattn_ext {
namespace {

using ascend_emulator::GlobalMemory;
using ascend_emulator::Use;

constexpr size_t kRngStateBytes = 2 * sizeof(int64_t);

struct Choices {
  ascend_emulator::Options options;
  int64_t cores = 2;
};

Choices choices() {
  Choices found;
  const char* const text = std::getenv("FLASHATTN_EXT_ASCEND_EMULATOR");
  std::istringstream pairs(text ? text : "");
  for (std::string pair; std::getline(pairs, pair, ',');) {
    const std::string key = pair.substr(0, pair.find('=')), value = pair.substr(std::min(pair.size(), key.size() + 1));
    using ascend_emulator::Mode;
    if (key == "mode" && (value == "eager" || value == "late" || value == "random"))
      found.options.mode = value == "late" ? Mode::late : value == "random" ? Mode::random : Mode::eager;
    else if (key == "seed" && !value.empty() && value.find_first_not_of("0123456789") == std::string::npos)
      found.options.seed = std::stoull(value);
    else if (key == "nan" && (value == "accept" || value == "refuse"))
      found.options.refuses_nan = value == "refuse";
    else if (key == "cores" && std::atoi(value.c_str()) > 0)
      found.cores = std::atoi(value.c_str());
    else
      throw std::runtime_error("FLASHATTN_EXT_ASCEND_EMULATOR: '" + pair +
                               "' is not accepted; accepted are mode=eager|late|random, "
                               "seed=NUMBER, cores=NUMBER, nan=accept|refuse");
  }
  return found;
}

int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// The bytes between the first and the last element of a tensor of the inputs'
// type.
void add(GlobalMemory& gm, const char* name, DType dtype, const TensorView& view, int64_t batch, int64_t rows,
         int64_t heads, int64_t columns, Use use) {
  if (!batch || !rows || !heads) return;
  const int64_t last = (batch - 1) * view.batch_stride + (rows - 1) * view.row_stride + (heads - 1) * view.head_stride;
  gm.add(name, view.data, static_cast<size_t>((last + columns) * size_of(dtype)), use);
}
void add(GlobalMemory& gm, const char* name, const RowView& view, int64_t batch, int64_t heads, int64_t rows, Use use) {
  if (!batch || !rows || !heads || !view.data) return;
  const int64_t last = (batch - 1) * view.batch_stride + (heads - 1) * view.head_stride + rows - 1;
  gm.add(name, view.data, static_cast<size_t>(last + 1) * 4, use);
}

void add(GlobalMemory& gm, const char* name, const AttnParams& p, const BiasView& view, Use use) {
  if (!view.data || !p.batch || !p.heads_q || !p.seqlen_q || !p.seqlen_k) return;
  const int64_t last =
      (p.batch - 1) * view.batch_stride + (p.heads_q - 1) * view.head_stride + (p.seqlen_q - 1) * view.row_stride;
  gm.add(name, view.data, static_cast<size_t>((last + p.seqlen_k) * size_of(view.dtype)), use);
}
size_t relative_bytes(const AttnParams& p) { return static_cast<size_t>(p.heads_q * (2 * p.relative_reach + 1)) * 4; }

void add_inputs(GlobalMemory& gm, const AttnParams& p) {
  const int64_t batch = p.is_varlen() ? 1 : p.batch;
  const int64_t rows_q = p.is_varlen() ? p.total_q : p.seqlen_q, rows_k = p.is_varlen() ? p.total_k : p.seqlen_k;
  add(gm, "q", p.dtype, p.q, batch, rows_q, p.heads_q, p.head_dim, Use::input);
  add(gm, "k", p.dtype, p.k, batch, rows_k, p.heads_k, p.head_dim, Use::input);
  add(gm, "v", p.dtype, p.v, batch, rows_k, p.heads_k, p.head_dim_v, Use::input);
  if (p.is_varlen()) {
    gm.add("cu_seqlens_q", p.cu_seqlens_q, static_cast<size_t>(p.batch + 1) * 4, Use::input);
    gm.add("cu_seqlens_k", p.cu_seqlens_k, static_cast<size_t>(p.batch + 1) * 4, Use::input);
  }
  const size_t slopes = static_cast<size_t>((p.alibi_batch_stride ? p.batch : 1) * p.heads_q) * 4;
  if (p.alibi_slopes) gm.add("alibi_slopes", p.alibi_slopes, slopes, Use::input);
  if (p.relative_bias) gm.add("relative_bias", p.relative_bias, relative_bytes(p), Use::input);
  add(gm, "bias", p, p.bias, Use::input);
  if (p.has_intervals()) {
    const IntervalView& view = p.intervals;
    const auto entries = [&](int64_t batch_stride, int64_t head_stride) {
      return static_cast<size_t>((batch_stride ? (p.batch - 1) * batch_stride : 0) + view.heads * head_stride);
    };
    gm.add("mask_intervals", view.data, entries(view.batch_stride, view.head_stride) * 8, Use::input);
    gm.add("mask_extremes", view.extremes, entries(view.extremes_batch_stride, view.extremes_head_stride) * 16,
           Use::input);
  }
  if (p.sink) gm.add("sink", p.sink, static_cast<size_t>(p.heads_q) * 4, Use::input);
  if (p.has_dropout()) gm.add("rng_state", p.rng_state, kRngStateBytes, Use::input);
}

void check(const ascend_emulator::Report& report) {
  if (report.errors.empty() && report.warnings.empty()) return;
  std::string text = "the Ascend C kernel violates a rule of the hardware:";
  for (const std::string& error : report.errors) text += "\n  " + error;
  for (const std::string& warning : report.warnings) text += "\n  " + warning;
  throw std::runtime_error(text);
}

// In Mode::time nothing is computed, but scalar code still reads the checks of
// vector cores: all pass.
std::vector<float> checks_in_time(ascend::Arguments* a, bool moves_data) {
  std::vector<float> all_finite(moves_data ? 0 : size_t(a->check_count));
  if (!moves_data && a->checks) a->checks = all_finite.data();
  return all_finite;
}
void add_checks(GlobalMemory& gm, const ascend::Arguments& a, Use use) {
  if (a.checks) gm.add("checks", a.checks, size_t(a.check_count) * 4, use);
}
void add_isolation(GlobalMemory& gm, const ascend::Arguments& a, int64_t cores, int64_t rows_fp32,
                   int64_t rows_of_16_bits) {
  if (!a.isolated) return;
  const int64_t core_bytes = a.isolated_pitch() * (a.dtype == DType::kFloat32 ? rows_fp32 * 4 : rows_of_16_bits * 2);
  gm.add("isolated", a.isolated, size_t(cores * core_bytes), Use::workspace);
}

// Runs a stage of a call. A kernel with cube cores takes their number as
// `blocks`, another one that of vector cores.
ascend_emulator::Report launch(ascend::Stage stage, int64_t blocks, const Choices& how, GlobalMemory& gm,
                               const ascend::Arguments& arguments) {
#define FLASHATTN_FUNCTION(cores, stage, type, options, name) name,
  static constexpr void (*kKernels[])(FlashattnBytes) = {FLASHATTN_KERNELS(FLASHATTN_FUNCTION)};
#undef FLASHATTN_FUNCTION
  const auto kernel = kKernels[ascend::kernel_of(stage, arguments)];
  const bool mixed = stage == ascend::Stage::kForward || stage == ascend::Stage::kBackward;
  return ascend_emulator::launch(mixed ? AscendC::KERNEL_TYPE_MIX_AIC_1_2 : AscendC::KERNEL_TYPE_AIV_ONLY,
                                 static_cast<int>(blocks), how.options, gm,
                                 [&] { kernel(ascend::to_bytes(arguments)); });
}

ascend_emulator::Report run_forward(const AttnParams& p, const Choices& how) {
  const int64_t cores = ascend::forward_cores(p, how.cores);
  if (!cores) return {};
  ascend::Arguments arguments = ascend::forward_arguments(p, how.cores);
  const bool moves_data = how.options.mode != ascend_emulator::Mode::time;
  const std::vector<float> all_finite = checks_in_time(&arguments, moves_data);
  ascend_emulator::Report total;
  if (p.has_intervals()) {
    GlobalMemory check(moves_data);
    add_inputs(check, p);
    add_checks(check, arguments, Use::output);
    total += launch(ascend::Stage::kForwardCheck, ascend::kVectorCores * how.cores, how, check, arguments);
    if (!total.errors.empty()) return total;
  }
  GlobalMemory gm(moves_data);
  add_inputs(gm, p);
  add_isolation(gm, arguments, cores, ascend::SizesOf<4>::kIsolatedForward, ascend::SizesOf<2>::kIsolatedForward);
  add_checks(gm, arguments, Use::input);
  const int64_t batch = p.is_varlen() ? 1 : p.batch, rows = p.is_varlen() ? p.total_q : p.seqlen_q;
  add(gm, "out", p.dtype, p.out, batch, rows, p.heads_q, p.head_dim_v, Use::output);
  add(gm, "lse", p.lse, batch, p.heads_q, rows, Use::output);
  const size_t bytes = static_cast<size_t>(cores * ascend::forward_slot_bytes(p));
  if (moves_data) std::memset(arguments.workspace, 0xff, bytes);
  gm.add("workspace", arguments.workspace, bytes, Use::workspace);
  total += launch(ascend::Stage::kForward, cores, how, gm, arguments);
  return total;
}

void forward(const AttnParams& p) { check(run_forward(p, choices())); }

// The three stages; each reads the results of the one before.
ascend_emulator::Report run_backward(const AttnGradParams& p, const Choices& how) {
  ascend::Arguments a = ascend::backward_arguments(p, how.cores);
  const bool moves_data = how.options.mode != ascend_emulator::Mode::time;
  const std::vector<float> all_finite = checks_in_time(&a, moves_data);
  const int64_t cores = ascend::backward_cores(p, how.cores);
  const int64_t batch = p.is_varlen() ? 1 : p.batch;
  const int64_t rows_q = p.is_varlen() ? p.total_q : p.seqlen_q, rows_k = p.is_varlen() ? p.total_k : p.seqlen_k;
  const auto with_sums = [&](GlobalMemory& gm, Use delta, Use sums) {
    const size_t dim = size_t(ascend::sum_pitch(p.head_dim)), dim_v = size_t(ascend::sum_pitch(p.head_dim_v));
    gm.add("delta", a.delta, size_t(p.heads_q * a.rows_q) * 4, delta);
    gm.add("dq_sum", a.dq_sum, size_t(p.heads_q * a.rows_q) * dim * 4, sums);
    gm.add("dk_sum", a.dk_sum, size_t(p.heads_k * a.rows_k) * dim * 4, sums);
    gm.add("dv_sum", a.dv_sum, size_t(p.heads_k * a.rows_k) * dim_v * 4, sums);
    if (p.dalibi_slopes) gm.add("slope_sums", a.slope_sums, size_t(a.slope_sums_count()) * 4, sums);
    if (p.drelative_bias) gm.add("relative_sums", a.relative_sums, size_t(a.relative_sums_count()) * 4, sums);
    add_inputs(gm, p);
    add(gm, "dout", p.dtype, p.dout, batch, rows_q, p.heads_q, p.head_dim_v, Use::input);
    add(gm, "out", p.dtype, p.out, batch, rows_q, p.heads_q, p.head_dim_v, Use::input);
    add(gm, "lse", p.lse, batch, p.heads_q, rows_q, Use::input);
    add(gm, "dlse", p.dlse, batch, p.heads_q, rows_q, Use::input);
  };
  ascend_emulator::Report total;
  const auto run = [&](ascend::Stage stage, int64_t blocks, GlobalMemory& gm) {
    if (total.errors.empty() && blocks) total += launch(stage, blocks, how, gm, a);
  };
  GlobalMemory prepare(moves_data), main(moves_data), finish(moves_data);
  with_sums(prepare, Use::output, Use::output);
  add_checks(prepare, a, Use::output);
  run(ascend::Stage::kPrepare, ascend::kVectorCores * how.cores, prepare);

  with_sums(main, Use::input, Use::accumulator);
  const size_t bytes = static_cast<size_t>(cores * ascend::backward_slot_bytes(p.dtype));
  if (moves_data) std::memset(a.workspace, 0xff, bytes);
  main.add("workspace", a.workspace, bytes, Use::workspace);
  add(main, "dbias", p, p.dbias, Use::accumulator);
  add_checks(main, a, Use::input);
  add_isolation(main, a, cores, ascend::SizesOf<4>::kIsolatedBackward, ascend::SizesOf<2>::kIsolatedBackward);
  run(ascend::Stage::kBackward, cores, main);

  with_sums(finish, Use::input, Use::input);
  add(finish, "dq", p.dtype, p.dq, batch, rows_q, p.heads_q, p.head_dim, Use::output);
  add(finish, "dk", p.dtype, p.dk, batch, rows_k, p.heads_k, p.head_dim, Use::output);
  add(finish, "dv", p.dtype, p.dv, batch, rows_k, p.heads_k, p.head_dim_v, Use::output);
  if (p.dsink) finish.add("dsink", p.dsink, static_cast<size_t>(p.heads_q) * 4, Use::output);
  const size_t slopes = size_t((p.alibi_batch_stride ? p.batch : 1) * p.heads_q) * 4;
  if (p.dalibi_slopes) finish.add("dalibi_slopes", p.dalibi_slopes, slopes, Use::output);
  if (p.drelative_bias) finish.add("drelative_bias", p.drelative_bias, relative_bytes(p), Use::output);
  run(ascend::Stage::kFinish, ascend::kVectorCores * how.cores, finish);
  return total;
}

void backward(const AttnGradParams& p) { check(run_backward(p, choices())); }

size_t forward_workspace_bytes(const AttnParams& p) { return ascend::forward_workspace_bytes(p, choices().cores); }
size_t backward_workspace_bytes(const AttnGradParams& p) {
  return ascend::backward_workspace_bytes(p, choices().cores);
}

void dropout_mask(const AttnParams& p, bool* mask) {
  const Choices how = choices();
  const int64_t bytes = p.batch * p.heads_q * p.seqlen_q * p.seqlen_k;
  if (!bytes) return;
  GlobalMemory gm;
  gm.add("rng_state", p.rng_state, kRngStateBytes, Use::input);
  gm.add("mask", mask, static_cast<size_t>(bytes), Use::output, 1);
  check(launch(ascend::Stage::kDropoutMask, ascend::kVectorCores * how.cores, how, gm,
               ascend::dropout_mask_arguments(p, mask)));
}

const Backend backend{"ascend-emulator",        "cpu",   ascend::supports, forward_workspace_bytes,
                      backward_workspace_bytes, forward, backward,         dropout_mask};

// The data of a call that scalar code reads, which therefore must exist in
// Mode::time too.
struct ReadByScalars {
  int64_t rng_state[2] = {1, 0};
  std::vector<float> slopes, relative_bias;
  const int32_t *intervals = nullptr,
                *extremes = nullptr;  // [Sk, 2] and its extremes
  const int32_t* starts = nullptr;    // cu_seqlens of queries and of keys
};
enum class ModelledScores { plain, softcap, alibi, relative_bias, bias };
constexpr int64_t kModelledReach = 128;

// Tensors of a dense call that do not exist, but for those: Mode::time looks at
// no byte of them. Each lies in a region of its own.
AttnGradParams imagined(const int64_t* sizes, ReadByScalars* read) {
  AttnGradParams p;
  p.dtype = DType::kFloat16;
  p.batch = sizes[0], p.seqlen_q = sizes[1], p.seqlen_k = sizes[2], p.heads_q = sizes[3], p.heads_k = sizes[4];
  p.head_dim = sizes[5], p.head_dim_v = sizes[6];
  p.softmax_scale = 1 / std::sqrt(static_cast<double>(p.head_dim));
  p.window_right = sizes[7] ? 0 : kUnbounded;
  p.dropout_threshold = static_cast<int32_t>(sizes[8]);
  p.has_sink = sizes[9] != 0;
  p.rng_state = read->rng_state;
  int64_t region = 0;
  const auto place = [&region] { return reinterpret_cast<void*>(++region << 44); };
  const auto tensor = [&](int64_t rows, int64_t heads, int64_t dim) {
    return TensorView{place(), read->starts ? 0 : rows * heads * dim, heads * dim, dim};
  };
  const auto rows = [&] {
    const int64_t count = read->starts ? sizes[14] : p.seqlen_q;
    return RowView{place(), read->starts ? 0 : p.heads_q * count, count};
  };
  p.q = tensor(p.seqlen_q, p.heads_q, p.head_dim), p.k = tensor(p.seqlen_k, p.heads_k, p.head_dim);
  p.v = tensor(p.seqlen_k, p.heads_k, p.head_dim_v), p.out = tensor(p.seqlen_q, p.heads_q, p.head_dim_v);
  p.lse = rows();
  p.dout = tensor(p.seqlen_q, p.heads_q, p.head_dim_v), p.dq = tensor(p.seqlen_q, p.heads_q, p.head_dim);
  p.dk = tensor(p.seqlen_k, p.heads_k, p.head_dim), p.dv = tensor(p.seqlen_k, p.heads_k, p.head_dim_v);
  p.workspace = place();
  const auto scores = static_cast<ModelledScores>(sizes[12]);
  if (scores == ModelledScores::softcap) p.softcap = 50;
  if (scores == ModelledScores::alibi) {
    read->slopes.assign(size_t(p.heads_q), 0.5f);
    p.alibi_slopes = read->slopes.data();
    p.dalibi_slopes = place();
  }
  if (scores == ModelledScores::relative_bias) {
    p.relative_reach = kModelledReach;
    read->relative_bias.assign(size_t(p.heads_q * (2 * kModelledReach + 1)), 0.5f);
    p.relative_bias = read->relative_bias.data();
    p.drelative_bias = place();
  }
  if (scores == ModelledScores::bias) {
    p.bias = {place(), p.dtype, p.heads_q * p.seqlen_q * p.seqlen_k, p.seqlen_q * p.seqlen_k, p.seqlen_k};
    p.dbias = p.bias;
    p.dbias.data = place();
  }
  if (read->starts) {  // sequences of at most S rows
    p.total_q = p.total_k = sizes[14];
    p.batch = sizes[13];
    p.cu_seqlens_q = p.cu_seqlens_k = read->starts;
  }
  if (read->intervals) {
    const int64_t granules = (p.seqlen_k + kMaskGranule - 1) / kMaskGranule;
    p.intervals = {
        read->intervals, 1, 0, p.seqlen_k, read->extremes, 0, granules + (granules + kMaskSuper - 1) / kMaskSuper};
  }
  return p;
}

}  // namespace
}  // namespace flashattn_ext

// The time model of a call. sizes: B, Sq, Sk, Hq, Hk, D, Dv, causal, dropout
// threshold, sink, backward, cores, scores (a number of ModelledScores), packed
// sequences. intervals and extremes: of a Mask [Sk, 2], or null. starts: of the
// packed sequences, or null. results: span in cycles,
// bytes of GM tensors read and written, of workspace read and written, then the
// busy cycles of all cores per pipe (S, V, M, MTE1, MTE2, MTE3, FIX), first of
// AICs and then of AIVs, then the bytes that a core uses of UB, L1, L0A, L0B
// and L0C. Returns the error message, or null.
extern "C" __attribute__((visibility("default"))) const char* flashattn_ext_model(const int64_t* sizes,
                                                                                  const int32_t* intervals,
                                                                                  const int32_t* extremes,
                                                                                  const int32_t* starts,
                                                                                  double* results) try {
  using namespace flashattn_ext;
  ReadByScalars read;
  read.intervals = intervals;
  read.extremes = extremes;
  read.starts = starts;
  const AttnGradParams p = imagined(sizes, &read);
  const std::string reason = ascend::supports(p, sizes[10] != 0);
  if (!reason.empty()) throw std::runtime_error(reason);
  Choices how;
  how.options.mode = ascend_emulator::Mode::time;
  how.cores = sizes[11];
  const ascend_emulator::Report report = sizes[10] ? run_backward(p, how) : run_forward(p, how);
  check(report);
  const auto& counters = report.counters;
  *results++ = counters.span_cycles;
  for (int traffic = 0; traffic < 2; ++traffic) {
    *results++ = double(counters.gm_read_bytes[size_t(traffic)]);
    *results++ = double(counters.gm_written_bytes[size_t(traffic)]);
  }
  for (const auto& kind : counters.cycles)
    for (double cycles : kind) *results++ = cycles;
  for (uint32_t bytes : counters.taken_bytes) *results++ = bytes;
  return nullptr;
} catch (const std::exception& error) {
  thread_local std::string text;
  text = error.what();
  return text.c_str();
}

extern "C" __attribute__((visibility("default"))) const flashattn_ext::Backend* flashattn_ext_backend() {
  return &flashattn_ext::backend;
}

extern "C" __attribute__((visibility("default"))) uint64_t flashattn_ext_backend_layout() {
  return flashattn_ext::kBackendLayout;
}
