// Decoding: attention of few queries to a KV cache, bound by memory bandwidth. The query heads of a KV head (GQA) form
// one block of rows, so that keys and values are read once for all of them. The keys of a sequence are divided into
// splits (split-KV), which any thread computes and `finish` combines in order. Sequences with more queries are
// compute-bound and go through forward.h. Forwards without a cache run here too if they have few queries
// (few_queries.h).
//
// A work item processes the keys of a split for several KV heads at once: the heads of a key are adjacent in memory,
// and only sequential reads reach the full bandwidth. Next: decode_products.h.
#pragma once

#include "cpu/decode/append.h"
#include "cpu/decode/cache_rows.h"
#include "cpu/decode/decode_plan.h"
#include "cpu/decode/decode_products.h"
#include "cpu/decode/invariant_decode.h"
#include "cpu/forward/forward.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

template <class In, class Op, class Accuracy>
class Decode {
  using Real = typename Op::Real;
  using S = typename Op::S;
  using V = typename S::V;
  using Staged = Widened<In>;
  using Product = RowProduct<Staged, Op>;
  using Unit = typename Product::Unit;
  using GroupRows = CacheRows<In, kDecodeKeys>;
  static constexpr int W = S::kWidth;
  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

 public:
  Decode(const DecodeParams& params, const DecodeWorkspace<In, Op>& workspace, void* base)
      : p(params), w(workspace), rule(GeneralScore<Real, Accuracy>::of(params)), scratch(workspace, base) {}

  // Computes one work item: split number `part` of `parts`, for one block of rows and the KV heads [first_head,
  // first_head + heads). partials: receives the partial results, head by head.
  void run(int64_t b, int64_t first_head, int64_t heads, int64_t block, int64_t part, int64_t parts, char* partials) {
    const Sequence queries = query_sequence(p, b);
    const KeyLocator keys(p, b);
    const Mask mask(p, queries.length, keys.length);
    begin_block(b, queries, block);
    first_position = mask.first_position();
    head_count = heads;
    for (int64_t n = 0; n < heads; ++n) load_queries(queries, first_head, n, partial(partials, n));
    const IndexRange visible = mask.keys_of(query_of(0), query_of(row_count - 1) + 1);
    const IndexRange range = split_keys(visible, kDecodeKeys, parts, part);
    // Double-buffered row pointers of two successive groups of keys. The score product prefetches the values of its
    // group, and the value product prefetches the keys of the next group: measured faster than prefetching both a whole
    // group ahead.
    GroupRows rows[2];
    rows[0].find(p, keys, first_head, range.begin, range.end, kDecodeKeys);
    for (int64_t n = 0; rows[n % 2].count > 0; ++n) {
      const GroupRows &here = rows[n % 2], &next = rows[(n + 1) % 2];
      rows[(n + 1) % 2].find(p, keys, first_head, here.key0 + here.count, range.end, kDecodeKeys);
      next_v = Ahead<In>(here.v, here.count, heads, p.v.head_stride, p.head_dim_v);
      next_k = Ahead<In>(next.k, next.count, heads, p.k.head_stride, p.head_dim);
      compute(mask, keys, here, first_head, partials);
    }
    for (int64_t n = 0; n < heads; ++n) store_sums(n, partial(partials, n));
  }

  // Combines the `parts` splits of a block into its results. partials: those of the first split.
  void finish(int64_t b, int64_t key_head, int64_t block, int64_t parts, char* partials) {
    const Sequence queries = query_sequence(p, b);
    begin_block(b, queries, block);
    hk = key_head;
    for (int64_t r = 0; r < row_count; ++r) finish_row(queries.start + query_of(r), r, parts, partials);
  }

 private:
  PartialRows<Real> partial(char* partials, int64_t n) const {
    ScratchCarver carve(partials + n * partial_bytes);
    return PartialRows<Real>(block_rows, w.columns_v, &carve);
  }
  void begin_block(int64_t b, const Sequence& queries, int64_t block) {
    const DecodePlan plan(p);
    batch = b;
    row0 = block * kDecodeRows;
    row_count = lesser(kDecodeRows, queries.length * p.group_size() - row0);
    block_rows = padded_rows<W>(plan.block_rows(b));
    partial_bytes = w.partial_bytes(plan, b);
  }

  // Query and head of row r of the block; adjacent rows are the heads of one query.
  int64_t query_of(int64_t r) const { return (row0 + r) / p.group_size(); }
  int64_t head_of(int64_t r) const { return hk * p.group_size() + (row0 + r) % p.group_size(); }

  void load_queries(const Sequence& queries, int64_t first_head, int64_t n, const PartialRows<Real>& to) {
    hk = first_head + n;
    Unit* const q = scratch.q + n * block_rows * w.units;
    for_bands<W>(row_count, [&](auto band, int64_t first) {
      constexpr int R = decltype(band)::value;
      for (int64_t r = 0; r < R; ++r) {
        stage_query(queries, first + r);
        BandProduct<Staged, Op, R>::place_row(q + first * w.units, r, scratch.q_row, w.units);
      }
    });
    const int64_t lanes = block_rows * W;
    std::fill(scratch.max + n * lanes, scratch.max + (n + 1) * lanes, -kInfinity);
    std::fill(scratch.sums + n * lanes, scratch.sums + (n + 1) * lanes, Real(0));
    std::fill(to.out, to.out + block_rows * w.columns_v, Real(0));
  }
  // Copies row r of the block to scratch.q_row, with zeros after it; zeros alone for a row of padding.
  FLASHATTN_SHARED void stage_query(const Sequence& queries, int64_t r) const {
    using Element = typename StagedElement<Op>::Type;
    auto* const row = reinterpret_cast<Element*>(scratch.q_row);
    const bool there = r < row_count;
    if (there) {
      with_type_of_q<In>(p, [&](auto element) {
        copy_row(row, row_of<const decltype(element)>(p.q, batch, head_of(r), queries.start + query_of(r)), p.head_dim);
      });
    }
    std::fill(row + (there ? p.head_dim : 0), row + w.units * Op::kPack, Element{});
  }
  void store_sums(int64_t n, const PartialRows<Real>& to) const {
    for_bands<W>(row_count, [&](auto band, int64_t first) {
      constexpr int R = decltype(band)::value, C = W / R;
      const int64_t lanes = (n * block_rows + first) * W;
      for (int64_t r = 0; r < R; ++r) {
        to.max[first + r] = scratch.max[lanes + r * C];
        to.sum[first + r] = 0;
        for (int64_t j = 0; j < C; ++j) to.sum[first + r] += scratch.sums[lanes + r * C + j];
      }
    });
  }

  // Attention of all heads of the work item to one group of keys, in three passes: scores, softmax, values. The softmax
  // pass handles all heads together, to hide the latency of its dependency chains.
  void compute(const Mask& mask, const KeyLocator& keys, const GroupRows& rows, int64_t first_head, char* partials) {
    const Staged* pointers[kDecodeKeys];
    const IndexRange of_all = mask.keys_of_all(query_of(0), query_of(row_count - 1) + 1);
    const bool has_intervals = p.has_intervals() && rows.key0 + rows.count + keys.first_interval > 0;
    const bool may_hide =
        rows.count < kDecodeKeys || rows.key0 < of_all.begin || of_all.end < rows.key0 + rows.count || has_intervals;
    uint64_t hides = 0;  // bit n: head n has masked scores
    const V factor = S::set1(rule.factor);
    for (int64_t n = 0; n < head_count; ++n) {
      hk = first_head + n;
      const int64_t offset = n * p.k.head_stride;
      [[maybe_unused]] const V descale = S::set1(static_cast<Real>(descale_of_products<In>(p, batch, hk)));
      for (int64_t j = 0; j < rows.count; j += kScoredKeys) {
        const Staged* const* const k = rows_of_head<kScoredKeys>(rows.k + j, offset, rows.count - j, p.head_dim,
                                                                 w.units * Op::kPack, scratch.staged_k, pointers);
        for_bands<W>(row_count, [&](auto band, int64_t first) {
          constexpr int R = decltype(band)::value;
          const int64_t row = n * block_rows + first;
          BandProduct<Staged, Op, R>::scores(scratch.scores + row * kDecodeKeys + j * R, scratch.q + row * w.units,
                                             w.units, k, ahead_of(&next_v, first), [&](V product) {
                                               if constexpr (kIsFloat8<In>) product = product * descale;
                                               return rule.stored(product) * factor;
                                             });
        });
      }
      if (!p.alibi_slopes && !p.bias.data && !may_hide) continue;
      for_bands<W>(row_count, [&](auto band, int64_t first) {
        constexpr int R = decltype(band)::value;
        Real* const scores = scratch.scores + (n * block_rows + first) * kDecodeKeys;
        if (p.alibi_slopes) add_alibi<R>(first, rows.key0, scores);
        if (p.bias.data) add_bias<R>(first, rows, scores);
        if (may_hide && hide<R>(mask, keys, has_intervals, first, rows, scores, hidden_rows(n) + first)) {
          hides |= uint64_t{1} << n;
        }
      });
    }
    next_v.ask_for_rest();  // no rows are left if D == Dv
    for (int64_t n = 0; n < head_count; ++n) {
      const PartialRows<Real> to = partial(partials, n);
      for_bands<W>(row_count, [&](auto band, int64_t first) {
        weigh<decltype(band)::value>(n * block_rows + first, to.out + first * w.columns_v);
      });
    }
    for (int64_t n = 0; n < head_count; ++n) {
      const PartialRows<Real> to = partial(partials, n);
      const Staged* const* const v = rows_of_head<kDecodeKeys>(rows.v, n * p.v.head_stride, rows.count, p.head_dim_v,
                                                               w.columns_v, scratch.staged_v, pointers);
      add_values(v, rows.count, hides >> n & 1, n, to.out);
    }
    next_k.ask_for_rest();
  }

  // What the product of the band that begins with row `first` prefetches. Rows of fp8 are prefetched all at once, by
  // ask_for_rest() in compute(), because products read copies of them.
  static Ahead<Staged>* ahead_of([[maybe_unused]] Ahead<In>* ahead, [[maybe_unused]] int64_t first) {
    if constexpr (kIsFloat8<In>) {
      return nullptr;
    } else {
      return first == 0 && ahead->any() ? ahead : nullptr;
    }
  }

  // The score of row r of a band and key j of a group.
  template <int R>
  static Real& score_at(Real* scores, int64_t r, int64_t j) {
    constexpr int C = W / R;
    return scores[j / C * W + r * C + j % C];
  }

  template <int R>
  void add_alibi(int64_t first, int64_t key0, Real* scores) const {
    for (int64_t r = 0; r < lesser<int64_t>(R, row_count - first); ++r) {
      const Real slope = HeadBias<Real>::of(p, batch, head_of(first + r)).slope * kLog2E<Real>;
      const int64_t distance = key0 - first_position - query_of(first + r);
      for (int64_t j = 0; j < kDecodeKeys; ++j) {
        score_at<R>(scores, r, j) -= slope * static_cast<Real>(distance + j < 0 ? -(distance + j) : distance + j);
      }
    }
  }

  // Adds the dense bias. As in forward.h, a bias of -inf masks a score, even a NaN or +inf.
  template <int R>
  void add_bias(int64_t first, const GroupRows& rows, Real* scores) const {
    alignas(64) Real bias[R * kDecodeKeys], of_row[kDecodeKeys];
    for (int64_t r = 0; r < R; ++r) {
      const int64_t row = lesser(first + r, row_count - 1);
      load_bias(query_of(row), head_of(row), rows, of_row);
      for (int64_t j = 0; j < kDecodeKeys; ++j) score_at<R>(bias, r, j) = of_row[j];
    }
    for (int64_t i = 0; i < R * kDecodeKeys; i += W) {
      const V added = S::load(bias + i);
      S::store(scores + i, BiasTile<Op>::where_hidden(added, S::set1(-kInfinity), S::load(scores + i) + added));
    }
  }
  // log2(e) times the bias of a row for a group of keys; 0 for padding keys.
  FLASHATTN_SHARED void load_bias(int64_t query, int64_t head, const GroupRows& rows, Real* to) const {
    const HeadBias<Real> bias = HeadBias<Real>::of(p, batch, head);
    for_element_type<Op>(p.bias.dtype, [&](auto element) {
      using Element = decltype(element);
      const Element* const row = static_cast<const Element*>(bias.bias) + query * bias.row_stride + rows.key0;
      // The next group of keys: hardware prefetchers do not follow as many rows.
      constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(Element));
      for (int64_t j = 0; j < kDecodeKeys; j += kLine) prefetch<false>(row + kDecodeKeys + j);
      const int64_t whole = rows.count / W * W;
      for (int64_t j = 0; j < whole; j += W) {
        const V bias = BiasTile<Op>::narrowed_lanes(WideVector<Real, Element>::load(row + j));
        S::store(to + j, bias * S::set1(kLog2E<Real>));
      }
      for (int64_t j = whole; j < kDecodeKeys; ++j) {
        to[j] = j < rows.count ? in_log2_units(static_cast<Real>(widen(row[j]))) : Real(0);
      }
    });
  }

  // Which keys the rows of head n of the work item do not see, in calls of hide().
  uint32_t* hidden_rows(int64_t n) const { return scratch.hidden + n * block_rows; }

  // Sets the scores of masked keys and padding keys to -inf, and their bits in `hidden`, of the rows of the band.
  // Returns whether there are any.
  template <int R>
  bool hide(const Mask& mask, const KeyLocator& keys, bool has_intervals, int64_t first, const GroupRows& rows,
            Real* scores, uint32_t* hidden) const {
    static_assert(kDecodeKeys <= 32, "hidden has a bit for each key");
    bool any = false;
    const auto hide_one = [&](int64_t r, int64_t j) {
      score_at<R>(scores, r, j) = -kInfinity;
      hidden[r] |= uint32_t{1} << j;
      any = true;
    };
    for (int64_t r = 0; r < R; ++r) {
      hidden[r] = 0;
      const int64_t query = query_of(lesser(first + r, row_count - 1));
      const IndexRange seen = mask.keys_of(query, query + 1);
      for (int64_t j = 0; j < kDecodeKeys; ++j) {
        const int64_t key = rows.key0 + j;
        if (j >= rows.count || key < seen.begin || seen.end <= key) hide_one(r, j);
      }
      if (!has_intervals) continue;
      const int32_t* const intervals =
          head_intervals(p, batch, head_of(lesser(first + r, row_count - 1)), keys.first_interval);
      for (int64_t j = 0; j < rows.count; ++j) {
        const int64_t key = rows.key0 + j;
        if (keys.first_interval + key < 0) continue;
        if (query < intervals[2 * key] || intervals[2 * key + 1] <= query) hide_one(r, j);
      }
    }
    return any;
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
      Real* const to = out + r * w.columns_v;
      for (int64_t d = 0; d < w.columns_v; d += W) S::store(to + d, S::load(to + d) * factor);
    }
    V sum = S::load(lanes_sum) * rescale;
    FLASHATTN_UNROLL(8)
    for (int64_t i = 0; i < kVectors; i += 2) {
      const V even = S::template exp2<Accuracy>(S::load(scores + i * W) - offset);
      const V odd = S::template exp2<Accuracy>(S::load(scores + (i + 1) * W) - offset);
      sum = sum + even + odd;
      S::store(scores + i * W, even);
      S::store(scores + (i + 1) * W, odd);
      BandValues<Staged, Op, R>::store_weights(scratch.weights + row * kDecodeKeys / 2, i / 2, even, odd);
    }
    S::store(lanes_sum, sum);
  }

  // out += weights * v, for head n of the work item.
  void add_values(const Staged* const* v, int64_t count, bool hides, int64_t n, Real* out) {
    for_bands<W>(row_count, [&](auto band, int64_t first) {
      constexpr int R = decltype(band)::value;
      Real* const to = out + first * w.columns_v;
      const int64_t row = n * block_rows + first;
      Real* const scores = scratch.scores + row * kDecodeKeys;
      if (hides) {
        add_seen_values<R>(v, count, scores, lesser<int64_t>(R, row_count - first), hidden_rows(n) + first, to);
      } else {
        BandValues<Staged, Op, R>::add(to, w.columns_v, scores, scratch.weights + row * kDecodeKeys / 2, v,
                                       ahead_of(&next_k, first));
      }
    });
  }
  // Adds the values of the keys that are not hidden: 0 times the value of a hidden key is NaN where it is not finite.
  template <int R>
  void add_seen_values(const Staged* const* v, int64_t count, Real* scores, int64_t rows, const uint32_t* hidden,
                       Real* out) const {
    for (int64_t r = 0; r < rows; ++r) {
      Real* const row = out + r * w.columns_v;
      for (int64_t j = 0; j < count; ++j) {
        if (hidden[r] >> j & 1) continue;
        const V weight = S::set1(score_at<R>(scores, r, j));
        for (int64_t d = 0; d < w.columns_v; d += W) {
          S::store(row + d, S::fma(weight, WideVector<Real, Staged>::load(v[j] + d), S::load(row + d)));
        }
      }
    }
  }

  void finish_row(int64_t row, int64_t r, int64_t parts, char* partials) const {
    const auto part_of = [&](int64_t n) { return partial(partials, n * p.heads_k); };
    const int64_t h = head_of(r);
    const Real sink = p.sink ? static_cast<const Real*>(p.sink)[h] : Real(0);
    const bool has_sink = p.has_sink && sink_counts(sink);
    const Real sink_max = has_sink ? sink_maximum(sink) : -kInfinity;
    Real largest = -kInfinity;  // largest logit, without the sink
    for (int64_t n = 0; n < parts; ++n) {
      const Real of_part = part_of(n).max[r];
      largest = of_part > largest || of_part != of_part ? of_part : largest;
    }
    const Real max = sink_max > largest ? sink_max : largest;
    const Real offset = max == -kInfinity ? Real(0) : max;
    Real sum = has_sink ? std::exp2(sink_max - offset) : Real(0);
    Real* const out = part_of(0).out + r * w.columns_v;
    for (int64_t n = 0; n < parts; ++n) {
      const PartialRows<Real> part = part_of(n);
      const Real scale = std::exp2(part.max[r] - offset);
      sum += part.sum[r] * scale;
      const Real* const from = part.out + r * w.columns_v;
      if (n == 0) {
        for (int64_t d = 0; d < w.columns_v; ++d) out[d] = from[d] * scale;
      } else {
        for (int64_t d = 0; d < w.columns_v; ++d) out[d] += from[d] * scale;
      }
    }
    const FinalRow<Real> of{max, sum, largest};
    write_out<In>(p, batch, h, row, out, of.is_empty() ? Real(0) : Real(descale_of_values<In>(p, batch, hk)) / sum);
    write_statistics(p, batch, h, row, of);
  }

  const DecodeParams& p;
  const DecodeWorkspace<In, Op>& w;
  const GeneralScore<Real, Accuracy> rule;
  DecodeScratch<In, Op> scratch;
  // The current block.
  int64_t batch = 0, hk = 0, row0 = 0, row_count = 0, first_position = 0, head_count = 0;
  // The rows of the sequence's largest block, in whole bands, and the bytes of a block's partial result for a head.
  int64_t block_rows = 0, partial_bytes = 0;
  Ahead<In> next_v, next_k;  // prefetch of this group's values and the next group's keys
};

template <class In, class Op>
inline int64_t decode_workspace_bytes(const DecodeParams& p, int64_t workers) {
  const DecodeWorkspace<In, Op> w(p, workers, nullptr);
  int64_t scratch = greater(DecodeScratch<In, Op>(w, nullptr).bytes, ForwardScratch<In, Op>(p, nullptr).bytes);
  if (p.invariant) scratch = greater(scratch, InvariantDecodeScratch<In, Op>(p, nullptr).bytes);
  return w.bytes + workers * scratch;
}

template <class In, class Op, class Accuracy>
void decode(const DecodeParams& params) {
  using Real = typename Op::Real;
  DecodeParams p = params;
  const CpuExecutor& executor = *static_cast<const CpuExecutor*>(p.stream);
  const DecodeWorkspace<In, Op> w(p, executor.num_threads, p.workspace);
  append<Real, In>(&p, w.rotated_q);

  const DecodePlan plan(p);
  const auto tiles_of = [&plan](int64_t b) { return plan.tiles(b); };
  const int64_t head_groups = p.heads_k > 0 ? ceil_div(p.heads_k, w.heads) : 0;
  int64_t items = 0, blocks = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    items += plan.tiles(b) * head_groups;
    blocks += plan.blocks(b) * p.heads_k;
  }
  const int64_t scratch_bytes = DecodeScratch<In, Op>(w, nullptr).bytes;
  std::atomic<int64_t> next{0};
  run_workers(executor, items, [&](int worker) {
    Decode<In, Op, Accuracy> kernel(p, w, w.scratch + worker * scratch_bytes);
    PartialCursor<In, Op> partials(plan, w);
    WorkCursor cursor(p.batch, head_groups);
    WorkItem item;
    while (cursor.find(next.fetch_add(1, std::memory_order_relaxed), tiles_of, &item)) {
      const int64_t parts = plan.splits(item.batch);
      const int64_t head = item.head * w.heads, heads = lesser(w.heads, p.heads_k - head);
      kernel.run(item.batch, head, heads, item.tile / parts, item.tile % parts, parts,
                 partials.find(item.batch, item.tile, head));
    }
  });
  std::atomic<int64_t> next_block{0};
  run_workers(executor, blocks, [&](int worker) {
    Decode<In, Op, Accuracy> kernel(p, w, w.scratch + worker * scratch_bytes);
    PartialCursor<In, Op> partials(plan, w);
    WorkCursor cursor(p.batch, p.heads_k);
    WorkItem item;
    while (cursor.find(
        next_block.fetch_add(1, std::memory_order_relaxed), [&](int64_t b) { return plan.blocks(b); }, &item)) {
      const int64_t parts = plan.splits(item.batch);
      char* const first = partials.find(item.batch, item.tile * parts, item.head);
      kernel.finish(item.batch, item.head, item.tile, parts, first);
    }
  });

  p.workspace = w.scratch;
  if (p.invariant) decode_invariantly<In, Op, Accuracy>(p);
  if (p.has_score_option() || p.has_bias()) {
    forward<In, Op, Accuracy, GeneralScore<Real, Accuracy>>(p, &p);
  } else {
    forward<In, Op, Accuracy, ScoreRule<Real, PlainProducts<true>>>(p, &p);
  }
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
