// The Backend table of the CPU: every entry calls the kernels of the instruction set in use.
#include "backend/backend.h"
#include "backend/cached_call.h"
#include "cpu/few_queries.h"
#include "cpu/kernels.h"
#include "rules/dropout.h"

namespace flashattn_ext {
namespace {

int64_t workers_of(const AttnParams& p) { return static_cast<const CpuExecutor*>(p.stream)->num_threads; }

std::string supports(const AttnParams& p, bool backward) {
  if (backward || !p.invariant || p.origin.key == 0) return {};
  return "invariant=True with an origin whose key is not 0 is not implemented: sums begin at key 0 of the sequence, "
         "got key " +
         std::to_string(p.origin.key) + "; pass all earlier keys, or leave invariant out";
}

std::string supports_decode(const DecodeParams&) { return {}; }
size_t decode_workspace_bytes(const DecodeParams& p) {
  return static_cast<size_t>(cpu_kernels(p.dtype).decode_workspace_bytes(p, workers_of(p)));
}
void decode(const DecodeParams& p) { cpu_kernels(p.dtype).decode(p); }

// Whether a forward runs on the kernels of decoding, as if its keys were in a KV cache. They implement neither
// dropout nor a relative bias, write no `centres`, and compute all keys that a Mask hides.
bool runs_few_queries(const AttnParams& p) {
  if (p.has_mask() || p.has_dropout() || p.relative_bias || p.centres.data) return false;
  // An invariant call does not divide keys among workers. The choice does not change the bits of an invariant call.
  if (p.invariant && p.batch * p.heads_k < workers_of(p)) return false;
  const DecodeParams call = cached_call(p);
  const int64_t lanes = cpu_kernels(p.dtype).float_lanes;
  int64_t b = 0;
  while (b < p.batch && !has_few_queries(call, b, lanes))
    b += p.is_varlen() ? 1 : p.batch;  // dense sequences are all alike
  return b < p.batch;
}

size_t forward_workspace_bytes(const AttnParams& p) {
  if (runs_few_queries(p)) return decode_workspace_bytes(cached_call(p));
  return static_cast<size_t>(workers_of(p) * cpu_kernels(p.dtype).forward_scratch_bytes(p));
}
size_t backward_workspace_bytes(const AttnGradParams& p) {
  const CpuKernels& kernels = cpu_kernels(p.dtype);
  return static_cast<size_t>(kernels.backward_workspace_bytes(p) + workers_of(p) * kernels.backward_scratch_bytes(p));
}
void forward(const AttnParams& p) { runs_few_queries(p) ? decode(cached_call(p)) : cpu_kernels(p.dtype).forward(p); }
void backward(const AttnGradParams& p) { cpu_kernels(p.dtype).backward(p); }

void dropout_mask(const AttnParams& p, bool* mask) {
  const CpuExecutor& executor = *static_cast<const CpuExecutor*>(p.stream);
  const PhiloxKey key = philox_key(p);
  auto fill = [&](int worker) {
    for (int64_t row = worker; row < p.batch * p.heads_q * p.seqlen_q; row += executor.num_threads) {
      const int64_t b = row / (p.heads_q * p.seqlen_q), h = row / p.seqlen_q % p.heads_q, i = row % p.seqlen_q;
      for (int64_t j = 0; j < p.seqlen_k; ++j) {
        mask[row * p.seqlen_k + j] = dropout_keep(key, p.dropout_threshold, b + p.origin.batch, h + p.origin.head,
                                                  i + p.origin.row, j + p.origin.key);
      }
    }
  };
  const auto run = [](void* context, int worker) { (*static_cast<decltype(fill)*>(context))(worker); };
  executor.run(executor.num_threads, run, &fill);
}

size_t jvp_workspace_bytes(const JvpParams& p) {
  return static_cast<size_t>(workers_of(p) * cpu_kernels(p.dtype).derivatives->jvp_scratch_bytes(p));
}
void jvp(const JvpParams& p) { cpu_kernels(p.dtype).derivatives->jvp(p); }
size_t second_workspace_bytes(const SecondParams& p) {
  const CpuDerivatives& kernels = *cpu_kernels(p.dtype).derivatives;
  return static_cast<size_t>(kernels.second_workspace_bytes(p) + workers_of(p) * kernels.second_scratch_bytes(p));
}
void second(const SecondParams& p) { cpu_kernels(p.dtype).derivatives->second(p); }

}  // namespace

const Backend& cpu_backend() {
  static const Backend backend = [] {
    Backend cpu{"cpu",   "cpu",    supports,    forward_workspace_bytes, backward_workspace_bytes,
                forward, backward, dropout_mask};
    cpu.supports_decode = supports_decode;
    cpu.decode_workspace_bytes = decode_workspace_bytes;
    cpu.decode = decode;
    cpu.runs_few_queries = runs_few_queries;
    cpu.jvp_workspace_bytes = jvp_workspace_bytes;
    cpu.jvp = jvp;
    cpu.second_workspace_bytes = second_workspace_bytes;
    cpu.second = second;
    cpu.reads_overlapping_rows = true;
    cpu.writes_centres = cpu.writes_lse_words = true;
    return cpu;
  }();
  return backend;
}

}  // namespace flashattn_ext
