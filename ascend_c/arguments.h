// What a kernel is told about one call, passed by value: the parameters of every backend, and what the scalar unit
// cannot compute from them because it has no double.
#pragma once

#include "../csrc/params.h"
#include "../csrc/score.h"

// How arguments travel to a kernel. CANN 8 copies the text of a parameter's struct into the launcher that it generates,
// which therefore has to stand alone: no namespace, no base, no name of another file, sizes in digits.
struct FlashattnBytes {
  alignas(8) unsigned char bytes[1024];
};

namespace flashattn_ext {
namespace ascend {

// Floats from row to row of a sum: whole repeats.
FLASHATTN_HOST_DEVICE constexpr int64_t sum_pitch(int64_t head_dim) { return (head_dim + 63) / 64 * 64; }
// Sums over diagonals have this many distances beyond the reach on either side. They belong to the entries at its ends.
constexpr int64_t kDiagonalMargin = 512;

struct Arguments : AttnGradParams {
  PlainScore<float, false> score;  // score.h
  float cap = 0;                   // softcap; 0: none
  float inner = 0;                 // softmax_scale / softcap
  float inverse_keep = 1.0f;       // 1 / p_keep of dropout

  // Backward, in the workspace: per-row values and sums of all rows of a head, one head after the other, in fp32.
  int64_t rows_q = 0, rows_k = 0;  // of a head: total_q or batch * seqlen_q, and so for keys
  void* delta = nullptr;           // [Hq, rows_q]
  void* dq_sum = nullptr;          // [Hq, rows_q, sum_pitch(D)]
  void* dk_sum = nullptr;          // [Hk, rows_k, sum_pitch(D)]
  void* dv_sum = nullptr;          // [Hk, rows_k, sum_pitch(Dv)]

  // Backward, in the workspace, where a bias wants its gradient: sums of bias_gradients.h, for both vector cores.
  int64_t slope_blocks = 0;       // of keys, of a head
  void* slope_sums = nullptr;     // [B, Hq, slope_blocks, 2], packed [Hq, slope_blocks, 2]
  int64_t relative_pitch = 0;     // distances, with a margin
  void* relative_sums = nullptr;  // [B, 2, Hq, relative_pitch]

  // With a Mask, in the workspace: what isolation.h keeps.
  int64_t check_count = 0;   // vector cores of the device
  void* checks = nullptr;    // [check_count] fp32
  void* isolated = nullptr;  // [cores, rows of a core, isolated_pitch()], in the type of an input

  void* keep_mask = nullptr;  // dropout_mask: [B, Hq, Sq, Sk], a byte for each score

  // Elements from row to row of `isolated`.
  FLASHATTN_HOST_DEVICE int64_t isolated_pitch() const {
    return sum_pitch(head_dim > head_dim_v ? head_dim : head_dim_v);
  }
  // In whole blocks of 32 bytes.
  FLASHATTN_HOST_DEVICE int64_t slope_sums_count() const {
    return ((is_varlen() ? 1 : batch) * heads_q * slope_blocks * 2 + 7) / 8 * 8;
  }
  FLASHATTN_HOST_DEVICE int64_t relative_sums_count() const { return batch * 2 * heads_q * relative_pitch; }
};

}  // namespace ascend
}  // namespace flashattn_ext
