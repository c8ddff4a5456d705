// Forward: out = dropout(softmax(scale * Q K^T)) V with an online softmax (Milakov and Gimelshein 2018;
// FlashAttention-2, Dao 2023, Algorithm 1), one query tile of one head at a time against all key tiles that it sees.
//
// Scores lie transposed, S^T[key][query]: a vector holds one key's scores for neighbouring queries, so that row maxima
// and sums need no reduction across lanes, K is read element by element where it lies, and P^T is the A operand of P V
// as is. Next: tiles.h (masks, dropout bits), gemm.h, pack.h.
#pragma once

#include "schedule.h"
#include "tiles.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

template <class Op>
struct ForwardScratch {
  using Real = typename Op::Real;
  using Unit = typename Op::Unit;

  ForwardScratch(const AttnParams& p, void* base) : BM(forward_tile<Real>(p).queries), BN(forward_tile<Real>(p).keys) {
    ScratchCarver carve(base);
    units = padded_units<Op>(p.head_dim);
    units_v = padded_units<Op>(p.head_dim_v);
    lanes_v = units_v * Op::kPack;
    rows = carve.take<Unit>(greater(BM * units, BN * units_v));
    q_transposed = carve.take<Unit>(units * BM);
    values = carve.take<Unit>(Op::kPack == 2 ? BN * units_v : 0);
    keys = carve.take<Unit>(BN * units);
    scores = carve.take<Real>(BN * BM);
    out = carve.take<Real>(BM * lanes_v);
    row_max = carve.take<Real>(BM);
    row_sum = carve.take<Real>(BM);
    rescale = carve.take<Real>(BM);
    first_key = carve.take<Real>(BM);
    last_key = carve.take<Real>(BM);
    keep = carve.take<uint16_t>(p.has_dropout() ? BN * BM / kDropoutLanes : 0);
    bytes = carve.used();
  }

  int64_t BM, BN;  // queries and keys of a tile
  int64_t units, units_v, lanes_v, bytes;
  Unit* rows;                         // staged Q, later staged V
  Unit* q_transposed;                 // [units][BM]
  Unit* values;                       // V with pairs of rows interleaved
  Unit* keys;                         // staged K
  Real* scores;                       // S^T, then P^T: [BN][BM]
  Real* out;                          // [BM][lanes_v], not yet divided by the row sum
  Real *row_max, *row_sum, *rescale;  // [BM]; the maximum in units of log2
  Real *first_key, *last_key;         // [BM] visible keys of each query, relative to the key tile
  uint16_t* keep;                     // [BN][BM / 16]
};

// P^T into the form that the product with V reads: rows of units, two keys at a time for bfloat16.
template <class Op>
inline void store_probabilities(typename Op::Real* scores, int64_t stride, int64_t key, int64_t lane,
                                typename Op::V first, typename Op::V second, bool has_second) {
  Op::S::store(scores + key * stride + lane, first);
  if (has_second) Op::S::store(scores + (key + 1) * stride + lane, second);
}
#if defined(FLASHATTN_ISA_AVX512_BF16)
template <>
inline void store_probabilities<Bf16DotOp>(float* scores, int64_t stride, int64_t key, int64_t lane, __m512 first,
                                           __m512 second, bool) {
  alignas(64) static constexpr uint16_t kInterleave[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                           21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                           11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i halves = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
  _mm512_storeu_si512(scores + key / 2 * stride + lane,
                      _mm512_permutexvar_epi16(_mm512_load_si512(kInterleave), halves));
}
#endif

template <class In, class Op, class Accuracy>
class Forward {
  using Real = typename Op::Real;
  using Unit = typename Op::Unit;
  using S = typename Op::S;
  using V = typename S::V;
  using Scratch = ForwardScratch<Op>;
  static constexpr int W = S::kWidth;

 public:
  Forward(const AttnParams& params, void* scratch) : p(params), s(params, scratch), BM(s.BM), BN(s.BN) {
    scale = log2_scale<Real>(p.softmax_scale);
    if (p.has_dropout()) key = philox_key(static_cast<uint64_t>(p.rng_state[0]), static_cast<uint64_t>(p.rng_state[1]));
  }

  // Tile `m_block` of query head h of batch entry b.
  void run(int64_t b, int64_t h, int64_t m_block) {
    const Sequence queries = query_sequence(p, b), keys = key_sequence(p, b);
    const Mask mask(p, queries.length, keys.length);
    row0 = m_block * BM;
    rows = lesser(BM, queries.length - row0);
    batch = b;
    head = h;
    load_queries(queries);
    const IndexRange visible = mask.keys_of(row0, row0 + rows);
    for (int64_t key0 = visible.begin / BN * BN; key0 < visible.end; key0 += BN) {
      key_tile(mask, keys, key0, lesser(BN, visible.end - key0));
    }
    write(queries);
  }

 private:
  const In* row_of(const TensorView& t, int64_t h, int64_t row) const {
    return static_cast<const In*>(t.data) + batch * t.batch_stride + h * t.head_stride + row * t.row_stride;
  }

  void load_queries(const Sequence& queries) {
    const Rows<Op> q = stage_rows<Op>(row_of(p.q, head, queries.start + row0), p.q.row_stride, rows, p.head_dim,
                                      Reads::kElements, s.rows);
    lanes = round_up(rows, W);
    transpose_rows<Op>(s.q_transposed, BM, q, rows, lanes, s.units, p.softmax_scale < 0);
    // The sink is a logit that is there before the first key (spec: smooth softmax is the logit 0).
    const Real sink = p.sink ? static_cast<const Real*>(p.sink)[head] : Real(0);
    const bool has_sink = p.has_sink && sink > -std::numeric_limits<Real>::infinity();
    for (int64_t i = 0; i < lanes; ++i) {
      s.row_max[i] = has_sink ? sink * static_cast<Real>(kLog2E) : -std::numeric_limits<Real>::infinity();
      s.row_sum[i] = has_sink ? Real(1) : Real(0);
    }
    std::memset(s.out, 0, rows * s.lanes_v * sizeof(Real));
  }

  void key_tile(const Mask& mask, const Sequence& keys, int64_t key0, int64_t count) {
    const int64_t hk = head / p.group_size();
    const TileMask<Op> tile(mask, row0, rows, key0, count);
    const Rows<Op> k =
        stage_rows<Op>(row_of(p.k, hk, keys.start + key0), p.k.row_stride, count, p.head_dim, Reads::kElements, s.keys);
    const Rows<Op> v_rows = stage_rows<Op>(row_of(p.v, hk, keys.start + key0), p.v.row_stride, count, p.head_dim_v,
                                           Reads::kVectors, s.rows);
    const Rows<Op> v = pair_rows<Op>(v_rows, count, s.units_v, s.values);
    if (p.has_dropout()) {
      fill_keep_bits(s.keep, BM / kDropoutLanes, key, p.dropout_threshold, batch, head, row0, rows, key0, count);
    }
    const Gemm<Op> qk{k.data, k.stride, s.q_transposed, BM, s.scores, BM};
    const IndexRange all_units{0, ceil_div(p.head_dim, Op::kPack)};
    for (int64_t lane = 0; lane < lanes; lane += kPanel<Op>) {
      const IndexRange panel = tile.panel_keys(lane);
      gemm<Order::kRowMajor, Init::kZero>(qk, panel, {lane, lesser(lane + kPanel<Op>, lanes)},
                                          [&](int64_t, int64_t) { return all_units; });
      const bool full = tile.panel_is_full(lane, panel);
      if (!full) tile.lane_limits(lane, lesser(kPanel<Op>, lanes - lane), s.first_key, s.last_key);
      for (int64_t i = lane; i < lesser(lane + kPanel<Op>, lanes); i += W) {
        if (full && !p.has_dropout()) {
          softmax<false, false>(i, panel);
        } else if (full) {
          softmax<false, true>(i, panel);
        } else if (!p.has_dropout()) {
          softmax<true, false>(i, panel);
        } else {
          softmax<true, true>(i, panel);
        }
      }
    }
    const Gemm<Op> pv{reinterpret_cast<const Unit*>(s.scores), BM, v.data, v.stride, s.out, s.lanes_v, s.rescale};
    gemm<Order::kKMajor, Init::kScale>(pv, {0, rows}, {0, s.lanes_v}, [&](int64_t begin, int64_t end) {
      const IndexRange seen = tile.keys_of(begin, end);
      return IndexRange{seen.begin / Op::kPack, ceil_div(seen.end, Op::kPack)};
    });
  }

  // The kWidth queries at `lane` against keys [seen.begin, seen.end): scores to probabilities, row statistics updated.
  template <bool kMasked, bool kDropout>
  void softmax(int64_t lane, IndexRange seen) {
    const Real infinity = std::numeric_limits<Real>::infinity();
    const int64_t BM = s.BM;  // a copy: vector stores might change the member, for all that the compiler knows
    const V first = kMasked ? S::load(s.first_key + lane) : S::zero();
    const V last = kMasked ? S::load(s.last_key + lane) : S::zero();
    V tile_max = S::set1(-infinity);
    for (int64_t j = seen.begin; j < seen.end; ++j) {
      V x = S::load(s.scores + j * BM + lane);
      if (kMasked) x = S::where_in_range(S::set1(static_cast<Real>(j)), first, last, x, S::set1(-infinity));
      tile_max = S::max(tile_max, x);
    }
    const V old_max = S::load(s.row_max + lane);
    const V new_max = S::max(old_max, tile_max * S::set1(scale));
    S::store(s.row_max + lane, new_max);
    // -inf - -inf would be NaN in rows that have seen no key yet.
    alignas(64) Real shift_lanes[W];
    S::store(shift_lanes, new_max);
    for (int l = 0; l < W; ++l) shift_lanes[l] = shift_lanes[l] == -infinity ? Real(0) : shift_lanes[l];
    const V shift = S::load(shift_lanes);
    const V rescale = S::template exp2<Accuracy>(old_max - shift);
    S::store(s.rescale + lane, rescale);

    const V scale_vector = S::set1(scale), minus_shift = S::zero() - shift;
    const uint16_t* keep = s.keep;
    V sum = S::zero();
    auto probability = [&](int64_t j) {
      V x = S::template exp2<Accuracy>(S::fma(S::load(s.scores + j * BM + lane), scale_vector, minus_shift));
      if (kMasked) x = S::where_in_range(S::set1(static_cast<Real>(j)), first, last, x, S::zero());
      sum = sum + x;
      if (kDropout) x = S::keep(x, keep_lanes<S>(keep + j * (BM / kDropoutLanes), lane));
      return x;
    };
    int64_t j = seen.begin;
    for (; j + 2 <= seen.end; j += 2) {
      const V a = probability(j);
      const V b = probability(j + 1);
      store_probabilities<Op>(s.scores, BM, j, lane, a, b, true);
    }
    if (j < seen.end) store_probabilities<Op>(s.scores, BM, j, lane, probability(j), S::zero(), false);
    S::store(s.row_sum + lane, S::fma(S::load(s.row_sum + lane), rescale, sum));
  }

  void write(const Sequence& queries) {
    const Real infinity = std::numeric_limits<Real>::infinity();
    const Real keep = static_cast<Real>(1.0 / keep_probability(p.dropout_threshold));
    In* out = static_cast<In*>(p.out.data) + batch * p.out.batch_stride + head * p.out.head_stride;
    Real* lse = static_cast<Real*>(p.lse.data) + batch * p.lse.batch_stride + head * p.lse.head_stride;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t row = queries.start + row0 + i;
      const Real sum = s.row_sum[i];
      const bool empty = sum == 0;  // no visible key and no sink
      narrow_row(out + row * p.out.row_stride, s.out + i * s.lanes_v, p.head_dim_v, empty ? Real(0) : keep / sum);
      lse[row] = empty ? -infinity : (s.row_max[i] + std::log2(sum)) * static_cast<Real>(kLn2);
    }
  }

  const AttnParams& p;
  Scratch s;
  const int64_t BM, BN;
  Real scale;  // |softmax_scale| * log2(e); a negative sign goes into q_transposed
  PhiloxKey key{0, 0};
  int64_t batch = 0, head = 0, row0 = 0, rows = 0, lanes = 0;
};

template <class In, class Op, class Accuracy>
void forward(const AttnParams& p) {
  using Real = typename Op::Real;
  const int64_t BM = forward_tile<Real>(p).queries;
  const CpuExecutor& executor = *static_cast<const CpuExecutor*>(p.stream);
  auto tiles_of = [&](int64_t b) { return ceil_div(query_sequence(p, b).length, BM); };
  int64_t items = 0;
  for (int64_t b = 0; b < p.batch; ++b) items += tiles_of(b) * p.heads_q;
  const int64_t scratch_bytes = ForwardScratch<Op>(p, nullptr).bytes;
  std::atomic<int64_t> next{0};
  run_workers(executor, items, [&](int worker) {
    Forward<In, Op, Accuracy> kernel(p, static_cast<char*>(p.workspace) + worker * scratch_bytes);
    WorkCursor cursor(p.batch, p.heads_q);
    WorkItem item;
    while (cursor.find(next.fetch_add(1, std::memory_order_relaxed), tiles_of, &item)) {
      // Causal tiles grow towards the end of the sequence: the longest come first.
      kernel.run(item.batch, item.head, tiles_of(item.batch) - 1 - item.tile);
    }
  });
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
