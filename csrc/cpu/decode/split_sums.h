// Sums of decoding (decode.h) in any order: the keys of a sequence are divided into splits (split-KV), a row sums its
// weights per vector lane, and `finish` combines the splits in order. Products: decode_products.h.
#pragma once

#include "cpu/decode/decode_item.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// q has rows in the layout of place_row(), scores and pairs of weights have that of BandProduct and BandValues.
template <class In, class Op>
struct SplitScratch : DecodeScratch<In, Op> {
  using Real = typename Op::Real;
  static constexpr int W = Op::S::kWidth;

  SplitScratch(const DecodeWorkspace<In, Op>& w, ScratchCarver carve)
      : DecodeScratch<In, Op>(w, kDecodeKeys, &carve),
        max(carve.take<Real>(this->rows * W)),
        sums(carve.take<Real>(this->rows * W)),
        hidden(carve.take<uint32_t>(this->rows)),
        bytes(carve.used()) {}

  Real *max, *sums;  // [rows][W], running values per lane; a band uses the first W of its rows
  uint32_t* hidden;  // [rows]: bit j is set if the row does not see key j of the group
  int64_t bytes;
};

template <class In, class Op, class Accuracy>
class SplitSums : public DecodeItem {
  using Real = typename Op::Real;
  using S = typename Op::S;
  using V = typename S::V;
  using Staged = Widened<In>;
  static constexpr int W = S::kWidth;
  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

 public:
  using Tile = CacheRows<In, kDecodeKeys>;

  static constexpr bool kCombinesParts = true;

  // of_split: the partial results of the item's heads.
  SplitSums(const DecodeItem& item, const DecodeWorkspace<In, Op>& workspace, void* base,
            const PartialHeads<Real>& of_split)
      : DecodeItem(item), scratch(workspace, base), rule(GeneralScore<Real, Accuracy>::of(p)), partial(of_split) {}

  int64_t tile_keys() const { return kDecodeKeys; }
  IndexRange keys_of_part(int64_t part, int64_t parts) const { return split_keys(visible(), kDecodeKeys, parts, part); }

  void start() {
    for (int64_t n = 0; n < head_count; ++n) {
      for_bands<W>(row_count, [&](auto band, int64_t first) {
        constexpr int R = decltype(band)::value;
        for (int64_t r = 0; r < R; ++r) {
          scratch.stage_query(*this, n, first + r);
          BandProduct<Staged, Op, R>::place_row(scratch.q + (n * head_rows + first) * scratch.units, r, scratch.q_row,
                                                scratch.units);
        }
      });
      Real* const out = partial[n].out;
      std::fill(out, out + head_rows * scratch.columns_v, Real(0));
    }
    std::fill(scratch.max, scratch.max + head_count * head_rows * W, -kInfinity);
    std::fill(scratch.sums, scratch.sums + head_count * head_rows * W, Real(0));
  }

  void begin_tile(const Tile& tile) {
    const IndexRange of_all = mask.keys_of_all(query_of(0), query_of(row_count - 1) + 1);
    const int64_t end = tile.key0 + tile.count;
    may_hide = tile.count < kDecodeKeys || tile.key0 < of_all.begin || of_all.end < end ||
               (p.has_intervals() && end + keys.first_interval > 0);
    hides = 0;
  }
  // Not inlined: in the registers of the loop over heads the state of `ahead` would displace that of the products.
  FLASHATTN_SHARED void score_group(const Tile& tile, int64_t, int64_t n, Ahead<In>* ahead) {
    const Staged* pointers[kDecodeKeys];
    const V factor = S::set1(rule.factor);
    [[maybe_unused]] const V descale = S::set1(static_cast<Real>(descale_of_products<In>(p, batch, first_head + n)));
    for (int64_t j = 0; j < tile.count; j += kScoredKeys) {
      const auto* const k = scratch.template keys_of<kScoredKeys>(*this, tile.k + j, tile.count - j, n, pointers);
      for_bands<W>(row_count, [&](auto band, int64_t first) {
        constexpr int R = decltype(band)::value;
        const int64_t row = n * head_rows + first;
        BandProduct<Staged, Op, R>::scores(scratch.scores + row * kDecodeKeys + j * R, scratch.q + row * scratch.units,
                                           scratch.units, k, first == 0 ? scratch.used(ahead) : nullptr,
                                           [&](V product) {
                                             if constexpr (kIsFloat8<In>) product = product * descale;
                                             return rule.stored(product) * factor;
                                           });
      });
    }
    if (!p.alibi_slopes && !p.bias.data && !may_hide) return;
    for_bands<W>(row_count, [&](auto band, int64_t first) {
      constexpr int R = decltype(band)::value;
      Real* const scores = scratch.scores + (n * head_rows + first) * kDecodeKeys;
      if (p.alibi_slopes) add_alibi<R>(n, first, tile.key0, scores);
      if (p.bias.data) add_bias<R>(n, first, tile, scores);
      if (may_hide && hide<R>(n, first, tile, scores)) hides |= uint64_t{1} << n;
    });
  }

  // The softmax handles all heads together, to hide the latency of its dependency chains.
  void weigh_tile(const Tile&) {
    for (int64_t n = 0; n < head_count; ++n) {
      Real* const out = partial[n].out;
      for_bands<W>(row_count, [&](auto band, int64_t first) {
        weigh<decltype(band)::value>(n * head_rows + first, out + first * scratch.columns_v);
      });
    }
  }

  void add_values(const Tile& tile, int64_t, int64_t n, Ahead<In>* ahead) {
    const Staged* pointers[kDecodeKeys];
    const Staged* const* const v = scratch.values_of(*this, tile.v, tile.count, n, pointers);
    Real* const out = partial[n].out;
    for_bands<W>(row_count, [&](auto band, int64_t first) {
      constexpr int R = decltype(band)::value;
      Real* const to = out + first * scratch.columns_v;
      const int64_t row = n * head_rows + first;
      Real* const scores = scratch.scores + row * kDecodeKeys;
      if (hides >> n & 1) {
        add_seen_values<R>(v, tile.count, scores, lesser<int64_t>(R, row_count - first), scratch.hidden + row, to);
      } else {
        BandValues<Staged, Op, R>::add(to, scratch.columns_v, scores, scratch.pairs + row * kDecodeKeys / 2, v,
                                       first == 0 ? scratch.used(ahead) : nullptr);
      }
    });
  }
  void end_tile(const Tile&) {}

  void store() {
    for (int64_t n = 0; n < head_count; ++n) {
      const PartialRows<Real> to = partial[n];
      for_bands<W>(row_count, [&](auto band, int64_t first) {
        constexpr int R = decltype(band)::value, C = W / R;
        const int64_t lanes = (n * head_rows + first) * W;
        for (int64_t r = 0; r < R; ++r) {
          to.max[first + r] = scratch.max[lanes + r * C];
          to.sum[first + r] = 0;
          for (int64_t j = 0; j < C; ++j) to.sum[first + r] += scratch.sums[lanes + r * C + j];
        }
      });
    }
  }

 private:
  // The score of row r of a band and key j of a group.
  template <int R>
  static Real& score_at(Real* scores, int64_t r, int64_t j) {
    constexpr int C = W / R;
    return scores[j / C * W + r * C + j % C];
  }

  template <int R>
  void add_alibi(int64_t n, int64_t first, int64_t key0, Real* scores) const {
    for (int64_t r = 0; r < lesser<int64_t>(R, row_count - first); ++r) {
      const Real slope = HeadBias<Real>::of(p, batch, head_of(n, first + r)).slope * kLog2E<Real>;
      const int64_t distance = key0 - mask.first_position() - query_of(first + r);
      for (int64_t j = 0; j < kDecodeKeys; ++j) {
        score_at<R>(scores, r, j) -= slope * static_cast<Real>(distance + j < 0 ? -(distance + j) : distance + j);
      }
    }
  }

  // Adds the dense bias. As in forward.h, a bias of -inf masks a score, even a NaN or +inf.
  template <int R>
  void add_bias(int64_t n, int64_t first, const Tile& tile, Real* scores) const {
    alignas(64) Real bias[R * kDecodeKeys], of_row[kDecodeKeys];
    for (int64_t r = 0; r < R; ++r) {
      const int64_t row = lesser(first + r, row_count - 1);
      load_bias(query_of(row), head_of(n, row), tile, of_row);
      for (int64_t j = 0; j < kDecodeKeys; ++j) score_at<R>(bias, r, j) = of_row[j];
    }
    for (int64_t i = 0; i < R * kDecodeKeys; i += W) {
      const V added = S::load(bias + i);
      S::store(scores + i, BiasTile<Op>::where_hidden(added, S::set1(-kInfinity), S::load(scores + i) + added));
    }
  }
  // log2(e) times the bias of a row for a group of keys; 0 for padding keys.
  FLASHATTN_SHARED void load_bias(int64_t query, int64_t head, const Tile& tile, Real* to) const {
    const HeadBias<Real> bias = HeadBias<Real>::of(p, batch, head);
    for_element_type<Op>(p.bias.dtype, [&](auto element) {
      using Element = decltype(element);
      const Element* const row = static_cast<const Element*>(bias.bias) + query * bias.row_stride + tile.key0;
      // The next group of keys: hardware prefetchers do not follow as many rows.
      constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(Element));
      for (int64_t j = 0; j < kDecodeKeys; j += kLine) prefetch<false>(row + kDecodeKeys + j);
      const int64_t whole = tile.count / W * W;
      for (int64_t j = 0; j < whole; j += W) {
        const V bias = BiasTile<Op>::narrowed_lanes(WideVector<Real, Element>::load(row + j));
        S::store(to + j, bias * S::set1(kLog2E<Real>));
      }
      for (int64_t j = whole; j < kDecodeKeys; ++j) {
        to[j] = j < tile.count ? in_log2_units(static_cast<Real>(widen(row[j]))) : Real(0);
      }
    });
  }

  // Sets the scores of masked keys and padding keys to -inf, and their bits in `hidden`, for the rows of the band.
  // Returns whether there are any.
  template <int R>
  bool hide(int64_t n, int64_t first, const Tile& tile, Real* scores) const {
    static_assert(kDecodeKeys <= 32, "hidden has a bit for each key");
    uint32_t any = 0;
    for (int64_t r = 0; r < R; ++r) {
      const RowVisibility seen = seen_by(n, lesser(first + r, row_count - 1));
      uint32_t hidden = 0;
      for (int64_t j = 0; j < kDecodeKeys; ++j) {
        if (j < tile.count && seen(tile.key0 + j)) continue;
        score_at<R>(scores, r, j) = -kInfinity;
        hidden |= uint32_t{1} << j;
      }
      scratch.hidden[n * head_rows + first + r] = hidden;
      any |= hidden;
    }
    return any != 0;
  }

  // Online softmax: turns base-2 logits into weights relative to the running maximum of each row, and
  // rescales the accumulators.
  template <int R>
  void weigh(int64_t row, Real* out) {
    constexpr int C = W / R;
    constexpr int64_t kVectors = kDecodeKeys * R / W;
    Real *const lanes_max = scratch.max + row * W, *const lanes_sum = scratch.sums + row * W;
    Real* const scores = scratch.scores + row * kDecodeKeys;
    const V old_max = S::load(lanes_max);
    V max = S::load(scores);
    for (int64_t i = 1; i < kVectors; ++i) max = S::max(max, S::load(scores + i * W));
    max = S::max(old_max, BandProduct<Staged, Op, R>::max_of_rows(max));
    S::store(lanes_max, max);
    const V offset = S::max(S::set1(std::numeric_limits<Real>::lowest()), max);  // -inf - -inf would be NaN
    const V rescale = S::template exp2<Accuracy>(old_max - offset);
    alignas(64) Real of_lanes[W];
    S::store(of_lanes, rescale);
    for (int64_t r = 0; r < R; ++r) {
      if (of_lanes[r * C] == 1) continue;
      const V factor = S::set1(of_lanes[r * C]);
      Real* const to = out + r * scratch.columns_v;
      for (int64_t d = 0; d < scratch.columns_v; d += W) S::store(to + d, S::load(to + d) * factor);
    }
    V sum = S::load(lanes_sum) * rescale;
    FLASHATTN_UNROLL(8)
    for (int64_t i = 0; i < kVectors; i += 2) {
      const V even = S::template exp2<Accuracy>(S::load(scores + i * W) - offset);
      const V odd = S::template exp2<Accuracy>(S::load(scores + (i + 1) * W) - offset);
      sum = sum + even + odd;
      S::store(scores + i * W, even);
      S::store(scores + (i + 1) * W, odd);
      BandValues<Staged, Op, R>::store_weights(scratch.pairs + row * kDecodeKeys / 2, i / 2, even, odd);
    }
    S::store(lanes_sum, sum);
  }

  // Adds the values of the keys that are not hidden: 0 times the value of a hidden key is NaN where it is not finite.
  template <int R>
  void add_seen_values(const Staged* const* v, int64_t count, Real* scores, int64_t rows, const uint32_t* hidden,
                       Real* out) const {
    for (int64_t r = 0; r < rows; ++r) {
      Real* const row = out + r * scratch.columns_v;
      for (int64_t j = 0; j < count; ++j) {
        if (hidden[r] >> j & 1) continue;
        const V weight = S::set1(score_at<R>(scores, r, j));
        for (int64_t d = 0; d < scratch.columns_v; d += W) {
          S::store(row + d, S::fma(weight, WideVector<Real, Staged>::load(v[j] + d), S::load(row + d)));
        }
      }
    }
  }

  const SplitScratch<In, Op> scratch;
  const GeneralScore<Real, Accuracy> rule;
  const PartialHeads<Real> partial;
  bool may_hide = false;  // whether any row of the item may not see a key of the tile
  uint64_t hides = 0;     // bit n: head n has masked scores in the tile
};

// Combines the `parts` splits of row r of a block of one head into its results. partial: those of the first split.
template <class In, class Real>
inline void finish_row(const DecodeItem& item, const PartialHeads<Real>& partial, int64_t r, int64_t parts) {
  const DecodeParams& p = item.p;
  const auto part_of = [&](int64_t n) { return partial[n * p.heads_k]; };
  const int64_t h = item.head_of(0, r);
  const RowStart<Real> start(p, h);
  Real largest = -std::numeric_limits<Real>::infinity();  // largest logit, without the sink
  for (int64_t n = 0; n < parts; ++n) {
    const Real of_part = part_of(n).max[r];
    largest = of_part > largest || of_part != of_part ? of_part : largest;
  }
  const Real max = start.max > largest ? start.max : largest;
  const Real offset = max == -std::numeric_limits<Real>::infinity() ? Real(0) : max;
  Real sum = start.sum > 0 ? std::exp2(start.max - offset) : Real(0);
  Real* const out = part_of(0).out + r * partial.columns_v;
  for (int64_t n = 0; n < parts; ++n) {
    const PartialRows<Real> part = part_of(n);
    const Real scale = std::exp2(part.max[r] - offset);
    sum += part.sum[r] * scale;
    const Real* const from = part.out + r * partial.columns_v;
    if (n == 0) {
      for (int64_t d = 0; d < partial.columns_v; ++d) out[d] = from[d] * scale;
    } else {
      for (int64_t d = 0; d < partial.columns_v; ++d) out[d] += from[d] * scale;
    }
  }
  write_row<In>(p, item.batch, h, item.queries.start + item.query_of(r), out, FinalRow<Real>{max, sum, largest});
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
