// Forward: out = dropout(softmax(scale * Q K^T)) V with an online softmax (Milakov and Gimelshein 2018;
// FlashAttention-2, Dao 2023, Algorithm 1), one query tile of one head at a time against all its visible key tiles.
//
// Scores are transposed, S^T[key][query]: K is read in place element by element, and P^T is directly the A operand of P
// V. Next: scores.h (what happens between the two products), gemm.h, pack.h.
#pragma once

#include "cpu/few_queries.h"
#include "cpu/score/head_mask.h"
#include "cpu/score/isolated_rows.h"
#include "cpu/score/scores.h"
#include "cpu/vectors/fp8.h"
#include "cpu/vectors/schedule.h"
#include "cpu/vectors/views.h"
#include "rules/lse_words.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// The keys and values of a tile: in place, or in an invariant call gathered from the pages of a KV cache.
template <class In>
struct TileRows {
  const In *k, *v;
  int64_t k_stride, v_stride;  // elements from one key to the next
};

template <class In>
inline TileRows<In> rows_of_run(const AttnParams& p, const KeyRun& run, int64_t key_head) {
  return {row_of<const In>(p.k, run.entry, key_head, run.row), row_of<const In>(p.v, run.entry, key_head, run.row),
          p.k.row_stride, p.v.row_stride};
}

// Memory for the rows of a tile that lies in several pages.
template <class In>
class GatheredRows {
 public:
  // For tiles of at most `rows` rows. Takes no memory in calls that are not invariant.
  GatheredRows(const AttnParams& p, int64_t rows, ScratchCarver* carve)
      : k_(carve->take<In>(p.invariant ? rows * stride(p.head_dim) : 0)),
        v_(carve->take<In>(p.invariant ? rows * stride(p.head_dim_v) : 0)) {}

  TileRows<In> gather(const AttnParams& p, const KeyLocator& keys, IndexRange tile, int64_t key_head) const {
    const TileRows<In> to{k_, v_, stride(p.head_dim), stride(p.head_dim_v)};
    KeyRun run;
    for (int64_t j = tile.begin; j < tile.end; j += run.count) {
      run = keys.run(j, tile.end - j);
      const TileRows<In> from = rows_of_run<In>(p, run, key_head);
      copy(k_ + (j - tile.begin) * to.k_stride, to.k_stride, from.k, from.k_stride, run.count, p.head_dim);
      copy(v_ + (j - tile.begin) * to.v_stride, to.v_stride, from.v, from.v_stride, run.count, p.head_dim_v);
    }
    return to;
  }

 private:
  // Rows begin at multiples of 4 elements: products read pairs of 16-bit elements in place (pack.h), aligned to 4
  // bytes.
  static int64_t stride(int64_t columns) { return round_up(columns, 4); }
  static void copy(In* to, int64_t to_stride, const In* from, int64_t stride, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; ++r) std::memcpy(to + r * to_stride, from + r * stride, columns * sizeof(In));
  }

  In *k_, *v_;
};

template <class In, class Op>
struct ForwardScratch {
  using Real = typename Op::Real;
  using Unit = typename Op::Unit;

  FLASHATTN_SHARED ForwardScratch(const AttnParams& p, ScratchCarver carve)
      : size(tile_size<Op>(p)),
        units(padded_units<Op>(p.head_dim)),
        units_v(padded_units<Op>(p.head_dim_v)),
        columns_v(units_v * Op::kPack),
        staged(carve.take<Unit>(greater(size.queries * units, size.keys * units_v))),
        q_transposed(carve.take<Unit>(units * size.queries)),
        values(carve.take<Unit>(row_panel_units<Op>(size.keys, units_v))),
        keys(carve.take<Unit>(product_row_units<Op>(size.keys, units))),
        tile(p, size, &carve),
        out(carve.take<Real>(size.queries * columns_v)),
        rows(p, size, &carve),
        isolated_v(p.has_mask() || p.invariant, size.keys, units_v, &carve),
        gathered(p, size.keys, &carve),
        bytes(carve.used()) {}

  TileSize size;
  int64_t units, units_v, columns_v;  // sizes of a padded row: units of q and k, units and columns of v
  Unit* staged;                       // Q, later V, as staged rows (pack.h)
  Unit *q_transposed, *values;        // B operands
  Unit* keys;                         // K as the A operand
  ScoreTile<Op> tile;
  Real* out;  // [queries][columns_v], not yet divided by the row sum
  RunningRows<Op> rows;
  IsolatedRows<In, Op> isolated_v;
  GatheredRows<In> gathered;
  int64_t bytes;
};

// The running maximum and sum of a row before its first key. The sink initialises them like a key (smooth softmax:
// logit 0).
template <class Real>
struct RowStart {
  RowStart(const AttnParams& p, int64_t head) {
    const Real sink = p.sink ? static_cast<const Real*>(p.sink)[head] : Real(0);
    const bool has_sink = p.has_sink && sink_counts(sink);
    max = has_sink ? sink_maximum(sink) : -std::numeric_limits<Real>::infinity();
    sum = has_sink ? Real(1) : Real(0);
  }
  Real max, sum;
};

// The statistics of a row after its last key. largest: used in calls that return the largest logits.
template <class Real>
struct FinalRow {
  Real max, sum, largest;

  bool is_empty() const { return sum == 0; }  // no visible key and no sink
  LseWords<Real> words() const {
    return is_empty() ? LseWords<Real>::of_no_key() : LseWords<Real>::of_row(max, std::log2(sum));
  }
};

// The largest logit of a row in natural units. A vector maximum may forget a NaN, which the sum of weights does not.
template <class Real>
inline Real largest_logit(Real largest, Real sum) {
  const bool has_nan = sum != sum && largest != std::numeric_limits<Real>::infinity();
  return has_nan ? sum : in_natural_units(largest);
}

// Writes the two words of the log-sum-exp of a row, where the call wants them.
template <class Real>
inline void write_words(const AttnParams& p, int64_t batch, int64_t head, int64_t row, const LseWords<Real>& words) {
  if (!p.lse_words.data) return;
  Real* const to = row_of<Real>(p.lse_words, batch, head, row);
  to[0] = words.top;
  to[1] = words.log2_sum;
}
// The statistics of a row that a call returns.
template <class Real>
inline void write_statistics(const AttnParams& p, int64_t batch, int64_t head, int64_t row, const FinalRow<Real>& of) {
  const LseWords<Real> words = of.words();
  *row_of<Real>(p.lse, batch, head, row) =
      of.is_empty() ? -std::numeric_limits<Real>::infinity() : row_lse(words.top, words.log2_sum);
  if (p.row_maxima.data) *row_of<Real>(p.row_maxima, batch, head, row) = largest_logit(of.largest, of.sum);
  write_words(p, batch, head, row, words);
}

// Writes out and the statistics of a row. sums: its unnormalised out, which is scaled in place.
template <class In, class Real>
inline void write_row(const AttnParams& p, int64_t batch, int64_t head, int64_t row, Real* sums,
                      const FinalRow<Real>& of) {
  const Real inverse_keep = static_cast<Real>(1.0 / keep_probability(p.dropout_threshold));
  const Real factor = inverse_keep * descale_of_values<In>(p, batch, head / p.group_size());
  write_out<In>(p, batch, head, row, sums, of.is_empty() ? Real(0) : factor / of.sum);
  write_statistics(p, batch, head, row, of);
}

template <class In, class Op, class Accuracy, class Rule>
class Forward {
  using Real = typename Op::Real;
  using Unit = typename Op::Unit;

 public:
  // cache: the same params in a decoding call, else nullptr.
  Forward(const AttnParams& params, const DecodeParams* cache, void* base)
      : p(params),
        cache(cache),
        rule(Rule::of(params)),
        scratch(params, base),
        size(scratch.size),
        philox(philox_key_of(p)) {}

  // A query tile of a query head.
  void run(const WorkItem& item) {
    const int64_t b = item.batch, h = item.head;
    const Sequence queries = query_sequence(p, b);
    const KeyLocator keys = cache ? KeyLocator(*cache, b) : KeyLocator(p, b);
    const HeadMask mask(p, b, h, queries, keys);
    if constexpr (kIsGeneral<Rule>) bias = HeadBias<Real>::of(p, b, h);
    row0 = item.tile * size.queries;
    row_count = lesser(size.queries, queries.length - row0);
    batch = b;
    head = h;
    writes_words_only = cache && has_few_queries(*cache, b, kFloatLanes);
    if constexpr (kIsFloat8<In>) rule = scaled_rule<Rule>(p, descale_of_products<In>(p, b, h / p.group_size()));
    load_queries(queries);
    const IndexRange visible = mask.basic.keys_of(row0, row0 + row_count);
    const IndexRange rows{row0, row0 + row_count};
    int64_t end;
    for (int64_t key0 = first_key(mask, rows, visible.begin / size.keys * size.keys); key0 < visible.end;
         key0 = first_key(mask, rows, end)) {
      const int64_t whole = lesser(size.keys, visible.end - key0);
      const KeyRun run = keys.run(key0, whole);  // a whole tile, or the rest of a page
      // In an invariant call every tile is whole, because its length determines the order of the sums.
      end = key0 + (p.invariant ? whole : run.count);
      const IndexRange tile{key0, end};
      if (mask.mask_visibility(rows, tile) == Visibility::kNone) continue;
      const int64_t hk = head / p.group_size();
      key_tile(mask, end - key0 == run.count ? rows_of_run<In>(p, run, hk) : scratch.gathered.gather(p, keys, tile, hk),
               tile);
    }
    write(queries);
  }

 private:
  // The first key from key0 on whose tile the rows may see. A tile begins at key0.
  int64_t first_key(const HeadMask& mask, IndexRange rows, int64_t key0) const {
    return p.has_blocks() ? mask.next_listed(rows, ceil_div(key0, size.keys)) * size.keys : key0;
  }

  void load_queries(const Sequence& queries) {
    const StagedRows<Op> q = with_type_of_q<In>(p, [&](auto element) {
      return stage_rows<Op>(row_of<const decltype(element)>(p.q, batch, head, queries.start + row0), p.q.row_stride,
                            row_count, p.head_dim, scratch.staged);
    });
    lane_count = round_up(row_count, Op::S::kWidth);
    q_transposed = transposed_panels<Op>(scratch.q_transposed, q, row_count, lane_count, scratch.units);
    const RowStart<Real> start(p, head);
    for (int64_t i = 0; i < lane_count; ++i) {
      scratch.rows.max[i] = start.max;
      scratch.rows.sum[i] = start.sum;
      if (p.row_maxima.data) scratch.rows.largest[i] = -std::numeric_limits<Real>::infinity();
      for (int c = 0; p.centres.data && c < kCentres; ++c) scratch.rows.centres.sums[c * size.queries + i] = 0;
    }
    std::memset(scratch.out, 0, row_count * scratch.columns_v * sizeof(Real));
  }

  // rows: the keys and values of the tile.
  void key_tile(const HeadMask& head_mask, const TileRows<In>& rows, IndexRange keys_of_tile) {
    const int64_t key0 = keys_of_tile.begin, count = keys_of_tile.end - key0;
    const PanelMask<Op> mask(head_mask, row0, row_count, key0, count, false, scratch.tile.limits);
    const StagedRows<Op> k = stage_product_rows<Op>(rows.k, rows.k_stride, count, p.head_dim, scratch.keys);
    const ScoreTile<Op>& tile = scratch.tile;
    if (p.has_dropout()) {
      fill_keep_bits(tile.keep_bits, size.queries / kWordLanes, philox, p, batch, head, row0, row_count, key0, count);
    }
    const Gemm<Op> qk{k.data, k.stride, q_transposed, tile.scores, size.queries};
    const TilePlace place{row0, row_count, key0, count, head_mask.basic.first_position()};
    if constexpr (kIsGeneral<Rule>) {
      tile.biases.load(bias, place);
      scratch.rows.centres.load(bias, place);
    }
    for (int64_t lane = 0; lane < lane_count; lane += kPanel<Op>) {
      const IndexRange lanes{lane, lesser(lane + kPanel<Op>, lane_count)}, panel_keys = mask.panel_keys(lane);
      const int64_t units = ceil_div(p.head_dim, Op::kPack);
      if constexpr (kIsGeneral<Rule>) {
        tile.biases.load_panel(bias, place, lanes, panel_keys);
        const PanelOrigin next = panel_after(place, lanes);
        score_product(qk, panel_keys, lanes, units, tile.biases.reads_panel(bias, next),
                      [&](IndexRange part) { tile.biases.ask_for(bias, next, part); });
      } else {
        score_product(qk, panel_keys, lanes, units);
      }
      weigh<Accuracy>(tile, rule, scratch.rows, mask, lanes, panel_keys);
    }
    if (writes_words_only) return;
    // In an invariant call a value that is not finite reaches no row that does not see it, also where a bias of -inf
    // hides it, and is added in the same order in whole tiles and in partial ones.
    const bool isolates = (p.has_mask() && !mask.is_whole()) || p.invariant;
    StagedRows<Op> v_rows = stage_rows<Op>(rows.v, rows.v_stride, count, p.head_dim_v, scratch.staged);
    if (isolates) v_rows = scratch.isolated_v.find(rows.v, rows.v_stride, count, p.head_dim_v, v_rows);
    const Panels<Op> v = row_panels<Op>(v_rows, count, scratch.units_v, scratch.values);
    const Gemm<Op> pv{reinterpret_cast<const Unit*>(tile.scores),
                      size.queries,
                      v,
                      scratch.out,
                      scratch.columns_v,
                      scratch.rows.rescale};
    gemm<Order::kKMajor, Init::kScale>(pv, {0, row_count}, {0, scratch.columns_v}, KeysOfRows<Op>{mask});
    if (!isolates || !scratch.isolated_v.any()) return;
    const auto weight = [&](int64_t row, int64_t key) { return PanelForms<Op>::of_key(pv.a, size.queries, key, row); };
    const auto add_to = [&](auto rows_of_key) {
      const auto seen = [&](int64_t key, auto body) {
        rows_of_key(key, [&](int64_t row) {
          if (!kIsGeneral<Rule> || !hides<Op>(p, bias, place, row, key)) body(row);
        });
      };
      scratch.isolated_v.add(scratch.out, scratch.columns_v, seen, weight);
    };
    if (mask.is_whole()) {
      add_to([&](int64_t, auto body) {
        for (int64_t row = 0; row < row_count; ++row) body(row);
      });
    } else {
      add_to(RowsThatSee{mask.limits()});
    }
  }

  // The panel after `lanes`; after the last panel of a tile the first panel of the next key tile.
  PanelOrigin panel_after(const TilePlace& place, IndexRange lanes) const {
    const int64_t next_row = place.row0 + lanes.end, next_key = place.key0 + place.keys;
    if (lanes.end < place.rows) return {true, next_row, place.key0};
    return {next_key < p.seqlen_k, place.row0, next_key};
  }

  void write(const Sequence& queries) {
    for (int64_t i = 0; i < row_count; ++i) {
      const int64_t row = queries.start + row0 + i;
      const FinalRow<Real> of{scratch.rows.max[i], scratch.rows.sum[i],
                              p.row_maxima.data ? scratch.rows.largest[i] : Real(0)};
      if (writes_words_only) {
        write_words(p, batch, head, row, of.words());
        continue;
      }
      write_row<In>(p, batch, head, row, scratch.out + i * scratch.columns_v, of);
      for (int c = 0; p.centres.data && c < kCentres; ++c) {
        const Real centre = scratch.rows.centres.sums[c * size.queries + i];
        row_of<Real>(p.centres, batch, head, row)[c] = of.is_empty() ? Real(0) : centre / of.sum;
      }
    }
  }

  const AttnParams& p;
  const DecodeParams* const cache;
  std::conditional_t<kIsFloat8<In>, Rule, const Rule> rule;  // in an fp8 call with the descales of the current head
  ForwardScratch<In, Op> scratch;
  const TileSize size;
  const PhiloxKey philox;
  HeadBias<Real> bias;
  Panels<Op> q_transposed{};
  // The current query tile; lane_count is row_count rounded up to whole vectors.
  int64_t batch = 0, head = 0, row0 = 0, row_count = 0, lane_count = 0;
  bool writes_words_only = false;
};

// The log-sum-exp, in units of log2 and in size, up to which the derivatives may read the words of decode.h. Its
// products add up in another order than theirs: scores differ by a few roundings, and then the weights of a row add up
// to another number than 1. These limits keep that error below 2^-18 in fp32 and below the rounding of 16-bit weights.
template <class In>
constexpr double kLargestTopOfDecode = sizeof(In) == 8   ? 1 << 15
                                       : sizeof(In) == 4 ? 1 << 5
                                                         : 1 << 10;

// Whether the words of a sequence that decode.h has computed have to be replaced by those of forward.h.
template <class In, class Real>
inline bool replaces_words(const DecodeParams& p, int64_t b) {
  if (!p.lse_words.data || p.invariant) return false;
  const Sequence queries = query_sequence(p, b);
  for (int64_t h = 0; h < p.heads_q; ++h) {
    for (int64_t i = 0; i < queries.length; ++i) {
      const Real top = LseWords<Real>::of(p, b, h, queries.start + i).top;
      if (std::abs(top) > Real(kLargestTopOfDecode<In>) && std::abs(top) < kLargest<Real>) return true;
    }
  }
  return false;
}

// cache: the same params in a decoding call, whose sequences with few queries are computed already: all but their
// words where replaces_words().
template <class In, class Op, class Accuracy, class Rule>
void forward(const AttnParams& p, const DecodeParams* cache = nullptr) {
  const TileSize size = tile_size<Op>(p);
  auto tiles_of = [&](int64_t b) {
    const bool is_computed = cache && has_few_queries(*cache, b, kFloatLanes);
    if (is_computed && !replaces_words<In, typename Op::Real>(*cache, b)) return int64_t{0};
    return ceil_div(query_sequence(p, b).length, size.queries);
  };
  const int64_t scratch_bytes = ForwardScratch<In, Op>(p, nullptr).bytes;
  run_query_tiles(p, tiles_of, [&](int worker) {
    return Forward<In, Op, Accuracy, Rule>(p, cache, static_cast<char*>(p.workspace) + worker * scratch_bytes);
  });
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
