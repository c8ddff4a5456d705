// What a thread block of heads.cuh works on, and its producer warps: one loads, two compute delta.
#pragma once

#include "cuda/sm90/shared/backward_policies.cuh"
#include "cuda/sm90/shared/backward_step.cuh"
#include "cuda/sm90/shared/backward_visibility.cuh"
#include "cuda/sm90/shared/backward_work.cuh"
#include "cuda/tile/panels.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/warp.cuh"

namespace flashattn_ext::sm90 {

struct HeadMaps : BackwardMaps {
  CUtensorMap out;
};

struct HeadWork : BackwardWork {
  int met_from;  // query tiles from this one on have met a key tile before: their delta is known, and dq has sums

  __device__ __forceinline__ bool has_met(int m) const { return m >= uniform(met_from); }
};

// The sums of dq are [thread blocks][query heads of a KV head][query tiles][halves of a tile][8][128 lanes], in the
// order of accumulators.
struct HeadWorkspace : BackwardWorkspace {
  float4* sums;
  int64_t sums_bytes;
  int query_tiles;  // query tiles of a head

  HeadWorkspace(const AttnGradParams& p, const BackwardTile& tile, int64_t blocks) : BackwardWorkspace(p) {
    query_tiles = static_cast<int>(tile_count(p.seqlen_q, tile.queries));
    Carver carver(p.workspace);
    delta = carver.take<float>(p.heads_q * rows);
    words = carver.take<LseWords<float>>(p.heads_q * rows);  // words of marked rows
    const int64_t vectors = head_sum_vectors(p, tile, blocks);
    sums = carver.take<float4>(vectors);
    sums_bytes = vectors * static_cast<int64_t>(sizeof(float4));
    bytes = static_cast<int64_t>(carver.bytes());
  }
};

// The walk over the query tiles of a key tile: all tiles of one head, then those of the group's next head.
struct HeadWalk {
  int h, m;         // current query head and query tile
  int first, last;  // tiles of a head
  int left;         // steps left, including this one

  __device__ __forceinline__ HeadWalk(const BackwardWork& work, int heads)
      : h(uniform(work.hk) * heads), m(uniform(work.first)), first(m), last(m + uniform(work.tiles) - 1) {
    left = uniform(work.tiles) * heads;
  }
  __device__ __forceinline__ void advance() {
    --left;
    h += m == last;
    m = m == last ? first : m + 1;
  }
};

template <class Kernel>
struct HeadLoader {
  static constexpr int kQueries = Kernel::kQueries;

  typename Kernel::Shared& shared;
  const AttnGradParams& p;
  const HeadWorkspace& workspace;
  const HeadMaps& maps;
  RingPosition<Kernel::kWorkStages> works;
  RingPosition<Kernel::kKeyStages> keys;
  RingPosition<Kernel::kValueStages> values;
  RingPosition<Kernel::kStages> queries;
  RingPosition<Kernel::kOutStages> outs;

  // All heads take the same time, so that each thread block knows its own.
  __device__ void load_heads(const TileGrid& grid) {
    const int heads = static_cast<int>(p.heads_k);
    for (int head = blockIdx.x; head < grid.tiles; head += gridDim.x) {
      HeadWork work{{head / heads, head % heads}};
      work.length_q = static_cast<int>(p.seqlen_q);
      work.length_k = static_cast<int>(p.seqlen_k);
      work.dq_tile =
          (static_cast<int>(blockIdx.x) - work.hk) * static_cast<int>(p.group_size()) * workspace.query_tiles;
      work.met_from = workspace.query_tiles;
      for (work.n = grid.blocks - 1; work.n >= 0; --work.n) {
        work.key0 = work.n * Kernel::kKeys;
        const Limits rows = queries_of_tile<ArithmeticQueries, Kernel::kKeys>(p, work, work.n);
        work.first = rows.begin / kQueries;
        work.tiles = rows.end > rows.begin ? (rows.end - 1) / kQueries + 1 - work.first : 0;
        const HeadWork& published = publish(work);
        if (uniform(published.tiles) == 0) continue;
        load_tile(published);
        work.met_from = work.first;
      }
    }
    publish(HeadWork{});  // ends the kernel
  }

 private:
  // Returns the description in shared memory, which stays unchanged while it is in use: registers are scarce here.
  __device__ const HeadWork& publish(const HeadWork& work) {
    ptx::barrier_wait(&shared.work_empty[works.stage], works.parity ^ 1);
    HeadWork& to = shared.work[works.stage];
    if (lane() == 0) {
      to = work;
      ptx::barrier_arrive(&shared.work_full[works.stage]);
    }
    works.advance();
    __syncwarp();
    return to;
  }
  __device__ void load_tile(const HeadWork& work) {
    ptx::barrier_wait(&shared.keys_empty[keys.stage], keys.parity ^ 1);
    if (lane() == 0) {
      load_panels(shared.k[keys.stage], shared.k_full[keys.stage], maps.k, work.key0, work.hk, work.b);
    }
    keys.advance();
    HeadWalk now(work, static_cast<int>(p.group_size()));
    load_queries(work, now);
    now.advance();
    ptx::barrier_wait(&shared.values_empty[values.stage], values.parity ^ 1);
    if (lane() == 0) {
      load_panels(shared.v[values.stage], shared.v_full[values.stage], maps.v, work.key0, work.hk, work.b);
    }
    values.advance();
    for (; now.left > 0; now.advance()) load_queries(work, now);
  }
  __device__ void load_queries(const HeadWork& work, const HeadWalk& now) {
    const int stage = queries.stage, row = now.m * kQueries;
    ptx::barrier_wait(&shared.queries_empty[stage], queries.parity ^ 1);
    if (lane() == 0) {
      load_panels(shared.q[stage], shared.q_full[stage], maps.q, row, now.h, work.b);
      load_panels(shared.dout[stage], shared.rows_full[stage], maps.dout, row, now.h, work.b);
    }
    if (!work.has_met(now.m)) {
      ptx::barrier_wait(&shared.out_empty[outs.stage], outs.parity ^ 1);
      if (lane() == 0) load_panels(shared.out[outs.stage], shared.out_full[outs.stage], maps.out, row, now.h, work.b);
      outs.advance();
    }
    load_lse(work, now.h, row);
    ptx::barrier_arrive(&shared.q_full[stage]);  // every lane, for its own writes
    queries.advance();
  }
  // In units of log2. Rows that do not exist have the words of a row without keys, which make their weights 0 for any
  // score.
  __device__ __forceinline__ void load_lse(const HeadWork& work, int h, int row) {
    float lse[kQueries / 32];
#pragma unroll
    for (int i = 0; i < kQueries / 32; ++i) {
      const int at = row + i * 32 + lane();
      lse[i] = at < work.length_q ? *row_statistic(p.lse, work.b, h, at) : infinity();
    }
    bool has_mark = false;
#pragma unroll
    for (int i = 0; i < kQueries / 32; ++i) {
      const float word = lse[i] == -infinity() ? infinity() : one_word(lse[i] * kLog2E<float>);
      shared.lse[queries.stage][i * 32 + lane()] = word;
      has_mark = has_mark || is_mark(word);
    }
    // The warpgroups of scores read the words of marked rows.
    for (int at = row + lane(); has_mark && at < min(row + kQueries, work.length_q); at += 32) {
      const auto words = LseWords<float>::of(p, work.b, h, at);
      workspace.words[h * workspace.rows + work.b * p.seqlen_q + at] = words;
      if (has_one_weight(words)) shared.lse[queries.stage][at - row] = mark_of_one_weight();
    }
    publish_marks(shared.has_marks[queries.stage], has_mark);
  }
};

// Delta of the rows of each step. A lane computes it when a row meets its first key tile, and reads it from the
// workspace in later ones. Only then the warpgroups may use the step's dout.
template <class Kernel>
struct DeltaWarps {
  using T = typename Kernel::Element;
  static constexpr int kQueries = Kernel::kQueries;
  static_assert(kQueries % Kernel::kDeltaThreads == 0);

  typename Kernel::Shared& shared;
  const AttnGradParams& p;
  const HeadWorkspace& workspace;
  const int thread;
  RingPosition<Kernel::kWorkStages> works;
  RingPosition<Kernel::kStages> queries;
  RingPosition<Kernel::kOutStages> outs;

  __device__ void compute_tiles() {
    for_each_work(shared, works, [&](const HeadWork& work) {
      if (uniform(work.tiles) > 0) {
        for (HeadWalk now(work, static_cast<int>(p.group_size())); now.left > 0; now.advance()) {
          compute(work, now.h, now.m);
        }
      }
      release(shared.work_empty[works.stage]);
    });
  }

 private:
  __device__ __forceinline__ void compute(const HeadWork& work, int h, int m) {
    const int rows = work.length_q - m * kQueries;
    float* const known = workspace.delta + h * workspace.rows + work.b * p.seqlen_q + m * kQueries;
    const bool is_known = work.has_met(m);
    if (!is_known) ptx::barrier_wait(&shared.out_full[outs.stage], outs.parity);
    ptx::barrier_wait(&shared.rows_full[queries.stage], queries.parity);
    ptx::barrier_wait(&shared.q_full[queries.stage], queries.parity);  // for the marks of rows in lse
#pragma unroll 1
    for (int row = thread; row < kQueries; row += Kernel::kDeltaThreads) {
      float delta = 0;
      if (is_known) {
        if (row < rows) delta = known[row];
      } else {
        if (!is_mark_of_one_weight(shared.lse[queries.stage][row])) delta = product(row);
        if (row < rows) {
          if (p.dlse.data) delta -= *row_statistic(p.dlse, work.b, h, m * kQueries + row);
          known[row] = delta;
        }
      }
      shared.delta[queries.stage][row] = delta;
    }
    ptx::barrier_arrive(&shared.dout_full[queries.stage]);
    queries.advance();
    if (is_known) return;
    ptx::barrier_arrive(&shared.out_empty[outs.stage]);
    outs.advance();
  }
  // <dout, out> of a row of the stages.
  __device__ __forceinline__ float product(int row) const {
    float sum[2] = {};  // two, so that additions overlap
#pragma unroll
    for (int panel = 0; panel < Kernel::kPanels; ++panel) {
      const T *dout = shared.dout[queries.stage][panel][row], *out = shared.out[outs.stage][panel][row];
#pragma unroll 2
      for (int chunk = 0; chunk < 8; ++chunk) {
        const int at = (chunk ^ (row % 8)) * 8;
        const uint4 x = *reinterpret_cast<const uint4*>(dout + at), y = *reinterpret_cast<const uint4*>(out + at);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          sum[e % 2] += widen(reinterpret_cast<const T*>(&x)[e]) * widen(reinterpret_cast<const T*>(&y)[e]);
        }
      }
    }
    return sum[0] + sum[1];
  }
};

}  // namespace flashattn_ext::sm90
