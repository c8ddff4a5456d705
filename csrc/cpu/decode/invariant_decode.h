// Decoding with the bits of the forward (AttnParams::invariant), for sequences with few queries: the sums of forward.h
// in the same order, on the same tiles of keys, but for all query heads of some adjacent KV heads at once, as in
// decode.h, and with keys in the vector lanes of the first product, most of which would be idle if they held queries.
//
// Each number comes from the same operations as in forward.h: a product adds its units in ascending order, a row adds
// the weights of a tile in ascending order and then the earlier tiles, and the second product adds keys in ascending
// order to the rescaled sums. A masked key adds 0 there and here. Workers divide sequences and KV heads among
// themselves, but not the keys of a sequence.
#pragma once

#include "cpu/decode/cache_rows.h"
#include "cpu/decode/decode_products.h"
#include "cpu/decode/row_scores.h"
#include "cpu/forward/forward.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

constexpr int64_t kInvariantRows = 64;  // maximum rows of a work item: queries times query heads

template <class In, class Op>
struct InvariantDecodeScratch {
  using Real = typename Op::Real;
  using Unit = typename Op::Unit;
  using Staged = Widened<In>;

  InvariantDecodeScratch(const DecodeParams& p, void* base)
      : InvariantDecodeScratch(p, tile_size<Op>(p), ScratchCarver(base)) {}

  // "rows" are those of all KV heads of the work item, each with the padding rows of its last band.
  TileSize size;
  int64_t units, columns_v;     // units of a padded row of q and k, elements of a padded row of v
  Unit* q;                      // [rows][units]
  Staged *staged_k, *staged_v;  // [kDecodeKeys][columns]: rows padded to whole vectors, and all rows of fp8
  Staged* zeros;                // [columns_v]: stands for a value that is not finite
  In* isolated;                 // [kDecodeKeys][head_dim_v]: values of a group of which some are not finite
  Real* scores;                 // [rows][size.keys], later weights
  Unit* pairs;                  // [rows][size.keys / 2]: pairs of weights, bfloat16 only
  Real* band_weights;           // [rows of a head][kDecodeKeys]: weights of a group of keys in the layout of BandValues
  Unit* band_pairs;             // [rows of a head][kDecodeKeys / 2]: pairs, bfloat16 only
  Real* rest;                   // [rows of a head][kDecodeKeys]: RowScores
  Real* hides;                  // [size.keys]: 1 where a key is masked for the current row, else 0
  Real* out;                    // [rows][columns_v], not yet divided by the row sum
  Real* before;                 // [rows][columns_v]: out before the values of the current tile
  Real *max, *sum, *rescale, *largest;
  IsolatedRows<In, Op> isolated_v;
  int64_t bytes;

 private:
  InvariantDecodeScratch(const DecodeParams& p, const TileSize& of_call, ScratchCarver carve)
      : size(of_call),
        units(padded_units<Op>(p.head_dim)),
        columns_v(padded_units<Op>(p.head_dim_v) * Op::kPack),
        q(carve.take<Unit>(kInvariantRows * units)),
        staged_k(carve.take<Staged>(kDecodeKeys * units * Op::kPack)),
        staged_v(carve.take<Staged>(kDecodeKeys * columns_v)),
        zeros(carve.take<Staged>(columns_v)),
        isolated(carve.take<In>(kDecodeKeys * p.head_dim_v)),
        scores(carve.take<Real>(kInvariantRows * size.keys)),
        pairs(carve.take<Unit>(Op::kPack == 2 ? kInvariantRows * size.keys / 2 : 0)),
        band_weights(carve.take<Real>(kInvariantRows * kDecodeKeys)),
        band_pairs(carve.take<Unit>(Op::kPack == 2 ? kInvariantRows * kDecodeKeys / 2 : 0)),
        rest(carve.take<Real>(units > kSumUnits ? kInvariantRows * kDecodeKeys : 0)),
        hides(carve.take<Real>(size.keys)),
        out(carve.take<Real>(kInvariantRows * columns_v)),
        before(carve.take<Real>(kInvariantRows * columns_v)),
        max(carve.take<Real>(kInvariantRows)),
        sum(carve.take<Real>(kInvariantRows)),
        rescale(carve.take<Real>(kInvariantRows)),
        largest(carve.take<Real>(kInvariantRows)),
        isolated_v(true, kDecodeKeys, 0, &carve),
        bytes(carve.used()) {}
};

template <class In, class Op, class Accuracy>
class InvariantDecode {
  using Real = typename Op::Real;
  using Unit = typename Op::Unit;
  using S = typename Op::S;
  using V = typename S::V;
  using Staged = Widened<In>;
  using Tile = CacheRows<In, kLargestTile>;
  static constexpr int W = S::kWidth;
  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

 public:
  // heads: KV heads of an item.
  InvariantDecode(const DecodeParams& params, int64_t heads, void* base)
      : p(params), scratch(params, base), size(scratch.size), item_heads(heads) {
    std::memset(static_cast<void*>(scratch.zeros), 0, scratch.columns_v * sizeof(Staged));
  }

  // Block `number` of the rows of each KV head of group `group`.
  void run(int64_t b, int64_t group, int64_t number) {
    const Sequence queries = query_sequence(p, b);
    const KeyLocator keys(p, b);
    const Mask mask(p, queries.length, keys.length);
    batch = b;
    hk0 = group * item_heads;
    head_count = lesser(item_heads, p.heads_k - hk0);
    row0 = number * kInvariantRows;
    row_count = lesser(kInvariantRows, queries.length * p.group_size() - row0);
    head_rows = padded_rows<W>(row_count);
    load_queries(queries);
    const IndexRange visible = mask.keys_of(query_of(0), query_of(row_count - 1) + 1);
    const auto find = [&](int64_t key0, Tile* tile) {
      tile->find(p, keys, hk0, key0, lesser(key0 + size.keys, visible.end), kDecodeKeys);
    };
    // The next tile's rows are known while the current one is processed, for the prefetch.
    Tile tiles[2];
    find(visible.begin / size.keys * size.keys, &tiles[0]);
    for (int64_t n = 0; tiles[n % 2].count > 0; ++n) {
      const Tile& here = tiles[n % 2];
      Tile& next = tiles[(n + 1) % 2];
      find(here.key0 + size.keys, &next);
      key_tile(mask, keys, here, next);
    }
    for_rows([&](int64_t r) { write(queries, r); });
  }

 private:
  // A row r of scratch is row r % head_rows of the block of the item's KV head r / head_rows; those from row_count on
  // are padding. Adjacent rows of a block are the heads of one query.
  int64_t query_of(int64_t r) const { return (row0 + r % head_rows) / p.group_size(); }
  int64_t key_head_of(int64_t r) const { return hk0 + r / head_rows; }
  int64_t head_of(int64_t r) const { return key_head_of(r) * p.group_size() + (row0 + r % head_rows) % p.group_size(); }
  template <class Body>
  void for_rows(Body body) const {
    for (int64_t n = 0; n < head_count; ++n) {
      for (int64_t r = 0; r < row_count; ++r) body(n * head_rows + r);
    }
  }

  void load_queries(const Sequence& queries) {
    for_rows([&](int64_t r) {
      using Element = typename StagedElement<Op>::Type;
      auto* const row = reinterpret_cast<Element*>(scratch.q + r * scratch.units);
      with_type_of_q<In>(p, [&](auto element) {
        copy_row(row, row_of<const decltype(element)>(p.q, batch, head_of(r), queries.start + query_of(r)), p.head_dim);
      });
      std::fill(row + p.head_dim, row + scratch.units * Op::kPack, Element{});
      const RowStart<Real> start(p, head_of(r));
      scratch.max[r] = start.max;
      scratch.sum[r] = start.sum;
      scratch.largest[r] = -kInfinity;
    });
    std::fill(scratch.out, scratch.out + head_count * head_rows * scratch.columns_v, Real(0));
  }

  // The groups of kDecodeKeys keys of a tile: scores of all heads, group by group; weights; values in the same way. The
  // heads of a key are adjacent in memory. Each group prefetches the one after it, the last group of scores the first
  // values, and the last group of values the first keys of the tile `next`, in the order of addresses.
  void key_tile(const Mask& mask, const KeyLocator& keys, const Tile& here, const Tile& next) {
    constexpr int64_t G = kDecodeKeys;
    const auto ahead_of = [this](const In* const* rows, int64_t left, const TensorView& t, int64_t columns) {
      return Ahead<In>(rows, lesser(G, left), head_count, t.head_stride, columns);
    };
    for (int64_t j = 0; j < here.count; j += G) {
      Ahead<In> ahead = j + G < here.count ? ahead_of(here.k + j + G, here.count - j - G, p.k, p.head_dim)
                                           : ahead_of(here.v, here.count, p.v, p.head_dim_v);
      for (int64_t n = 0; n < head_count; ++n) score_group(here, j, n, &ahead);
      ahead.ask_for_rest();
    }
    const IndexRange tile{here.key0, here.key0 + here.count};
    lanes_of_tile = round_up(here.count, W);
    if (p.has_score_option()) {
      weigh_rows<GeneralScore<Real, Accuracy>>(mask, keys, tile);
    } else {
      weigh_rows<ScoreRule<Real, PlainProducts<true>>>(mask, keys, tile);
    }
    add_weights(here.count);
    for_rows([&](int64_t r) { rescale(r); });
    for (int64_t j = 0; j < here.count; j += G) {
      Ahead<In> ahead = j + G < here.count ? ahead_of(here.v + j + G, here.count - j - G, p.v, p.head_dim_v)
                                           : ahead_of(next.k, next.count, p.k, p.head_dim);
      for (int64_t n = 0; n < head_count; ++n) add_values(here, j, n, false, used(&ahead));
      ahead.ask_for_rest();
    }
    for (int64_t n = 0; n < head_count; ++n) {
      if (!is_finite_row(scratch.out + n * head_rows * scratch.columns_v, p.head_dim_v)) isolate(mask, keys, here, n);
    }
  }

  // Rows of fp8 are prefetched all at once, by ask_for_rest(), because products read copies of them.
  static Ahead<Staged>* used([[maybe_unused]] Ahead<In>* ahead) {
    if constexpr (kIsFloat8<In>) {
      return nullptr;
    } else {
      return ahead->any() ? ahead : nullptr;
    }
  }

  // The scores of the keys from number j of the tile on, for head n of the item.
  void score_group(const Tile& tile, int64_t j, int64_t n, Ahead<In>* ahead) {
    const Staged* pointers[kDecodeKeys];
    const Staged* const* const k =
        rows_of_head<kDecodeKeys>(tile.k + j, n * p.k.head_stride, tile.count - j, p.head_dim,
                                  scratch.units * Op::kPack, scratch.staged_k, pointers);
    RowScores<Staged, Op>::run(scratch.scores + n * head_rows * size.keys + j, size.keys,
                               scratch.q + n * head_rows * scratch.units, row_count, scratch.units, k, scratch.rest,
                               used(ahead));
  }

  // Adds the values of the keys from number j of the tile on to the sums of head n. finite: but not those that are not
  // finite.
  FLASHATTN_SHARED void add_values(const Tile& tile, int64_t j, int64_t n, bool finite, Ahead<Staged>* ahead) {
    const int64_t count = lesser(kDecodeKeys, tile.count - j), offset = n * p.v.head_stride;
    const Staged* pointers[kDecodeKeys];
    const Staged* const* const v = rows_of_head<kDecodeKeys>(tile.v + j, offset, count, p.head_dim_v, scratch.columns_v,
                                                             scratch.staged_v, pointers);
    // The rows after the last key have weights of 0, and copies of these rows are not initialised.
    for (int64_t key = 0; key < kDecodeKeys; ++key) {
      if (key >= count || (finite && !is_finite_row(tile.v[j + key] + offset, p.head_dim_v))) {
        pointers[key] = scratch.zeros;
      }
    }
    for_bands<W>(row_count, [&](auto band, int64_t first) {
      constexpr int R = decltype(band)::value;
      const int64_t row = n * head_rows + first;
      place_weights<R>(row, lesser<int64_t>(R, row_count - first), j);
      BandValues<Staged, Op, R>::add(scratch.out + row * scratch.columns_v, scratch.columns_v, scratch.band_weights,
                                     scratch.band_pairs, v, first == 0 ? ahead : nullptr);
    });
  }

  // Multiplies the sums of a row by its factor, and keeps a copy of them for isolate().
  void rescale(int64_t r) {
    const V factor = S::set1(scratch.rescale[r]);
    Real *const out = scratch.out + r * scratch.columns_v, *const before = scratch.before + r * scratch.columns_v;
    for (int64_t d = 0; d < scratch.columns_v; d += W) {
      const V sums = S::load(out + d) * factor;
      S::store(out + d, sums);
      S::store(before + d, sums);
    }
  }

  // Adds the values of a tile once more, after a sum of head n has become inf or NaN: a value that is not finite makes
  // the sums of all rows so, because 0 * inf is NaN. The product leaves such values out; the rows that see them get
  // them afterwards.
  FLASHATTN_SHARED void isolate(const Mask& mask, const KeyLocator& keys, const Tile& tile, int64_t n) {
    const int64_t first = n * head_rows * scratch.columns_v;
    std::copy(scratch.before + first, scratch.before + first + row_count * scratch.columns_v, scratch.out + first);
    for (int64_t j = 0; j < tile.count; j += kDecodeKeys) add_values(tile, j, n, true, nullptr);
    add_isolated(mask, keys, tile, n);
  }

  // Copies the weights of one group of keys for a band of R rows, `rows` of them no padding, to the layout of
  // BandValues. Keys after the tile have the weight 0.
  template <int R>
  void place_weights(int64_t row, int64_t rows, int64_t j) {
    constexpr int C = W / R, kPairs = C > 1 ? C / 2 : 1;
    const auto place = [&](auto* to, const auto* from, int64_t stride, int64_t lanes, int64_t left, int64_t chunk) {
      for (int64_t l = 0; l < lanes; l += chunk) {
        FLASHATTN_UNROLL(16)
        for (int64_t r = 0; r < R; ++r) {
          FLASHATTN_UNROLL(8)
          for (int64_t i = 0; i < chunk; ++i) {
            to[l * R + r * chunk + i] = r < rows && l + i < left ? from[(row + r) * stride + l + i] : 0;
          }
        }
      }
    };
    const int64_t left = lanes_of_tile - j;
    if constexpr (Op::kPack == 2) {
      place(scratch.band_pairs, scratch.pairs + j / 2, size.keys / 2, kDecodeKeys / 2, left / 2, kPairs);
    } else {
      place(scratch.band_weights, scratch.scores + j, size.keys, kDecodeKeys, left, C);
    }
  }

  // Adds the values of the tile that are not finite to the rows of head n that see them.
  void add_isolated(const Mask& mask, const KeyLocator& keys, const Tile& tile, int64_t n) {
    for (int64_t j = 0; j < tile.count; j += kDecodeKeys) {
      const int64_t count = lesser(kDecodeKeys, tile.count - j), columns = p.head_dim_v;
      for (int64_t key = 0; key < count; ++key) {
        std::memcpy(scratch.isolated + key * columns, tile.v[j + key] + n * p.v.head_stride, columns * sizeof(In));
      }
      scratch.isolated_v.locate(scratch.isolated, columns, count, columns);
      const auto rows_that_see = [&](int64_t key, auto body) {
        for (int64_t r = n * head_rows; r < n * head_rows + row_count; ++r) {
          if (sees(mask, keys, r, tile.key0 + j + key)) body(r);
        }
      };
      scratch.isolated_v.add(scratch.out, scratch.columns_v, rows_that_see,
                             [&](int64_t r, int64_t key) { return weight_of(r, j + key); });
    }
  }

  bool sees(const Mask& mask, const KeyLocator& keys, int64_t r, int64_t key) const {
    const int64_t query = query_of(r);
    const IndexRange seen = mask.keys_of(query, query + 1);
    if (key < seen.begin || seen.end <= key) return false;
    if (!p.has_intervals() || keys.first_interval + key < 0) return true;
    const int32_t* const interval = head_intervals(p, batch, head_of(r), keys.first_interval) + 2 * key;
    return interval[0] <= query && query < interval[1];
  }
  // Fills `hides` for row r, also for the lanes after the tile. Returns whether it hides any key.
  bool find_hidden(const Mask& mask, const KeyLocator& keys, int64_t r, IndexRange tile, int64_t lanes) const {
    const int64_t query = query_of(r);
    const IndexRange seen = mask.keys_of(query, query + 1);
    const bool sees_all = seen.begin <= tile.begin && tile.end <= seen.end && !p.has_intervals();
    if (sees_all && tile.end - tile.begin == lanes) return false;
    for (int64_t j = 0; j < lanes; ++j) {
      const int64_t key = tile.begin + j;
      scratch.hides[j] = key < tile.end && (sees_all || sees(mask, keys, r, key)) ? Real(0) : Real(1);
    }
    return true;
  }

  // The rule of the call is a template argument of these two functions alone: the others would be compiled twice.
  template <class Rule>
  void weigh_rows(const Mask& mask, const KeyLocator& keys, IndexRange tile) {
    Rule rule = Rule::of(p);
    for_rows([&](int64_t r) {
      if constexpr (kIsFloat8<In>) rule = scaled_rule<Rule>(p, descale_of_products<In>(p, batch, key_head_of(r)));
      weigh(r, rule, find_hidden(mask, keys, r, tile, lanes_of_tile), lanes_of_tile);
    });
  }
  // The online softmax of forward.h for one row: turns products into weights.
  template <class Rule>
  void weigh(int64_t r, const Rule rule, bool hides, int64_t lanes) {
    Real* const scores = scratch.scores + r * size.keys;
    const V factor = S::set1(kIsGeneral<Rule> ? Real(1) : rule.factor), hidden = S::set1(-kInfinity);
    V maxima = hidden;
    for (int64_t j = 0; j < lanes; j += W) {
      V score = rule.stored(S::load(scores + j));
      if constexpr (kIsGeneral<Rule>) score = unfused(score * S::set1(rule.factor));
      if (hides) score = S::where_less(S::load(scratch.hides + j), S::set1(Real(1)), score, hidden);
      S::store(scores + j, score);
      maxima = S::max(maxima, score);
    }
    alignas(64) Real of_lanes[W];
    S::store(of_lanes, maxima * factor);
    Real tile_max = of_lanes[0];
    for (int l = 1; l < W; ++l) tile_max = tile_max > of_lanes[l] ? tile_max : of_lanes[l];
    const Real old_max = scratch.max[r], new_max = old_max > tile_max ? old_max : tile_max;
    if (tile_max > scratch.largest[r] || tile_max != tile_max) scratch.largest[r] = tile_max;
    scratch.max[r] = new_max;
    Real offset = new_max == -kInfinity ? Real(0) : new_max;  // -inf - -inf would be NaN
    S::store(of_lanes, S::template exp2<Accuracy>(S::set1(old_max - offset)));
    scratch.rescale[r] = of_lanes[0];
    if (!kIsGeneral<Rule> && rounds_products(offset)) {
      S::store(of_lanes, S::set1(offset));
      subtract_rounded<S>(scores, W, {0, lanes / W}, rule.factor, of_lanes);
      offset = 0;
    }
    const V minus_offset = S::set1(-offset);
    for (int64_t j = 0; j < lanes; j += W) {
      S::store(scores + j, S::template exp2<Accuracy>(S::fma(S::load(scores + j), factor, minus_offset)));
    }
  }

  // Adds the weights of all rows to their sums, key by key, and writes the pairs that a product of bfloat16 reads. Some
  // rows at a time, because each addition waits for the one before.
  void add_weights(int64_t count) {
    constexpr int64_t kRows = 8;
    const int64_t rows = head_count * row_count;
    for (int64_t first = 0; first < rows; first += kRows) {
      int64_t row[kRows];
      const Real* of_row[kRows];
      Real sums[kRows] = {};
      for (int64_t n = 0; n < kRows; ++n) {
        const int64_t i = lesser(first + n, rows - 1);
        row[n] = i / row_count * head_rows + i % row_count;
        of_row[n] = scratch.scores + row[n] * size.keys;
      }
      for (int64_t j = 0; j < count; ++j) {
        FLASHATTN_UNROLL(8)
        for (int64_t n = 0; n < kRows; ++n) sums[n] += of_row[n][j];
      }
      for (int64_t n = 0; n < lesser(kRows, rows - first); ++n) {
        alignas(64) Real sum[W];
        S::store(sum, S::fma(S::set1(scratch.sum[row[n]]), S::set1(scratch.rescale[row[n]]), S::set1(sums[n])));
        scratch.sum[row[n]] = sum[0];
      }
    }
    if constexpr (Op::kPack == 2) {
      for_rows(
          [&](int64_t r) { row_of_pairs(scratch.pairs + r * size.keys / 2, scratch.scores + r * size.keys, count); });
    }
  }
  Real weight_of(int64_t r, int64_t key) const {
    if constexpr (Op::kPack == 2) {
      return widen(reinterpret_cast<const typename StagedElement<Op>::Type*>(scratch.pairs)[r * size.keys + key]);
    } else {
      return scratch.scores[r * size.keys + key];
    }
  }

  void write(const Sequence& queries, int64_t r) {
    write_row<In>(p, batch, head_of(r), queries.start + query_of(r), scratch.out + r * scratch.columns_v,
                  FinalRow<Real>{scratch.max[r], scratch.sum[r], scratch.largest[r]});
  }

  const DecodeParams& p;
  InvariantDecodeScratch<In, Op> scratch;
  const TileSize size;
  const int64_t item_heads;
  // The current work item and tile.
  int64_t batch = 0, hk0 = 0, head_count = 0, row0 = 0, row_count = 0, head_rows = 0, lanes_of_tile = 0;
};

// KV heads of a work item: as many adjacent heads as have kInvariantRows rows, while every worker gets several items.
// The result does not depend on this number.
template <class Op, class BlocksOf>
inline int64_t invariant_heads(const DecodeParams& p, BlocksOf blocks_of, int64_t workers) {
  constexpr int64_t kItemsOfWorker = 2;
  if (p.k.head_stride > p.k.row_stride || p.v.head_stride > p.v.row_stride) return 1;
  int64_t blocks = 0, rows = 1;
  for (int64_t b = 0; b < p.batch; ++b) {
    blocks += blocks_of(b);
    rows =
        greater(rows, padded_rows<Op::S::kWidth>(lesser(kInvariantRows, query_sequence(p, b).length * p.group_size())));
  }
  int64_t most = lesser(p.heads_k, kInvariantRows / rows);
  while (most > 1 && blocks * ceil_div(p.heads_k, most) < kItemsOfWorker * workers) most = ceil_div(most, 2);
  return ceil_div(p.heads_k, ceil_div(p.heads_k, most));
}

template <class In, class Op, class Accuracy>
void decode_invariantly(const DecodeParams& p) {
  const auto blocks_of = [&](int64_t b) {
    return has_few_queries(p, b, kFloatLanes) ? ceil_div(query_sequence(p, b).length * p.group_size(), kInvariantRows)
                                              : 0;
  };
  if (p.heads_k == 0) return;
  const int64_t heads = invariant_heads<Op>(p, blocks_of, static_cast<const CpuExecutor*>(p.stream)->num_threads);
  const int64_t scratch_bytes = InvariantDecodeScratch<In, Op>(p, nullptr).bytes;
  run_query_tiles(p, ceil_div(p.heads_k, heads), blocks_of, [&](int worker) {
    return InvariantDecode<In, Op, Accuracy>(p, heads, static_cast<char*>(p.workspace) + worker * scratch_bytes);
  });
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
