// Data that the stages (prepare, main, finish) of one backward call share: buffers in the workspace, which is global
// memory, and scalar factors.
#pragma once

#include <cuda_runtime.h>

#include "cuda/host/carver.h"
#include "cuda/score/general_score.cuh"
#include "cuda/tile/exact_sum.cuh"
#include "rules/dropout.h"
#include "rules/lse_words.h"
#include "rules/score.h"
#include "rules/seqlen.h"

namespace flashattn_ext {

// Per-row arrays are [Hq][rows of the call]. A tile of dq never holds rows of two sequences, so each packed sequence
// may end in a partial tile.
struct BackwardWorkspace {
  using Score = ScoreRule<float, PlainProducts<false>>;

  // delta / keep_scale; lse as one word or the mark of large_rows.cuh, in units of log2, +inf for fully masked rows.
  float *delta, *lse;
  LseWords<float>* words;  // the same lse as two words
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
    dbias_is_sum = view.data && ((p.batch > 1 && view.batch_stride == 0) || (p.heads_q > 1 && view.head_stride == 0) ||
                                 (p.seqlen_q > 1 && view.row_stride == 0));
    dbias_of_keys = dbias_is_sum && p.seqlen_q > 1 && view.row_stride == 0;
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

}  // namespace flashattn_ext
