// Sums of decoding (decode.h) with the bits of the forward (AttnParams::invariant): the sums of forward.h in its order,
// on the same tiles of keys, but with keys in the vector lanes of the first product, most of which would be idle if
// they held queries.
//
// Each number comes from the same operations as in forward.h: a product adds its units in ascending order, a row adds
// the weights of a tile in ascending order and then the earlier tiles, and the second product adds keys in ascending
// order to the rescaled sums. A masked key adds 0 there and here. Workers divide sequences and KV heads among
// themselves, but not the keys of a sequence.
#pragma once

#include "cpu/decode/decode_item.h"
#include "cpu/decode/row_scores.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

template <class In, class Op>
struct InvariantScratch : DecodeScratch<In, Op> {
  using Real = typename Op::Real;
  using Unit = typename Op::Unit;

  InvariantScratch(const DecodeParams& p, const DecodeWorkspace<In, Op>& w, ScratchCarver carve)
      : DecodeScratch<In, Op>(w, tile_size<Op>(p).keys, &carve),
        keys(tile_size<Op>(p).keys),
        zeros(carve.take<Widened<In>>(w.columns_v)),
        isolated(carve.take<In>(kDecodeKeys * p.head_dim_v)),
        band_weights(carve.take<Real>(w.block_rows * kDecodeKeys)),
        band_pairs(carve.take<Unit>(Op::kPack == 2 ? w.block_rows * kDecodeKeys / 2 : 0)),
        rest(carve.take<Real>(w.units > kSumUnits ? w.block_rows * kDecodeKeys : 0)),
        hides(carve.take<Real>(keys)),
        out(carve.take<Real>(this->rows * w.columns_v)),
        before(carve.take<Real>(this->rows * w.columns_v)),
        max(carve.take<Real>(this->rows)),
        sum(carve.take<Real>(this->rows)),
        rescale(carve.take<Real>(this->rows)),
        largest(carve.take<Real>(this->rows)),
        isolated_v(true, kDecodeKeys, 0, &carve),
        bytes(carve.used()) {}

  int64_t keys;        // of a tile
  Widened<In>* zeros;  // [columns_v]: stands for a value that is not finite
  In* isolated;        // [kDecodeKeys][head_dim_v]: values of a group of which some are not finite
  Real* band_weights;  // [rows of a head][kDecodeKeys]: weights of a group of keys in the layout of BandValues
  Unit* band_pairs;    // [rows of a head][kDecodeKeys / 2]: pairs, bfloat16 only
  Real* rest;          // [rows of a head][kDecodeKeys]: RowScores
  Real* hides;         // [keys]: 1 where a key is masked for the current row, else 0
  Real* out;           // [rows][columns_v], not yet divided by the row sum
  Real* before;        // [rows][columns_v]: out before the values of the current tile
  Real *max, *sum, *rescale, *largest;  // [rows]
  IsolatedRows<In, Op> isolated_v;
  int64_t bytes;
};

template <class In, class Op, class Accuracy>
class InvariantSums : public DecodeItem {
  using Real = typename Op::Real;
  using S = typename Op::S;
  using V = typename S::V;
  using Staged = Widened<In>;
  static constexpr int W = S::kWidth;
  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

 public:
  using Tile = CacheRows<In, kLargestTile>;
  static constexpr bool kCombinesParts = false;

  InvariantSums(const DecodeItem& item, const DecodeWorkspace<In, Op>& workspace, void* base, const PartialHeads<Real>&)
      : DecodeItem(item), scratch(p, workspace, base) {
    std::memset(static_cast<void*>(scratch.zeros), 0, scratch.columns_v * sizeof(Staged));
  }

  int64_t tile_keys() const { return scratch.keys; }
  // An item has all keys, in the tiles of forward.h.
  IndexRange keys_of_part(int64_t, int64_t) const {
    return {visible().begin / scratch.keys * scratch.keys, visible().end};
  }

  void start() {
    for_rows([&](int64_t n, int64_t r, int64_t row) {
      scratch.stage_query(*this, n, r);
      std::memcpy(scratch.q + row * scratch.units, scratch.q_row, scratch.units * sizeof(*scratch.q));
      const RowStart<Real> start(p, head_of(n, r));
      scratch.max[row] = start.max;
      scratch.sum[row] = start.sum;
      scratch.largest[row] = -kInfinity;
    });
    std::fill(scratch.out, scratch.out + head_count * head_rows * scratch.columns_v, Real(0));
  }

  void begin_tile(const Tile& tile) { lanes_of_tile = round_up(tile.count, W); }

  // The scores of the keys from number j of the tile on, for head n of the item.
  void score_group(const Tile& tile, int64_t j, int64_t n, Ahead<In>* ahead) {
    const Staged* pointers[kDecodeKeys];
    const auto* const k = scratch.template keys_of<kDecodeKeys>(*this, tile.k + j, tile.count - j, n, pointers);
    RowScores<Staged, Op>::run(scratch.scores + n * head_rows * scratch.keys + j, scratch.keys,
                               scratch.q + n * head_rows * scratch.units, row_count, scratch.units, k, scratch.rest,
                               scratch.used(ahead));
  }

  void weigh_tile(const Tile& tile) {
    if (p.has_score_option()) {
      weigh_rows<GeneralScore<Real, Accuracy>>(tile);
    } else {
      weigh_rows<ScoreRule<Real, PlainProducts<true>>>(tile);
    }
    add_weights(tile.count);
    for_rows([&](int64_t, int64_t, int64_t row) { rescale(row); });
  }

  void add_values(const Tile& tile, int64_t j, int64_t n, Ahead<In>* ahead) {
    add_group(tile, j, n, false, scratch.used(ahead));
  }

  void end_tile(const Tile& tile) {
    for (int64_t n = 0; n < head_count; ++n) {
      if (!is_finite_row(scratch.out + n * head_rows * scratch.columns_v, p.head_dim_v)) isolate(tile, n);
    }
  }

  void store() {
    for_rows([&](int64_t n, int64_t r, int64_t row) {
      write_row<In>(p, batch, head_of(n, r), queries.start + query_of(r), scratch.out + row * scratch.columns_v,
                    FinalRow<Real>{scratch.max[row], scratch.sum[row], scratch.largest[row]});
    });
  }

 private:
  // Calls body(n, r, row) for row r of the block of each head n, which is `row` in scratch.
  template <class Body>
  void for_rows(Body body) const {
    for (int64_t n = 0; n < head_count; ++n) {
      for (int64_t r = 0; r < row_count; ++r) body(n, r, n * head_rows + r);
    }
  }

  // Adds the values of the keys from number j of the tile on to the sums of head n. finite: but not those that are not
  // finite.
  FLASHATTN_SHARED void add_group(const Tile& tile, int64_t j, int64_t n, bool finite, Ahead<Staged>* ahead) {
    const int64_t count = lesser(kDecodeKeys, tile.count - j), offset = n * p.v.head_stride;
    const Staged* pointers[kDecodeKeys];
    const Staged* const* const v = scratch.values_of(*this, tile.v + j, count, n, pointers);
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
  FLASHATTN_SHARED void isolate(const Tile& tile, int64_t n) {
    const int64_t first = n * head_rows * scratch.columns_v;
    std::copy(scratch.before + first, scratch.before + first + row_count * scratch.columns_v, scratch.out + first);
    for (int64_t j = 0; j < tile.count; j += kDecodeKeys) add_group(tile, j, n, true, nullptr);
    add_isolated(tile, n);
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
      place(scratch.band_pairs, scratch.pairs + j / 2, scratch.keys / 2, kDecodeKeys / 2, left / 2, kPairs);
    } else {
      place(scratch.band_weights, scratch.scores + j, scratch.keys, kDecodeKeys, left, C);
    }
  }

  // Adds the values of the tile that are not finite to the rows of head n that see them.
  void add_isolated(const Tile& tile, int64_t n) {
    for (int64_t j = 0; j < tile.count; j += kDecodeKeys) {
      const int64_t count = lesser(kDecodeKeys, tile.count - j), columns = p.head_dim_v;
      for (int64_t key = 0; key < count; ++key) {
        std::memcpy(scratch.isolated + key * columns, tile.v[j + key] + n * p.v.head_stride, columns * sizeof(In));
      }
      scratch.isolated_v.locate(scratch.isolated, columns, count, columns);
      const auto rows_that_see = [&](int64_t key, auto body) {
        for (int64_t r = 0; r < row_count; ++r) {
          if (seen_by(n, r)(tile.key0 + j + key)) body(n * head_rows + r);
        }
      };
      scratch.isolated_v.add(scratch.out, scratch.columns_v, rows_that_see,
                             [&](int64_t r, int64_t key) { return weight_of(r, j + key); });
    }
  }

  // Fills `hides` for a row, also for the lanes after the tile. Returns whether it hides any key.
  bool find_hidden(const Tile& tile, int64_t n, int64_t r) const {
    const RowVisibility seen = seen_by(n, r);
    const int64_t end = tile.key0 + tile.count;
    const bool sees_all = seen.range.begin <= tile.key0 && end <= seen.range.end && !p.has_intervals();
    if (sees_all && tile.count == lanes_of_tile) return false;
    for (int64_t j = 0; j < lanes_of_tile; ++j) {
      scratch.hides[j] = j < tile.count && (sees_all || seen(tile.key0 + j)) ? Real(0) : Real(1);
    }
    return true;
  }

  // The rule of the call is a template argument of these two functions alone: the others would be compiled twice.
  template <class Rule>
  void weigh_rows(const Tile& tile) {
    Rule rule = Rule::of(p);
    for_rows([&](int64_t n, int64_t r, int64_t row) {
      if constexpr (kIsFloat8<In>) rule = scaled_rule<Rule>(p, descale_of_products<In>(p, batch, first_head + n));
      weigh(row, rule, find_hidden(tile, n, r), lanes_of_tile);
    });
  }
  // The online softmax of forward.h for one row: turns products into weights.
  template <class Rule>
  void weigh(int64_t r, const Rule rule, bool hides, int64_t lanes) {
    Real* const scores = scratch.scores + r * scratch.keys;
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
        of_row[n] = scratch.scores + row[n] * scratch.keys;
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
      for_rows([&](int64_t, int64_t, int64_t row) {
        row_of_pairs(scratch.pairs + row * scratch.keys / 2, scratch.scores + row * scratch.keys, count);
      });
    }
  }
  Real weight_of(int64_t r, int64_t key) const {
    if constexpr (Op::kPack == 2) {
      return widen(reinterpret_cast<const typename Op::Element*>(scratch.pairs)[r * scratch.keys + key]);
    } else {
      return scratch.scores[r * scratch.keys + key];
    }
  }

  InvariantScratch<In, Op> scratch;
  int64_t lanes_of_tile = 0;
};

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
