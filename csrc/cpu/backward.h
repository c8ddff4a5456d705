// Backward: dq, dk, dv by recomputing the probabilities from lse (FlashAttention-2, Dao 2023, Algorithm 2).
//
// One work item is a key tile of one key head: dk and dv stay in scratch memory while it walks the query tiles of all
// query heads of its group. Scores lie transposed as in forward.h. dq is a sum over key tiles: each query tile has a
// turn counter, and key tiles add in ascending order, so that the result has the same bits for every number of threads.
#pragma once

#include "backward_finish.h"
#include "backward_prepare.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

template <class In, class Op>
struct BackwardScratch {
  using Real = typename Op::Real;
  using Unit = typename Op::Unit;
  static constexpr int64_t BM = Tile<Real>::kQueries;
  static constexpr int64_t BN = Tile<Real>::kKeys;
  static constexpr bool kPairs = Op::kPack == 2;

  BackwardScratch(const AttnGradParams& p, void* base) {
    ScratchCarver carve(base);
    units = padded_units<Op>(p.head_dim);
    units_v = padded_units<Op>(p.head_dim_v);
    lanes = units * Op::kPack;
    lanes_v = units_v * Op::kPack;
    k = carve.take<Unit>(BN * units);
    v = carve.take<Unit>(BN * units_v);
    q = carve.take<Unit>(BM * units);
    dout = carve.take<Unit>(BM * units_v);
    k_pairs = carve.take<Unit>(kPairs ? BN * units : 0);
    q_pairs = carve.take<Unit>(kPairs ? BM * units : 0);
    dout_pairs = carve.take<Unit>(kPairs ? BM * units_v : 0);
    q_transposed = carve.take<Unit>(units * BM);
    dout_transposed = carve.take<Unit>(units_v * BM);
    scores = carve.take<Real>(BN * BM);
    dscores = carve.take<Real>(BN * BM);
    dscores_pairs = carve.take<Unit>(kPairs ? BN / 2 * BM : 0);
    dk = carve.take<Real>(BN * lanes);
    dv = carve.take<Real>(BN * lanes_v);
    lse = carve.take<Real>(BM);
    delta = carve.take<Real>(BM);
    dlse = carve.take<Real>(BM);
    first_key = carve.take<Real>(BM);
    last_key = carve.take<Real>(BM);
    keep = carve.take<uint16_t>(p.has_dropout() ? BN * BM / kDropoutLanes : 0);
    bytes = carve.used();
  }

  int64_t units, units_v, lanes, lanes_v, bytes;
  Unit *k, *v, *q, *dout;                // staged rows
  Unit *k_pairs, *q_pairs, *dout_pairs;  // interleaved for products along rows
  Unit *q_transposed, *dout_transposed;  // [units][BM]
  Real *scores, *dscores;                // S^T then P^T, dP^T then dS^T: [BN][BM]
  Unit* dscores_pairs;                   // dS^T with pairs of keys in one unit: [BN / 2][BM]
  Real *dk, *dv;                         // [BN][lanes], [BN][lanes_v]
  Real *lse, *delta, *dlse;              // [BM]; lse in units of log2, delta and dlse times softmax_scale
  Real *first_key, *last_key;            // [BM]
  uint16_t* keep;                        // [BN][BM / 16]
};

// P^T (or dS^T) of two neighbouring keys for the queries of one panel, in the forms that the products read: rows of
// [key][query], and for bfloat16 dS^T also [key pair][query]. The form is written over the fp32 row that it came from.
template <class Op>
struct PanelStore {
  using Real = typename Op::Real;
  using V = typename Op::V;
  static constexpr int W = Op::S::kWidth;
  static void row(Real* to, int64_t lane, const V* x, int vectors) {
    for (int n = 0; n < vectors; ++n) Op::S::store(to + lane + n * W, x[n]);
  }
  static void pair(typename Op::Unit*, int64_t, const V*, const V*, int) {}
};
#if defined(FLASHATTN_ISA_AVX512_BF16)
template <>
struct PanelStore<Bf16DotOp> {
  static void row(float* to, int64_t lane, const __m512* x, int vectors) {
    uint16_t* half_row = reinterpret_cast<uint16_t*>(to);
    const __m512 second = vectors > 1 ? x[1] : _mm512_setzero_ps();
    const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, x[0]));
    _mm512_storeu_si512(half_row + lane, both);
  }
  static void pair(uint32_t* to, int64_t lane, const __m512* even, const __m512* odd, int vectors) {
    alignas(64) static constexpr uint16_t kInterleave[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                             21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                             11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    for (int n = 0; n < vectors; ++n) {
      const __m512i halves = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd[n], even[n]));
      _mm512_storeu_si512(to + lane + n * 16, _mm512_permutexvar_epi16(_mm512_load_si512(kInterleave), halves));
    }
  }
};
#endif

template <class In, class Op, class Accuracy>
class Backward {
  using Real = typename Op::Real;
  using Unit = typename Op::Unit;
  using S = typename Op::S;
  using V = typename S::V;
  using Scratch = BackwardScratch<In, Op>;
  static constexpr int W = S::kWidth;
  static constexpr int64_t BM = Scratch::BM, BN = Scratch::BN;

 public:
  Backward(const AttnGradParams& params, const BackwardShared<In, Op>& shared_data, void* scratch)
      : p(params), shared(shared_data), s(params, scratch) {
    scale = log2_scale<Real>(p.softmax_scale);
    // dS = P * (dP * softmax_scale / p_keep - delta * softmax_scale): the scale of dq and dk is in it.
    dp_scale = static_cast<Real>(p.softmax_scale / keep_probability(p.dropout_threshold));
    if (p.has_dropout()) key = philox_key(static_cast<uint64_t>(p.rng_state[0]), static_cast<uint64_t>(p.rng_state[1]));
  }

  // Key tile n of key head hk of batch entry b.
  void run(int64_t b, int64_t hk, int64_t n) {
    batch = b;
    queries = query_sequence(p, b);
    keys = key_sequence(p, b);
    key0 = n * BN;
    key_count = lesser(BN, keys.length - key0);
    const Mask mask(p, queries.length, keys.length);
    k = stage_rows<Op>(row_of(p.k, hk, keys.start + key0), p.k.row_stride, key_count, p.head_dim, Reads::kVectors, s.k);
    v = stage_rows<Op>(row_of(p.v, hk, keys.start + key0), p.v.row_stride, key_count, p.head_dim_v, Reads::kElements,
                       s.v);
    k_pairs = pair_rows<Op>(k, key_count, s.units, s.k_pairs);
    std::memset(s.dk, 0, key_count * s.lanes * sizeof(Real));
    std::memset(s.dv, 0, key_count * s.lanes_v * sizeof(Real));
    const IndexRange seen_by = mask.rows_of(key0, key0 + key_count);
    for (int64_t h = hk * p.group_size(); h < (hk + 1) * p.group_size(); ++h) {
      for (int64_t m = seen_by.begin / BM; m * BM < seen_by.end; ++m) query_tile(mask, h, m, n);
    }
    write(p.dk, hk, s.dk, s.lanes, p.head_dim, Real(1));
    write(p.dv, hk, s.dv, s.lanes_v, p.head_dim_v, static_cast<Real>(1.0 / keep_probability(p.dropout_threshold)));
  }

 private:
  const In* row_of(const TensorView& t, int64_t h, int64_t row) const {
    return static_cast<const In*>(t.data) + batch * t.batch_stride + h * t.head_stride + row * t.row_stride;
  }

  void query_tile(const Mask& mask, int64_t h, int64_t m, int64_t n) {
    const int64_t row0 = m * BM, rows = lesser(BM, queries.length - row0);
    const TileMask<Op> tile(mask, row0, rows, key0, key_count);
    const int64_t lanes = round_up(rows, W);
    load_rows(h, row0, rows, lanes);
    if (p.has_dropout()) {
      fill_keep_bits(s.keep, BM / kDropoutLanes, key, p.dropout_threshold, batch, h, row0, rows, key0, key_count);
    }
    for (int64_t lane = 0; lane < lanes; lane += kPanel<Op>) {
      const IndexRange seen = mask.keys_of(row0 + lane, row0 + lesser(lane + kPanel<Op>, rows));
      whole_rows = sizeof(In) == 2 && seen.begin < seen.end && seen.begin >= key0 && seen.end <= key0 + key_count;
      score_panel(tile, lane, lesser(kPanel<Op>, lanes - lane));
    }
    key_gradients(tile);
    const IndexRange visible = mask.keys_of(row0, row0 + rows);
    query_gradient(tile, h, m, rows, n - visible.begin / BN, n == (visible.end - 1) / BN);
  }

  void load_rows(int64_t h, int64_t row0, int64_t rows, int64_t lanes) {
    const int64_t row = queries.start + row0;
    const Rows<Op> q = stage_rows<Op>(row_of(p.q, h, row), p.q.row_stride, rows, p.head_dim, Reads::kVectors, s.q);
    const Rows<Op> dout =
        stage_rows<Op>(row_of(p.dout, h, row), p.dout.row_stride, rows, p.head_dim_v, Reads::kVectors, s.dout);
    transpose_rows<Op>(s.q_transposed, BM, q, rows, lanes, s.units, p.softmax_scale < 0);
    transpose_rows<Op>(s.dout_transposed, BM, dout, rows, lanes, s.units_v, false);
    q_pairs = pair_rows<Op>(q, rows, s.units, s.q_pairs);
    dout_pairs = pair_rows<Op>(dout, rows, s.units_v, s.dout_pairs);
    const Real infinity = std::numeric_limits<Real>::infinity();
    const Real* lse = static_cast<const Real*>(p.lse.data) + batch * p.lse.batch_stride + h * p.lse.head_stride + row;
    row_delta = shared.delta + h * shared.rows + shared.first_row(p, batch, queries) + row0;
    row_count = rows;
    const Real softmax_scale = static_cast<Real>(p.softmax_scale);
    for (int64_t i = 0; i < lanes; ++i) {
      // A row that sees nothing has lse = -inf: its scores are all masked, and +inf keeps the difference a number.
      const bool used = i < rows && lse[i] != -infinity;
      s.lse[i] = used ? lse[i] * static_cast<Real>(kLog2E) : infinity;
      s.delta[i] = i < rows ? row_delta[i] * softmax_scale : Real(0);
      s.dlse[i] = i < rows ? lse_gradient<Real>(p, batch, h, row + i) * softmax_scale : Real(0);
    }
  }

  // S^T, dP^T, then P^T and dS^T for the queries [lane, lane + count) of the tile.
  void score_panel(const TileMask<Op>& tile, int64_t lane, int64_t count) {
    const IndexRange panel = tile.panel_keys(lane);
    const IndexRange lanes{lane, lane + count};
    const Gemm<Op> qk{k.data, k.stride, s.q_transposed, BM, s.scores, BM};
    const Gemm<Op> dov{v.data, v.stride, s.dout_transposed, BM, s.dscores, BM};
    const IndexRange all{0, ceil_div(p.head_dim, Op::kPack)}, all_v{0, ceil_div(p.head_dim_v, Op::kPack)};
    gemm<Order::kRowMajor, Init::kZero>(qk, panel, lanes, [&](int64_t, int64_t) { return all; });
    gemm<Order::kRowMajor, Init::kZero>(dov, panel, lanes, [&](int64_t, int64_t) { return all_v; });
    const bool full = tile.panel_is_full(lane, panel);
    if (!full) tile.lane_limits(lane, count, s.first_key, s.last_key);
    const bool wide = count > W;
    if (full && !p.has_dropout()) {
      wide ? gradients<false, false, 2>(lane, panel) : gradients<false, false, 1>(lane, panel);
    } else if (full) {
      wide ? gradients<false, true, 2>(lane, panel) : gradients<false, true, 1>(lane, panel);
    } else if (!p.has_dropout()) {
      wide ? gradients<true, false, 2>(lane, panel) : gradients<true, false, 1>(lane, panel);
    } else {
      wide ? gradients<true, true, 2>(lane, panel) : gradients<true, true, 1>(lane, panel);
    }
  }

  template <bool kMasked, bool kDropout, int kVectors>
  void gradients(int64_t lane, IndexRange panel) {
    V lse[kVectors], delta[kVectors], first[kVectors], last[kVectors];
    for (int n = 0; n < kVectors; ++n) {
      lse[n] = S::zero() - S::load(s.lse + lane + n * W);
      delta[n] = S::zero() - S::load(s.delta + lane + n * W);
      first[n] = kMasked ? S::load(s.first_key + lane + n * W) : S::zero();
      last[n] = kMasked ? S::load(s.last_key + lane + n * W) : S::zero();
    }
    const V scale_vector = S::set1(scale), dp_scale_vector = S::set1(dp_scale);
    auto weight = [&](int64_t j, int n) {
      const V score = S::load(s.scores + j * BM + lane + n * W);
      const V x = S::template exp2<Accuracy>(S::fma(score, scale_vector, lse[n]));
      return kMasked ? S::where_in_range(S::set1(static_cast<Real>(j)), first[n], last[n], x, S::zero()) : x;
    };
    // dS, and in *probability what multiplies dout.
    auto score_gradient = [&](int64_t j, int n, V x, V* probability) {
      V dp = S::load(s.dscores + j * BM + lane + n * W);
      *probability = x;
      if (kDropout) {
        const uint32_t bits = keep_lanes<S>(s.keep + j * (BM / kDropoutLanes), lane + n * W);
        *probability = S::keep(x, bits);
        dp = S::keep(dp, bits);
      }
      const V ds = x * S::fma(dp, dp_scale_vector, delta[n]);
      // A masked score has no gradient, also when dP is not finite.
      return kMasked ? S::where_in_range(S::set1(static_cast<Real>(j)), first[n], last[n], ds, S::zero()) : ds;
    };
    const bool known = whole_rows;  // the weights already lie in the place of the scores
    if (known) {
      // delta is the row sum of P * dP. Out of 16-bit `out` it carries its rounding, which is all that is left where
      // few keys are visible and the gradient cancels; here the whole row is at hand.
      FLASHATTN_UNROLL(2)
      for (int n = 0; n < kVectors; ++n) {
        V sum = S::load(s.dlse + lane + n * W), kept;
        delta[n] = S::zero();
        for (int64_t j = panel.begin; j < panel.end; ++j) {
          const V x = weight(j, n);
          S::store(s.scores + j * BM + lane + n * W, x);
          sum = sum - score_gradient(j, n, x, &kept);
        }
        delta[n] = sum;
        S::store(s.delta + lane + n * W, sum);
      }
      // For the gradient of the sink; no other key tile reads or writes these rows.
      const bool wanted = p.dsink && p.softmax_scale != 0;
      for (int64_t i = lane; wanted && i < lesser(lane + kVectors * W, row_count); ++i) {
        row_delta[i] = -s.delta[i] / static_cast<Real>(p.softmax_scale);
      }
    }
    auto one_key = [&](int64_t j, V* probability, V* dscore) {
      FLASHATTN_UNROLL(2)
      for (int n = 0; n < kVectors; ++n) {
        const V x = known ? S::load(s.scores + j * BM + lane + n * W) : weight(j, n);
        dscore[n] = score_gradient(j, n, x, probability + n);
      }
    };
    for (int64_t j = panel.begin; j < panel.end; j += 2) {
      V probability[2][kVectors], dscore[2][kVectors];
      one_key(j, probability[0], dscore[0]);
      const bool both = j + 1 < panel.end;
      if (both) one_key(j + 1, probability[1], dscore[1]);
      for (int n = 0; n < kVectors; ++n) dscore[1][n] = both ? dscore[1][n] : S::zero();
      PanelStore<Op>::row(s.scores + j * BM, lane, probability[0], kVectors);
      PanelStore<Op>::row(s.dscores + j * BM, lane, dscore[0], kVectors);
      if (both) {
        PanelStore<Op>::row(s.scores + (j + 1) * BM, lane, probability[1], kVectors);
        PanelStore<Op>::row(s.dscores + (j + 1) * BM, lane, dscore[1], kVectors);
      }
      PanelStore<Op>::pair(s.dscores_pairs + j / 2 * BM, lane, dscore[0], dscore[1], kVectors);
    }
  }

  // dv += P^T dout, dk += dS^T q
  void key_gradients(const TileMask<Op>& tile) {
    auto rows_of = [&](int64_t begin, int64_t end) {
      const IndexRange rows = tile.rows_of(begin, end);
      return IndexRange{rows.begin / Op::kPack, ceil_div(rows.end, Op::kPack)};
    };
    const Unit* probabilities = reinterpret_cast<const Unit*>(s.scores);
    const Unit* dscores = reinterpret_cast<const Unit*>(s.dscores);
    const Gemm<Op> dv{probabilities, BM, dout_pairs.data, dout_pairs.stride, s.dv, s.lanes_v};
    const Gemm<Op> dk{dscores, BM, q_pairs.data, q_pairs.stride, s.dk, s.lanes};
    gemm<Order::kRowMajor, Init::kAccumulate>(dv, {0, key_count}, {0, s.lanes_v}, rows_of);
    gemm<Order::kRowMajor, Init::kAccumulate>(dk, {0, key_count}, {0, s.lanes}, rows_of);
  }

  // dq += dS k, when the `turn` key tiles before this one have added theirs.
  void query_gradient(const TileMask<Op>& tile, int64_t h, int64_t m, int64_t rows, int64_t turn, bool is_last) {
    auto keys_of = [&](int64_t begin, int64_t end) {
      const IndexRange seen = tile.keys_of(begin, end);
      return IndexRange{seen.begin / Op::kPack, ceil_div(seen.end, Op::kPack)};
    };
    const int64_t first_row = shared.first_row(p, batch, queries);
    In* out = static_cast<In*>(p.dq.data) + batch * p.dq.batch_stride + h * p.dq.head_stride +
              (queries.start + m * BM) * p.dq.row_stride;
    Real* sum = shared.dq_in_place ? reinterpret_cast<Real*>(out)
                                   : shared.dq + (h * shared.rows + first_row + m * BM) * shared.dq_lanes;
    const int64_t stride = shared.dq_in_place ? p.dq.row_stride : shared.dq_lanes;
    const Unit* dscores = Op::kPack == 2 ? s.dscores_pairs : reinterpret_cast<const Unit*>(s.dscores);
    const Gemm<Op> dq{dscores, BM, k_pairs.data, k_pairs.stride, sum, stride};
    std::atomic<int32_t>& counter = shared.turn(h, first_row, batch, m);
    while (counter.load(std::memory_order_acquire) != turn) std::this_thread::yield();
    if (turn == 0) {
      gemm<Order::kKMajor, Init::kZero>(dq, {0, rows}, {0, s.lanes}, keys_of);
    } else {
      gemm<Order::kKMajor, Init::kAccumulate>(dq, {0, rows}, {0, s.lanes}, keys_of);
    }
    if (is_last && !shared.dq_in_place) {
      for (int64_t i = 0; i < rows; ++i) narrow_row(out + i * p.dq.row_stride, sum + i * stride, p.head_dim, Real(1));
    }
    counter.store(static_cast<int32_t>(turn + 1), std::memory_order_release);
  }

  void write(const TensorView& to, int64_t hk, Real* from, int64_t stride, int64_t head_dim, Real factor) const {
    In* row =
        static_cast<In*>(to.data) + batch * to.batch_stride + hk * to.head_stride + (keys.start + key0) * to.row_stride;
    for (int64_t j = 0; j < key_count; ++j) narrow_row(row + j * to.row_stride, from + j * stride, head_dim, factor);
  }

  const AttnGradParams& p;
  const BackwardShared<In, Op>& shared;
  Scratch s;
  Real scale, dp_scale;
  PhiloxKey key{0, 0};
  int64_t batch = 0, key0 = 0, key_count = 0, row_count = 0;
  Real* row_delta = nullptr;  // of the current query tile, in `shared`
  bool whole_rows = false;    // the queries of the current panel see no key outside this key tile
  Sequence queries{0, 0}, keys{0, 0};
  Rows<Op> k{}, v{}, k_pairs{}, q_pairs{}, dout_pairs{};
};

template <class In, class Op, class Accuracy>
void backward(const AttnGradParams& p) {
  constexpr int64_t BN = Tile<typename Op::Real>::kKeys;
  const CpuExecutor& executor = *static_cast<const CpuExecutor*>(p.stream);
  const BackwardShared<In, Op> shared(p, p.workspace);
  char* scratch = static_cast<char*>(p.workspace) + shared.bytes;
  const int64_t scratch_bytes = BackwardScratch<In, Op>(p, nullptr).bytes;

  const BackwardPrepare<In, Op> prepare(p, shared);
  std::atomic<int64_t> next_prepare{0};
  run_workers(executor, p.batch * p.heads_q, [&](int) {
    int64_t item;
    while ((item = next_prepare.fetch_add(1, std::memory_order_relaxed)) < p.batch * p.heads_q) {
      prepare.run(item / p.heads_q, item % p.heads_q);
    }
  });

  // Ascending key tiles within a batch entry: whoever waits for a turn waits for an item that was drawn earlier.
  auto tiles_of = [&p](int64_t b) { return ceil_div(key_sequence(p, b).length, BN); };
  int64_t items = 0;
  for (int64_t b = 0; b < p.batch; ++b) items += tiles_of(b) * p.heads_k;
  std::atomic<int64_t> next{0};
  run_workers(executor, items, [&](int worker) {
    Backward<In, Op, Accuracy> kernel(p, shared, scratch + worker * scratch_bytes);
    WorkCursor cursor(p.batch, p.heads_k);
    WorkItem item;
    while (cursor.find(next.fetch_add(1, std::memory_order_relaxed), tiles_of, &item)) {
      kernel.run(item.batch, item.head, item.tile);
    }
  });

  std::atomic<int64_t> next_head{0};
  run_workers(executor, p.dsink ? p.heads_q : 0, [&](int) {
    int64_t h;
    while ((h = next_head.fetch_add(1, std::memory_order_relaxed)) < p.heads_q) finish_sink(p, shared, h);
  });
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
