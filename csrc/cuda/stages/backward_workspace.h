// What the stages of a backward call (prepare, main, finish) share: buffers of the workspace in global memory, scalar
// factors, and exact sums; and the declarations of the stages other than the main one.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/host/call.h"
#include "cuda/ptx/memory.cuh"
#include "cuda/score/general_score.cuh"
#include "cuda/table/options.h"
#include "rules/dropout.h"
#include "rules/lse_words.h"
#include "rules/mask.h"
#include "rules/score.h"

namespace flashattn_ext {

// Sums of floats in global memory that have the same bits in whatever order threads add to them: additions of integers
// are exact. A sum is a fixed-point number with a place for every bit a float can have, in words of 64 bits that are 32
// bits apart, so that 2^31 floats can be added before a word overflows.

struct ExactSum {
  static constexpr int kLowestBit = -149;  // the last bit of the smallest float is 2^-149
  static constexpr int kWords = 9;
  int64_t words[kWords];  // word i has the weight 2^(32 i - 149); all are zero at first

  // Adds a finite x if `wanted`, without branches.
  __device__ __forceinline__ void add_if(bool wanted, float x) {
    const uint32_t bits = __float_as_uint(x), exponent = bits >> 23 & 255;
    const uint32_t mantissa = (bits & 0x7FFFFFu) | (exponent != 0 ? 0x800000u : 0u);
    const int position = static_cast<int>(exponent != 0 ? exponent - 1 : 0);  // position of the mantissa's last bit
    int64_t value = static_cast<int64_t>(mantissa) << position % 32;
    if (bits >> 31) value = -value;
    ptx::add_if(wanted, words + position / 32, value & 0xFFFFFFFF);
    ptx::add_if(wanted, words + position / 32 + 1, value >> 32);
  }

  // The sum, rounded as a double is.
  __device__ double total() const {
    const bool negative = is_negative();
    const int64_t sign = negative ? -1 : 1;
    double total = 0;
    int64_t carry = 0;
    for (int i = 0; i < kWords; ++i) {
      const int64_t word = sign * words[i] + carry;
      total += ldexp(static_cast<double>(word & 0xFFFFFFFF), 32 * i + kLowestBit);
      carry = word >> 32;
    }
    total += ldexp(static_cast<double>(carry), 32 * kWords + kLowestBit);
    return negative ? -total : total;
  }

 private:
  __device__ bool is_negative() const {
    int64_t carry = 0;
    for (const int64_t word : words) carry = (word + carry) >> 32;
    return carry < 0;
  }
};

// Per-row arrays are [Hq][rows of the call]. A tile of dq never holds rows of two sequences, so each packed sequence
// may end in a partial tile.
struct BackwardWorkspace {
  using Score = ScoreRule<float, PlainProducts<false>>;

  // delta / keep_scale; lse as one word or the mark of large_rows.cuh, in units of log2, +inf for fully masked rows.
  float *delta, *lse;
  LseWords<float>* words;  // lse as two words
  float* dq;               // [Hq][tiles][tile_floats], in the order of the main stage's accumulators
  int* dq_added;           // deterministic calls: [Hq][tiles][dq_parts], how many key tiles have added to a part of dq
  int* key_tiles_taken;    // by thread blocks (TileGrid::taken)
  Score score;
  float keep_scale;      // factor of the weights that dropout keeps
  float gradient_scale;  // factor of the sums for dq and dk
  int64_t rows, tile_rows, tile_floats, tiles, dq_parts;
  int64_t zeroed_bytes;  // from dq on: the buffers that the main stage adds to
  int64_t bytes;

  // The main stage chooses the tiles of dq: tile_rows rows and tile_floats floats, in dq_parts parts that are summed
  // independently.
  BackwardWorkspace(const AttnGradParams& p, int64_t tile_rows, int64_t tile_floats, int64_t dq_parts)
      : BackwardWorkspace(p) {
    this->tile_rows = tile_rows;
    this->tile_floats = tile_floats;
    this->dq_parts = dq_parts;
    tiles = p.is_varlen() ? rows / tile_rows + p.batch : p.batch * dense_tiles(p);
    Carver carver(p.workspace);
    delta = carver.take<float>(p.heads_q * rows);
    lse = carver.take<float>(p.heads_q * rows);
    words = carver.take<LseWords<float>>(p.heads_q * rows);
    dq = carver.take<float>(p.heads_q * tiles * tile_floats);
    dq_added = carver.take<int>(p.deterministic ? p.heads_q * tiles * dq_parts : 0);
    key_tiles_taken = carver.take<int>(1);
    zeroed_bytes = carver.rest() - reinterpret_cast<char*>(dq);
    bytes = static_cast<int64_t>(carver.bytes());
  }
  // The workspace of a call without options of a score and biases, from `base`; as GeneralWorkspace has for the others.
  static BackwardWorkspace complete(const AttnGradParams&, const BackwardWorkspace& base, int, int) { return base; }

  // words_of(...)(i): the words of row first + i of a sequence.
  struct WordsOfRows {
    const LseWords<float>* first;
    __device__ __forceinline__ LseWords<float> operator()(int row) const { return first[row]; }
  };
  __device__ __forceinline__ WordsOfRows words_of(const AttnParams& p, int b, int h, int first) const {
    return {words + h * rows + (p.is_varlen() ? query_sequence(p, b).start : b * p.seqlen_q) + first};
  }
  __host__ __device__ int64_t dense_tiles(const AttnParams& p) const {
    return (p.seqlen_q + tile_rows - 1) / tile_rows;
  }
  // The first dq tile of a sequence, counted within a head.
  __device__ int64_t first_tile(const AttnParams& p, int64_t b, const Sequence& queries) const {
    return p.is_varlen() ? queries.start / tile_rows + b : b * dense_tiles(p);
  }

 protected:
  // The scalars alone, for a workspace with other buffers.
  explicit BackwardWorkspace(const AttnGradParams& p) : score(Score::of(p)) {
    keep_scale = 1 / static_cast<float>(keep_probability(p.dropout_threshold));
    gradient_scale = score.softmax_scale * keep_scale;
    rows = p.is_varlen() ? p.total_q : p.batch * p.seqlen_q;
  }

  // Another buffer that the main stage adds to, behind the last one.
  void* take_zeroed(const AttnGradParams& p, int64_t size) {
    void* const piece = static_cast<char*>(p.workspace) + bytes;
    size = (size + 63) / 64 * 64;
    zeroed_bytes += size;
    bytes += size;
    return piece;
  }
};

// The additional buffers of calls in which the query heads of a group add up dk and dv: tiles as those of dq.
struct GroupedWorkspace : BackwardWorkspace {
  float *dk, *dv;  // [Hk][key_tiles][tile_floats]
  int64_t key_tiles;
  int dense_key_tiles;  // key tiles of a sequence of a dense call

  GroupedWorkspace(const AttnGradParams& p, const BackwardWorkspace& base) : BackwardWorkspace(base) {
    dense_key_tiles = static_cast<int>((p.seqlen_k + tile_rows - 1) / tile_rows);
    key_tiles = p.is_varlen() ? p.total_k / tile_rows + p.batch : p.batch * dense_key_tiles;
    const int64_t size = p.heads_k * key_tiles * tile_floats * static_cast<int64_t>(sizeof(float));
    dk = static_cast<float*>(take_zeroed(p, size));
    dv = static_cast<float*>(take_zeroed(p, size));
  }
  static GroupedWorkspace complete(const AttnGradParams& p, const BackwardWorkspace& base, int, int) {
    return {p, base};
  }

  // The first tile of a sequence, counted within a KV head. key_start: its first packed row.
  __device__ int first_key_tile(const AttnParams& p, int b, int key_start) const {
    return p.is_varlen() ? key_start / static_cast<int>(tile_rows) + b : b * dense_key_tiles;
  }
};

// The additional buffers of calls with options of a score or biases.
struct GeneralWorkspace : BackwardWorkspace {
  static constexpr int kSums = 3;  // BiasSums: of slopes, and of both ends of the relative bias

  GeneralScore score;
  // [Hq][key_tiles][parts][kSums]: the BiasSums of every warp that computes scores of a key tile; nullptr without
  // gradients of slopes and of a relative bias.
  float* sums = nullptr;
  ExactSum* relative_sums = nullptr;   // deterministic calls: of every entry of the relative bias, [Hq][2L + 1]
  int key_tile_rows, dense_key_tiles;  // keys of a tile; key tiles of a sequence of a dense call
  int64_t key_tiles;
  int parts;
  bool dbias_is_sum, dbias_of_keys;  // several scores share an element of the bias; all rows share it

  // keys: of a key tile; parts: warps that compute its scores.
  GeneralWorkspace(const AttnGradParams& p, const BackwardWorkspace& base, int keys, int parts)
      : BackwardWorkspace(base), score(GeneralScore::of(p)), key_tile_rows(keys), parts(parts) {
    dense_key_tiles = static_cast<int>((p.seqlen_k + keys - 1) / keys);
    key_tiles = p.is_varlen() ? p.total_k / keys + p.batch : p.batch * dense_key_tiles;
    const BiasView& view = p.dbias;
    dbias_of_keys = has_gradient_of_keys(p);
    dbias_is_sum = dbias_of_keys ||
                   (view.data && ((p.batch > 1 && view.batch_stride == 0) || (p.heads_q > 1 && view.head_stride == 0)));
    if (!p.dalibi_slopes && !p.drelative_bias) return;
    sums = static_cast<float*>(take_zeroed(p, p.heads_q * key_tiles * parts * kSums * 4));
    if (!p.drelative_bias || !p.deterministic) return;
    const int64_t entries = p.heads_q * (2 * p.relative_reach + 1);
    relative_sums = static_cast<ExactSum*>(take_zeroed(p, entries * static_cast<int64_t>(sizeof(ExactSum))));
  }

  static GeneralWorkspace complete(const AttnGradParams& p, const BackwardWorkspace& base, int keys, int parts) {
    return {p, base, keys, parts};
  }

  // The first key tile of a sequence, counted within a head.
  __device__ int64_t first_key_tile(const AttnParams& p, int64_t b, const Sequence& keys) const {
    // A 64-bit division would be a function call, across which ptxas serialises wgmma.
    return p.is_varlen() ? static_cast<int>(keys.start) / key_tile_rows + b : b * dense_key_tiles;
  }
};

// The other stages are functions that no source of a main stage compiles again: before it backward_prepare.cu and
// few_keys_delta.cu, after it backward_finish.cu.

// First stage: delta = <dout, out> - dlse of every row (Dao 2023, "FlashAttention-2", Algorithm 2, line 4), and lse in
// units of log2, as one word or a mark and as two words. With dropout, delta is divided by the scale of the kept
// weights: the main stage then scales no weight, and multiplies its sums by the scale once, at the end. The same launch
// zeroes the buffers that the main stage adds to. T: the element type of q, __half, __nv_bfloat16 or float.
template <class T>
void launch_prepare(const AttnGradParams& p, const BackwardWorkspace& workspace);

// Replaces delta in the workspace, after the first stage, where a call has gradients of slopes or of a relative bias
// and few keys, by the row sum of P * dP - dlse. delta from a 16-bit `out` has the rounding error of `out`: where a row
// sees one or two keys, its dS nearly cancels, and sums over rows would consist of that error. A row keeps its delta if
// its weights do not add up to 1 (without the sink's): then its lse is that of a call with more keys.
void find_delta_of_few_keys(const AttnGradParams& p, const GeneralWorkspace& workspace);
// Calls without options of a score and biases have no such sums.
inline void find_delta_of_few_keys(const AttnGradParams&, const BackwardWorkspace&) {}

// Last stage of calls with biases: gradients of slopes and of both ends of the relative bias, from the sums that warps
// have written (bias_gradient.cuh) and the centres of rows (rules/bias.h), in a fixed order. In deterministic calls it
// also forms the gradients of all entries of the relative bias.
void finish_biases(const AttnGradParams& p, const GeneralWorkspace& workspace);
inline void finish_biases(const AttnGradParams&, const BackwardWorkspace&) {}  // the call has no biases
inline void finish_biases(const AttnGradParams&, const GroupedWorkspace&) {}

}  // namespace flashattn_ext
