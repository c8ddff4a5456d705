// Forward on every GPU since Ampere: a thread block computes one tile of queries of one head and walks over the key
// tiles that it sees, the last one first, with an online softmax (Dao 2023, "FlashAttention-2", Algorithm 1). Copies
// overlap products: the next keys are copied during the product of the values, and the values during the product of the
// keys.
#pragma once

#include "cuda/host/call.h"
#include "cuda/host/launch.cuh"
#include "cuda/score/score_policy.cuh"
#include "cuda/score/scores.cuh"
#include "cuda/sm80/forward/forward_large.cuh"
#include "cuda/sm80/shared/dropout_policy.cuh"
#include "cuda/sm80/shared/query_tile.cuh"
#include "cuda/sm80/shared/tiles.h"
#include "cuda/sm80/shared/visibility_policy.cuh"
#include "cuda/tile/operand_tile.cuh"
#include "cuda/tile/products.cuh"
#include "cuda/tile/store_row.cuh"

namespace flashattn_ext::sm80 {

// Options of a score, ALiBi or a relative bias: as GeneralScores, without a bias of any shape.
template <class T, int kRowTiles, int kKeys>
struct DistanceScores : CentredScores<kRowTiles, DistanceBias<false, kRowTiles, kKeys / 8>> {
  using Rule = GeneralScore;
  using Bias = DistanceBias<false, kRowTiles, kKeys / 8>;

  template <class CoordinatesOf>
  __device__ __forceinline__ auto make_logits(const AttnParams& p, const Rule& rule,
                                              float (&x)[kRowTiles][kKeys / 8][4], const CoordinatesOf& coordinates,
                                              Nothing) {
    const auto stored = make_scores<T>(rule, x, p.has_bias());
    if (p.has_bias()) coordinates().template bias<Bias>(p).add_to_logits(x);
    return stored;
  }
};

// By the options of a row in the table of kernels. The first policy of each sort is empty and compiles to nothing.
struct PlainPolicies {
  static constexpr bool kHasMask = false;
  template <class T, int kRowTiles, int kKeys>
  using Scoring = PlainScores;
  using Dropping = NoDropout;
};

template <Options kOptions>
struct ForwardPolicies;
template <>
struct ForwardPolicies<kPlain> : PlainPolicies {};
template <>
struct ForwardPolicies<kDropout> : PlainPolicies {
  using Dropping = CounterDropout;
};
template <>
struct ForwardPolicies<kMasks> : PlainPolicies {
  static constexpr bool kHasMask = true;
};
template <>
struct ForwardPolicies<kScores> : PlainPolicies {
  template <class T, int kRowTiles, int kKeys>
  using Scoring = DistanceScores<T, kRowTiles, kKeys>;
};
template <>
struct ForwardPolicies<kFp8Scores> : PlainPolicies {
  template <class T, int kRowTiles, int kKeys>
  using Scoring = DescaledScores<T>;
};
template <>
struct ForwardPolicies<kFp8General> : ForwardPolicies<kFp8Scores> {
  static constexpr bool kHasMask = true;
};
template <>
struct ForwardPolicies<kGeneral> {
  static constexpr bool kHasMask = true;
  template <class T, int kRowTiles, int kKeys>
  using Scoring = GeneralScores<T, kRowTiles, kKeys>;
  using Dropping = OptionalDropout;
};

// kShared: bytes of shared memory that a thread block may have, one of the sizes of tiles.h; it chooses the tile.
template <class T, int kHeadDim, Options kOptions, int kShared>
struct Forward {
  using Core = TensorCore<T>;
  using Policies = ForwardPolicies<kOptions>;
  using Visibility = VisibilityOf<Forward, Policies::kHasMask>;
  using Dropping = typename Policies::Dropping;
  using Step = typename Visibility::Step;
  static constexpr ForwardTile kTile = forward_tile<T, kHeadDim, kOptions, kShared>();
  static constexpr int kThreads = kTile.warps * 32, kRowTiles = kTile.row_tiles, kStages = kTile.stages;
  static constexpr bool kHasOption = Dropping::kDrops || kOptions == kScores;
  static constexpr int kQueries = kTile.queries(), kKeys = step_keys<kHeadDim, kHasOption>(kTile);
  static constexpr int kColumns = out_columns(kHeadDim);  // columns of v and out
  using RowTile = InputTile<T, kHeadDim>;                 // tiles of queries and keys
  using ValueTile = InputTile<T, kHeadDim, kColumns>;     // tiles of values
  static constexpr int kKeyTileElements = kKeys * RowTile::kStride, kValueTileElements = kKeys * ValueTile::kStride;
  static constexpr int kTileElements = kQueries * RowTile::kStride + kStages * (kKeyTileElements + kValueTileElements);
  static constexpr int kScoreTiles = kKeys / 8, kOutTiles = kColumns / 8, kSteps = kKeys / Core::kK;
  static_assert(kStages == 1 || kColumns == kHeadDim);  // the keys and the values of a stage have the same offset
  using Scoring = typename Policies::template Scoring<T, kRowTiles, kKeys>;
  using Score = typename Scoring::Rule;
  using Scores = float[kRowTiles][kScoreTiles][4];
  using Weights = typename Core::A[kRowTiles][kSteps];

  // Register pressure is high. The scalars that a step needs besides its tiles are kept in slots of shared memory
  // (TileSlots), or in registers where that was found to spill less.
  static constexpr bool kSharesPointers = kHeadDim > 64 || sizeof(T) == 4 || Visibility::kHasMask;
  static constexpr bool kSharesLengths =
      sizeof(T) == 2 && (kHeadDim == 96 || kHeadDim == 144 || (kHeadDim == 128 && Dropping::kDrops));

  static_assert(!Visibility::kHasMask || (kThreads >= kKeys && kStages == 1));
  using Slots = TileSlots<RowTile, kTileElements, 4 + Visibility::template kSlots<kKeys>>;
  static_assert(RowTile::kSwizzled || kColumns == kHeadDim);
  static constexpr int kSharedBytes = Slots::kSharedBytes;
  static_assert(kSharedBytes <= (kShared < kLargeShared ? kShared : least_shared(sizeof(T), kHeadDim)));
  static constexpr int kResident = forward_blocks(kTile, kSharedBytes);

  const AttnParams& p;
  Slots slots;
  T *q_tile, *k_tile, *v_tile;
  const Score& score;
  int own_length_q, own_length_k;
  KeyPointers<T> own_pointers;      // of the keys that are loaded next
  typename RowTile::Places places;  // for queries and keys, and for values where these have as many columns
  int row0;                         // first query of the tile
  float out[kRowTiles][kOutTiles][4];
  OnlineSoftmax<tells_largest(kOptions)> softmax[kRowTiles];
  Scoring scoring;

  __device__ Forward(const AttnParams& params, const Score& score, T* shared)
      : p(params),
        slots{shared},
        q_tile(shared),
        k_tile(q_tile + kQueries * RowTile::kStride),
        v_tile(k_tile + kStages * kKeyTileElements),
        score(score) {}

  // The first of the 16 rows of this warp's row tile i, within the query tile.
  static __device__ int tile_row(int i) { return (threadIdx.x / 32 * kRowTiles + i) * 16; }
  __device__ float* tolerance() const { return slots.template at<float>(3); }
  __device__ int length_q() const { return kSharesLengths ? slots.head()->length_q : own_length_q; }
  __device__ int length_k() const { return kSharesLengths ? slots.head()->length_k : own_length_k; }
  __device__ auto mask() const { return typename Visibility::Mask(p, length_q(), length_k()); }
  // The rows of the query tile that exist.
  __device__ Limits tile_rows() const { return {row0, min(row0 + kQueries, length_q())}; }

  __device__ void start_head(int b, int h) {
    const Sequence queries = query_sequence(p, b), keys = key_sequence(p, b);
    const int64_t hk = h / p.group_size();
    own_length_q = static_cast<int>(queries.length);
    own_length_k = static_cast<int>(keys.length);
    if (threadIdx.x == 0) {
      *slots.head() = {b, h, own_length_q, own_length_k};
      *slots.pointers() = {row_pointer<const T>(p.k, b, hk, keys.start), row_pointer<const T>(p.v, b, hk, keys.start)};
      Dropping::start_head(p, b, slots.dropout());
      Visibility::start_head(*this, b, h, static_cast<int>(hk), static_cast<int>(keys.start));
      // The sink is the first maximum. If logits could exceed it by the tolerance, weights near 1 would not be exact,
      // and dS would lose digits.
      *tolerance() = sink_counts(head_sink(p, h)) ? 0.f : kTolerance;
    }
    __syncthreads();
  }

  __device__ void start_tile() {
    const float sink = head_sink(p, slots.head()->h);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      set_zero(out[i]);
      softmax[i].start(sink);
    }
    scoring.start_tile(p, slots.head()->b, slots.head()->h);
  }

  // Starts copying the keys or values of tile n; tiles come in descending order.
  template <class Tile>
  __device__ void load_rows(T* tile, const T* KeyPointers<T>::* which, int64_t row_stride, int n, int columns) {
    const T* from;
    if constexpr (kSharesPointers) {
      from = slots.pointers()->*which + n * kKeys * row_stride;
    } else {
      from = own_pointers.*which;
      own_pointers.*which -= kKeys * row_stride;
    }
    load_tile<Tile, kKeys, kThreads>(tile, from, row_stride, min(kKeys, length_k() - n * kKeys), columns);
    ptx::cp_async_commit();
  }
  __device__ void load_keys(T* tile, int n, int columns) {
    load_rows<RowTile>(tile, &KeyPointers<T>::k, p.k.row_stride, n, columns);
  }

  __device__ void load_values(T* tile, int n, int columns) {
    Visibility::load_pairs(*this, n);
    load_rows<ValueTile>(tile, &KeyPointers<T>::v, p.v.row_stride, n, columns);
  }

  __device__ void walk_keys() {
    const int b = slots.head()->b, h = slots.head()->h, row_end = tile_rows().end;
    const Limits visible = mask().keys_of(row0, row_end), full = mask().keys_of_all(row0, row_end);
    const int first = visible.begin / kKeys, last = (visible.end - 1) / kKeys;
    const int first_full = (full.begin + kKeys - 1) / kKeys, end_full = full.end / kKeys;  // tiles that need no mask
    if (visible.end == visible.begin) return;
    typename Visibility::Walk walk(*this, last, first, first_full, end_full);
    int n = walk.tile(*this);
    if (walk.is_empty(n)) return;
    const int columns = static_cast<int>(p.head_dim), columns_v = static_cast<int>(p.head_dim_v);
    const T* q = row_pointer<const T>(p.q, b, h, query_sequence(p, b).start + row0);
    load_tile<RowTile, kQueries, kThreads>(q_tile, q, p.q.row_stride, row_end - row0, columns);
    if constexpr (!kSharesPointers) {
      const int64_t hk = h / p.group_size(), key = key_sequence(p, b).start + last * kKeys;
      own_pointers = {row_pointer<const T>(p.k, b, hk, key), row_pointer<const T>(p.v, b, hk, key)};
    }
    load_keys(k_tile, n, columns);
    if (kStages == 2) load_values(v_tile, n, columns_v);
    int stage = 0;  // as an offset of elements
    for (; n >= walk.end(); n = walk.tile(*this)) {
      ptx::cp_async_wait<0>();
      __syncthreads();
      const Step step = walk.step(*this, n, tile_row(0));
      const int next = walk.advance(*this);
      const bool more = next >= walk.end();
      if (kStages == 1) {
        load_values(v_tile, n, columns_v);
      } else if (more) {
        load_keys(k_tile + (kKeyTileElements - stage), next, columns);
        load_values(v_tile + (kKeyTileElements - stage), next, columns_v);
      }
      // The choice that spills least was found by experiment; OperandTile::Places has the reason.
      if (sizeof(T) == 2 && kHeadDim > 64) kHeadDim == 128 && !Dropping::kDrops ? places.recompute() : places.renew();
      Scores scores;
      const auto begun = scoring.begin(p, [&] { return tile_coordinates(n); });
      score_product<RowTile>(scores, places, q_tile, tile_row(0), k_tile + stage, 0);
      if (kStages == 1) {
        ptx::cp_async_wait<0>();
        __syncthreads();
        if (more) load_keys(k_tile, next, columns);
      }
      const bool isolates = Visibility::isolate(*this, step, v_tile + stage);
      Weights weights;
      weigh(weights, scores, step, begun);
      __syncwarp();  // keeps the compiler from prefetching so much of V that registers spill
      if (sizeof(T) == 2 && (kHeadDim == 64 || kHeadDim == 128) && !Dropping::kDrops) places.recompute();
      value_product(weights, v_tile + stage);
      if (isolates) Visibility::poison(*this, n);
      if (kStages == 2) stage = kKeyTileElements - stage;
    }
  }

  // The TileCoordinates of this warp's scores against key tile n.
  __device__ auto tile_coordinates(int n) const {
    return TileCoordinates{slots.head()->b, slots.head()->h, mask(), ptx::opaque(row0) + tile_row(0), n * kKeys};
  }
  // The row of this lane's first score; recomputed as well.
  __device__ int score_row() const { return ptx::opaque(row0) + tile_row(0) + quad(); }

  // Scores of a step become weights, with dropout applied, and `out` is rescaled.
  template <class Begun>
  __device__ void weigh(Weights& weights, Scores& scores, const Step& step, const Begun& begun) {
    constexpr bool kDropEarly = sizeof(T) == 4 || kHeadDim == 144;  // takes fewer registers there
    const auto coordinates = [&] { return tile_coordinates(step.n); };
    const auto& rule = scoring.make_logits(p, score, scores, coordinates, begun);
    if (step.masked) hide_keys<true, true>(scores, mask(), score_row(), step.n * kKeys + 2 * lane_in_quad());
    Visibility::hide(*this, step, scores);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      float shrink[2], sums[2];
      softmax[i].weigh(
          scores[i], rule, *tolerance(),
          [&](const float (&factors)[2]) {
            rescale(out[i], factors);
            shrink[0] = factors[0], shrink[1] = factors[1];
          },
          [&](int r, float sum) { sums[r] = sum; });
      scoring.add_centres(p, coordinates, i, scores[i], sums, shrink);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) weights[i][k] = Core::from_accumulators(scores[i], k);
      if (kDropEarly) drop(weights, i, step.n);
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      if (!kDropEarly) drop(weights, i, step.n);
    }
  }
  __device__ void drop(Weights& weights, int i, int n) const {
    Dropping::template drop<Core>(p, slots.dropout(), slots.head()->h, weights[i], row0 + tile_row(i), n * kKeys);
  }

  // out += P V
  __device__ void value_product(const Weights& weights, const T* v_tile) {
    auto operand = [&](int i, int step) {
      if (sizeof(T) == 4 && i == 0) __syncwarp();  // as in walk_keys: V, split in two, needs twice the registers
      return weights[i][step];
    };
    if constexpr (kColumns == kHeadDim) {
      accumulate<ValueTile, kSteps>(out, places, operand, v_tile, 0);
    } else {
      accumulate<ValueTile, kSteps>(out, typename ValueTile::Places(), operand, v_tile, 0);
    }
  }

  __device__ void finish_tile() {
    const int b = slots.head()->b, h = slots.head()->h, rows = length_q() - row0;
    const int64_t start = query_sequence(p, b).start + row0;
    const float scale = Dropping::keep_scale(p) * scoring.value_scale(p, b, h);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float sum = softmax[i].total(r);
        const bool empty = sum == 0;
        const float factor = scale / sum;
        const int row = tile_row(i) + quad() + 8 * r;
        if (row < rows) softmax[i].store_statistics(p, b, h, start + row, r, sum);
        scoring.store_centres(p, b, h, start + row, i, r, sum, row < rows);
        if constexpr (Scoring::kIsFp8) {
          store_row_of_fp8(p, b, h, start + row, out[i], r, factor, empty, row < rows, static_cast<int>(p.head_dim_v));
        } else {
          // Every warp overwrites only its own rows of the q tile.
#pragma unroll
          for (int n = 0; n < kOutTiles; ++n) {
            const float x = empty ? 0.f : out[i][n][2 * r] * factor, y = empty ? 0.f : out[i][n][2 * r + 1] * factor;
            Core::store_pair(q_tile + RowTile::offset(row, n * 8 + 2 * lane_in_quad()), x, y);
          }
        }
      }
    }
    if constexpr (!Scoring::kIsFp8) {
      __syncthreads();
      store_tile<RowTile, kQueries, kColumns, kThreads>(row_pointer<T>(p.out, b, h, start), p.out.row_stride, q_tile,
                                                        min(rows, kQueries), static_cast<int>(p.head_dim_v));
    }
  }
};

template <class T, int kHeadDim, Options kOptions, int kShared>
__global__ void __launch_bounds__(Forward<T, kHeadDim, kOptions, kShared>::kThreads,
                                  Forward<T, kHeadDim, kOptions, kShared>::kResident)
    forward_kernel(const __grid_constant__ AttnParams p, const __grid_constant__ TileOrder order,
                   const __grid_constant__ typename Forward<T, kHeadDim, kOptions, kShared>::Score score) {
  if constexpr (kRunsHere<kShared>) {
    extern __shared__ __align__(16) unsigned char shared[];
    compute_tiles(Forward<T, kHeadDim, kOptions, kShared>(p, score, reinterpret_cast<T*>(shared)), order);
  } else {
    __trap();
  }
}

// Calls run(part) for every kColumns columns of v and out: `part` is the call for these columns alone. lse is the same
// in all parts.
template <int kColumns, class Run>
void for_columns(const AttnParams& p, const Run& run) {
  for (int64_t first = 0; first < p.head_dim_v; first += kColumns) {
    AttnParams part = p;
    part.v.data = static_cast<char*>(p.v.data) + first * element_bytes(p);
    part.out.data = static_cast<char*>(p.out.data) + first * out_bytes(p);
    part.head_dim_v = std::min<int64_t>(kColumns, p.head_dim_v - first);
    run(part);
  }
}

template <class T, int kHeadDim, Options kOptions, int kShared>
void forward_columns(const AttnParams& p) {
  using Kernel = Forward<T, kHeadDim, kOptions, kShared>;
  const int64_t blocks = tile_count(p.seqlen_q, Kernel::kQueries);
  for_columns<Kernel::kColumns>(p, [&](const AttnParams& part) {
    launch(forward_kernel<T, kHeadDim, kOptions, kShared>, "forward", part, blocks * p.batch * p.heads_q,
           Kernel::kThreads, Kernel::kSharedBytes, forward_order(part, blocks, sizeof(T)), Kernel::Score::of(part));
  });
}

template <class T, int kHeadDim, Options kOptions>
void forward(const AttnParams& p) {
  if (p.batch * p.heads_q == 0) return;
  if constexpr (kHeadDim > 256 && sizeof(T) == 2 && kOptions == kPlain) {
    forward_large<T, kHeadDim>(p);
  } else {
    with_shared_memory(most_shared_memory(), [&](auto size) {
      forward_columns<T, kHeadDim, kOptions, size_of_forward<T, kHeadDim, kOptions, decltype(size)::value>()>(p);
    });
  }
}

}  // namespace flashattn_ext::sm80
