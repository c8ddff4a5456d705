// The split-KV attention kernel of decoding, bound by the memory bandwidth of reading keys and values. A thread block
// computes parts (KV splits) of tasks (plan.h) one after another. The teams of warps (tiles.h) interleave the steps of
// a part's keys. Each team has its own multistage buffer (ring) in shared memory and its own online softmax; the
// epilogue combines the teams in a fixed order.
#pragma once

#include "cuda/decode/split/kernels.h"
#include "cuda/decode/split/key_format.cuh"
#include "cuda/decode/split/plan.cuh"
#include "cuda/ptx/async.cuh"
#include "cuda/score/distance_bias.cuh"
#include "cuda/score/general_score.cuh"
#include "cuda/score/intervals.cuh"
#include "cuda/score/scores.cuh"
#include "cuda/tile/operand_tile.cuh"
#include "cuda/tile/tile.cuh"
#include "cuda/tile/warp.cuh"

namespace flashattn_ext::decode {

// Key: the type of keys and values. T: the type of q, and the element of tiles in shared memory.
template <class Key, int kHeadDim, int kTileRows>
struct Split {
  static constexpr DecodeRow kTableRow = row_of_tile<Key, kHeadDim, kTileRows>();
  static constexpr Tile kTile = kTableRow.tile;
  static constexpr TileSizes kSizes = sizes_of(kTypeOf<Key>, kTableRow);
  static constexpr int kRowTiles = kTile.row_tiles, kRows = kTile.rows();  // kRows: of a KV head
  // A tile of two KV heads has the rows of the first one in the upper halves of the MMA tiles. Both products multiply
  // all rows with the keys and values of each head, and what is of the other head is not used.
  static constexpr int kHeads = kTile.heads;
  static constexpr int kAllRows = kTile.all_rows();
  static_assert(kHeads == 1 || (kHeads == 2 && kAllRows == 16));
  using Format = KeyFormat<Key, kRowTiles>;
  using T = typename Format::T;
  using Core = TensorCore<T>;
  static constexpr int kColumnWarps = kTile.column_warps, kTeamWarps = kTile.row_warps * kColumnWarps;
  static constexpr int kTeamBarriers = 1;  // named barriers, one for each team, from this number on; 0: __syncthreads
  static constexpr int kKeys = kTile.keys, kStages = kTile.stages;
  static constexpr bool kHasRegisters = sizeof(T) == 2 && kRowTiles == 1 && kHeadDim <= 128;  // registers to spare
  static constexpr int kPack = Format::kPack, kRowElements = kHeads * kHeadDim / kPack;       // per row of keys
  using KeyTile = SwizzledTile<T, kRowElements>;                                              // for keys and values
  static constexpr int kQueryStride = kTileStride<T, kHeadDim>, kVectorElements = kVectorBytes / sizeof(T);
  static constexpr int kQueryVectors = kHeadDim / kVectorElements;
  static constexpr int kStageElements = 2 * kKeys * kRowElements;
  static constexpr int kScoreTiles = kKeys / 8, kSteps = kKeys / Core::kK;
  // Output columns per warp, computed in chunks. With many fp32 columns in one chunk the compiler hoists so many
  // loads of values that registers spill.
  static constexpr int kWarpColumns = kHeads * kHeadDim / kColumnWarps;
  static constexpr int kChunkColumns = sizeof(T) == 4 && kWarpColumns > 128 ? 16 : kWarpColumns;
  static constexpr int kChunks = kWarpColumns / kChunkColumns, kChunkTiles = kChunkColumns / 8;
  // The query fragments stay in registers for the whole part, if a warp has one row tile of 16-bit elements.
  static constexpr bool kKeepsQueries = kHasRegisters;
  static constexpr int kSumStride = kHeadDim + kSumPadding;  // in floats
  static_assert(kUnitKeys % kKeys == 0);
  static constexpr bool kAhead = kSizes.ahead;
  static constexpr int kSumsBegin = kSizes.sums_begin, kTeamElements = kSizes.team_elements;
  static_assert(kTeamElements >= kStages * kStageElements);

  // A warp copies runs of adjacent keys. A run never crosses pages, whose sizes are multiples of 16 keys.
  static constexpr int kWarpKeys = kKeys / kTeamWarps, kRunKeys = kWarpKeys < 16 ? kWarpKeys : 16;
  // It copies kRunsAtOnce runs at the same time, each with kRunLanes lanes, so that each lane locates one of them only.
  static constexpr int kRuns = kWarpKeys / kRunKeys, kRunsAtOnce = Format::kSparesInstructions ? kRuns : 1;
  static constexpr int kRunLanes = 32 / kRunsAtOnce, kLaneRuns = kRuns / kRunsAtOnce;
  static constexpr int kRowVectors = kRowElements / kVectorElements, kRunVectors = kRunKeys * kRowVectors;
  // The assignment of lanes to columns repeats after kPeriod vectors per lane, which cover kPeriodKeys rows.
  static constexpr int kPeriod = kRowVectors % kRunLanes == 0   ? kRowVectors / kRunLanes
                                 : kRunLanes % kRowVectors == 0 ? 1
                                                                : 3;
  static constexpr int kPeriodKeys = kRunLanes * kPeriod / kRowVectors;
  static_assert(kRunVectors % (kRunLanes * kPeriod) == 0 && kRunLanes * kPeriod % kRowVectors == 0);
  static_assert((kPeriodKeys & (kPeriodKeys - 1)) == 0);

  // Shared memory: the query tile (double-buffered if kAhead), the row maxima and sums of each team, the rings.
  static constexpr int kQueryElements = kAllRows * kQueryStride, kQueryBytes = kSizes.query_bytes;
  static_assert(kQueryBytes == (kAhead ? 2 : 1) * kQueryElements * static_cast<int>(sizeof(T)));
  static_assert(sizeof(RowSum) == kRowSumBytes);

  struct Runs {
    const Key *k[kLaneRuns], *v[kLaneRuns];
  };

  const DecodeParams& p;
  const Plan& plan;
  const GeneralScore& score;
  T* q_tiles;
  RowSum* row_sums;
  T* rings;
  int teams;
  bool aligned;  // whether rows of k and v can be read in 16-byte vectors
  bool whole;    // aligned, and head_dim and head_dim_v are both kHeadDim
  int now = 0;   // index of the current entry of parts() and works()
  const int thread = kHasRegisters ? ptx::opaque(threadIdx.x) : static_cast<int>(threadIdx.x);
  // The compiler would recompute the swizzled addresses for every operand. ptx::opaque keeps them in registers where
  // there are registers to spare.
  const int kept_key_place = kHasRegisters ? ptx::opaque(KeyTile::first_place_b()) : 0;
  const int kept_value_place = kHasRegisters ? ptx::opaque(KeyTile::first_place_transposed()) : 0;
  Format format;
  float out[kChunks][kRowTiles][kChunkTiles][4];
  OnlineSoftmax<> softmax[kRowTiles];
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
    rings = reinterpret_cast<T*>(row_sums + teams * kAllRows);
  }

  // The current and the next part with their sequences, in shared memory to reduce register pressure.
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
  __device__ __forceinline__ int team() const { return thread / 32u / kTeamWarps; }
  __device__ __forceinline__ int member() const { return thread / 32u % kTeamWarps; }
  __device__ __forceinline__ void team_sync() const {
    if constexpr (kTeamWarps == 1) {
      __syncwarp();
    } else {
      ptx::named_barrier_sync(kTeamBarriers + team(), kTeamWarps * 32);
    }
  }
  __device__ __forceinline__ T* stage(int i) const { return rings + team() * kTeamElements + i * kStageElements; }

  // The first row of this warp and of this lane within the tile. The lane's other rows follow at steps of 8.
  __device__ __forceinline__ int warp_row() const { return member() / kColumnWarps * 16 * kRowTiles; }
  __device__ __forceinline__ int lane_row() const { return warp_row() + quad(); }
  // The first output column of this warp.
  __device__ __forceinline__ int warp_column() const { return member() % kColumnWarps * kWarpColumns; }
  // The KV head of a row of the tile, and the number of the row among the rows of that head.
  __device__ __forceinline__ int key_head(int i) const {
    return kHeads == 1 ? part().head_k : part().head_k * kHeads + i / kRows;
  }
  __device__ __forceinline__ int row_of_head(int i) const {
    return part().row_tile * kRows + (kHeads == 1 ? i : i % kRows);
  }
  // The query and the query head of a row of the tile. Padding rows map to queries past the last one.
  struct Row {
    int query, head;
  };
  __device__ __forceinline__ Row row(int i) const {
    const int row = row_of_head(i);
    return {row / plan.group, key_head(i) * plan.group + row % plan.group};
  }
  __device__ __forceinline__ Mask32 mask() const { return Mask32(p, work().queries, work().length); }

  // --- scheduling of parts (split_parts.cuh) -------------------------------------------------------------------------

  __device__ void run_fixed();

  __device__ void run_share();

  // What an early thread block writes to split_tasks when it may: the task that its first part begins, if any.
  // It fills whole vectors: the compiler reads its neighbours in vectors, which racecheck reports if they overlap it.
  struct alignas(16) BegunTask {
    int at;  // index in split_tasks; -1: none
    SplitTask task;
  };
  static __device__ __forceinline__ BegunTask& begun_task() {
    __shared__ BegunTask begun;
    return begun;
  }
  static __device__ __forceinline__ void forget_begun_task() { begun_task().at = -1; }
  __device__ __forceinline__ void forget_task() const {
    if (!plan.by_task) plan.split_tasks[blockIdx.x].parts = 0;
  }
  __device__ __forceinline__ void begin_task(int at, const SplitTask& task, bool is_early) const {
    if (is_early) {
      begun_task() = BegunTask{at, task};
    } else {
      plan.split_tasks[at] = task;
    }
  }
  __device__ __forceinline__ void store_begun_task() const {
    if (threadIdx.x > 0) return;
    forget_task();
    if (begun_task().at >= 0) plan.split_tasks[begun_task().at] = begun_task().task;
  }
  static __device__ __forceinline__ void begin_memory_accesses() {
    ptx::wait_for_previous_kernel();
    ptx::let_next_kernel_start();
  }

  __device__ __forceinline__ bool find_part(Share* share, int which, bool is_known = false, bool is_early = false);

  __device__ __forceinline__ int next_part(const Share& share, Part* part, const SequenceWork& work, bool is_early);

  // The index of a task in split_tasks, for shares with fixed parts. A packed sequence takes its index from its offset
  // in the packed queries, so that a thread block need not sum the tile counts of the sequences before it.
  __device__ __forceinline__ int task_of(const Part& part) const {
    const int64_t start = query_sequence(p, part.b).start;
    const int first = p.is_varlen() ? static_cast<int>(start * plan.group / kRows) + part.b : part.b * plan.row_tiles;
    return part.head_k * plan.head_tasks + first + part.row_tile;
  }

  // --- mainloop of one part (copies: split_loads.cuh) ----------------------------------------------------------------

  // A team's iteration over the keys of a part.
  struct Walk {
    Limits keys, whole;  // cache rows visible to at least one row of the tile, and to every row of the tile
    int first, steps;    // the team's first step and its number of steps
    KeyLocator locator;
    uint32_t reciprocal;  // reciprocal of the page size, for formats that locate keys with it
    Runs runs;            // runs of the step that is copied next
  };

  // Starts copying the queries and the first keys of a part. is_early: the previous kernel may still be running.
  __device__ __forceinline__ Walk start(bool is_early = false) {
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
              0,
              {}};
    if constexpr (Format::kSparesInstructions) walk.reciprocal = walk.locator.reciprocal_of_pages();
    locate(walk, 0);
    if (is_early) begin_memory_accesses();
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) {
      copy_step(walk, i, i);
      if (i == 0) load_queries();  // after the first keys, whose loads take longer
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

  __device__ void load_queries();

  // Whether rows can be read in vectors that are 16-byte aligned.
  static __device__ __forceinline__ bool rows_are_aligned(const TensorView& t) {
    const int64_t strides = t.batch_stride | t.head_stride | t.row_stride;
    return reinterpret_cast<uintptr_t>(t.data) % kVectorBytes == 0 && strides % kVectorElements == 0;
  }

  // Starts an asynchronous copy of the first `elements` elements of a vector. The other elements become zero.
  template <class X>  // T or Key
  static __device__ __forceinline__ void copy_vector(T* to, const X* from, int elements) {
    constexpr int kElements = kVectorBytes / sizeof(X);
    ptx::cp_async_part(to, from, min(max(elements, 0), kElements) * static_cast<int>(sizeof(X)));
  }
  // Copies a vector from an unaligned address, synchronously.
  template <class X>
  static __device__ __forceinline__ void copy_elements(T* to, const X* from, int elements) {
    constexpr int kElements = kVectorBytes / sizeof(X);
#pragma unroll 1
    for (int e = 0; e < kElements; ++e) {
      X zero;
      narrow(0.f, &zero);
      reinterpret_cast<X*>(to)[e] = e < elements ? from[e] : zero;
    }
  }

  __device__ __forceinline__ void walk_keys(Walk& walk) {
    start_rows();
    ptx::cp_async_wait<kStages - 2>();
    __syncthreads();  // the queries have arrived
    prepare_queries();
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

  __device__ __forceinline__ void prepare_queries() {
    if constexpr (Format::kPreparesQueries) {
      for (int i = thread / 32; i < kAllRows; i += blockDim.x / 32) {
        Format::template prepare_query<kHeadDim>(q_tile() + i * kQueryStride);
      }
      __syncthreads();
    }
    format.template start_part<kHeadDim>(
        p, part().b, [&](int i, int r) { return key_head(lane_row() + 16 * i + 8 * r); },
        [&](int i, int r) { return q_tile() + (lane_row() + 16 * i + 8 * r) * kQueryStride; });
  }

  // Starts copying the team's i-th step, if it exists, and locates the next step.
  __device__ __forceinline__ void copy_step(Walk& walk, int i, int to) const {
    if (i >= walk.steps) return;
    load(stage(to), walk.runs, walk.first + i * teams, walk.keys);
    locate(walk, i + 1);
  }

  // The first key of the i-th run of this lane within a step.
  __device__ __forceinline__ int run_key(int i) const {
    const int first = member() * kWarpKeys + i * kRunsAtOnce * kRunKeys;
    return kRunsAtOnce == 1 ? first : first + lane() / kRunLanes * kRunKeys;
  }
  __device__ __forceinline__ int run_lane() const { return kRunsAtOnce == 1 ? lane() : lane() % kRunLanes; }

  __device__ __forceinline__ void locate(Walk& walk, int step) const;

  __device__ __forceinline__ void load(T* to, const Runs& runs, int step, const Limits& keys) const;
  __device__ __forceinline__ void load_whole_run(T* to, const Key* from, int64_t row_stride) const;
  __device__ __forceinline__ void load_run(T* to, const Key* from, int64_t row_stride, int columns, int row,
                                           const Limits& keys) const;

  // Initialises accumulators and softmax. The sink is counted once: by team 0 of the task's first part, or by its
  // epilogue.
  __device__ __forceinline__ void start_rows() {
    const bool has_sink = Format::kSoftmaxHasSink && p.has_sink && part().is_first && team() == 0;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      for_chunks([&](int c) { set_zero(out[c][i]); });
      float sinks[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Row at = row(lane_row() + 16 * i + 8 * r);
        sinks[r] = has_sink && at.query < work().queries ? head_sink(p, at.head) : -infinity();
      }
      softmax[i].start(sinks);
    }
  }

  __device__ __forceinline__ typename Core::A query_operand(int row_tile, int column) const {
    return Core::load_a(q_tile(), kQueryStride, warp_row() + row_tile * 16, column);
  }

  __device__ __forceinline__ int key_place() const { return kHasRegisters ? kept_key_place : KeyTile::first_place_b(); }
  __device__ __forceinline__ int value_place() const {
    return kHasRegisters ? kept_value_place : KeyTile::first_place_transposed();
  }

  // row0: cache row of the first key of the step.
  __device__ __forceinline__ void compute_step(const T* keys, int row0, const Limits& whole) {
    float scores[kRowTiles][kScoreTiles][4];
    auto operand = [&](int i, int d) {
      if constexpr (kKeepsQueries) {
        return queries[d / Core::kK];
      } else {
        return query_operand(i, d);
      }
    };
    const auto multiply = [&](float (&products)[kRowTiles][kScoreTiles][4], int first_column) {
      Format::template score_product<kHeadDim>(products, operand, [&](typename Core::B(&pair)[2], int n, int d) {
        KeyTile::load_b(pair, keys + n * 8 * kRowElements, KeyTile::moved(key_place(), (first_column + d) / kPack));
      });
    };
    multiply(scores, 0);
    if constexpr (kHeads == 2) {
      float second[kRowTiles][kScoreTiles][4];
      multiply(second, kHeadDim);
      each_element<kRowTiles, kScoreTiles>([&](int i, int n, int e) {
        if (e >= 2) scores[i][n][e] = second[i][n][e];
      });
    }
    const auto rule = format.make_logits(score, scores, p.alibi_slopes != nullptr);
    if (p.alibi_slopes) add_slopes(scores, row0);
    if (row0 < whole.begin || row0 + kKeys > whole.end) hide_unseen(scores, row0);
    if (p.has_intervals()) hide_by_mask(scores, row0);
    const T* const values = keys + kKeys * kRowElements;
    typename Core::A weights[kRowTiles][kSteps];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      softmax[i].weigh(scores[i], rule, kTolerance,
                       [&](const float (&shrink)[2]) { for_chunks([&](int c) { rescale(out[c][i], shrink); }); });
#pragma unroll
      for (int step = 0; step < kSteps; ++step) weights[i][step] = Core::from_accumulators(scores[i], step);
    }
    for_chunks([&](int chunk) {
      const int column = warp_column() + chunk * kChunkColumns;
      const auto weight = [&](int i, int step) { return weights[i][step]; };
      const auto load_values = [&](typename Core::B(&pair)[2], int step, int c) {
        KeyTile::load_b_transposed(pair, values + step * Core::kK * kRowElements,
                                   KeyTile::moved(value_place(), (column + c * 8) / kPack));
      };
      Format::template accumulate<kSteps>(out[chunk], weight, load_values);
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
    unrolled<kRowTiles, 2>([&](int i, int r) { body(i, r); });
  }

  // The query and the query head of row g (r = 0) or g + 8 of row tile i.
  __device__ __forceinline__ Row row(int i, int r) const { return row(lane_row() + 16 * i + 8 * r); }

  __device__ __forceinline__ void hide_unseen(float (&x)[kRowTiles][kScoreTiles][4], int row0) const {
    const auto query_of = [&](int i, int r) { return row(i, r).query; };
    hide_keys_of<true, true>(x, mask(), query_of, row0 + 2 * lane_in_quad() - work().first_row);
  }

  __device__ __forceinline__ void add_slopes(float (&x)[kRowTiles][kScoreTiles][4], int row0) const {
    const float* const slopes = static_cast<const float*>(p.alibi_slopes) + part().b * p.alibi_batch_stride;
    const int position = work().first_row + mask().first_position();  // cache row at the position of query 0
    add_slopes_of(x, [&](int i, int r) {
      const Row at = row(i, r);
      return SlopeOfRow{at.query < work().queries ? slopes[at.head] * kLog2E<float> : 0.f,
                        row0 + 2 * lane_in_quad() - position - at.query};
    });
  }

  // A Mask has intervals for the last mask_keys keys of the sequence only.
  __device__ __forceinline__ void hide_by_mask(float (&x)[kRowTiles][kScoreTiles][4], int row0) const {
    const int masked = static_cast<int>(p.mask_keys), start = work().first_row + work().length - masked;
    if (row0 + kKeys <= start) return;
    hide_keys_by_interval_of(x, masked, row0 + 2 * lane_in_quad() - start, [&](int i, int r) {
      const Row at = row(i, r);
      const bool exists = at.query < work().queries;
      return IntervalsOfRow{at.query, exists,
                            exists ? reinterpret_cast<const int2*>(head_intervals(p, part().b, at.head, 0)) : nullptr};
    });
  }

  // --- epilogue of a part (split.cuh) --------------------------------------------------------------------------------

  // A team's accumulators in shared memory, stored over its ring.
  __device__ __forceinline__ float* sums(int team) const {
    return reinterpret_cast<float*>(rings + team * kTeamElements + kSumsBegin);
  }
  __device__ __forceinline__ void store_sums();

  // Number of rows of the tile without padding, of each KV head.
  __device__ __forceinline__ int tile_rows() const {
    return min(kRows, work().queries * plan.group - part().row_tile * kRows);
  }

  // Four columns of a row over all teams: the output, and the maximum and the sum of its weights.
  struct Combined {
    float x[4] = {};
    RowSum row;
  };
  __device__ __forceinline__ Combined combine_teams(int i, int column) const;
  __device__ __forceinline__ float largest_logit(int i) const;

  __device__ __forceinline__ void store_rows();
  __device__ __forceinline__ void store_output(const Combined& all, int i, int column, int64_t first_query);
  __device__ __forceinline__ void store_partial(const Combined& all, int i, int column);
};

}  // namespace flashattn_ext::decode
