// What a kernel is told about one call, passed by value: the parameters of every backend, and what the scalar unit
// cannot compute from them because it has no double.
#pragma once

#include "../csrc/params.h"
#include "../csrc/score.h"

// How arguments travel to a kernel. CANN 8 copies the text of a parameter's struct into the launcher that it generates,
// which therefore has to stand alone: no namespace, no base, no name of another file, sizes in digits.
struct FlashattnBytes {
  alignas(8) unsigned char bytes[768];
};

namespace flashattn_ext {
namespace ascend {

// Floats from row to row of a sum: whole repeats.
FLASHATTN_HOST_DEVICE constexpr int64_t sum_pitch(int64_t head_dim) { return (head_dim + 63) / 64 * 64; }

struct Arguments : AttnGradParams {
  PlainScore<float, false> score;  // score.h
  float inverse_keep = 1.0f;       // 1 / p_keep of dropout

  // Backward, in the workspace: per-row values and sums of all rows of a head, one head after the other, in fp32.
  int64_t rows_q = 0, rows_k = 0;  // of a head: total_q or batch * seqlen_q, and so for keys
  void* delta = nullptr;           // [Hq, rows_q]
  void* dq_sum = nullptr;          // [Hq, rows_q, sum_pitch(D)]
  void* dk_sum = nullptr;          // [Hk, rows_k, sum_pitch(D)]
  void* dv_sum = nullptr;          // [Hk, rows_k, sum_pitch(Dv)]

  void* keep_mask = nullptr;  // dropout_mask: [B, Hq, Sq, Sk], a byte for each score
};

}  // namespace ascend
}  // namespace flashattn_ext
