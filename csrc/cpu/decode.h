// Attention of few queries to a cache, which takes as long as reading the cache does. The rows of all query heads that
// share a key head are one block, so that keys and values are read once for all of them; the keys of a sequence are
// split into parts, which any thread computes and `finish` puts together in their order. Sequences with more queries
// go through forward.h, whose tiles multiply faster than memory delivers.
//
// Scores have one row for each query here, S[query][key], since there are too few queries for the lanes of a vector.
// A product sums along the head dim in vectors, and the sums of kWidth pairs of a query and a key are reduced together.
#pragma once

#include "append.h"
#include "forward.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

constexpr int64_t kDecodeRows = 128;  // rows of a block at most
constexpr int64_t kDecodeKeys = 64;   // keys that are computed together; parts are multiples of it

// How a call is divided among items of work: block and part of a sequence, and key head.
class DecodePlan {
 public:
  explicit DecodePlan(const DecodeParams& params) : p(params) {}

  // Rows of all the query heads of a key head.
  int64_t rows(int64_t b) const {
    const int64_t queries = query_sequence(p, b).length;
    return p.heads_k > 0 && has_few_queries(queries) ? queries * p.group_size() : 0;
  }
  int64_t blocks(int64_t b) const { return ceil_div(rows(b), kDecodeRows); }
  // Parts that the keys are split into. What is chosen depends on the length of the sequence alone, so that neither the
  // batch nor the number of threads changes a bit: few enough that combining them costs nothing, enough for a few
  // sequences to keep many threads busy.
  int64_t splits(int64_t b) const {
    constexpr int64_t kKeysOfPart = 2048, kMost = 32;
    if (p.num_splits > 0) return p.num_splits;
    const int64_t parts = ceil_div(KeyLocator(p, b).length, kKeysOfPart);
    return parts < 1 ? 1 : lesser(parts, kMost);
  }
  int64_t tiles(int64_t b) const { return blocks(b) * splits(b); }

  const DecodeParams& p;
};

// What one item leaves of the rows of a block: the maximum and the sum of the weights of each row, and the sums of the
// values, relative to the maximum.
template <class Real>
struct PartialRows {
  // For blocks of at most `rows` rows.
  PartialRows(int64_t rows, int64_t columns_v, ScratchCarver* carve)
      : max(carve->take<Real>(rows)), sum(carve->take<Real>(rows)), out(carve->take<Real>(rows * columns_v)) {}

  Real *max, *sum, *out;
};

// How the rows of q and of keys meet: in vectors of kElements elements, of q as they are staged.
template <class In, class Op>
struct RowProduct {
  using Real = typename Op::Real;
  using Element = Real;
  static constexpr int64_t kElements = Simd<Real>::kWidth;
  using Vector = typename Simd<Real>::V;

  template <class Source>
  static Vector load(const Source* from) {
    return WideVector<Real, Source>::load(from);
  }
  static Vector multiply_add(Vector sum, Vector k, Vector q) { return Simd<Real>::fma(k, q, sum); }
};
#if defined(FLASHATTN_ISA_AVX512_BF16)
template <>
struct RowProduct<BFloat16, Bf16DotOp> {
  using Element = BFloat16;
  static constexpr int64_t kElements = 32;
  using Vector = __m512i;

  static Vector load(const BFloat16* from) { return _mm512_loadu_si512(from); }
  static __m512 multiply_add(__m512 sum, Vector k, Vector q) { return Bf16DotOp::multiply_add(sum, k, q); }
};
#endif

// The memory of a call: rotated queries, partial results of sequences that are split, scratch of each worker.
template <class In, class Op>
struct DecodeWorkspace {
  using Real = typename Op::Real;
  using S = typename Op::S;

  DecodeWorkspace(const DecodeParams& params, void* base) : DecodeWorkspace(params, ScratchCarver(base)) {}

  int64_t block_rows;          // of the largest block
  int64_t columns, columns_v;  // of a row of q and k, and of v, in whole vectors
  In* rotated_q;
  char* partials;  // [tiles of the call][heads_k] PartialRows
  int64_t partial_bytes;
  char* scratch;  // what is left, for the workers
  int64_t bytes;  // without scratch

 private:
  DecodeWorkspace(const DecodeParams& p, ScratchCarver carve) {
    const DecodePlan plan(p);
    int64_t tiles = 0;
    block_rows = 0;
    for (int64_t b = 0; b < p.batch; ++b) {
      block_rows = greater(block_rows, lesser(plan.rows(b), kDecodeRows));
      tiles += plan.tiles(b);
    }
    columns = round_up(p.head_dim, RowProduct<In, Op>::kElements);
    columns_v = round_up(p.head_dim_v, S::kWidth);
    ScratchCarver measure(nullptr);
    PartialRows<Real>(block_rows, columns_v, &measure);
    partial_bytes = measure.used();
    rotated_q = carve.take<In>(rotated_elements(p));
    partials = carve.take<char>(tiles * p.heads_k * partial_bytes);
    scratch = carve.take<char>(0);
    bytes = carve.used();
  }
};

template <class In, class Op>
struct DecodeScratch {
  using Real = typename Op::Real;
  using Element = typename RowProduct<In, Op>::Element;

  DecodeScratch(const DecodeWorkspace<In, Op>& w, void* base) : DecodeScratch(w, ScratchCarver(base)) {}

  Element* q;         // [rows][columns]
  Real* scores;       // [rows][kDecodeKeys], then weights
  Element* staged_k;  // [kDecodeKeys][columns]: rows that end inside a vector, in whole ones
  Real* staged_v;     // [kDecodeKeys][columns_v]
  int64_t bytes;

 private:
  DecodeScratch(const DecodeWorkspace<In, Op>& w, ScratchCarver carve)
      : q(carve.template take<Element>(w.block_rows * w.columns)),
        scores(carve.template take<Real>(w.block_rows * kDecodeKeys)),
        staged_k(carve.template take<Element>(kDecodeKeys * w.columns)),
        staged_v(carve.template take<Real>(kDecodeKeys * w.columns_v)),
        bytes(carve.used()) {}
};

// Asks for the cache line of an element that is needed later; any address will do. Rows of one head are far apart,
// which hardware does not foresee. To the L2 cache, because the L1 cache has no room for two groups of keys.
template <class In>
inline void prefetch(const In* element) {
  __builtin_prefetch(element, 0, 2);
}

// out[lane] = the sum of all lanes of x[lane].
template <class Real>
inline typename Simd<Real>::V sums_of_vectors(typename Simd<Real>::V* x) {
  using S = Simd<Real>;
  using T = Transpose<std::conditional_t<sizeof(Real) == 8, uint64_t, uint32_t>>;
  const auto fold = [x](auto half) {
    constexpr int H = decltype(half)::value;
    FLASHATTN_UNROLL(16)
    for (int n = 0; n < H; ++n) {
      using Lanes = std::make_integer_sequence<int, S::kWidth>;
      const auto a = (typename T::V)(x[n]), b = (typename T::V)(x[n + H]);
      x[n] = (typename S::V)(T::template low<H>(a, b, Lanes())) + (typename S::V)(T::template high<H>(a, b, Lanes()));
    }
  };
  if constexpr (S::kWidth >= 16) fold(std::integral_constant<int, 8>());
  if constexpr (S::kWidth >= 8) fold(std::integral_constant<int, 4>());
  if constexpr (S::kWidth >= 4) fold(std::integral_constant<int, 2>());
  fold(std::integral_constant<int, 1>());
  return x[0];
}

template <class In, class Op, class Accuracy>
class Decode {
  using Real = typename Op::Real;
  using S = typename Op::S;
  using V = typename S::V;
  using Product = RowProduct<In, Op>;
  static constexpr int W = S::kWidth;
  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

 public:
  Decode(const DecodeParams& params, const DecodeWorkspace<In, Op>& workspace, void* base)
      : p(params), w(workspace), rule(params), scratch(workspace, base) {}

  // Part `part` of `parts` of the keys, for the rows of one block of a key head.
  void run(int64_t b, int64_t key_head, int64_t block, int64_t part, int64_t parts, const PartialRows<Real>& to) {
    const Sequence queries = query_sequence(p, b);
    const KeyLocator keys(p, b);
    const Mask mask(p, queries.length, keys.length);
    batch = b;
    hk = key_head;
    row0 = block * kDecodeRows;
    row_count = lesser(kDecodeRows, queries.length * p.group_size() - row0);
    first_position = mask.first_position();
    load_queries(queries, to);
    const IndexRange visible = mask.keys_of(query_of(0), query_of(row_count - 1) + 1);
    const IndexRange range = split_keys(visible, kDecodeKeys, parts, part);
    if (range.begin >= range.end) return;
    // The rows of two neighbouring groups of keys are known: those of the next one are asked for meanwhile.
    CacheRows rows[2];
    rows[0].find(*this, keys, {range.begin, lesser(range.begin + kDecodeKeys, range.end)});
    for (int64_t n = 0; rows[n % 2].count > 0; ++n) {
      const int64_t next = rows[n % 2].key0 + rows[n % 2].count;
      rows[(n + 1) % 2].find(*this, keys, {next, lesser(next + kDecodeKeys, range.end)});
      compute(mask, keys, rows[n % 2], rows[(n + 1) % 2], to);
    }
  }

  // The results of a block, from its `parts` parts, the first of which is `partials`, one after the other `stride`
  // bytes apart.
  void finish(int64_t b, int64_t key_head, int64_t block, int64_t parts, char* partials, int64_t stride) {
    const Sequence queries = query_sequence(p, b);
    batch = b;
    hk = key_head;
    row0 = block * kDecodeRows;
    row_count = lesser(kDecodeRows, queries.length * p.group_size() - row0);
    for (int64_t r = 0; r < row_count; ++r) finish_row(queries.start + query_of(r), r, parts, partials, stride);
  }

 private:
  // Where the rows of some keys are.
  struct CacheRows {
    void find(const Decode& decode, const KeyLocator& keys, IndexRange range) {
      key0 = range.begin;
      count = greater<int64_t>(range.end - range.begin, 0);
      const DecodeParams& p = decode.p;
      KeyRun run;
      for (int64_t j = 0; j < count; j += run.count) {
        run = keys.run(key0 + j, count - j);
        const In* const k_row = row_of<const In>(p.k, run.entry, decode.hk, run.row);
        const In* const v_row = row_of<const In>(p.v, run.entry, decode.hk, run.row);
        for (int64_t n = 0; n < run.count; ++n) {
          k[j + n] = k_row + n * p.k.row_stride;
          v[j + n] = v_row + n * p.v.row_stride;
        }
      }
    }

    int64_t key0 = 0, count = 0;
    const In* k[kDecodeKeys] = {};  // those after `count` are null, or what was there before
    const In* v[kDecodeKeys] = {};
  };

  // Rows of a block: neighbouring ones are the heads of one query.
  int64_t query_of(int64_t r) const { return (row0 + r) / p.group_size(); }
  int64_t head_of(int64_t r) const { return hk * p.group_size() + (row0 + r) % p.group_size(); }

  void load_queries(const Sequence& queries, const PartialRows<Real>& to) {
    for (int64_t r = 0; r < row_count; ++r) {
      auto* const row = scratch.q + r * w.columns;
      copy_row(row, row_of<const In>(p.q, batch, head_of(r), queries.start + query_of(r)), p.head_dim);
      std::fill(row + p.head_dim, row + w.columns, typename Product::Element{});
      to.max[r] = -kInfinity;
      to.sum[r] = 0;
    }
    std::fill(to.out, to.out + row_count * w.columns_v, Real(0));
  }

  // Rows that end inside a vector become ones of whole vectors, with zeros; others are read where they are.
  template <class Element, class Body>
  void with_whole_rows(const In* const* rows, int64_t count, int64_t head_dim, int64_t columns, Element* scratch_rows,
                       Body body) {
    if (head_dim == columns) return body(rows);
    const Element* staged[kDecodeKeys];
    for (int64_t j = 0; j < count; ++j) {
      Element* const row = scratch_rows + j * columns;
      copy_row(row, rows[j], head_dim);
      std::fill(row + head_dim, row + columns, Element{});
      staged[j] = row;
    }
    body(static_cast<const Element* const*>(staged));
  }

  void compute(const Mask& mask, const KeyLocator& keys, const CacheRows& rows, const CacheRows& next,
               const PartialRows<Real>& to) {
    with_whole_rows(rows.k, rows.count, p.head_dim, w.columns, scratch.staged_k,
                    [&](const auto* k) { products(k, rows.count, next); });
    const IndexRange of_all = mask.keys_of_all(query_of(0), query_of(row_count - 1) + 1);
    const bool has_intervals = p.has_intervals() && rows.key0 + rows.count + keys.first_interval > 0;
    const bool may_hide =
        rows.count < kDecodeKeys || rows.key0 < of_all.begin || of_all.end < rows.key0 + rows.count || has_intervals;
    bool hides = false;
    for (int64_t r = 0; r < row_count; ++r) {
      Real* const scores = scratch.scores + r * kDecodeKeys;
      make_logits(r, rows.key0, scores);
      if (may_hide && hide(mask, keys, has_intervals, r, rows, scores)) hides = true;
      weigh_row(r, scores, to);
    }
    with_whole_rows(rows.v, rows.count, p.head_dim_v, w.columns_v, scratch.staged_v, [&](const auto* v) {
      if (hides) {
        add_seen_values(v, rows.count, to.out);
      } else {
        add_values(v, next, to.out);
      }
    });
  }

  // --- scores = <q, k> ---
  template <class Element>
  void products(const Element* const* k, int64_t count, const CacheRows& next) const {
    int64_t r = 0;
    for (; r + 4 <= row_count; r += 4) product_rows<4>(k, count, r, r == 0 ? &next : nullptr);
    if (row_count - r >= 2) {
      product_rows<2>(k, count, r, r == 0 ? &next : nullptr);
      r += 2;
    }
    if (row_count > r) product_rows<1>(k, count, r, r == 0 ? &next : nullptr);
  }
  template <int kRows, class Element>
  void product_rows(const Element* const* k, int64_t count, int64_t r, const CacheRows* next) const {
    constexpr int kKeys = W / kRows > 0 ? W / kRows : 1;
    if constexpr (kRows * kKeys != W) {  // more rows than lanes
      for (int n = 0; n < kRows; ++n) product_rows<1>(k, count, r + n, n == 0 ? next : nullptr);
    } else {
      const auto* const q = scratch.q + r * w.columns;
      for (int64_t j = 0; j < count; j += kKeys) {
        const Element* row[kKeys];
        FLASHATTN_UNROLL(16)
        for (int n = 0; n < kKeys; ++n) row[n] = k[lesser(j + n, count - 1)];
        V sums[W];
        FLASHATTN_UNROLL(16)
        for (int n = 0; n < W; ++n) sums[n] = S::zero();
        for (int64_t d = 0; d < w.columns; d += Product::kElements) {
          typename Product::Vector q_vector[kRows];
          FLASHATTN_UNROLL(4)
          for (int m = 0; m < kRows; ++m) q_vector[m] = Product::load(q + m * w.columns + d);
          FLASHATTN_UNROLL(16)
          for (int n = 0; n < kKeys; ++n) {
            const auto k_vector = Product::load(row[n] + d);
            if (next && d * sizeof(In) % 64 == 0) prefetch(next->k[j + n] + d);
            FLASHATTN_UNROLL(4)
            for (int m = 0; m < kRows; ++m)
              sums[m * kKeys + n] = Product::multiply_add(sums[m * kKeys + n], k_vector, q_vector[m]);
          }
        }
        alignas(64) Real of_pairs[W];
        S::store(of_pairs, sums_of_vectors<Real>(sums));
        FLASHATTN_UNROLL(4)
        for (int m = 0; m < kRows; ++m) {
          std::memcpy(scratch.scores + (r + m) * kDecodeKeys + j, of_pairs + m * kKeys, kKeys * sizeof(Real));
        }
      }
    }
  }

  // --- products of one row to logits in units of log2, to weights relative to the row's maximum ---
  void make_logits(int64_t r, int64_t key0, Real* scores) const {
    const V factor = S::set1(rule.factor);
    for (int64_t j = 0; j < kDecodeKeys; j += W) S::store(scores + j, rule.stored(S::load(scores + j)) * factor);
    if (!p.alibi_slopes) return;
    const Real slope = HeadBias<Real>::of(p, batch, head_of(r)).slope * kLog2E<Real>;
    const int64_t distance = key0 - first_position - query_of(r);
    for (int64_t j = 0; j < kDecodeKeys; ++j) {
      scores[j] -= slope * static_cast<Real>(distance + j < 0 ? -(distance + j) : distance + j);
    }
  }

  // -inf for the keys that a row does not see, and for those that are not there. Returns whether there are any.
  bool hide(const Mask& mask, const KeyLocator& keys, bool has_intervals, int64_t r, const CacheRows& rows,
            Real* scores) const {
    const int64_t query = query_of(r);
    bool any = false;
    const IndexRange seen = mask.keys_of(query, query + 1);
    for (int64_t j = 0; j < kDecodeKeys; ++j) {
      const int64_t key = rows.key0 + j;
      if (j < rows.count && seen.begin <= key && key < seen.end) continue;
      scores[j] = -kInfinity;
      any = true;
    }
    if (!has_intervals) return any;
    const int32_t* const intervals = head_intervals(p, batch, head_of(r), keys.first_interval);
    for (int64_t j = 0; j < rows.count; ++j) {
      const int64_t key = rows.key0 + j;
      if (keys.first_interval + key < 0) continue;
      if (intervals[2 * key] <= query && query < intervals[2 * key + 1]) continue;
      scores[j] = -kInfinity;
      any = true;
    }
    return any;
  }

  void weigh_row(int64_t r, Real* scores, const PartialRows<Real>& to) const {
    V lane_max = S::load(scores);
    for (int64_t j = W; j < kDecodeKeys; j += W) lane_max = S::max(lane_max, S::load(scores + j));
    alignas(64) Real lanes[W];
    S::store(lanes, lane_max);
    Real max = to.max[r];
    for (int l = 0; l < W; ++l) max = lanes[l] > max ? lanes[l] : max;
    const Real offset = max == -kInfinity ? Real(0) : max;  // -inf - -inf would be NaN
    if (max != to.max[r]) {
      S::store(lanes, S::template exp2<Accuracy>(S::set1(to.max[r] - offset)));
      const V rescale = S::set1(lanes[0]);
      Real* const out = to.out + r * w.columns_v;
      for (int64_t d = 0; d < w.columns_v; d += W) S::store(out + d, S::load(out + d) * rescale);
      to.sum[r] *= lanes[0];
      to.max[r] = max;
    }
    V sum = S::zero();
    for (int64_t j = 0; j < kDecodeKeys; j += W) {
      const V logit = S::load(scores + j);
      const V weight = S::template exp2<Accuracy>(logit - S::set1(offset));
      sum = sum + weight;
      S::store(scores + j, weight);
    }
    S::store(lanes, sum);
    Real total = 0;
    for (int l = 0; l < W; ++l) total += lanes[l];
    to.sum[r] += total;
  }

  // --- out += weights * v ---
  template <class Element>
  void add_values(const Element* const* v, const CacheRows& next, Real* out) const {
    int64_t r = 0;
    for (; r + 4 <= row_count; r += 4) add_rows<4, 4>(v, r, r == 0 ? &next : nullptr, out);
    if (row_count - r >= 2) {
      add_rows<2, 8>(v, r, r == 0 ? &next : nullptr, out);
      r += 2;
    }
    if (row_count > r) add_rows<1, 8>(v, r, r == 0 ? &next : nullptr, out);
  }
  // kVectors vectors of columns at a time, then what is left of them.
  template <int kRows, int kVectors, class Element>
  void add_rows(const Element* const* v, int64_t r, const CacheRows* next, Real* out) const {
    int64_t d = 0;
    for (; d + kVectors * W <= w.columns_v; d += kVectors * W) {
      add_columns<kRows, kVectors>(v, r, d, next, out);
    }
    for (; d < w.columns_v; d += W) add_columns<kRows, 1>(v, r, d, next, out);
  }
  template <int kRows, int kVectors, class Element>
  void add_columns(const Element* const* v, int64_t r, int64_t d, const CacheRows* next, Real* out) const {
    V sums[kRows][kVectors];
    FLASHATTN_UNROLL(4)
    for (int m = 0; m < kRows; ++m) {
      FLASHATTN_UNROLL(8)
      for (int n = 0; n < kVectors; ++n) sums[m][n] = S::load(out + (r + m) * w.columns_v + d + n * W);
    }
    const Real* const weights = scratch.scores + r * kDecodeKeys;
    for (int64_t j = 0; j < kDecodeKeys; ++j) {
      V weight[kRows];
      FLASHATTN_UNROLL(4)
      for (int m = 0; m < kRows; ++m) weight[m] = S::set1(weights[m * kDecodeKeys + j]);
      FLASHATTN_UNROLL(8)
      for (int n = 0; n < kVectors; ++n) {
        const V values = WideVector<Real, Element>::load(v[j] + d + n * W);
        if (next && n * W * sizeof(In) % 64 == 0) prefetch(next->v[j] + d + n * W);
        FLASHATTN_UNROLL(4)
        for (int m = 0; m < kRows; ++m) sums[m][n] = S::fma(weight[m], values, sums[m][n]);
      }
    }
    FLASHATTN_UNROLL(4)
    for (int m = 0; m < kRows; ++m) {
      FLASHATTN_UNROLL(8)
      for (int n = 0; n < kVectors; ++n) S::store(out + (r + m) * w.columns_v + d + n * W, sums[m][n]);
    }
  }
  // The same where rows differ in what they see: a value that is not finite must not reach a row by a weight of 0.
  template <class Element>
  void add_seen_values(const Element* const* v, int64_t count, Real* out) const {
    for (int64_t r = 0; r < row_count; ++r) {
      const Real* const weights = scratch.scores + r * kDecodeKeys;
      Real* const row = out + r * w.columns_v;
      for (int64_t j = 0; j < count; ++j) {
        if (weights[j] == 0) continue;
        const V weight = S::set1(weights[j]);
        for (int64_t d = 0; d < w.columns_v; d += W) {
          S::store(row + d, S::fma(weight, WideVector<Real, Element>::load(v[j] + d), S::load(row + d)));
        }
      }
    }
  }

  void finish_row(int64_t row, int64_t r, int64_t parts, char* partials, int64_t stride) const {
    const auto part_of = [&](int64_t n) {
      ScratchCarver carve(partials + n * stride);
      return PartialRows<Real>(w.block_rows, w.columns_v, &carve);
    };
    const int64_t h = head_of(r);
    const Real sink = p.sink ? static_cast<const Real*>(p.sink)[h] : Real(0);
    const bool has_sink = p.has_sink && sink_counts(sink);
    const Real sink_max = has_sink ? sink_maximum(sink) : -kInfinity;
    Real max = sink_max;
    for (int64_t n = 0; n < parts; ++n) {
      const Real of_part = part_of(n).max[r];
      max = of_part > max || of_part != of_part ? of_part : max;
    }
    const Real offset = max == -kInfinity ? Real(0) : max;
    Real sum = has_sink ? std::exp2(sink_max - offset) : Real(0);
    Real* const out = part_of(0).out + r * w.columns_v;
    for (int64_t n = 0; n < parts; ++n) {
      const PartialRows<Real> part = part_of(n);
      const Real scale = std::exp2(part.max[r] - offset);
      sum += part.sum[r] * scale;
      const Real* const from = part.out + r * w.columns_v;
      for (int64_t d = 0; d < w.columns_v; ++d) out[d] = n == 0 ? from[d] * scale : out[d] + from[d] * scale;
    }
    const bool empty = sum == 0;  // no visible key and no sink
    narrow_row(row_of<In>(p.out, batch, h, row), out, p.head_dim_v, empty ? Real(0) : Real(1) / sum);
    *row_of<Real>(p.lse, batch, h, row) = empty ? -kInfinity : row_lse(max, std::log2(sum));
  }

  const DecodeParams& p;
  const DecodeWorkspace<In, Op>& w;
  const GeneralScore<Real, Accuracy> rule;
  DecodeScratch<In, Op> scratch;
  // The current block.
  int64_t batch = 0, hk = 0, row0 = 0, row_count = 0, first_position = 0;
};

template <class In, class Op>
inline int64_t decode_workspace_bytes(const DecodeParams& p, int64_t workers) {
  const DecodeWorkspace<In, Op> w(p, nullptr);
  const int64_t scratch = greater(DecodeScratch<In, Op>(w, nullptr).bytes, ForwardScratch<In, Op>(p, nullptr).bytes);
  return w.bytes + workers * scratch;
}

template <class In, class Op, class Accuracy>
void decode(const DecodeParams& params) {
  using Real = typename Op::Real;
  DecodeParams p = params;
  const CpuExecutor& executor = *static_cast<const CpuExecutor*>(p.stream);
  const DecodeWorkspace<In, Op> w(p, p.workspace);
  append<Real>(&p, w.rotated_q);

  const DecodePlan plan(p);
  const auto tiles_of = [&plan](int64_t b) { return plan.tiles(b); };
  int64_t items = 0, blocks = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    items += plan.tiles(b) * p.heads_k;
    blocks += plan.blocks(b) * p.heads_k;
  }
  const int64_t scratch_bytes = DecodeScratch<In, Op>(w, nullptr).bytes;
  // The partial results of a block's parts are heads_k apart.
  const auto partial_of = [&](const WorkItem& item) {
    return w.partials + (item.tile_of_call * p.heads_k + item.head) * w.partial_bytes;
  };
  const int64_t stride = p.heads_k * w.partial_bytes;
  std::atomic<int64_t> next{0};
  run_workers(executor, items, [&](int worker) {
    Decode<In, Op, Accuracy> kernel(p, w, w.scratch + worker * scratch_bytes);
    WorkCursor cursor(p.batch, p.heads_k);
    WorkItem item;
    while (cursor.find(next.fetch_add(1, std::memory_order_relaxed), tiles_of, &item)) {
      const int64_t parts = plan.splits(item.batch);
      ScratchCarver carve(partial_of(item));
      const PartialRows<Real> to(w.block_rows, w.columns_v, &carve);
      kernel.run(item.batch, item.head, item.tile / parts, item.tile % parts, parts, to);
    }
  });
  std::atomic<int64_t> next_block{0};
  run_workers(executor, blocks, [&](int worker) {
    Decode<In, Op, Accuracy> kernel(p, w, w.scratch + worker * scratch_bytes);
    // The first part of each block, by its number among all parts.
    WorkCursor cursor(p.batch, p.heads_k), tiles(p.batch, p.heads_k);
    int64_t first_tile = 0, batch = 0;
    WorkItem item;
    while (cursor.find(
        next_block.fetch_add(1, std::memory_order_relaxed), [&](int64_t b) { return plan.blocks(b); }, &item)) {
      for (; batch < item.batch; ++batch) first_tile += plan.tiles(batch);
      const int64_t parts = plan.splits(item.batch);
      WorkItem first = item;
      first.tile_of_call = first_tile + item.tile * parts;
      kernel.finish(item.batch, item.head, item.tile, parts, partial_of(first), stride);
    }
  });

  p.workspace = w.scratch;
  if (p.softcap > 0 || p.has_bias()) {
    forward<In, Op, Accuracy, GeneralScore<Real, Accuracy>>(p, &p);
  } else {
    forward<In, Op, Accuracy, PlainScore<Real, true>>(p, &p);
  }
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
