// Decoding with the bits of the forward (AttnParams::invariant), for sequences with few queries: the sums of forward.h
// in the same order, on the same tiles of keys, but for all query heads of a KV head at once, and with keys in the
// vector lanes of the first product, most of which would be idle if they held queries.
//
// Each number comes from the same operations as in forward.h: a product adds its units in ascending order, a row adds
// the weights of a tile in ascending order and then the earlier tiles, and the second product adds keys in ascending
// order to the rescaled sums. A masked key adds 0 there and here. Workers divide sequences and KV heads among
// themselves, but not the keys of a sequence.
#pragma once

#include "forward.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

constexpr int64_t kInvariantRows = 64;  // maximum rows of a block: queries times query heads of a KV head
constexpr int64_t kValueKeys = 32;      // values that the second product reads at a time, from the L1 cache

template <class In, class Op>
struct InvariantDecodeScratch {
  using Real = typename Op::Real;
  using Unit = typename Op::Unit;

  InvariantDecodeScratch(const DecodeParams& p, void* base)
      : InvariantDecodeScratch(p, tile_size<Op>(p), ScratchCarver(base)) {}

  TileSize size;
  int64_t units, units_v, columns_v;  // as in ForwardScratch
  Unit* q;                            // [rows][units]
  Unit *keys, *staged_v;              // staged rows: kPanel keys, kValueKeys values
  Unit *keys_transposed, *values;     // the same as B operands
  Real* scores;                       // [rows][size.keys], later weights
  Unit* weights;                      // [rows][size.keys / 2]: pairs of weights, bfloat16 only
  Real* hides;                        // [size.keys]: 1 where a key is masked for the current row, else 0
  Real* out;                          // [rows][columns_v], not yet divided by the row sum
  Real *max, *sum, *rescale, *largest;
  IsolatedRows<In, Op> isolated_v;
  GatheredRows<In> gathered;
  int64_t bytes;

 private:
  InvariantDecodeScratch(const DecodeParams& p, const TileSize& of_call, ScratchCarver carve)
      : size(of_call),
        units(padded_units<Op>(p.head_dim)),
        units_v(padded_units<Op>(p.head_dim_v)),
        columns_v(units_v * Op::kPack),
        q(carve.take<Unit>(kInvariantRows * units)),
        keys(carve.take<Unit>(kPanel<Op> * units)),
        staged_v(carve.take<Unit>(kValueKeys * units_v)),
        keys_transposed(carve.take<Unit>(kPanel<Op> * units)),
        values(carve.take<Unit>(row_panel_units<Op>(kValueKeys, units_v))),
        scores(carve.take<Real>(kInvariantRows * size.keys)),
        weights(carve.take<Unit>(Op::kPack == 2 ? kInvariantRows * size.keys / 2 : 0)),
        hides(carve.take<Real>(size.keys)),
        out(carve.take<Real>(kInvariantRows * columns_v)),
        max(carve.take<Real>(kInvariantRows)),
        sum(carve.take<Real>(kInvariantRows)),
        rescale(carve.take<Real>(kInvariantRows)),
        largest(carve.take<Real>(kInvariantRows)),
        isolated_v(true, kValueKeys, units_v, &carve),
        gathered(p, size.keys, &carve),
        bytes(carve.used()) {}
};

template <class In, class Op, class Accuracy, class Rule>
class InvariantDecode {
  using Real = typename Op::Real;
  using Unit = typename Op::Unit;
  using S = typename Op::S;
  using V = typename S::V;
  static constexpr int W = S::kWidth;
  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

 public:
  InvariantDecode(const DecodeParams& params, void* base)
      : p(params), rule(make_rule<Rule>(params)), scratch(params, base), size(scratch.size) {}

  // Block `number` of the rows of KV head `key_head`.
  void run(int64_t b, int64_t key_head, int64_t number) {
    const Sequence queries = query_sequence(p, b);
    const KeyLocator keys(p, b);
    const Mask mask(p, queries.length, keys.length);
    batch = b;
    hk = key_head;
    row0 = number * kInvariantRows;
    row_count = lesser(kInvariantRows, queries.length * p.group_size() - row0);
    if constexpr (kIsFloat8<In>) rule = make_rule<Rule>(p, descale_of_products<In>(p, b, hk));
    load_queries(queries);
    const IndexRange visible = mask.keys_of(query_of(0), query_of(row_count - 1) + 1);
    for (int64_t key0 = visible.begin / size.keys * size.keys; key0 < visible.end; key0 += size.keys) {
      const IndexRange tile{key0, lesser(key0 + size.keys, visible.end)};
      const KeyRun run = keys.run(key0, tile.end - key0);
      const bool is_run = run.count == tile.end - key0;
      key_tile(mask, keys, is_run ? rows_of_run<In>(p, run, hk) : scratch.gathered.gather(p, keys, tile, hk), tile,
               {tile.end, lesser(tile.end + size.keys, visible.end)});
    }
    for (int64_t r = 0; r < row_count; ++r) write(queries, r);
  }

 private:
  // Query and head of row r of the block; adjacent rows are the heads of one query.
  int64_t query_of(int64_t r) const { return (row0 + r) / p.group_size(); }
  int64_t head_of(int64_t r) const { return hk * p.group_size() + (row0 + r) % p.group_size(); }

  void load_queries(const Sequence& queries) {
    for (int64_t r = 0; r < row_count; ++r) {
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
    }
    std::fill(scratch.out, scratch.out + row_count * scratch.columns_v, Real(0));
  }

  // next: the tile after this one, which is prefetched; empty after the last.
  void key_tile(const Mask& mask, const KeyLocator& keys, const TileRows<In>& rows, IndexRange tile, IndexRange next) {
    constexpr int64_t P = kPanel<Op>;
    const int64_t count = tile.end - tile.begin, lanes = round_up(count, W);
    for (int64_t first = 0; first < count; first += P) {
      ask_for(p.k, p.head_dim, keys, {next.begin + first, lesser(next.begin + first + P, next.end)});
      const int64_t n = lesser(P, count - first), panel_lanes = round_up(n, W);
      const StagedRows<Op> k =
          stage_rows<Op>(rows.k + first * rows.k_stride, rows.k_stride, n, p.head_dim, scratch.keys);
      const Panels<Op> panel = transposed_panels<Op>(scratch.keys_transposed, k, n, panel_lanes, scratch.units);
      const Gemm<Op> qk{scratch.q, scratch.units, panel, scratch.scores + first, size.keys};
      score_product(qk, {0, row_count}, {0, panel_lanes}, ceil_div(p.head_dim, Op::kPack));
    }
    for (int64_t r = 0; r < row_count; ++r) weigh(r, find_hidden(mask, keys, r, tile, lanes), lanes);
    add_weights(count);

    bool isolates = false;
    for (int64_t first = 0; first < count; first += kValueKeys) {
      ask_for(p.v, p.head_dim_v, keys, {next.begin + first, lesser(next.begin + first + kValueKeys, next.end)});
      const int64_t n = lesser(kValueKeys, count - first);
      const Panels<Op> v = row_panels<Op>(finite_values(rows, first, n), n, scratch.units_v, scratch.values);
      isolates = isolates || scratch.isolated_v.any();
      const Gemm<Op> pv{
          weights() + first / Op::kPack, size.keys / Op::kPack, v, scratch.out, scratch.columns_v, scratch.rescale};
      const auto all_keys = [n](int64_t, int64_t) { return IndexRange{0, ceil_div(n, Op::kPack)}; };
      if (first == 0) {
        gemm<Order::kRowMajor, Init::kScale>(pv, {0, row_count}, {0, scratch.columns_v}, all_keys);
      } else {
        gemm<Order::kRowMajor, Init::kAccumulate>(pv, {0, row_count}, {0, scratch.columns_v}, all_keys);
      }
    }
    for (int64_t first = 0; isolates && first < count; first += kValueKeys) {
      finite_values(rows, first, lesser(kValueKeys, count - first));
      const auto rows_that_see = [&](int64_t key, auto body) {
        for (int64_t r = 0; r < row_count; ++r) {
          if (sees(mask, keys, r, tile.begin + first + key)) body(r);
        }
      };
      scratch.isolated_v.add(scratch.out, scratch.columns_v, rows_that_see,
                             [&](int64_t r, int64_t key) { return weight_of(r, first + key); });
    }
  }

  // The staged values of keys [first, first + count) of the tile, without the non-finite ones, which isolated_v has.
  StagedRows<Op> finite_values(const TileRows<In>& rows, int64_t first, int64_t count) {
    const In* const from = rows.v + first * rows.v_stride;
    const StagedRows<Op> staged = stage_rows<Op>(from, rows.v_stride, count, p.head_dim_v, scratch.staged_v);
    return scratch.isolated_v.find(from, rows.v_stride, count, p.head_dim_v, staged);
  }

  // Prefetches the rows of the keys in `range`. The heads of a key are adjacent in memory, so that rows of one head are
  // too far apart for the hardware prefetcher.
  void ask_for(const TensorView& t, int64_t columns, const KeyLocator& keys, IndexRange range) const {
    constexpr int64_t kLine = 64;
    KeyRun run;
    for (int64_t key = range.begin; key < range.end; key += run.count) {
      run = keys.run(key, range.end - key);
      for (int64_t n = 0; n < run.count; ++n) {
        const auto* const row = reinterpret_cast<const char*>(row_of<const In>(t, run.entry, hk, run.row + n));
        for (int64_t byte = 0; byte < columns * static_cast<int64_t>(sizeof(In)); byte += kLine) {
          prefetch<false>(row + byte);
        }
      }
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

  // The online softmax of forward.h for one row: turns products into weights.
  void weigh(int64_t r, bool hides, int64_t lanes) {
    Real* const scores = scratch.scores + r * size.keys;
    const V factor = S::set1(kIsGeneral<Rule> ? Real(1) : rule.factor), hidden = S::set1(-kInfinity);
    V maxima = hidden;
    for (int64_t j = 0; j < lanes; j += W) {
      V score = rule.stored(S::load(scores + j));
      if constexpr (kIsGeneral<Rule>) score = score * S::set1(rule.factor);
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
    const Real offset = new_max == -kInfinity ? Real(0) : new_max;  // -inf - -inf would be NaN
    S::store(of_lanes, S::template exp2<Accuracy>(S::set1(old_max - offset)));
    scratch.rescale[r] = of_lanes[0];
    const V minus_offset = S::set1(-offset);
    for (int64_t j = 0; j < lanes; j += W) {
      S::store(scores + j, S::template exp2<Accuracy>(S::fma(S::load(scores + j), factor, minus_offset)));
    }
  }

  // Adds the weights of all rows to their sums, key by key, and writes the pairs that a product of bfloat16 reads. Four
  // rows at a time, because each addition waits for the one before.
  void add_weights(int64_t count) {
    constexpr int64_t kRows = 4;
    for (int64_t first = 0; first < row_count; first += kRows) {
      const Real* of_row[kRows];
      Real sums[kRows] = {};
      for (int64_t n = 0; n < kRows; ++n) of_row[n] = scratch.scores + lesser(first + n, row_count - 1) * size.keys;
      for (int64_t j = 0; j < count; ++j) {
        for (int64_t n = 0; n < kRows; ++n) sums[n] += of_row[n][j];
      }
      for (int64_t r = first; r < lesser(first + kRows, row_count); ++r) {
        alignas(64) Real sum[W];
        S::store(sum, S::fma(S::set1(scratch.sum[r]), S::set1(scratch.rescale[r]), S::set1(sums[r - first])));
        scratch.sum[r] = sum[0];
      }
    }
    if constexpr (Op::kPack == 2) {
      for (int64_t r = 0; r < row_count; ++r) {
        PanelForms<Op>::of_row(scratch.weights + r * size.keys / 2, scratch.scores + r * size.keys, count);
      }
    }
  }
  // The weights as the A operand of the second product: [rows][size.keys / kPack].
  const Unit* weights() const {
    if constexpr (Op::kPack == 2) {
      return scratch.weights;
    } else {
      return scratch.scores;
    }
  }
  Real weight_of(int64_t r, int64_t key) const {
    if constexpr (Op::kPack == 2) {
      return widen(reinterpret_cast<const typename StagedElement<Op>::Type*>(scratch.weights)[r * size.keys + key]);
    } else {
      return scratch.scores[r * size.keys + key];
    }
  }

  void write(const Sequence& queries, int64_t r) {
    write_row<In>(p, batch, head_of(r), queries.start + query_of(r), scratch.out + r * scratch.columns_v,
                  FinalRow<Real>{scratch.max[r], scratch.sum[r], scratch.largest[r]});
  }

  const DecodeParams& p;
  std::conditional_t<kIsFloat8<In>, Rule, const Rule> rule;  // of an fp8 call: with the descales of the current head
  InvariantDecodeScratch<In, Op> scratch;
  const TileSize size;
  // The current block.
  int64_t batch = 0, hk = 0, row0 = 0, row_count = 0;
};

template <class In, class Op, class Accuracy, class Rule>
void decode_invariantly(const DecodeParams& p) {
  const auto blocks_of = [&](int64_t b) {
    const int64_t queries = query_sequence(p, b).length;
    return has_few_queries(p, queries) ? ceil_div(queries * p.group_size(), kInvariantRows) : 0;
  };
  int64_t items = 0;
  for (int64_t b = 0; b < p.batch; ++b) items += blocks_of(b) * p.heads_k;
  const int64_t scratch_bytes = InvariantDecodeScratch<In, Op>(p, nullptr).bytes;
  std::atomic<int64_t> next{0};
  run_workers(*static_cast<const CpuExecutor*>(p.stream), items, [&](int worker) {
    InvariantDecode<In, Op, Accuracy, Rule> kernel(p, static_cast<char*>(p.workspace) + worker * scratch_bytes);
    WorkCursor cursor(p.batch, p.heads_k);
    WorkItem item;
    while (cursor.find(next.fetch_add(1, std::memory_order_relaxed), blocks_of, &item)) {
      kernel.run(item.batch, item.head, item.tile);
    }
  });
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
