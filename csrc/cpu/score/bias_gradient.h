// The gradients of the biases: sums of the logit gradients over all scores that read one element (bias.h).
//
// A worker first sums locally: over the diagonals of a tile, and for the slopes, the relative bias and a bias that is
// broadcast along rows over all query tiles of its key tile and head. The remaining sums over key tiles, heads and
// batch entries are accumulated in a fixed order (turns.h). The local sums take O(S) memory; the gradient of a bias
// takes one panel besides itself.
#pragma once

#include "cpu/score/bias_tile.h"
#include "cpu/vectors/turns.h"
#include "cpu/vectors/views.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// The dimensions in which a bias is broadcast: its gradient is a sum over them.
struct SharedBias {
  bool batch = false, heads = false, rows = false;

  explicit SharedBias(const AttnGradParams& p)
      : batch(p.dbias.data && p.batch > 1 && p.dbias.batch_stride == 0),
        heads(p.dbias.data && p.heads_q > 1 && p.dbias.head_stride == 0),
        rows(p.dbias.data && p.seqlen_q > 1 && p.dbias.row_stride == 0) {}

  bool in_turns() const { return batch || heads; }
  // The order number of the contribution of head h of batch entry b.
  int64_t part(const AttnParams& p, int64_t b, int64_t h) const {
    return (batch ? b : 0) * (heads ? p.heads_q : 1) + (heads ? h : 0);
  }
  // The head of the bias, counted through its batch entries, that head h of batch entry b reads.
  int64_t entry(const AttnParams& p, int64_t b, int64_t h) const {
    return (batch ? 0 : b) * (heads ? 1 : p.heads_q) + (heads ? 0 : h);
  }
};

// The order counters of the sums (turns.h), in the workspace of the call.
struct BiasTurns {
  BiasTurns(const AttnGradParams& p, const TileSize& size, ScratchCarver* carve)
      : query_tiles(ceil_div(p.seqlen_q, size.queries)), key_tiles(ceil_div(p.seqlen_k, size.keys)) {
    head_count = p.dalibi_slopes || p.drelative_bias ? p.heads_q : 0;
    const SharedBias shared(p);
    const int64_t entries = (shared.batch ? 1 : p.batch) * (shared.heads ? 1 : p.heads_q);
    tile_count = shared.in_turns() ? entries * key_tiles * query_tiles : 0;
    heads = carve->take<Turn>(head_count);
    tiles = carve->take<Turn>(tile_count);
  }
  void reset() const {
    for (int64_t n = 0; n < head_count; ++n) heads[n].store(0, std::memory_order_relaxed);
    for (int64_t n = 0; n < tile_count; ++n) tiles[n].store(0, std::memory_order_relaxed);
  }
  Turn& tile(int64_t entry, int64_t key_tile, int64_t query_tile) const {
    return tiles[(entry * key_tiles + key_tile) * query_tiles + query_tile];
  }

  int64_t query_tiles, key_tiles, head_count, tile_count;
  Turn* heads;  // [Hq], of the slopes and the relative bias: ordered by key tile, counted through all batch entries
  Turn* tiles;  // [heads of the bias][key_tiles][query_tiles]: ordered by head, counted through all batch entries
};

template <class Op>
class BiasGradient {
  using Real = typename Op::Real;
  using S = typename Op::S;
  using V = typename S::V;
  // The diagonals of adjacent keys overlap in all but one element. Separate copies for four successive keys avoid a
  // load that depends on the preceding store.
  static constexpr int64_t kCopies = 4;

 public:
  BiasGradient(const AttnGradParams& params, const TileSize& size, ScratchCarver* carve)
      : p(params),
        size_(size),
        places_(size),
        shared_(params),
        has_diagonals_(p.dalibi_slopes || p.drelative_bias),
        has_elements_(p.dbias.data) {
    const int64_t rows = p.is_varlen() ? p.total_q : p.seqlen_q;
    const int64_t distances = round_up(rows, size_.queries) + size_.keys;
    diagonals_ = carve->take<Real>(has_diagonals_ ? kCopies * places_.count : 0);
    relative_ = carve->take<double>(p.drelative_bias ? lesser(distances, 2 * p.relative_reach + 1) : 0);
    elements_ = carve->take<Real>(has_elements_ && !shared_.rows ? size_.keys * kPanel<Op> : 0);
    columns_ = carve->take<Real>(shared_.rows ? size_.keys * S::kWidth : 0);
    column_sums_ = carve->take<double>(shared_.rows ? size_.keys * S::kWidth : 0);
    row_sums_ = carve->take<Real>(has_diagonals_ && p.centres.data ? size_.queries : 0);
  }

  bool any() const { return has_diagonals_ || has_elements_; }
  // Whether the bias is not broadcast along rows: panels are then added to memory as soon as they are computed.
  bool adds_panels() const { return has_elements_ && !shared_.rows; }

  // Head h of batch entry b, against the keys [key0, key0 + keys) and all rows of its sequence.
  void begin_head(int64_t b, int64_t h, int64_t rows, int64_t key0, int64_t shift) {
    batch_ = b;
    head_ = h;
    slope_ = below_ = above_ = 0;
    if (has_diagonals_) std::fill(diagonals_, diagonals_ + kCopies * places_.count, Real(0));
    if (p.drelative_bias) {
      first_entry_ = bias().entry(key0 - round_up(rows, size_.queries) - shift);
      last_entry_ = bias().entry(key0 + size_.keys - 1 - shift);
      std::fill(relative_, relative_ + (last_entry_ - first_entry_ + 1), 0.0);
    }
    if (shared_.rows) {
      std::fill(columns_, columns_ + size_.keys * S::kWidth, Real(0));
      std::fill(column_sums_, column_sums_ + size_.keys * S::kWidth, 0.0);
    }
  }

  // The accumulators of one vector of queries. Kernels hold it by value, so that the compiler need not assume that
  // their stores alias it.
  class Lanes {
   public:
    Lanes() = default;
    Lanes(const BiasGradient& sums, int64_t lane)
        : diagonal_count_(sums.places_.count),
          has_diagonals_(sums.has_diagonals_),
          has_elements_(sums.has_elements_ && !sums.shared_.rows),
          has_columns_(sums.shared_.rows),
          diagonals_(sums.diagonals_ + sums.places_.of(0, lane)),
          elements_(sums.elements_ + lane % kPanel<Op>),
          columns_(sums.columns_) {}

    // Adds the logit gradients of one key.
    void add(int64_t key, V gradients) const {
      if (has_diagonals_) add_to_sum(diagonals_ + key % kCopies * diagonal_count_ - key, gradients);
      if (has_elements_) S::store(elements_ + key * kPanel<Op>, gradients);
      if (has_columns_) add_to_sum(columns_ + key * S::kWidth, gradients);
    }

   private:
    static void add_to_sum(Real* sum, V x) { S::store(sum, S::load(sum) + x); }

    int64_t diagonal_count_;
    bool has_diagonals_, has_elements_, has_columns_;
    Real *diagonals_, *elements_, *columns_;
  };

  // Sets the sums of the logit gradients over all keys, for the queries from `lane` on.
  void set_row_sums(int64_t lane, V sums) const {
    if (has_diagonals_ && p.centres.data) S::store(row_sums_ + lane, sums);
  }
  // Prefetches a part of the gradient to which a panel will be added (BiasTile::ask_for), if panels are added.
  void ask_for(const TilePlace& place, IndexRange lanes, IndexRange part) const {
    const int64_t bytes = dtype_bytes(p.dbias.dtype);
    const char* const panel =
        static_cast<const char*>(p.dbias.data) + offset(place.row0 + lanes.begin, place.key0) * bytes;
    ask_for_panel<Op>(part, size_.keys, bytes, [&](int64_t row, int64_t byte) {
      prefetch<true>(panel + row * p.dbias.row_stride * bytes + byte);
    });
  }
  // Called after the gradients of a panel; `keys` are the computed ones.
  void end_panel(const TilePlace& place, IndexRange lanes, IndexRange keys, const BiasTurns& turns) const {
    if (!adds_panels()) return;
    if (shared_.in_turns()) wait_for_turn(tile_turn(place, turns), shared_.part(p, batch_, head_));
    for_element_type<Op>(p.dbias.dtype, [&](auto element) { add_panel<decltype(element)>(place, lanes, keys); });
  }
  // row: the first row of the tile, as an index into the tensors.
  FLASHATTN_SHARED void end_tile(const TilePlace& place, int64_t row, const BiasTurns& turns) {
    if (has_diagonals_) sum_diagonals(place);
    if (has_diagonals_ && p.centres.data) subtract_centres(row, place.rows);
    if (shared_.rows) return sum_columns(place);
    if (adds_panels() && shared_.in_turns()) {
      in_turn(tile_turn(place, turns), shared_.part(p, batch_, head_), [] {});
    }
  }
  // Called for a tile that is fully masked for this head; it may be visible to other heads, which wait for this one.
  void skip_tile(int64_t row0, int64_t key0, const BiasTurns& turns) const {
    if (!adds_panels() || !shared_.in_turns()) return;
    in_turn(turns.tile(shared_.entry(p, batch_, head_), key0 / size_.keys, row0 / size_.queries),
            shared_.part(p, batch_, head_), [] {});
  }
  // key_tile: counted through all batch entries.
  FLASHATTN_SHARED void end_head(int64_t key_tile, int64_t key0, int64_t keys, const BiasTurns& turns) {
    if (has_diagonals_) in_turn(turns.heads[head_], key_tile, [&] { add_distances(); });
    if (!shared_.rows) return;
    const auto add = [&] {
      for_element_type<Op>(p.dbias.dtype, [&](auto element) { add_columns<decltype(element)>(key0, keys); });
    };
    if (!shared_.in_turns()) return add();
    in_turn(turns.tile(shared_.entry(p, batch_, head_), key0 / size_.keys, 0), shared_.part(p, batch_, head_), add);
  }

 private:
  Turn& tile_turn(const TilePlace& place, const BiasTurns& turns) const {
    return turns.tile(shared_.entry(p, batch_, head_), place.key0 / size_.keys, place.row0 / size_.queries);
  }
  HeadBias<Real> bias() const { return HeadBias<Real>::of(p, batch_, head_); }

  template <class Body>
  static void in_turn(Turn& turn, int64_t number, Body body) {
    wait_for_turn(turn, number);
    body();
    end_turn(turn, number + 1);
  }

  void sum_diagonals(const TilePlace& place) {
    const HeadBias<Real> head = bias();
    for (int64_t n = 1; n < places_.count; ++n) {  // no score is on number 0, whose distance relative_ may not have
      double sum = 0;
      for (int64_t copy = 0; copy < kCopies; ++copy) {
        sum += static_cast<double>(diagonals_[copy * places_.count + n]);
        diagonals_[copy * places_.count + n] = 0;
      }
      const int64_t distance = places_.distance(place, n);
      slope_ -= sum * static_cast<double>(distance < 0 ? -distance : distance);
      if (p.drelative_bias) relative_[head.entry(distance) - first_entry_] += sum;
    }
  }
  // Subtracts from the sums over diagonals, for each row from `row` on, its centres times the sum of its logit
  // gradients (bias.h).
  void subtract_centres(int64_t row, int64_t rows) {
    for (int64_t i = 0; i < rows; ++i) {
      const Real* const centres = row_of<const Real>(p.centres, batch_, head_, row + i);
      const double sum = static_cast<double>(row_sums_[i]);
      slope_ += sum * static_cast<double>(centres[kDistance]);
      below_ -= sum * static_cast<double>(centres[kBelow]);
      above_ -= sum * static_cast<double>(centres[kAbove]);
    }
  }
  void add_distances() const {
    if (p.dalibi_slopes) {
      Real& total = static_cast<Real*>(p.dalibi_slopes)[batch_ * p.alibi_batch_stride + head_];
      total = static_cast<Real>(static_cast<double>(total) + slope_);
    }
    if (!p.drelative_bias) return;
    Real* total = static_cast<Real*>(p.drelative_bias) + head_ * (2 * p.relative_reach + 1) + p.relative_reach;
    for (int64_t n = first_entry_; n <= last_entry_; ++n) total[n] += static_cast<Real>(relative_[n - first_entry_]);
    total[-p.relative_reach] += static_cast<Real>(below_);
    total[p.relative_reach] += static_cast<Real>(above_);
  }

  void sum_columns(const TilePlace& place) const {
    for (int64_t n = 0; n < place.keys * S::kWidth; ++n) {
      column_sums_[n] += static_cast<double>(columns_[n]);
      columns_[n] = 0;
    }
  }

  int64_t offset(int64_t row, int64_t key) const {
    return batch_ * p.dbias.batch_stride + head_ * p.dbias.head_stride + row * p.dbias.row_stride + key;
  }
  template <class Element>
  Element* element(int64_t row, int64_t key) const {
    return static_cast<Element*>(p.dbias.data) + offset(row, key);
  }
  // A 16-bit gradient has one score per element and is still 0, so that it is assigned.
  template <class Element>
  static void add_to(Element* sum, Real x) {
    narrow(static_cast<float>(x), sum);
  }
  static void add_to(float* sum, Real x) { *sum += static_cast<float>(x); }
  static void add_to(double* sum, Real x) { *sum += static_cast<double>(x); }

  // Adds the gradients of a whole vector of keys.
  template <class Element>
  static void add_vector(Element* sum, V x) {
    if constexpr (std::is_same<Element, Real>::value) {
      S::store(sum, S::load(sum) + x);
    } else {
      alignas(64) Real lanes[S::kWidth];
      S::store(lanes, x);
      if constexpr (std::is_same<Element, BFloat16>::value && sizeof(Real) == 4) {
        return narrow_vector(lanes, sum);
      }
      const int64_t done = std::is_same<Element, Float16>::value ? narrow_vectors(sum, lanes, S::kWidth) : 0;
      for (int64_t i = done; i < S::kWidth; ++i) add_to(sum + i, lanes[i]);
    }
  }

  template <class Element>
  FLASHATTN_SHARED void add_panel(const TilePlace& place, IndexRange lanes, IndexRange keys) const {
    using T = Transpose<Real>;
    constexpr int64_t W = S::kWidth;
    alignas(64) Real block[W * W];
    for (int64_t lane = lanes.begin; lane < lanes.end; lane += W) {
      const int64_t rows = lesser(W, place.rows - lane);
      for (int64_t key = keys.begin; key < keys.end; key += W) {
        const int64_t count = lesser(W, keys.end - key);
        typename T::V by_key[W];
        const Real* const from = elements_ + key * kPanel<Op> + lane % kPanel<Op>;
        FLASHATTN_UNROLL(16)
        for (int i = 0; i < W; ++i) by_key[i] = i < count ? T::load(from + i * kPanel<Op>) : typename T::V{};
        T::template exchange<W / 2>(by_key);
        for (int i = 0; i < W; ++i) T::store(block + i * W, by_key[i]);
        for (int64_t r = 0; r < rows; ++r) {
          Element* const to = element<Element>(place.row0 + lane + r, place.key0 + key);
          if (count == W) {
            add_vector(to, S::load(block + r * W));
          } else {
            for (int64_t i = 0; i < count; ++i) add_to(to + i, block[r * W + i]);
          }
        }
      }
    }
  }
  template <class Element>
  FLASHATTN_SHARED void add_columns(int64_t key0, int64_t keys) const {
    Element* to = element<Element>(0, key0);
    for (int64_t key = 0; key < keys; ++key) {
      double sum = 0;
      for (int64_t l = 0; l < S::kWidth; ++l) sum += column_sums_[key * S::kWidth + l];
      add_to(to + key, static_cast<Real>(sum));
    }
  }

  const AttnGradParams& p;
  const TileSize size_;
  const Diagonals places_;
  const SharedBias shared_;
  bool has_diagonals_, has_elements_;
  Real* diagonals_;   // [kCopies][places_.count]: sums of this tile
  Real* elements_;    // [keys][kPanel]: the gradients of a panel's logits
  double* relative_;  // entries first_entry_ to last_entry_ of the relative bias: sums over this head's query tiles
  // [keys][kWidth]: sums over rows of this tile and over this head's query tiles, separately for each vector lane.
  Real* columns_;
  double* column_sums_;
  Real* row_sums_;  // [queries]: sums of this tile's logit gradients over its keys
  // Sums over this head's query tiles: gradient of the slope, and terms of the centres for both ends of the relative
  // bias.
  double slope_ = 0, below_ = 0, above_ = 0;
  int64_t first_entry_ = 0, last_entry_ = 0;
  int64_t batch_ = 0, head_ = 0;
};

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
