// Backward on Hopper: a thread block keeps a tile of keys, 64 in each of two warpgroups, and walks over the queries that
// see it, which one more warp brings by TMA (Shah et al. 2024, "FlashAttention-3"). Scores are transposed,
// S^T = K Q^T: P^T and dS^T, packed where they stand in registers, are operands of the products for dv and dk, and only
// dS^T goes through shared memory, for dq. The products of a step overlap with the next one's: docs/sm90_backward.md.
#pragma once

#include "../common/backward_finish.cuh"
#include "../common/keep.cuh"
#include "../common/tensor_map.h"
#include "../ptx/wgmma.cuh"
#include "pipeline.cuh"
#include "tiles.h"

namespace flashattn_ext::sm90 {

struct BackwardMaps {
  CUtensorMap q, k, v, dout;
};

// How the sums of dq lie in the workspace: a warpgroup computes 64 rows and 64 columns of a step, the two of a thread
// block either different rows or different columns.
template <class T, int kHeadDimension>
struct QuerySums {
  using Element = T;
  static constexpr int kM = backward_tile<kHeadDimension>().queries, kThreads = 2 * kGroupThreads, kSplits = 1;
  static constexpr int kHeadDim = 2 * 64 * 64 / kM;  // columns, some of them beyond the head dim
  static constexpr int kStride = kTileStride<T, kHeadDim>;
  static constexpr int kQueryRowTiles = 1, kQueryColumnTiles = 8;
  static constexpr int64_t kFloats = kM * kHeadDim;

  // Accumulator tile c of a warp, of the eight that compute.
  static __device__ __forceinline__ float* fragment(const BackwardShared& shared, int64_t tile, int warp, int c) {
    return shared.dq + tile * kFloats + (warp * kQueryColumnTiles + c) * 128;
  }

  // For dq_finish_kernel, which has these eight warps alone.
  static __device__ int warp() { return threadIdx.x / 32; }
  static __device__ int query_row() { return (kM == 64 ? warp() % 4 : warp()) * 16; }
  static __device__ int query_column(int) { return kM == 64 ? warp() / 4 * 64 : 0; }
  static __device__ float* dq_fragment(const BackwardShared& shared, int64_t tile, int, int, int c) {
    return fragment(shared, tile, warp(), c);
  }
};

template <class T, int kHeadDim, bool kDropout>
struct Backward {
  using Core = TensorCore<T>;
  using Sums = QuerySums<T, kHeadDim>;
  static constexpr BackwardTile kTile = backward_tile<kHeadDim>();
  static constexpr RegisterBudget kRegisters{24, 240};
  static constexpr int kM = kTile.queries, kN = kTile.keys, kStages = kTile.stages, kKeyStages = kTile.key_stages;
  static constexpr int kThreads = 3 * kGroupThreads, kWarps = 8;
  static constexpr int kPanels = (kHeadDim + kPanelColumns - 1) / kPanelColumns, kScorePanels = kM / kPanelColumns;
  static constexpr int kScoreTiles = kM / 8, kSteps = kM / 16, kColumnTiles = kHeadDim / 8;
  static_assert(Sums::kHeadDim >= kHeadDim);

  // One tile of keys, as the loading warp hands it to those that compute.
  struct alignas(16) Work {
    int b, hk, n;      // n: of the key tile
    int first, tiles;  // query tiles that see it, for every head of the group
    int key_start, length_q, length_k;
    int first_tile, pad[3];  // of the sequence, in BackwardShared

    __device__ bool exists() const { return n * kN < length_k; }
    __device__ TileMask mask(const AttnParams& p) const { return TileMask(p, length_q, length_k); }
  };

  // A query tile of one head; those of the heads of a group come one after the other.
  struct Position {
    int h, m;
    __device__ __forceinline__ void advance(const Work& work) {
      if (++m == work.first + work.tiles) {
        m = work.first;
        ++h;
      }
    }
  };

  // 128-byte rows, swizzled by TMA, in panels of 64 columns.
  struct Shared {
    T k[kKeyStages][kPanels][kN][kPanelColumns];
    T v[kKeyStages][kPanels][kN][kPanelColumns];
    T q[kStages][kPanels][kM][kPanelColumns];
    T dout[kStages][kPanels][kM][kPanelColumns];
    T dscores[2][kScorePanels][kN][kPanelColumns];  // dS^T: [keys][queries]
    float lse[kStages][kM], delta[kStages][kM];
    Work work;
    ptx::Barrier k_full[kKeyStages], v_full[kKeyStages], keys_empty[kKeyStages];
    ptx::Barrier q_full[kStages], dout_full[kStages], queries_empty[kStages];
    ptx::Barrier work_full, work_empty;
  };
  static_assert(sizeof(Shared) <= kSharedLimit);

  // Named barriers: of all that compute, and one for each warpgroup.
  static constexpr int kExchangeBarrier = 1, kGroupBarrier = 2;

  // --- the warp that loads ----------------------------------------------------------------------------------------

  struct Loader {
    Shared& s;
    const AttnGradParams& p;
    const BackwardShared& shared;
    const BackwardMaps& maps;
    Place<kKeyStages> keys;
    Place<kStages> queries;
    uint32_t work_parity = 0;
    int query_start = 0;

    static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

    __device__ void load_tiles(const TileGrid& grid) {
      const int heads = static_cast<int>(p.heads_k), all_heads = heads * static_cast<int>(p.batch);
      for (int tile = blockIdx.x; tile < grid.tiles;) {
        const int next = uniform(lane() == 0 ? grid.draw() : 0);
        // The first keys of causal heads have the longest walk: they come first.
        const auto [head, block] = grid.index(tile, all_heads);
        Work work = start_head(head / heads, head % heads);
        // A sequence may be longer than the host was told: then the last tile stands for all that follow, in their
        // order: dq is summed up in that order when it has to be deterministic.
        for (work.n = block; work.exists(); ++work.n) {
          look(work);
          publish(work);
          if (work.tiles > 0) load_tile(work);
          if (block != grid.blocks - 1) break;
        }
        tile = next;
      }
      publish(Work{});
    }

    __device__ Work start_head(int b, int hk) {
      const Sequence rows = query_sequence(p, b), columns = key_sequence(p, b);
      query_start = static_cast<int>(rows.start);
      Work work{b, hk};
      work.key_start = static_cast<int>(columns.start);
      work.length_q = static_cast<int>(rows.length);
      work.length_k = static_cast<int>(columns.length);
      work.first_tile = static_cast<int>(shared.first_tile(p, b, rows));
      return work;
    }
    __device__ void look(Work& work) const {
      const int key0 = work.n * kN;
      const Limits rows = work.mask(p).rows_of(key0, min(key0 + kN, work.length_k));
      work.first = rows.begin / kM;
      work.tiles = rows.end > rows.begin ? (rows.end - 1) / kM + 1 - work.first : 0;
    }
    __device__ void publish(const Work& work) {
      ptx::barrier_wait(&s.work_empty, work_parity ^ 1);
      if (lane() == 0) {
        s.work = work;
        ptx::barrier_arrive(&s.work_full);
      }
      work_parity ^= 1;
    }

    __device__ void load_tile(const Work& work) {
      const int batch = p.is_varlen() ? 0 : work.b, group = static_cast<int>(p.group_size());
      const int key = work.key_start + work.n * kN;
      ptx::barrier_wait(&s.keys_empty[keys.stage], keys.parity ^ 1);
      if (lane() == 0) {
        load_panels(s.k[keys.stage], s.k_full[keys.stage], maps.k, key, work.hk, batch);
        load_panels(s.v[keys.stage], s.v_full[keys.stage], maps.v, key, work.hk, batch);
      }
      keys.advance();
      Position now{work.hk * group, work.first};
      for (int left = work.tiles * group; left > 0; --left) {
        load_queries(work, now, batch);
        now.advance(work);
      }
    }

    // Rows beyond the sequence's last have weights of 0 whatever their scores are.
    __device__ void load_queries(const Work& work, const Position& now, int batch) {
      const int stage = queries.stage, row = query_start + now.m * kM;
      ptx::barrier_wait(&s.queries_empty[stage], queries.parity ^ 1);
      if (lane() == 0) {
        load_panels(s.q[stage], s.q_full[stage], maps.q, row, now.h, batch);
        load_panels(s.dout[stage], s.dout_full[stage], maps.dout, row, now.h, batch);
      }
      const int rows = work.length_q - now.m * kM;
      const int64_t index = now.h * shared.rows + (p.is_varlen() ? 0 : work.b * p.seqlen_q) + row;
      float lse[kM / 32], delta[kM / 32];
#pragma unroll
      for (int i = 0; i < kM / 32; ++i) {
        const bool exists = i * 32 + lane() < rows;
        lse[i] = exists ? shared.lse[index + i * 32 + lane()] : infinity();
        delta[i] = exists ? shared.delta[index + i * 32 + lane()] : 0.f;
      }
#pragma unroll
      for (int i = 0; i < kM / 32; ++i) {
        s.lse[stage][i * 32 + lane()] = lse[i];
        s.delta[stage][i * 32 + lane()] = delta[i];
      }
      __syncwarp();
      if (lane() == 0) ptx::barrier_arrive(&s.q_full[stage]);
      queries.advance();
    }
  };

  // --- the warpgroups that compute --------------------------------------------------------------------------------

  Shared& s;
  const AttnGradParams& p;
  const BackwardShared& shared;
  const int group, warp_key;  // first of this warp's 16 keys, within the tile
  Dropout dropout;
  uint32_t work_parity = 0;
  Place<kKeyStages> keys;
  Place<kStages> queries;  // of the step whose scores have been computed last
  int buffer = 0;          // of dscores
  float dk[kColumnTiles][4], dv[kColumnTiles][4];
  uint32_t weights[kSteps][4];  // P^T as operands; with dropout, dropped ones carry a sign

  __device__ Backward(Shared& memory, const AttnGradParams& params, const BackwardShared& all, int group)
      : s(memory),
        p(params),
        shared(all),
        group(group),
        warp_key(uniform(static_cast<int>(threadIdx.x) / 32 - 4) * 16),
        dropout(kDropout ? Dropout(params, 0) : Dropout()) {}

  static __device__ __forceinline__ int g() { return threadIdx.x % 32 / 4; }
  static __device__ __forceinline__ int t() { return threadIdx.x % 4; }

  __device__ __forceinline__ void compute_tiles() {
    for (Work work = receive(); work.exists(); work = receive()) {
      dropout.batch = work.b;
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c) {
#pragma unroll
        for (int e = 0; e < 4; ++e) dk[c][e] = dv[c][e] = 0;
      }
      if (work.tiles > 0) walk_queries(work);
      write(work);
    }
  }

  __device__ __forceinline__ Work receive() {
    ptx::barrier_wait(&s.work_full, work_parity);
    work_parity ^= 1;
    Work work{};
    if (threadIdx.x % 32 == 0) work = s.work;
    release(s.work_empty);
    for (int* field : {&work.b, &work.hk, &work.n, &work.first, &work.tiles, &work.key_start, &work.length_q,
                       &work.length_k, &work.first_tile}) {
      *field = uniform(*field);
    }
    return work;
  }

  // In a step, while the scores and dq of the one before are under way, nothing else needs the tensor cores: they are
  // issued together, and the next weights are computed under dq.
  __device__ __forceinline__ void walk_queries(const Work& work) {
    const int key0 = work.n * kN + group * 64;
    // Rows that see all keys of this warpgroup. Dense rows beyond the last do no harm.
    Limits clear = work.mask(p).rows_of_all(key0, key0 + 64);
    if (clear.end == work.length_q && !p.is_varlen()) clear.end += kM;
    const int heads = static_cast<int>(p.group_size());
    Position now{work.hk * heads, work.first};
    ptx::barrier_wait(&s.k_full[keys.stage], keys.parity);
    clear_keys(work);
    float scores[kScoreTiles][4];
    ptx::barrier_wait(&s.q_full[queries.stage], queries.parity);
    score_product(scores);
    ptx::wgmma_wait<0>();
    ptx::hold(scores);
    weigh(scores, work, now, clear);
    ptx::barrier_wait(&s.v_full[keys.stage], keys.parity);
    float dq[8][4];
    Position before = now;
    for (int left = work.tiles * heads; left > 1; --left) {
      const int stage = queries.stage;
      key_products(work, now, clear, dq, before);
      queries.advance();
      ptx::barrier_wait(&s.q_full[queries.stage], queries.parity);
      score_product(scores);
      exchange();
      ptx::wgmma_wait<1>();  // dk: frees registers
      query_product(dq);
      ptx::wgmma_wait<1>();
      ptx::hold(scores);
      release(s.queries_empty[stage]);
      before = now;
      now.advance(work);
      weigh(scores, work, now, clear);
      ptx::wgmma_wait<0>();
      ptx::hold(dq);
    }
    key_products(work, now, clear, dq, before);
    exchange();
    query_product(dq);
    ptx::wgmma_wait<0>();
    ptx::hold(dq);
    release(s.queries_empty[queries.stage]);
    release(s.keys_empty[keys.stage]);
    queries.advance();
    keys.advance();
    add_query_gradient(dq, work, now);
  }

  // S^T = K Q^T
  __device__ __forceinline__ void score_product(float (&scores)[kScoreTiles][4]) {
    score_product(scores, s.k[keys.stage], s.q[queries.stage]);
  }
  __device__ __forceinline__ void score_product(float (&c)[kScoreTiles][4], const T (&rows)[kPanels][kN][kPanelColumns],
                                                const T (&columns)[kPanels][kM][kPanelColumns]) {
    const uint64_t a = ptx::swizzled_descriptor(&rows[0][group * 64], 0);
    const uint64_t b = ptx::swizzled_descriptor(columns, 0);
    ptx::hold(c);
    ptx::wgmma_fence();
#pragma unroll
    for (int d = 0; d < kHeadDim; d += 16) {
      const int panel = d / kPanelColumns, step = d % kPanelColumns / 16;
      ptx::wgmma<ptx::kMajorK, ptx::kMajorK>(c, a + panel * kN * 8 + step * 2, b + panel * kM * 8 + step * 2, d > 0,
                                             T());
    }
    ptx::wgmma_commit();
  }

  // sum += A * rows of queries
  __device__ __forceinline__ void accumulate(float (&sum)[kColumnTiles][4], const uint32_t (&a)[kSteps][4],
                                             const T (&rows)[kPanels][kM][kPanelColumns]) {
    const uint64_t b = ptx::swizzled_descriptor(rows, kM * 128);
    ptx::hold(sum);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) ptx::wgmma<ptx::kMajorMN>(sum, a[step], b + step * 128, T());
    ptx::wgmma_commit();
  }

  // Issues dv += P^T dO and dk += dS^T Q; dS^T also goes into shared memory.
  // Meanwhile it adds what the step before, if there is one, contributes to dq.
  __device__ __forceinline__ void key_products(const Work& work, const Position& now, const Limits& clear,
                                               const float (&dq)[8][4], const Position& before) {
    const int stage = queries.stage;
    ptx::barrier_wait(&s.dout_full[stage], queries.parity);
    clear_queries(work, now);
    float dscores[kScoreTiles][4];
    score_product(dscores, s.v[keys.stage], s.dout[stage]);
    uint32_t kept[kSteps][4];
    keep(kept);
    accumulate(dv, kept, s.dout[stage]);
    if (before.m != now.m || before.h != now.h) add_query_gradient(dq, work, before);
    ptx::wgmma_wait<1>();
    ptx::hold(dscores);
    const bool masked = now.m * kM < clear.begin || now.m * kM + kM > clear.end;
    masked ? differentiate<true>(dscores) : differentiate<false>(dscores);
    uint32_t packed[kSteps][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const auto a = Core::from_accumulators(dscores, step);
#pragma unroll
      for (int i = 0; i < 4; ++i) packed[step][i] = a.x[i];
    }
    store_scores(packed);
    accumulate(dk, packed, s.q[stage]);
  }

  // dq = dS K
  __device__ __forceinline__ void query_product(float (&dq)[8][4]) {
    constexpr bool kOwnRows = kM == 128;  // or own columns
    const uint64_t a = ptx::swizzled_descriptor(s.dscores[buffer][kOwnRows ? group : 0], 0);
    const uint64_t b = ptx::swizzled_descriptor(s.k[keys.stage][kOwnRows ? 0 : group], 0);
    buffer ^= 1;
    ptx::hold(dq);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kN / 16; ++step) {
      ptx::wgmma<ptx::kMajorMN, ptx::kMajorMN>(dq, a + step * 128, b + step * 128, step > 0, T());
    }
    ptx::wgmma_commit();
  }

  // Behind it dS^T of both warpgroups is there, and neither needs the one before any longer.
  __device__ __forceinline__ void exchange() {
    ptx::fence_async_shared();
    ptx::named_barrier_sync(kExchangeBarrier, 2 * kGroupThreads);
  }

  __device__ __forceinline__ void store_scores(const uint32_t (&packed)[kSteps][4]) {
    const int lane = threadIdx.x % 32, chunk = (lane / 16) ^ (lane % 8);
    char* const row = reinterpret_cast<char*>(s.dscores[buffer][0][warp_key + lane % 16]);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      ptx::stmatrix(row + step / 4 * (kN * 128) + ((chunk ^ (step % 4 * 2)) * 16), packed[step]);
    }
  }

  // scores: S^T becomes weights.
  __device__ __forceinline__ void weigh(float (&scores)[kScoreTiles][4], const Work& work, const Position& now,
                                        const Limits& clear) {
    const int row0 = now.m * kM;
    row0 < clear.begin || row0 + kM > clear.end ? weigh<true>(scores, work, row0) : weigh<false>(scores, work, row0);
    if constexpr (kDropout) mark_dropped(now.h, work.n * kN + warp_key, row0);
  }
  template <bool kMasked>
  __device__ __forceinline__ void weigh(float (&scores)[kScoreTiles][4], const Work& work, int row0) {
    Limits limits[2];
    if (kMasked) {
      const TileMask mask = work.mask(p);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        limits[r] = rows_that_see(mask, work.n * kN + warp_key + 8 * r + g());
        limits[r].begin -= row0 + 2 * t();
        limits[r].end -= row0 + 2 * t();
      }
    }
    const float scale = shared.score_scale;
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
      const float2 lse = *reinterpret_cast<const float2*>(&s.lse[queries.stage][n * 8 + 2 * t()]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float x[2];
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          x[odd] = ptx::ex2(fmaf(scores[n][2 * r + odd], scale, odd ? -lse.y : -lse.x));
          const int row = n * 8 + odd;
          if (kMasked && (row < limits[r].begin || row >= limits[r].end)) x[odd] = 0;
        }
        weights[n / 2][n % 2 * 2 + r] = Core::pack(x[0], x[1]);
      }
    }
  }

  // A sign on a weight stands for a dropped one.
  __device__ __forceinline__ void mark_dropped(int h, int key, int row) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const auto kept = dropout.transposed<1>(h, key, row + step * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // register i: queries 8 * (i / 2), keys 8 * (i % 2), whose byte is i
        const int byte = i / 2 + i % 2 * 2;
        const uint32_t signs = ptx::permute_bytes(kept.even[0], kept.odd[0], 0x4000 + 0x1010 * byte);
        weights[step][i] |= ~signs & 0x80008000u;
      }
    }
  }
  __device__ __forceinline__ void keep(uint32_t (&kept)[kSteps][4]) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) kept[step][i] = kDropout ? Core::not_negative(weights[step][i]) : weights[step][i];
    }
  }

  // dP^T becomes dS^T; masked scores have no gradient, also when dP is not finite.
  template <bool kMasked>
  __device__ __forceinline__ void differentiate(float (&dscores)[kScoreTiles][4]) const {
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
      const float2 delta = *reinterpret_cast<const float2*>(&s.delta[queries.stage][n * 8 + 2 * t()]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 pair = Core::unpack(weights[n / 2][n % 2 * 2 + r]);
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const float weight = odd ? pair.y : pair.x, row_delta = odd ? delta.y : delta.x;
          float& x = dscores[n][2 * r + odd];
          if (kDropout) x = weight >= 0 ? x * shared.keep_scale : 0.f;
          x = fabsf(weight) * (x - row_delta);
          if (kMasked && weight == 0) x = 0;
        }
      }
    }
  }

  // Behind the end of a packed sequence lies another one: 0 * NaN would carry its values over.
  template <int kRows>
  static __device__ __forceinline__ void clear_rows(T (&tile)[kPanels][kRows][kPanelColumns], int from) {
    const int vectors = (kRows - from) * 8, thread = threadIdx.x - kGroupThreads;
#pragma unroll 1
    for (int panel = 0; panel < kPanels; ++panel) {
      uint4* const rows = reinterpret_cast<uint4*>(tile[panel][from]);
#pragma unroll 1
      for (int i = thread; i < vectors; i += 2 * kGroupThreads) rows[i] = make_uint4(0, 0, 0, 0);
    }
  }
  __device__ __forceinline__ void clear_keys(const Work& work) {
    const int from = work.length_k - work.n * kN;
    if (from >= kN || !p.is_varlen()) return;
    clear_rows(s.k[keys.stage], from);
    exchange();
  }
  __device__ __forceinline__ void clear_queries(const Work& work, const Position& now) {
    const int from = work.length_q - now.m * kM;
    if (from >= kM || !p.is_varlen()) return;
    clear_rows(s.q[queries.stage], from);
    clear_rows(s.dout[queries.stage], from);
    exchange();
  }

  // Adds to the fp32 sums; when they have to be deterministic, key tiles take turns.
  __device__ __forceinline__ void add_query_gradient(const float (&dq)[8][4], const Work& work, const Position& now) {
    const int64_t tile = now.h * shared.tiles + work.first_tile + now.m;
    int* const turn = shared.turns + tile * 2 + group;
    int my_turn = 0;
    const bool leader = threadIdx.x % kGroupThreads == 0;
    if (p.deterministic) {
      const int row0 = now.m * kM;
      my_turn = work.n - work.mask(p).keys_of(row0, min(row0 + kM, work.length_q)).begin / kN;
      if (leader) {
        while (ptx::load_acquire(turn) != my_turn) __nanosleep(64);
      }
      ptx::named_barrier_sync(kGroupBarrier + group, kGroupThreads);
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const bool exists = kM == 128 || 64 + c * 8 < kHeadDim || group == 0;
      if (exists) ptx::add_fragment(Sums::fragment(shared, tile, warp_key / 16, c), dq[c]);
    }
    if (p.deterministic) {
      __threadfence();
      ptx::named_barrier_sync(kGroupBarrier + group, kGroupThreads);
      if (leader) ptx::store_release(turn, my_turn + 1);
    }
  }

  __device__ __forceinline__ void write(const Work& work) const {
    const float scale = static_cast<float>(p.softmax_scale);
    const int key = work.n * kN + warp_key + g();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool exists = key + 8 * r < work.length_k;
      const int64_t row = int64_t{work.key_start} + key + 8 * r;
      store_row(row_pointer<T>(p.dk, work.b, work.hk, row), dk, r, scale, false, exists, static_cast<int>(p.head_dim));
      store_row(row_pointer<T>(p.dv, work.b, work.hk, row), dv, r, shared.keep_scale, false, exists,
                static_cast<int>(p.head_dim_v));
    }
  }
};

template <class T, int kHeadDim, bool kDropout>
__global__ void __launch_bounds__(Backward<T, kHeadDim, kDropout>::kThreads, 1)
    backward_kernel(const __grid_constant__ AttnGradParams p, const __grid_constant__ BackwardShared shared,
                    const __grid_constant__ BackwardMaps maps, const __grid_constant__ TileGrid grid) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Kernel = Backward<T, kHeadDim, kDropout>;
  extern __shared__ __align__(1024) unsigned char memory[];
  typename Kernel::Shared& s = *reinterpret_cast<typename Kernel::Shared*>(memory);
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&maps.q, &maps.k, &maps.v, &maps.dout}) ptx::prefetch_tensor_map(map);
    for (int i = 0; i < Kernel::kKeyStages; ++i) {
      ptx::barrier_init(&s.k_full[i], 1);
      ptx::barrier_init(&s.v_full[i], 1);
      ptx::barrier_init(&s.keys_empty[i], Kernel::kWarps);
    }
    for (int i = 0; i < Kernel::kStages; ++i) {
      ptx::barrier_init(&s.q_full[i], 2);  // the copy, and the rows' statistics
      ptx::barrier_init(&s.dout_full[i], 1);
      ptx::barrier_init(&s.queries_empty[i], Kernel::kWarps);
    }
    ptx::barrier_init(&s.work_full, 1);
    ptx::barrier_init(&s.work_empty, Kernel::kWarps);
    ptx::fence_barrier_init();
  }
  __syncthreads();
  // One warpgroup loads; it gives its registers to those that compute.
  if (threadIdx.x < kGroupThreads) {
    ptx::give_registers<Kernel::kRegisters.producer>();
    if (threadIdx.x < 32) typename Kernel::Loader{s, p, shared, maps}.load_tiles(grid);
  } else {
    ptx::take_registers<Kernel::kRegisters.consumer>();
    Kernel(s, p, shared, uniform(static_cast<int>(threadIdx.x) / kGroupThreads) - 1).compute_tiles();
  }
#endif
}

template <class T, int kHeadDim>
BackwardShared backward_shared(const AttnGradParams& p) {
  using Sums = QuerySums<T, kHeadDim>;
  return BackwardShared(p, Sums::kM, Sums::kFloats, 2);
}

// Key heads whose sums of dq, queries and output gradients stay in the L2 cache together.
inline int64_t backward_section(const AttnGradParams& p) {
  constexpr int64_t kCacheBytes = 32 << 20;
  const int64_t head_bytes =
      std::max<int64_t>(1, p.seqlen_q * (3 * p.head_dim + p.head_dim_v) * 2 * p.group_size());
  // Without a mask all tiles are equally long: then those of one head follow each other.
  if (p.window_right == kUnbounded) return 1;
  return std::clamp<int64_t>(kCacheBytes / head_bytes, 1, std::max<int64_t>(p.batch * p.heads_k, 1));
}

template <class T, int kHeadDim, bool kDropout>
void launch_main(const AttnGradParams& p, const BackwardShared& shared) {
  using Kernel = Backward<T, kHeadDim, kDropout>;
  const bool bfloat16 = p.dtype == DType::kBFloat16;
  const int64_t batch = p.is_varlen() ? 1 : p.batch;
  const int64_t rows_q = p.is_varlen() ? p.total_q : p.seqlen_q, rows_k = p.is_varlen() ? p.total_k : p.seqlen_k;
  const BackwardMaps maps{tensor_map(p.q, bfloat16, p.head_dim, rows_q, p.heads_q, batch, Kernel::kM),
                          tensor_map(p.k, bfloat16, p.head_dim, rows_k, p.heads_k, batch, Kernel::kN),
                          tensor_map(p.v, bfloat16, p.head_dim_v, rows_k, p.heads_k, batch, Kernel::kN),
                          tensor_map(p.dout, bfloat16, p.head_dim_v, rows_q, p.heads_q, batch, Kernel::kM)};
  const int64_t blocks = tiles(p.seqlen_k, Kernel::kN), all = blocks * p.batch * p.heads_k;
  const TileGrid grid{static_cast<int>(all), static_cast<int>(blocks), static_cast<int>(backward_section(p)),
                      shared.drawn};
  launch(backward_kernel<T, kHeadDim, kDropout>, "sm90 backward", p, std::min<int64_t>(all, multiprocessors()),
         Kernel::kThreads, static_cast<int>(sizeof(typename Kernel::Shared)), shared, maps, grid);
}

template <class T, int kHeadDim>
size_t backward_bytes(const AttnGradParams& p) {
  return static_cast<size_t>(backward_shared<T, kHeadDim>(p).bytes);
}

template <class T, int kHeadDim>
void backward(const AttnGradParams& p) {
  const BackwardShared shared = backward_shared<T, kHeadDim>(p);
  launch_prepare<T>(p, shared);
  p.has_dropout() ? launch_main<T, kHeadDim, true>(p, shared) : launch_main<T, kHeadDim, false>(p, shared);
  launch_finish<QuerySums<T, kHeadDim>>(p, shared);
}

}  // namespace flashattn_ext::sm90
