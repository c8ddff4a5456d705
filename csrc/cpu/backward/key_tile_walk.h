// What the backward (backward.h) and its derivative (second.h) share: the walk of a key tile over the query tiles that
// see it, the ordered sums for dq, and the distribution of the key tiles.
#pragma once

#include "cpu/backward/backward_prepare.h"
#include "cpu/score/isolated_rows.h"
#include "cpu/score/scores.h"
#include "cpu/vectors/schedule.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// The rows of one input of a key tile: as the A operand of a product for scores, and as the B operand of one for dq.
template <class In, class Op>
class KeyRowsOperand {
  using Unit = typename Op::Unit;

 public:
  // wanted: false for an input that is absent, which takes no memory.
  KeyRowsOperand(const AttnParams& p, const TileSize& size, int64_t units, bool wanted, ScratchCarver* carve)
      : staged_(carve->take<Unit>(wanted ? product_row_units<Op>(size.keys, units) : 0)),
        panels_memory_(carve->take<Unit>(wanted ? row_panel_units<Op>(size.keys, units) : 0)),
        isolated_(wanted && p.has_mask(), size.keys, units, carve),
        units_(units),
        has_intervals_(p.has_mask()) {}

  void load(const In* from, int64_t stride, int64_t count, int64_t columns) {
    count_ = count;
    rows_ = stage_rows<Op>(from, stride, count, columns, behind_pairs<Op>(staged_, count, units_));
    (void)product_rows<Op>(rows_, count, units_, staged_);
    panels_ = row_panels<Op>(rows_, count, units_, panels_memory_);
    panels_are_finite_ = false;
    if (has_intervals_) finite_ = isolated_.find(from, stride, count, columns, rows_);
  }
  // The B operand, without its non-finite rows if `isolates` (isolated_rows.h).
  const Panels<Op>& panels(bool isolates) {
    const bool finite = isolates && isolated_.any();
    if (panels_are_finite_ != finite) {
      panels_ = row_panels<Op>(finite ? finite_ : rows_, count_, units_, panels_memory_);
      panels_are_finite_ = finite;
    }
    return panels_;
  }
  // Adds the rows that the last call of panels() left out: to[row] += weight(row, key) * (row of the key).
  template <class Weight>
  void add_isolated(typename Op::Real* to, int64_t stride, const PanelMask<Op>& mask, Weight weight) const {
    if (panels_are_finite_) isolated_.add(to, stride, RowsThatSee{mask.limits()}, weight);
  }

  // The A operand.
  StagedRows<Op> rows() const {
    if constexpr (kPairsRows<Op>) {
      return {staged_, units_};
    } else {
      return rows_;
    }
  }

 private:
  StagedRows<Op> rows_{};
  Unit *staged_, *panels_memory_;
  IsolatedRows<In, Op> isolated_;
  int64_t units_, count_ = 0;
  bool has_intervals_, panels_are_finite_ = false;  // whether panels_ leave out non-finite rows
  StagedRows<Op> finite_{};
  Panels<Op> panels_{};
};

// Reads the statistics of `rows` rows of a head from `row` on, an index into the tensors; lane_count have a place in a
// vector. plain: of a call with PlainProducts (KnownLse::begin). delta_of_rows: in the workspace. delta_scale: the
// factor of delta and dlse (GradientScales).
template <class Real>
FLASHATTN_SHARED void load_known_rows(KnownRows<Real>& to, const AttnGradParams& p, bool plain, int64_t b, int64_t h,
                                      int64_t row, int64_t rows, int64_t lane_count, const Real* delta_of_rows,
                                      Real delta_scale) {
  const Real sink = p.sink ? static_cast<const Real*>(p.sink)[h] : Real(0);
  const bool has_sink = p.has_sink && sink_counts(sink);
  to.lse.begin(plain);
  for (int64_t i = 0; i < lane_count; ++i) {
    using Words = LseWords<Real>;
    const bool is_row = i < rows;
    const Words words = is_row ? Words::of(p, b, h, row + i) : Words::of_no_key();
    to.lse.set(i, words);
    to.delta[i] = is_row ? delta_of_rows[i] * delta_scale : Real(0);
    to.dlse[i] = is_row ? lse_gradient<Real>(p, b, h, row + i) * delta_scale : Real(0);
    to.sink_weight[i] = has_sink ? std::exp2(words.sink_log2_weight(sink)) : Real(0);
    to.error[i] = weight_error(words.top);
  }
}

// One input of a query tile, of `columns` elements: as a B operand along its columns (transposed) and along its rows.
template <class In, class Op>
class QueryRowsOperand {
  using Unit = typename Op::Unit;

 public:
  QueryRowsOperand(const AttnParams& p, const TileSize& size, int64_t columns, bool wanted, ScratchCarver* carve)
      : columns_(columns),
        units_(padded_units<Op>(columns)),
        staged_(carve->take<Unit>(wanted ? size.queries * units_ : 0)),
        panels_memory_(carve->take<Unit>(wanted ? row_panel_units<Op>(size.queries, units_) : 0)),
        transposed_memory_(carve->take<Unit>(wanted ? size.queries * units_ : 0)),
        isolated_(wanted && p.has_mask(), size.queries, units_, carve) {}

  // isolates: leave non-finite rows out of `panels` (isolated_rows.h).
  void load(const In* from, int64_t stride, int64_t rows, int64_t lane_count, bool isolates) {
    StagedRows<Op> staged = stage_rows<Op>(from, stride, rows, columns_, staged_);
    transposed = transposed_panels<Op>(transposed_memory_, staged, rows, lane_count, units_);
    if (isolates) staged = isolated_.find(from, stride, rows, columns_, staged);
    panels = row_panels<Op>(staged, rows, units_, panels_memory_);
  }
  // to += weights * rows, [keys][row of the operand]; `weights` are [keys][queries] in the form PanelForms::queries.
  void add_product(const typename Op::Real* weights, typename Op::Real* to, int64_t queries, int64_t keys,
                   const PanelMask<Op>& mask, bool isolates) const {
    const int64_t stride = units_ * Op::kPack;
    const Gemm<Op> product{reinterpret_cast<const Unit*>(weights), queries, panels, to, stride};
    gemm<Order::kRowMajor, Init::kAccumulate>(product, {0, keys}, {0, stride}, RowsOfKeys<Op>{mask});
    if (!isolates) return;
    const auto keys_seen = [&](int64_t row, auto body) {
      for (int64_t key = 0; key < keys; ++key) {
        if (mask.limits().sees(row, key)) body(key);
      }
    };
    isolated_.add(to, stride, keys_seen,
                  [&](int64_t key, int64_t row) { return PanelForms<Op>::of_query(weights, queries, key, row); });
  }

  Panels<Op> transposed{}, panels{};

 private:
  int64_t columns_, units_;
  Unit *staged_, *panels_memory_, *transposed_memory_;
  IsolatedRows<In, Op> isolated_;
};

// The scratch that both kernels have.
template <class In, class Op>
struct KeyTileScratch {
  using Real = typename Op::Real;

  KeyTileScratch(const AttnGradParams& p, ScratchCarver* carve)
      : size(tile_size<Op>(p)),
        units(padded_units<Op>(p.head_dim)),
        units_v(padded_units<Op>(p.head_dim_v)),
        columns(units * Op::kPack),
        columns_v(units_v * Op::kPack),
        k(p, size, units, true, carve),
        v(carve->take<typename Op::Unit>(product_row_units<Op>(size.keys, units_v))),
        q(p, size, p.head_dim, true, carve),
        dout(p, size, p.head_dim_v, true, carve),
        tile(p, size, carve),
        gradients(p, size, carve),
        dk(carve->take<Real>(size.keys * columns)),
        dv(carve->take<Real>(size.keys * columns_v)) {}

  TileSize size;
  int64_t units, units_v;      // units of a padded row of q and k, and of v and dout
  int64_t columns, columns_v;  // their elements
  KeyRowsOperand<In, Op> k;
  typename Op::Unit* v;  // staged rows (pack.h)
  QueryRowsOperand<In, Op> q, dout;
  ScoreTile<Op> tile;
  GradientTile<Op> gradients;
  Real *dk, *dv;  // [keys][columns], [keys][columns_v]
};

// A worker's state of one key tile. Kernel derives from it and has
//   load_keys(hk)                   the rows of KV head hk
//   load_rows(h, place, lane_count) those of query head h
//   score_panel(...)                the products of the queries `lanes` of a query tile, and dS
//   query_gradient(...)             what the tile adds to dq
//   key_gradients(mask)             dk and dv, unless the walk's are all
// Scratch: a KeyTileScratch and what else the kernel needs.
template <class Kernel, class Params, class Scratch, class Workspace, class In, class Op, class Rule>
class KeyTileWalk {
  using Real = typename Op::Real;
  using Unit = typename Op::Unit;

 public:
  KeyTileWalk(const Params& params, const Workspace& call_workspace, void* base)
      : p(params),
        workspace(call_workspace),
        size(workspace.size),
        rule(Rule::of(params)),
        scratch(params, base),
        philox(philox_key_of(p)) {}

  // Processes one key tile of one KV head.
  void run(const WorkItem& item) {
    const int64_t hk = item.head;
    begin(item);
    kernel().load_keys(hk);
    std::memset(scratch.dk, 0, key_count * scratch.columns * sizeof(Real));
    std::memset(scratch.dv, 0, key_count * scratch.columns_v * sizeof(Real));
    for (int64_t h = hk * p.group_size(); h < (hk + 1) * p.group_size(); ++h) walk(h, item.tile_of_call);
    const Real inverse_keep = static_cast<Real>(1.0 / keep_probability(p.dropout_threshold));
    write_key_rows(p.dk, hk, scratch.dk, scratch.columns, p.head_dim, Real(1));
    write_key_rows(p.dv, hk, scratch.dv, scratch.columns_v, p.head_dim_v, inverse_keep);
  }

 protected:
  void begin(const WorkItem& item) {
    batch = item.batch;
    queries = query_sequence(p, batch);
    keys = key_sequence(p, batch);
    key_tile = item.tile;
    key0 = key_tile * size.keys;
    key_count = lesser(size.keys, keys.length - key0);
  }

  // All query tiles of query head h that see the key tile. tile_of_call: the key tile, counted through all batch
  // entries.
  void walk(int64_t h, int64_t tile_of_call) {
    BiasGradient<Op>& bias_gradient = scratch.gradients.biases;
    const HeadMask mask(p, batch, h, queries, KeyLocator(p, batch));
    if constexpr (kIsGeneral<Rule>) {
      bias = HeadBias<Real>::of(p, batch, h);
      bias_gradient.begin_head(batch, h, queries.length, key0, mask.basic.first_position());
    }
    const IndexRange seen_by = mask.basic.rows_of(key0, key0 + key_count);
    const int64_t end = ceil_div(seen_by.end, size.queries);
    for (int64_t m = seen_by.begin / size.queries; m < end; ++m) {
      const int64_t listed = lesser(mask.next_listed_rows(key_tile, m), end);
      for (; m < listed; ++m) {
        if constexpr (kIsGeneral<Rule>) bias_gradient.skip_tile(m * size.queries, key0, workspace.bias_turns);
      }
      if (m == end) break;
      const IndexRange rows{m * size.queries, lesser((m + 1) * size.queries, queries.length)};
      if (mask.sees_tile(size.keys, rows, key_tile)) {
        query_tile(mask, h, m);
      } else if constexpr (kIsGeneral<Rule>) {
        bias_gradient.skip_tile(rows.begin, key0, workspace.bias_turns);
      }
    }
    if constexpr (kIsGeneral<Rule>) bias_gradient.end_head(tile_of_call, key0, key_count, workspace.bias_turns);
  }

  // Query tile `number` of query head h.
  void query_tile(const HeadMask& head_mask, int64_t h, int64_t number) {
    const int64_t row0 = number * size.queries, rows = lesser(size.queries, queries.length - row0);
    BiasGradient<Op>& bias_gradient = scratch.gradients.biases;
    const bool pads = kIsGeneral<Rule> && bias_gradient.any();
    const PanelMask<Op> mask(head_mask, row0, rows, key0, key_count, pads, scratch.tile.limits);
    const int64_t lane_count = round_up(rows, Op::S::kWidth);
    const TilePlace place{row0, rows, key0, key_count, head_mask.basic.first_position()};
    isolates = p.has_mask() && !mask.is_whole();
    kernel().load_rows(h, place, lane_count);
    if (p.has_dropout()) {
      fill_keep_bits(scratch.tile.keep_bits, size.queries / kWordLanes, philox, p, batch, h, row0, rows, key0,
                     key_count);
    }
    if constexpr (kIsGeneral<Rule>) scratch.tile.biases.load(bias, place);
    for (int64_t lane = 0; lane < lane_count; lane += kPanel<Op>) {
      kernel().score_panel(head_mask, mask, place, h, {lane, lesser(lane + kPanel<Op>, lane_count)});
    }
    if constexpr (kIsGeneral<Rule>) bias_gradient.end_tile(place, queries.start + row0, workspace.bias_turns);
    kernel().key_gradients(mask);
    add_to_dq(head_mask, h, number, rows, [&](Real* sum, int64_t stride, bool is_first) {
      kernel().query_gradient(mask, rows, sum, stride, is_first);
    });
  }
  void load_rows_of(QueryRowsOperand<In, Op>& operand, const TensorView& t, int64_t h, const TilePlace& place,
                    int64_t lane_count) {
    operand.load(row_of<const In>(t, batch, h, queries.start + place.row0), t.row_stride, place.rows, lane_count,
                 isolates);
  }
  // dv += P^T dout, dk += dS^T q
  void key_gradients(const PanelMask<Op>& mask) const {
    scratch.dout.add_product(scratch.tile.scores, scratch.dv, size.queries, key_count, mask, isolates);
    scratch.q.add_product(scratch.gradients.scores, scratch.dk, size.queries, key_count, mask, isolates);
  }
  // sum += weights * rows of the operand, or assigns it if is_first, for the rows of a query tile, `stride` apart.
  void add_keys(KeyRowsOperand<In, Op>& operand, const Unit* weights, const PanelMask<Op>& mask, int64_t rows,
                Real* sum, int64_t stride, bool is_first) {
    const Gemm<Op> product{weights, size.queries, operand.panels(isolates), sum, stride};
    if (is_first) {
      gemm<Order::kKMajor, Init::kZero>(product, {0, rows}, {0, scratch.columns}, KeysOfRows<Op>{mask});
    } else {
      gemm<Order::kKMajor, Init::kAccumulate>(product, {0, rows}, {0, scratch.columns}, KeysOfRows<Op>{mask});
    }
    operand.add_isolated(sum, stride, mask, [&](int64_t row, int64_t key) {
      return PanelForms<Op>::of_key(weights, size.queries, key, row);
    });
  }

  // Whether rows [begin, end) of the sequence see no key of another tile.
  bool see_no_other_tile(const HeadMask& mask, IndexRange rows) const {
    return mask.previous_tile(size.keys, rows, key_tile) < 0 && mask.next_tile(size.keys, rows, key_tile) < 0;
  }

  // Calls add(sum, stride, is_first), which adds this key tile's part to the dq of query tile `number` of head h, or
  // assigns it if is_first. Key tiles take turns in ascending order (turns.h).
  template <class Add>
  void add_to_dq(const HeadMask& mask, int64_t h, int64_t number, int64_t rows, Add add) {
    const IndexRange tile_rows{number * size.queries, number * size.queries + rows};
    const int64_t previous = mask.previous_tile(size.keys, tile_rows, key_tile);
    const bool is_last = mask.next_tile(size.keys, tile_rows, key_tile) < 0;
    const int64_t first_row = workspace.first_row(p, batch, queries), row = queries.start + tile_rows.begin;
    Real* sum = workspace.dq_in_place
                    ? row_of<Real>(p.dq, batch, h, row)
                    : workspace.dq + (h * workspace.rows + first_row + tile_rows.begin) * workspace.dq_columns;
    const int64_t stride = workspace.dq_in_place ? p.dq.row_stride : workspace.dq_columns;
    Turn& turn = workspace.dq_turn(h, first_row, batch, number);
    wait_for_turn(turn, previous + 1);
    add(sum, stride, previous < 0);
    for (int64_t i = 0; is_last && !workspace.dq_in_place && i < rows; ++i) {
      narrow_row(row_of<In>(p.dq, batch, h, row + i), sum + i * stride, p.head_dim, Real(1));
    }
    end_turn(turn, key_tile + 1);
  }

  // Writes the sums for the keys of this tile, times `scale`, to a gradient of the keys or values.
  void write_key_rows(const TensorView& to, int64_t hk, Real* sums, int64_t stride, int64_t columns, Real scale) const {
    for (int64_t j = 0; j < key_count; ++j) {
      narrow_row(row_of<In>(to, batch, hk, keys.start + key0 + j), sums + j * stride, columns, scale);
    }
  }

  Kernel& kernel() { return static_cast<Kernel&>(*this); }

  const Params& p;
  const Workspace& workspace;
  const TileSize size;
  const Rule rule;
  Scratch scratch;
  const PhiloxKey philox;
  StagedRows<Op> v{};
  bool isolates = false;  // isolated_rows.h: whether the current query tile needs it
  HeadBias<Real> bias;    // the slope and biases of the current query head
  int64_t batch = 0, key_tile = 0, key0 = 0, key_count = 0;
  Sequence queries{0, 0}, keys{0, 0};
};

// Calls body(b, h) for every query head of every batch entry.
template <class Body>
inline void for_heads(const AttnParams& p, Body body) {
  for_each_item(p, p.batch * p.heads_q, [&](int64_t item) { body(item / p.heads_q, item % p.heads_q); });
}

// Runs all key tiles. kernel_of(worker) makes the kernel of a worker, whose run(item) processes a key tile of a KV
// head.
template <class In, class Op, class KernelOf>
inline void run_key_tiles(const AttnGradParams& p, const BackwardWorkspace<In, Op>& workspace, KernelOf kernel_of) {
  // Key tiles ascend within a batch entry, so that a worker that waits for earlier additions to dq waits only for items
  // that were drawn earlier.
  auto tiles_of = [&](int64_t b) { return ceil_div(key_sequence(p, b).length, workspace.size.keys); };
  // If heads add in order to a shared bias gradient, a group of heads completes its walk before the next group may add:
  // adjacent items must then not belong to the same key tile.
  const bool heads_first = SharedBias(p).heads && p.group_size() > 1;
  workspace.bias_turns.reset();
  run_tiles(p, p.heads_k, heads_first ? WorkOrder::kHeadsFirst : WorkOrder::kTilesFirst, tiles_of, kernel_of);
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
