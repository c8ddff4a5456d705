// The biases of one tile of scores (bias.h), in the layout of the scores, S^T[key][query], and in units of log2.
//
// ALiBi and the relative bias depend only on the distance of key and query. Along a key's row of S^T the distance falls
// by one from query to query, so that one array of distances, read from a place that depends on the key, holds them for
// the whole tile. A bias of any shape is transposed panel by panel.
#pragma once

#include "cpu/vectors/pack.h"
#include "cpu/vectors/tiles.h"
#include "rules/bias.h"
#include "rules/score.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// Position and size of a tile. shift: the position of query 0 among the keys (BasicMask::first_position).
struct TilePlace {
  int64_t row0, rows, key0, keys, shift;
};

// First row and key of a panel, if it exists.
struct PanelOrigin {
  bool exists;
  int64_t row, key;
};

// The diagonals of a tile: number `of(key, lane)`, from 1 on, holds the scores of one distance.
struct Diagonals {
  explicit Diagonals(const TileSize& size) : count(size.queries + size.keys), keys(size.keys) {}

  int64_t of(int64_t key, int64_t lane) const { return lane - key + keys; }
  // The distance (bias.h) of diagonal `number`.
  int64_t distance(const TilePlace& place, int64_t number) const {
    return place.key0 - place.row0 - place.shift + keys - number;
  }

  int64_t count, keys;
};

// The sums that a forward accumulates for the centres of rows (bias.h).
template <class Op>
class CentreSums {
  using Real = typename Op::Real;
  using S = typename Op::S;
  using V = typename S::V;

 public:
  CentreSums(const AttnParams& p, const TileSize& size, ScratchCarver* carve)
      : any(p.centres.data),
        sums(carve->take<Real>(any ? kCentres * size.queries : 0)),
        queries_(size.queries),
        diagonals_(size),
        terms_(carve->take<Real>(any ? kCentres * diagonals_.count : 0)) {}

  // Prepares a tile, before add().
  void load(const HeadBias<Real>& head, const TilePlace& place) const {
    for (int64_t n = 0; any && n < diagonals_.count; ++n) {
      const int64_t distance = diagonals_.distance(place, n);
      const bool below = head.relative && distance <= -head.reach, above = head.relative && distance >= head.reach;
      terms_[kDistance * diagonals_.count + n] = static_cast<Real>(distance < 0 ? -distance : distance);
      terms_[kBelow * diagonals_.count + n] = below ? Real(1) : Real(0);
      terms_[kAbove * diagonals_.count + n] = above && !below ? Real(1) : Real(0);
    }
  }
  // Adds the weights of one key, for the queries from `lane` on, to the sums of this tile.
  void add(V (&tile_sums)[kCentres], int64_t key, int64_t lane, V weights) const {
    for (int c = 0; any && c < kCentres; ++c) {
      const V term = S::load(terms_ + c * diagonals_.count + diagonals_.of(key, lane));
      tile_sums[c] = S::fma(weights, term, tile_sums[c]);
    }
  }
  // After all keys of a tile. rescale: the factor of the sums of earlier tiles.
  void end_tile(const V (&tile_sums)[kCentres], int64_t lane, V rescale) const {
    for (int c = 0; any && c < kCentres; ++c) {
      Real* const sum = sums + c * queries_ + lane;
      S::store(sum, S::fma(S::load(sum), rescale, tile_sums[c]));
    }
  }

  const bool any;
  Real* const sums;  // [kCentres][queries], relative to the running maximum of the row, like its weights

 private:
  const int64_t queries_;
  const Diagonals diagonals_;
  Real* const terms_;  // [kCentres][diagonals]: factors of the weights
};

// Calls body(element) with a value of the C++ type of a bias, which is float or the type of the inputs (validate.cpp).
template <class Op, class Body>
inline void for_element_type(DType dtype, Body body) {
  if constexpr (sizeof(typename Op::Real) == 8) {
    if (dtype == DType::kFloat64) return body(double{});
  } else {
    if (dtype == DType::kBFloat16) return body(BFloat16{});
    if constexpr (Op::kPack == 1) {
      if (dtype == DType::kFloat16) return body(Float16{});
    }
  }
  body(float{});
}

// Whether a bias of -inf hides a key from a row, which are counted from the beginning of a tile.
template <class Op, class Real>
FLASHATTN_SHARED bool hides(const AttnParams& p, const HeadBias<Real>& head, const TilePlace& place, int64_t row,
                            int64_t key) {
  const int64_t distance = place.key0 + key - place.row0 - row - place.shift;
  double bias = -static_cast<double>(head.slope) * static_cast<double>(distance < 0 ? -distance : distance);
  if (head.relative) bias += static_cast<double>(head.relative[head.entry(distance)]);
  if (head.bias) {
    for_element_type<Op>(p.bias.dtype, [&](auto element) {
      const auto* const elements = static_cast<const decltype(element)*>(head.bias);
      bias += static_cast<double>(widen(elements[(place.row0 + row) * head.row_stride + place.key0 + key]));
    });
  }
  return bias == -std::numeric_limits<double>::infinity();
}

inline int64_t dtype_bytes(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

// Prefetches a cache line to the L2 cache. The empty assembly keeps GCC from treating the function as free of side
// effects and removing its calls.
template <bool kToWrite>
inline void prefetch(const void* address) {
  __builtin_prefetch(address, kToWrite, 2);
  asm volatile("");
}

// Calls ask(row, byte offset in the row) for every cache line to prefetch in a part of a panel of elements. Its rows
// are short and far apart, which defeats the hardware prefetcher, and have more lines than can be in flight at once.
// The score products, which hit the caches, therefore prefetch a few of them with each group of keys.
template <class Op, class Ask>
inline void ask_for_panel(IndexRange part, int64_t keys, int64_t element_bytes, Ask ask) {
  constexpr int64_t kLine = 64;
  const int64_t lines = keys * element_bytes / kLine * kPanel<Op>;
  for (int64_t n = lines * part.begin / keys; n < lines * part.end / keys; ++n) {
    ask(n % kPanel<Op>, n / kPanel<Op> * kLine);
  }
}

// A block of a bias: one vector of queries, and as many keys as one vector load holds.
template <class Real, class Element>
struct BiasBlock {
  using S = Simd<Real>;
  using Units = Transpose<Real>;
  static constexpr bool kPairs = std::is_same<Element, BFloat16>::value && sizeof(Real) == 4;
  static constexpr int kQueries = S::kWidth, kKeys = kPairs ? 2 * S::kWidth : S::kWidth;

  // Transposes and widens kQueries rows, `stride` elements apart, to rows of keys, `to_stride` apart.
  static void load(const Element* from, int64_t stride, Real* to, int64_t to_stride) {
    typename Units::V block[kQueries];
    FLASHATTN_UNROLL(16)
    for (int i = 0; i < kQueries; ++i) block[i] = load_units(from + i * stride);
    Units::template exchange<kQueries / 2>(block);
    FLASHATTN_UNROLL(16)
    for (int i = 0; i < kQueries; ++i) {
      if constexpr (kPairs) {  // two keys in each unit: bfloat16 is the upper half of a float
        Units::store(to + 2 * i * to_stride, block[i] << 16);
        Units::store(to + (2 * i + 1) * to_stride, block[i] & -0x10000);
      } else {
        Units::store(to + i * to_stride, block[i]);
      }
    }
  }
  // Loads the first `rows` rows and `keys` keys; the rest of the block is 0.
  static void load_part(const Element* from, int64_t stride, int64_t rows, int64_t keys, Real* to, int64_t to_stride) {
    Element padded[kQueries * kKeys];
    std::memset(static_cast<void*>(padded), 0, sizeof padded);
    for (int64_t r = 0; r < rows; ++r) std::memcpy(padded + r * kKeys, from + r * stride, keys * sizeof(Element));
    load(padded, kKeys, to, to_stride);
  }

 private:
  static typename Units::V load_units(const Element* from) {
    if constexpr (kPairs) {
      return Units::load(reinterpret_cast<const Real*>(from));
    } else {
      const auto wide = WideVector<Real, Element>::load(from);
      return reinterpret_cast<const typename Units::V&>(wide);
    }
  }
};

template <class Op>
class BiasTile {
  using Real = typename Op::Real;
  using S = typename Op::S;
  using V = typename S::V;
  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

 public:
  BiasTile(const AttnParams& p, const TileSize& size, ScratchCarver* carve)
      : has_diagonals_(p.alibi_slopes || p.relative_bias),
        has_elements_(p.bias.data),
        dtype_(p.bias.dtype),
        places_(size) {
    diagonals_ = carve->take<Real>(has_diagonals_ ? places_.count : 0);
    elements_ = carve->take<Real>(has_elements_ ? size.keys * kPanel<Op> : 0);
  }

  // Called before the panels of a tile.
  void load(const HeadBias<Real>& head, const TilePlace& place) const {
    if (has_diagonals_) load_diagonals(head, place);
  }
  // Called before the logits of a panel; `keys` are the computed ones. narrows: whether the log-sum-exp of a row is
  // known to be among the numbers that narrowed() of score.h changes.
  void load_panel(const HeadBias<Real>& head, const TilePlace& place, IndexRange lanes, IndexRange keys,
                  bool narrows = false) const {
    if (!has_elements_ || keys.begin >= keys.end) return;  // an empty range may begin beyond the tile
    for_element_type<Op>(dtype_, [&](auto element) { load_elements<decltype(element)>(head, place, lanes, keys); });
    if (narrows) narrow_panel(lanes, keys);
  }
  // Whether the panel reads bias rows of its own, not a row that all queries share.
  bool reads_panel(const HeadBias<Real>& head, const PanelOrigin& panel) const {
    return has_elements_ && panel.exists && head.row_stride != 0;
  }
  // Prefetches a fraction of such a panel: the fraction of a tile's keys that are in `part`.
  void ask_for(const HeadBias<Real>& head, const PanelOrigin& panel, IndexRange part) const {
    const int64_t bytes = dtype_bytes(dtype_);
    const char* const from = static_cast<const char*>(head.bias) + (panel.row * head.row_stride + panel.key) * bytes;
    ask_for_panel<Op>(part, places_.keys, bytes, [&](int64_t row, int64_t offset) {
      prefetch<false>(from + row * head.row_stride * bytes + offset);
    });
  }

  // The biases of one vector of queries. Kernels hold it by value, so that the compiler need not assume that their
  // stores alias it.
  class Lanes {
   public:
    Lanes() = default;
    Lanes(const BiasTile& tile, int64_t lane)
        : has_diagonals_(tile.has_diagonals_),
          has_elements_(tile.has_elements_),
          diagonals_(tile.diagonals_ + tile.places_.of(0, lane)),
          elements_(tile.elements_ + lane % kPanel<Op>) {}

    // log2(e) times the logits of one key, given their values without biases, a rounded product. A bias of -inf masks
    // a score, even a NaN or +inf.
    V logits(int64_t key, V scaled) const {
      if (!has_diagonals_ && !has_elements_) return scaled;
      const V bias = of_key<false>(key);
      return where_hidden(bias, S::set1(-kInfinity), scaled + bias);
    }
    // The biases alone, of which none that is finite is infinite in units of log2.
    V narrowed_biases(int64_t key) const { return of_key<true>(key); }

   private:
    template <bool kNarrowed>
    V of_key(int64_t key) const {
      const V bias = has_diagonals_ ? S::load(diagonals_ - key) : S::zero();
      if (!has_elements_) return bias;
      const V element = S::load(elements_ + key * kPanel<Op>);
      return S::fma(kNarrowed ? narrowed_lanes(element) : element, S::set1(kLog2E<Real>), bias);
    }

    bool has_diagonals_, has_elements_;
    const Real *diagonals_, *elements_;
  };

  // narrowed() of score.h for the elements of a bias.
  static V narrowed_lanes(V element) {
    const V half = element * S::set1(Real(0.5)), limit = S::set1(kNarrowsFrom<Real> / 2);
    return S::max(half - limit, S::min(half + limit, element));
  }
  // Whether an element of the bias may be infinite in units of log2 though it is finite. Kernels look for such elements
  // only in rows whose largest logit is as large in size: elsewhere they weigh 0 either way.
  bool may_narrow() const { return has_elements_ && dtype_ != DType::kFloat16; }
  // `hidden` where the logit is -inf, otherwise x.
  static V where_hidden(V logit, V hidden, V x) {
    return S::where_less(logit, S::set1(std::numeric_limits<Real>::lowest()), hidden, x);
  }

 private:
  FLASHATTN_SHARED void load_diagonals(const HeadBias<Real>& head, const TilePlace& place) const {
    for (int64_t n = 0; n < places_.count; ++n) {
      const int64_t distance = places_.distance(place, n);
      const double alibi = -static_cast<double>(head.slope) * static_cast<double>(distance < 0 ? -distance : distance);
      const double relative = head.relative ? static_cast<double>(head.relative[head.entry(distance)]) : 0;
      diagonals_[n] = rounded_log2_units(alibi + relative);
    }
  }

  // in_log2_units() of a sum that has not been rounded yet.
  static Real rounded_log2_units(double natural) {
    const auto rounded = static_cast<Real>(natural);
    return narrowed(rounded) == rounded ? static_cast<Real>(natural * kLog2E<double>) : in_log2_units(rounded);
  }

  template <class Element>
  FLASHATTN_SHARED void load_elements(const HeadBias<Real>& head, const TilePlace& place, IndexRange lanes,
                                      IndexRange keys) const {
    using Block = BiasBlock<Real, Element>;
    const Element* const bias = static_cast<const Element*>(head.bias);
    if (head.row_stride == 0) return repeat_row(bias + place.key0, keys);
    const Element* const panel = bias + (place.row0 + lanes.begin) * head.row_stride + place.key0;
    for (int64_t lane = 0; lane < lanes.end - lanes.begin; lane += Block::kQueries) {
      const int64_t rows = lesser<int64_t>(Block::kQueries, place.rows - lanes.begin - lane);
      for (int64_t key = keys.begin / Block::kKeys * Block::kKeys; key < keys.end; key += Block::kKeys) {
        const int64_t block_keys = lesser<int64_t>(Block::kKeys, place.keys - key);
        const Element* const from = panel + lane * head.row_stride + key;
        Real* const to = elements_ + key * kPanel<Op> + lane;
        if (rows < Block::kQueries || block_keys < Block::kKeys) {
          Block::load_part(from, head.row_stride, rows, block_keys, to, kPanel<Op>);
          continue;
        }
        Block::load(from, head.row_stride, to, kPanel<Op>);
      }
    }
  }
  FLASHATTN_SHARED void narrow_panel(IndexRange lanes, IndexRange keys) const {
    for (int64_t key = keys.begin; key < keys.end; ++key) {
      for (int64_t lane = 0; lane < lanes.end - lanes.begin; lane += S::kWidth) {
        Real* const element = elements_ + key * kPanel<Op> + lane;
        S::store(element, narrowed_lanes(S::load(element)));
      }
    }
  }

  // A bias that is broadcast along the rows.
  template <class Element>
  void repeat_row(const Element* row, IndexRange keys) const {
    for (int64_t key = keys.begin; key < keys.end; ++key) {
      for (int64_t lane = 0; lane < kPanel<Op>; lane += S::kWidth) {
        S::store(elements_ + key * kPanel<Op> + lane, S::set1(static_cast<Real>(widen(row[key]))));
      }
    }
  }

  bool has_diagonals_, has_elements_;
  DType dtype_;
  Diagonals places_;
  Real* diagonals_;  // [places_.count]: log2(e) times ALiBi and the relative bias
  Real* elements_;   // [keys][kPanel]: the bias of the panel
};

// score_product that, if `asks`, calls ask_for(part) before each part of the keys, to interleave prefetches.
template <class Op, class AskFor>
inline void score_product(const Gemm<Op>& g, IndexRange keys, IndexRange lanes, int64_t units, bool asks,
                          AskFor ask_for) {
  if (!asks) return score_product(g, keys, lanes, units);
  constexpr int64_t kStep = 2 * kTileRows;
  for (int64_t begin = keys.begin; begin < keys.end; begin += kStep) {
    const IndexRange part{begin, lesser(begin + kStep, keys.end)};
    ask_for(part);
    score_product(g, part, lanes, units);
  }
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
