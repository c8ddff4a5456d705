// Attention to a key-value cache: a thread block computes parts of tasks (plan.cuh), which are bound by the reading of
// keys and values. Teams of warps walk over the keys of a part side by side, each with a ring of its own in shared
// memory and an online softmax of its own; at the end of the part their sums are added up in their order.
#pragma once

#include "../common/general_score.cuh"
#include "../common/intervals.cuh"
#include "../common/launch.cuh"
#include "../common/operand_tile.cuh"
#include "../common/scores.cuh"
#include "../common/tile.cuh"
#include "../ptx/barrier.cuh"
#include "../ptx/grid.cuh"
#include "../sm80/products.cuh"
#include "kernels.h"
#include "plan.cuh"

namespace flashattn_ext::decode {

template <class T, int kHeadDim, bool kWide>
struct Split {
  using Core = TensorCore<T>;
  static constexpr Tile kTile = tile<sizeof(T), kHeadDim, kWide>();
  static constexpr int kRowTiles = kTile.row_tiles, kRows = kTile.rows();
  static constexpr int kColumnWarps = kTile.column_warps, kTeamWarps = kTile.row_warps * kColumnWarps;
  static constexpr int kKeys = kTile.keys, kStages = kTile.stages;
  static constexpr bool kHasRegisters = sizeof(T) == 2 && kRowTiles == 1 && kHeadDim <= 128;  // left over
  using KeyTile = SwizzledTile<T, kHeadDim>;                                                  // also of values
  static constexpr int kQueryStride = kTileStride<T, kHeadDim>, kVectorElements = kVectorBytes / sizeof(T);
  static constexpr int kStageElements = 2 * kKeys * kHeadDim;
  static constexpr int kScoreTiles = kKeys / 8, kSteps = kKeys / Core::kK;
  // Columns of the result that a warp has, and those that it computes one after another: of many fp32 columns at once
  // the compiler would load so many values ahead that registers run out.
  static constexpr int kWarpColumns = kHeadDim / kColumnWarps;
  static constexpr int kChunkColumns = sizeof(T) == 4 && kWarpColumns > 128 ? 16 : kWarpColumns;
  static constexpr int kChunks = kWarpColumns / kChunkColumns, kChunkTiles = kChunkColumns / 8;
  // One tile of 16-bit rows stays in registers while a part is computed.
  static constexpr bool kKeepsQueries = kHasRegisters;
  static constexpr int kSumStride = kHeadDim + 8;  // floats; eight rows start in different banks
  static_assert(kUnitKeys % kKeys == 0);
  // At the end of a part a team's sums replace its ring. A ring of three stages gives but its last one for them: the
  // others are filled with the next part's first keys meanwhile.
  static constexpr bool kAhead = kStages > 2;
  static constexpr int kSumsBegin = kAhead ? (kStages - 1) * kStageElements : 0;
  static constexpr int kSumsEnd = kSumsBegin + kRows * kSumStride * static_cast<int>(sizeof(float) / sizeof(T));
  static constexpr int kTeamElements = kStages * kStageElements > kSumsEnd ? kStages * kStageElements : kSumsEnd;

  // A warp copies runs of neighbouring keys: pages are multiples of 16 keys.
  static constexpr int kWarpKeys = kKeys / kTeamWarps, kRunKeys = kWarpKeys < 16 ? kWarpKeys : 16;
  static constexpr int kRuns = kWarpKeys / kRunKeys;
  static constexpr int kRowVectors = kHeadDim / kVectorElements, kRunVectors = kRunKeys * kRowVectors;
  // A warp's lanes have the same places again after kPeriod vectors each, which are kPeriodKeys rows.
  static constexpr int kPeriod = kRowVectors % 32 == 0 ? kRowVectors / 32 : 32 % kRowVectors == 0 ? 1 : 3;
  static constexpr int kPeriodKeys = 32 * kPeriod / kRowVectors;
  static_assert(kRunVectors % (32 * kPeriod) == 0 && 32 * kPeriod % kRowVectors == 0);
  static_assert((kPeriodKeys & (kPeriodKeys - 1)) == 0);

  // Shared memory: the tile of queries, maxima and sums of each team's rows, rings of the teams.
  struct RowSum {
    float max, sum;
  };
  static constexpr int kQueryElements = kRows * kQueryStride;
  static constexpr int kQueryBytes = (kAhead ? 2 : 1) * kQueryElements * static_cast<int>(sizeof(T));
  static constexpr int kTeamBytes =
      kRows * static_cast<int>(sizeof(RowSum)) + kTeamElements * static_cast<int>(sizeof(T));

  struct Runs {
    const T *k[kRuns], *v[kRuns];
  };

  const DecodeParams& p;
  const Plan& plan;
  const GeneralScore& score;
  T* q_tiles;
  RowSum* row_sums;
  T* rings;
  int teams;
  bool aligned;  // whether rows of the caches can be read in vectors
  bool whole;    // and fill rows of the tiles
  int now = 0;   // which of parts() and works() is computed
  const int thread = kHasRegisters ? ptx::opaque(threadIdx.x) : static_cast<int>(threadIdx.x);
  // The compiler takes places for cheap and would compute them for every operand again, which registers left over
  // avoid.
  const int kept_key_place = kHasRegisters ? ptx::opaque(KeyTile::first_place_b()) : 0;
  const int kept_value_place = kHasRegisters ? ptx::opaque(KeyTile::first_place_transposed()) : 0;
  float out[kChunks][kRowTiles][kChunkTiles][4];
  OnlineSoftmax softmax[kRowTiles];
  typename Core::A queries[kKeepsQueries ? kHeadDim / Core::kK : 1];

  __device__ Split(const DecodeParams& params, const Plan& plan, const GeneralScore& score, bool aligned,
                   unsigned char* shared)
      : p(params),
        plan(plan),
        score(score),
        teams(blockDim.x / 32 / kTeamWarps),
        aligned(aligned),
        whole(aligned && params.head_dim == kHeadDim && params.head_dim_v == kHeadDim) {
    q_tiles = reinterpret_cast<T*>(shared);
    row_sums = reinterpret_cast<RowSum*>(shared + kQueryBytes);
    rings = reinterpret_cast<T*>(row_sums + teams * kRows);
  }

  // What is computed, and what comes next, in shared memory: all threads write the same, and registers are scarce.
  static __device__ __forceinline__ Part* parts() {
    __shared__ Part parts[2];
    return parts;
  }
  static __device__ __forceinline__ SequenceWork* works() {
    __shared__ SequenceWork works[2];
    return works;
  }
  __device__ __forceinline__ const Part& part() const { return parts()[now]; }
  __device__ __forceinline__ const SequenceWork& work() const { return works()[now]; }
  __device__ __forceinline__ T* q_tile() const { return q_tiles + (kAhead ? now * kQueryElements : 0); }
  __device__ __forceinline__ int lane() const { return thread % 32u; }
  __device__ __forceinline__ int g() const { return lane() / 4; }
  __device__ __forceinline__ int t() const { return lane() % 4; }
  __device__ __forceinline__ int team() const { return thread / 32u / kTeamWarps; }
  __device__ __forceinline__ int member() const { return thread / 32u % kTeamWarps; }
  __device__ __forceinline__ void team_sync() const {
    if constexpr (kTeamWarps == 1) {
      __syncwarp();
    } else {
      ptx::named_barrier_sync(1 + team(), kTeamWarps * 32);
    }
  }
  __device__ __forceinline__ T* stage(int i) const { return rings + team() * kTeamElements + i * kStageElements; }

  // The first packed row of this warp within the tile, and of this lane, whose others are 8 and 16 rows on.
  __device__ __forceinline__ int warp_row() const { return member() / kColumnWarps * 16 * kRowTiles; }
  __device__ __forceinline__ int lane_row() const { return warp_row() + g(); }
  // The first column of the result that this warp has.
  __device__ __forceinline__ int warp_column() const { return member() % kColumnWarps * kWarpColumns; }
  // The query and the query head of a packed row of the tile. Rows after the last one count as queries after the last.
  struct Row {
    int query, head;
  };
  __device__ __forceinline__ Row row(int i) const {
    const int packed = part().row_tile * kRows + i;
    return {packed / plan.group, part().head_k * plan.group + packed % plan.group};
  }
  __device__ __forceinline__ Mask32 mask() const { return Mask32(p, work().queries, work().length); }

  // --- which parts
  // ---------------------------------------------------------------------------------------------------

  __device__ void run_fixed() {
    const int heads = static_cast<int>(p.heads_k), split = blockIdx.x % plan.splits, task = blockIdx.x / plan.splits;
    Part& part = parts()[now];
    SequenceWork& work = works()[now];
    part.b = task / plan.row_tiles / heads;
    part.head_k = task / plan.row_tiles % heads;
    part.is_first = split == 0;
    part.slot = plan.splits > 1 ? static_cast<int>(blockIdx.x) : -1;
    work = SequenceWork::of<kRows>(p, plan, part.b);
    const IndexRange keys = split_keys({work.begin, work.end}, kUnitKeys, plan.splits, split);
    part.begin = static_cast<int>(keys.begin);
    part.end = static_cast<int>(keys.end);
    // The longest tiles of a causal call start first. A sequence may be longer than the host knows, if it is not split.
    int row_tile = plan.row_tiles - 1 - task % plan.row_tiles;
    if (plan.splits > 1 && split == 0 && threadIdx.x == 0) {
      const int slot = task * plan.splits, parts = row_tile < work.tiles ? plan.splits : 0;
      plan.split_tasks[task] = {part.b, part.head_k, row_tile, parts, slot, slot};
    }
    for (; row_tile < work.tiles; row_tile += plan.row_tiles) {
      part.row_tile = row_tile;
      Walk walk = start();
      walk_keys(walk);
      finish();
    }
  }

  __device__ void run_share() {
    __shared__ Share share;  // what is left of it
    if (!plan.by_task && threadIdx.x == 0) plan.split_tasks[blockIdx.x].parts = 0;
    Share::find<kRows>(&share, &works()[now], p, plan);
    if (!find_part(&share, now, true)) return;
    for (Walk walk = start();;) {
      bool has_next = kAhead && find_part(&share, now ^ 1);  // while the first keys of this part are on their way
      walk_keys(walk);
      if (has_next) walk = start_next();
      finish();
      if (!kAhead && find_part(&share, now)) {
        walk = start();
        has_next = true;
      }
      if (!has_next) return;
      if (kAhead) now ^= 1;
    }
  }

  // Takes the part that the share begins with. Returns false when nothing is left. is_known: whether works() has the
  // sequence already.
  __device__ __forceinline__ bool find_part(Share* share, int which, bool is_known = false) {
    for (; share->begin < share->end; is_known = false) {
      if (!is_known) works()[which] = SequenceWork::of<kRows>(p, plan, share->b);
      const int end = next_part(*share, &parts()[which], works()[which]);
      const bool found = end > share->begin;
      __syncthreads();
      if (threadIdx.x == 0) share->advance(end, works()[which].task_units(p));
      __syncthreads();
      if (found) return true;
    }
    return false;
  }

  // Finds the part that the share begins with, and returns its end on the line.
  __device__ __forceinline__ int next_part(const Share& share, Part* part, const SequenceWork& work) {
    const int block = static_cast<int>(blockIdx.x);
    const int unit = share.begin - share.sequence_begin;
    if (unit >= work.task_units(p)) return share.begin;  // of the next sequence
    const int task = unit / work.units, task_begin = share.sequence_begin + task * work.units;
    const int task_end = task_begin + work.units, end = min(task_end, share.end);
    const int first_unit = work.first_unit() - task_begin;
    const bool is_first = share.begin == task_begin, is_last = end == task_end;
    part->b = share.b;
    part->head_k = task / work.tiles;
    part->row_tile = task % work.tiles;
    part->begin = max(work.begin, (first_unit + share.begin) * kUnitKeys);
    part->end = min(work.end, (first_unit + end) * kUnitKeys);
    part->is_first = is_first;
    // A share that continues a task has the block's own slot for that, and one after those of all blocks for a task
    // that it begins.
    part->slot = is_first && is_last ? -1 : block + (is_first ? plan.blocks : 0);
    if (is_first && (plan.by_task || !is_last) && threadIdx.x == 0) {
      const int at =
          plan.by_task ? (part->b * static_cast<int>(p.heads_k) + part->head_k) * work.tiles + part->row_tile : block;
      const int parts = is_last ? 0 : share.block_of(task_end - 1) - block + 1;
      plan.split_tasks[at] = {part->b, part->head_k, part->row_tile, parts, block + plan.blocks, block};
    }
    return end;
  }

  // --- one part
  // ------------------------------------------------------------------------------------------------------

  // A team's way over the keys of a part.
  struct Walk {
    Limits keys, whole;  // rows of the room that some row of the tile sees in the part, and that all of them see
    int first, steps;    // the team's first step, and how many it takes
    KeyLocator locator;
    Runs runs;  // of the step that is copied next
  };

  // Starts copying the queries and the first keys of a part.
  __device__ __forceinline__ Walk start() {
    const int first_query = part().row_tile * kRows / plan.group;
    const int end_query = min((part().row_tile * kRows + kRows - 1) / plan.group + 1, work().queries);
    const Limits visible = mask().keys_of(first_query, end_query), whole = mask().keys_of_all(first_query, end_query);
    const int begin = max(part().begin, work().first_row + visible.begin);
    const int end = max(begin, min(part().end, work().first_row + visible.end));
    const int first = begin / kKeys + team(), last = end > begin ? (end - 1) / kKeys : -1;
    Walk walk{{begin, end},
              {work().first_row + whole.begin, work().first_row + whole.end},
              first,
              last >= first ? (last - first) / teams + 1 : 0,
              KeyLocator(p, part().b),
              {}};
    locate(walk, 0);
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) {
      copy_step(walk, i, i);
      if (i == 0) load_queries();  // after keys, which take longer
      ptx::cp_async_commit();
    }
    return walk;
  }
  __device__ __forceinline__ Walk start_next() {
    now ^= 1;
    const Walk walk = start();
    now ^= 1;
    return walk;
  }

  __device__ __forceinline__ void finish() {
    store_sums();
    __syncthreads();
    store_rows();
    __syncthreads();
  }

  __device__ void load_queries() {
    const int64_t start = query_sequence(p, part().b).start;
    const int columns = static_cast<int>(p.head_dim), rows = work().queries * plan.group;
    const bool in_vectors = rows_are_aligned(p.q);
#pragma unroll 1
    for (int v = threadIdx.x; v < kRows * kRowVectors; v += blockDim.x) {
      const int i = v / kRowVectors, column = v % kRowVectors * kVectorElements;
      const Row at = row(i);
      const bool exists = part().row_tile * kRows + i < rows;
      const T* const from = exists ? row_pointer<const T>(p.q, part().b, at.head, start + at.query) + column : nullptr;
      T* const to = q_tile() + i * kQueryStride + column;
      const int elements = exists ? columns - column : 0;
      in_vectors ? copy_vector(to, from, elements) : copy_elements(to, from, elements);
    }
  }

  // Whether rows can be read in vectors that are 16-byte aligned.
  static __device__ __forceinline__ bool rows_are_aligned(const TensorView& t) {
    const int64_t strides = t.batch_stride | t.head_stride | t.row_stride;
    return reinterpret_cast<uintptr_t>(t.data) % kVectorBytes == 0 && strides % kVectorElements == 0;
  }

  // Starts copying a vector of which `elements` exist, or all when there are more; the others become zero.
  static __device__ __forceinline__ void copy_vector(T* to, const T* from, int elements) {
    ptx::cp_async_part(to, from, min(max(elements, 0), kVectorElements) * static_cast<int>(sizeof(T)));
  }
  // The same from any address, and at once.
  static __device__ __forceinline__ void copy_elements(T* to, const T* from, int elements) {
#pragma unroll 1
    for (int e = 0; e < kVectorElements; ++e) {
      T zero;
      narrow(0.f, &zero);
      to[e] = e < elements ? from[e] : zero;
    }
  }

  __device__ __forceinline__ void walk_keys(Walk& walk) {
    start_rows();
    ptx::cp_async_wait<kStages - 2>();
    __syncthreads();  // all queries are there
    if constexpr (kKeepsQueries) {
#pragma unroll
      for (int d = 0; d < kHeadDim; d += Core::kK) queries[d / Core::kK] = query_operand(0, d);
    }
    int from = 0, to = kStages - 1;
    for (int i = 0; i < walk.steps; ++i) {
      ptx::cp_async_wait<kStages - 2>();
      team_sync();
      copy_step(walk, i + kStages - 1, to);
      ptx::cp_async_commit();
      compute_step(stage(from), (walk.first + i * teams) * kKeys, walk.whole);
      from = from + 1 == kStages ? 0 : from + 1;
      to = to + 1 == kStages ? 0 : to + 1;
    }
    team_sync();
  }

  // Starts copying the team's i-th step, if there is one, and finds the one after it.
  __device__ __forceinline__ void copy_step(Walk& walk, int i, int to) const {
    if (i >= walk.steps) return;
    load(stage(to), walk.runs, walk.first + i * teams, walk.keys);
    locate(walk, i + 1);
  }

  // Where the runs of a step are that this warp copies: found a step before they are copied, because a page is read
  // from the block table.
  __device__ __forceinline__ void locate(Walk& walk, int step) const {
    if (step >= walk.steps) return;
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const int row = (walk.first + step * teams) * kKeys + member() * kWarpKeys + i * kRunKeys;
      const KeyRun run = walk.locator.run_of_row(min(row, walk.keys.end - 1) / kRunKeys * kRunKeys, kRunKeys);
      walk.runs.k[i] = row_pointer<const T>(p.k, run.entry, part().head_k, run.row);
      walk.runs.v[i] = row_pointer<const T>(p.v, run.entry, part().head_k, run.row);
    }
  }

  // Starts copying the keys and values of a step.
  __device__ __forceinline__ void load(T* to, const Runs& runs, int step, const Limits& keys) const {
    const int columns = static_cast<int>(p.head_dim), columns_v = static_cast<int>(p.head_dim_v);
    const bool all = whole && step * kKeys >= keys.begin && (step + 1) * kKeys <= keys.end;
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const int key = member() * kWarpKeys + i * kRunKeys, row = step * kKeys + key;
      T* const k_to = to + key * kHeadDim;
      T* const v_to = k_to + kKeys * kHeadDim;
      if (all) {
        load_whole_run(k_to, runs.k[i], p.k.row_stride);
        load_whole_run(v_to, runs.v[i], p.v.row_stride);
      } else {
        load_run(k_to, runs.k[i], p.k.row_stride, columns, row, keys);
        load_run(v_to, runs.v[i], p.v.row_stride, columns_v, row, keys);
      }
    }
  }
  // A run of which every element exists: what the loop of a long sequence spends its instructions on.
  __device__ __forceinline__ void load_whole_run(T* to, const T* from, int64_t row_stride) const {
#pragma unroll
    for (int phase = 0; phase < kPeriod; ++phase) {
      const int v = lane() + 32 * phase, key = v / kRowVectors, column = v % kRowVectors * kVectorElements;
      const T* source = from + key * row_stride + column;
      T* const target = to + key * kHeadDim;
      const int place = column ^ KeyTile::places(key);
#pragma unroll
      for (int i = 0; i < kRunVectors / (32 * kPeriod); ++i) {
        // key is less than kPeriodKeys, a power of two: their bits do not meet.
        const int further = i * kPeriodKeys;
        ptx::cp_async(target + further * kHeadDim + (place ^ KeyTile::places(further)), source, true);
        source += kPeriodKeys * row_stride;
      }
    }
  }
  // row: of the room, the first one of the run. What no row of the tile sees is not read and becomes zero.
  __device__ __forceinline__ void load_run(T* to, const T* from, int64_t row_stride, int columns, int row,
                                           const Limits& keys) const {
    const auto copy = [&](int v, const auto& copy_one) {
      const int key = v / kRowVectors, column = v % kRowVectors * kVectorElements;
      const bool exists = row + key >= keys.begin && row + key < keys.end;
      copy_one(to + KeyTile::offset(key, column), from + key * row_stride + column, exists ? columns - column : 0);
    };
    if (aligned) {
#pragma unroll 4
      for (int i = 0; i < kRunVectors / 32; ++i) copy(lane() + 32 * i, copy_vector);
    } else {
#pragma unroll 1
      for (int v = lane(); v < kRunVectors; v += 32) copy(v, copy_elements);
    }
  }

  // The rows' beginning: the sink, in the part that has it and in one team of that.
  __device__ __forceinline__ void start_rows() {
    const bool has_sink = p.has_sink && part().is_first && team() == 0;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      for_chunks([&](int c) { set_zero(out[c][i]); });
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Row at = row(lane_row() + 16 * i + 8 * r);
        const float sink = has_sink && at.query < work().queries ? head_sink(p, at.head) : -infinity();
        softmax[i].max[r] = sink;
        softmax[i].sum[r] = t() == 0 && sink_counts(sink) ? 1.f : 0.f;
      }
    }
  }

  __device__ __forceinline__ typename Core::A query_operand(int row_tile, int column) const {
    return Core::load_a(q_tile(), kQueryStride, warp_row() + row_tile * 16, column);
  }

  __device__ __forceinline__ int key_place() const { return kHasRegisters ? kept_key_place : KeyTile::first_place_b(); }
  __device__ __forceinline__ int value_place() const {
    return kHasRegisters ? kept_value_place : KeyTile::first_place_transposed();
  }

  // row0: of the room, the first key of the step.
  __device__ __forceinline__ void compute_step(const T* keys, int row0, const Limits& whole) {
    float scores[kRowTiles][kScoreTiles][4];
    auto operand = [&](int i, int d) {
      if constexpr (kKeepsQueries) {
        return queries[d / Core::kK];
      } else {
        return query_operand(i, d);
      }
    };
    sm80::score_product<T, kHeadDim>(scores, operand, [&](typename Core::B(&pair)[2], int n, int d) {
      KeyTile::load_b(pair, keys + n * 8 * kHeadDim, KeyTile::moved(key_place(), d));
    });
    score.make_logits<T>(scores);
    if (p.alibi_slopes) add_slopes(scores, row0);
    if (row0 < whole.begin || row0 + kKeys > whole.end) hide_unseen(scores, row0);
    if (p.has_intervals()) hide_by_mask(scores, row0);
    const T* const values = keys + kKeys * kHeadDim;
    typename Core::A weights[kRowTiles][kSteps];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      softmax[i].weigh(scores[i], StoredLogit(), kTolerance,
                       [&](const float (&shrink)[2]) { for_chunks([&](int c) { rescale(out[c][i], shrink); }); });
#pragma unroll
      for (int step = 0; step < kSteps; ++step) weights[i][step] = Core::from_accumulators(scores[i], step);
    }
    for_chunks([&](int chunk) {
      const int column = warp_column() + chunk * kChunkColumns;
      sm80::accumulate<T, kSteps>(
          out[chunk], [&](int i, int step) { return weights[i][step]; },
          [&](typename Core::B(&pair)[2], int step, int c) {
            KeyTile::load_b_transposed(pair, values + step * Core::kK * kHeadDim,
                                       KeyTile::moved(value_place(), column + c * 8));
          });
      if (kChunks > 1) __syncwarp();
    });
  }

  template <class Body>
  static __device__ __forceinline__ void for_chunks(const Body& body) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) body(c);
  }
  template <class Body>
  static __device__ __forceinline__ void each_row(const Body& body) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) body(i, r);
    }
  }

  __device__ __forceinline__ void hide_unseen(float (&x)[kRowTiles][kScoreTiles][4], int row0) const {
    const int first = row0 + 2 * t() - work().first_row;
    each_row([&](int i, int r) {
      const int query = row(lane_row() + 16 * i + 8 * r).query;
      const Limits seen = mask().keys_of(query, query + 1);
      const int begin = seen.begin - first, end = seen.end - first;
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          if (n * 8 + odd < begin || n * 8 + odd >= end) x[i][n][2 * r + odd] = -infinity();
        }
      }
    });
  }

  __device__ __forceinline__ void add_slopes(float (&x)[kRowTiles][kScoreTiles][4], int row0) const {
    const float* const slopes = static_cast<const float*>(p.alibi_slopes) + part().b * p.alibi_batch_stride;
    const int position = work().first_row + mask().first_position();  // of query 0, as a row of the room
    each_row([&](int i, int r) {
      const Row at = row(lane_row() + 16 * i + 8 * r);
      const float slope = at.query < work().queries ? slopes[at.head] * kLog2E<float> : 0.f;
      const int distance = row0 + 2 * t() - position - at.query;
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          x[i][n][2 * r + odd] -= slope * fabsf(static_cast<float>(distance + n * 8 + odd));
        }
      }
    });
  }

  // The intervals of a Mask are about the last mask_keys keys of the sequence.
  __device__ __forceinline__ void hide_by_mask(float (&x)[kRowTiles][kScoreTiles][4], int row0) const {
    const int masked = static_cast<int>(p.mask_keys), start = work().first_row + work().length - masked;
    if (row0 + kKeys <= start) return;
    const int first = row0 + 2 * t() - start;  // the interval of this lane's first key
    each_row([&](int i, int r) {
      const Row at = row(lane_row() + 16 * i + 8 * r);
      if (at.query >= work().queries) return;
      const int2* const pairs = reinterpret_cast<const int2*>(head_intervals(p, part().b, at.head, 0));
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const int j = first + n * 8 + odd;
          if (j < 0 || j >= masked) continue;
          const int2 seen_by = __ldg(pairs + j);
          if (at.query < seen_by.x || at.query >= seen_by.y) x[i][n][2 * r + odd] = -infinity();
        }
      }
    });
  }

  // --- the end of a part
  // ---------------------------------------------------------------------------------------------

  // What a team has summed up replaces its ring.
  __device__ __forceinline__ float* sums(int team) const {
    return reinterpret_cast<float*>(rings + team * kTeamElements + kSumsBegin);
  }
  __device__ __forceinline__ void store_sums() {
    float* const own = sums(team());
    const int rows = tile_rows();
    each_row([&](int i, int r) {
      const int row = lane_row() + 16 * i + 8 * r;
      const float sum = softmax[i].total(r);
      if (row >= rows) return;
      if (t() == 0 && warp_column() == 0) row_sums[team() * kRows + row] = {softmax[i].max[r], sum};
      for_chunks([&](int c) {
#pragma unroll
        for (int n = 0; n < kChunkTiles; ++n) {
          *reinterpret_cast<float2*>(own + row * kSumStride + warp_column() + c * kChunkColumns + n * 8 + 2 * t()) =
              make_float2(out[c][i][n][2 * r], out[c][i][n][2 * r + 1]);
        }
      });
    });
  }

  // Rows of the tile that exist.
  __device__ __forceinline__ int tile_rows() const {
    return min(kRows, work().queries * plan.group - part().row_tile * kRows);
  }

  // Adds up the teams; a thread does four columns of a row at a time.
  __device__ __forceinline__ void store_rows() {
    constexpr int kGroups = kHeadDim / 4, kMostTeams = kMaxWarps / kTeamWarps;
    const int columns = static_cast<int>(p.head_dim_v);
    const int64_t start = query_sequence(p, part().b).start;
    const int vectors = tile_rows() * kGroups;
#pragma unroll 1
    for (int v = thread; v < vectors; v += blockDim.x) {
      const int i = v / kGroups, column = v % kGroups * 4;
      const Row at = row(i);
      if (column >= columns) continue;
      float max = -infinity(), sum = 0, x[4] = {};
      RowSum own[kMostTeams];
#pragma unroll
      for (int n = 0; n < kMostTeams; ++n) own[n] = n < teams ? row_sums[n * kRows + i] : RowSum{-infinity(), 0.f};
#pragma unroll
      for (int n = 0; n < kMostTeams; ++n) max = fmaxf(max, own[n].max);
#pragma unroll
      for (int n = 0; n < kMostTeams; ++n) {
        if (own[n].sum == 0) continue;
        const float weight = ptx::ex2(own[n].max - finite_max(max));
        const float4 values = *reinterpret_cast<const float4*>(sums(n) + i * kSumStride + column);
        sum += own[n].sum * weight;
        x[0] += values.x * weight, x[1] += values.y * weight, x[2] += values.z * weight, x[3] += values.w * weight;
      }
      const float factor = sum == 0 ? 0.f : 1 / sum;
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = sum == 0 ? 0.f : x[e] * factor;
      if (part().slot < 0) {
        const float lse = sum == 0 ? -infinity() : row_lse(finite_max(max), log2f(sum));
        if (column == 0) *row_statistic(p.lse, part().b, at.head, start + at.query) = lse;
        T* const to = row_pointer<T>(p.out, part().b, at.head, start + at.query) + column;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (column + e < columns) narrow(x[e], to + e);
        }
      } else {
        const int64_t slot_row = static_cast<int64_t>(part().slot) * kRows + i;
        *reinterpret_cast<float4*>(plan.partial_out + slot_row * kHeadDim + column) =
            make_float4(x[0], x[1], x[2], x[3]);
        if (column == 0) plan.partial_lse[slot_row] = sum == 0 ? -infinity() : finite_max(max) + log2f(sum);
      }
    }
  }
};

template <class T, int kHeadDim, bool kWide>
__global__ void __launch_bounds__(kMaxWarps * 32, 1)
    split_kernel(const __grid_constant__ DecodeParams p, const __grid_constant__ Plan plan,
                 const __grid_constant__ GeneralScore score, bool aligned) {
  extern __shared__ __align__(128) unsigned char shared[];
  ptx::wait_for_previous_kernel();
  ptx::let_next_kernel_start();
  Split<T, kHeadDim, kWide> split(p, plan, score, aligned, shared);
  plan.splits > 0 ? split.run_fixed() : split.run_share();
}

template <class T, int kHeadDim, bool kWide>
TileSizes tile_sizes() {
  using Kernel = Split<T, kHeadDim, kWide>;
  return {Kernel::kRows, Kernel::kTeamWarps, Kernel::kQueryBytes, Kernel::kTeamBytes};
}

template <class T, int kHeadDim, bool kWide>
void split(const DecodeParams& p, const Plan& plan, int warps, int shared_bytes, bool aligned) {
  launch_early(split_kernel<T, kHeadDim, kWide>, "decode", p, dim3(static_cast<unsigned>(plan.blocks)), warps * 32,
               shared_bytes, p, plan, GeneralScore::of(p), aligned);
}

}  // namespace flashattn_ext::decode
