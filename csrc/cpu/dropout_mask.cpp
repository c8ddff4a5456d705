#include "cpu/dropout_mask.h"

#include "rules/dropout.h"

namespace flashattn_ext {

void cpu_dropout_mask(const AttnParams& params, bool* mask) {
  const CpuExecutor& executor = *static_cast<const CpuExecutor*>(params.stream);
  struct Call {
    const AttnParams& p;
    bool* mask;
    int workers;
    PhiloxKey key;
  } call{params, mask, executor.num_threads, philox_key(params)};
  auto body = [](void* context, int worker) {
    const Call& c = *static_cast<const Call*>(context);
    const AttnParams& p = c.p;
    const int64_t rows = p.batch * p.heads_q * p.seqlen_q;
    for (int64_t row = worker; row < rows; row += c.workers) {
      const int64_t b = row / (p.heads_q * p.seqlen_q), h = row / p.seqlen_q % p.heads_q, i = row % p.seqlen_q;
      for (int64_t j = 0; j < p.seqlen_k; ++j) {
        c.mask[row * p.seqlen_k + j] = dropout_keep(c.key, p.dropout_threshold, b + p.origin.batch, h + p.origin.head,
                                                    i + p.origin.row, j + p.origin.key);
      }
    }
  };
  executor.run(call.workers, body, &call);
}

}  // namespace flashattn_ext
