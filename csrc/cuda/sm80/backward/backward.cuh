// Backward on every GPU since Ampere: a thread block keeps one tile of keys and walks over the tiles of queries that
// see it (Dao 2023, "FlashAttention-2", Algorithm 2). Scores are transposed, S^T = K Q^T, and divided among the warps.
// If a warp has all queries of its keys, it holds P^T and dS^T in registers as operands of the products for dv and dk,
// and only dS^T goes through shared memory, for dq. Otherwise both go through shared memory, which allows warp tiles
// that are closer to squares and read less. The fp32 sums of dq are in the workspace.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/sm80/backward/gradient_policy.cuh"
#include "cuda/sm80/shared/backward_visibility.cuh"
#include "cuda/sm80/shared/dropout_policy.cuh"
#include "cuda/sm80/shared/key_tile.cuh"
#include "cuda/stages/backward_workspace.h"

namespace flashattn_ext::sm80 {

// By the options of a row in the table of kernels. The first policy of each sort is empty and compiles to nothing.
struct PlainBackwardPolicies {
  static constexpr bool kHasMask = false;
  template <class T, int kKeyTiles, int kQueryTiles>
  using Gradients = PlainGradients;
  using Dropping = NoDropout;
};

template <Options kOptions>
struct BackwardPolicies;
template <>
struct BackwardPolicies<kPlain> : PlainBackwardPolicies {};
template <>
struct BackwardPolicies<kDropout> : PlainBackwardPolicies {
  using Dropping = CounterDropout;
};
template <>
struct BackwardPolicies<kMasks> : PlainBackwardPolicies {
  static constexpr bool kHasMask = true;
};
template <>
struct BackwardPolicies<kScores> : PlainBackwardPolicies {
  template <class T, int kKeyTiles, int kQueryTiles>
  using Gradients = GeneralGradients<T, DistanceBias<true, kKeyTiles, kQueryTiles>>;
};
template <>
struct BackwardPolicies<kGeneral> {
  static constexpr bool kHasMask = true;
  template <class T, int kKeyTiles, int kQueryTiles>
  using Gradients = GeneralGradients<T, TileBias<T, true, kKeyTiles, kQueryTiles>>;
  using Dropping = OptionalDropout;
};

template <class T, int kHeadDim, Options kOptions, int kShared>
struct BackwardSizes {
  static constexpr BackwardTile kTile = backward_tile<T, kHeadDim, kOptions, kShared>();
};

template <class T, int kHeadDim, Options kOptions, int kShared>
struct Backward;

// The types that a kernel consists of.
template <class T, int kHeadDim, Options kOptions, int kShared>
struct BackwardTypes {
  using Policies = BackwardPolicies<kOptions>;
  using Kernel = Backward<T, kHeadDim, kOptions, kShared>;
  using Visibility = QueriesOf<Kernel, Policies::kHasMask>;
  using Dropping = typename Policies::Dropping;
  using Shape = KeyTileShape<T, kHeadDim, BackwardSizes<T, kHeadDim, kOptions, kShared>>;
  using Gradients = typename Policies::template Gradients<T, Shape::kKeyTiles, Shape::kScoreTiles>;
  using Workspace = typename Gradients::Workspace;
};

template <class T, int kHeadDim, Options kOptions, int kShared,
          class Types = BackwardTypes<T, kHeadDim, kOptions, kShared>>
using BackwardBase = KeyTileKernel<Backward<T, kHeadDim, kOptions, kShared>, typename Types::Shape, AttnGradParams,
                                   typename Types::Workspace, typename Types::Visibility>;

template <class T, int kHeadDimension, Options kOptions, int kShared>
struct Backward : BackwardBase<T, kHeadDimension, kOptions, kShared> {
  using Types = BackwardTypes<T, kHeadDimension, kOptions, kShared>;
  using Base = BackwardBase<T, kHeadDimension, kOptions, kShared>;
  using Visibility = typename Types::Visibility;
  using Dropping = typename Types::Dropping;
  using Gradients = typename Types::Gradients;
  using Workspace = typename Types::Workspace;
  using Base::accumulate_keys, Base::extent, Base::first_score_key, Base::score_key, Base::score_query, Base::starts;
  using Base::kHeadDim, Base::kKeys, Base::kQueries, Base::kStages, Base::kThreads, Base::kScoreStride;
  using Base::kInRegisters, Base::kKeyTiles, Base::kScoreTiles, Base::kHoldsValues;
  using Base::p, Base::workspace, Base::k_tile, Base::places, Base::b, Base::hk, Base::dk, Base::dv;
  using typename Base::QuerySums, typename Base::QueryTile, typename Base::RowTile, typename Base::Scores;
  using typename Base::Walk;
  static constexpr bool kTwoWords = Gradients::kTwoWords || sizeof(T) == 4;
  // Shared memory has k and v [kKeys][kHeadDim]; stages of q and dout [kQueries][kHeadDim], lse (with kTwoWords as two
  // arrays), delta and what Gradients::load_row adds [kQueries]; buffers of scores [kKeys][kScoreStride]; and Notes.
  // Scores are dS^T of kStages steps when P^T stays in registers, otherwise dS^T and P^T of one step.
  static constexpr int kBytes = sizeof(T), kScoreBytes = kKeys * kScoreStride * kBytes;
  static constexpr int kStageBytes =
      2 * kQueries * RowTile::kRowBytes + kQueries * ((kTwoWords ? 3 : 2) * 4 + Gradients::kRowBytes);
  static constexpr int kScoreBuffers = kInRegisters ? kStages : 2;
  static constexpr int kKeyBytes = kKeys * RowTile::kRowBytes;
  static constexpr int kStepBytes = kStages * kStageBytes + kScoreBuffers * kScoreBytes;
  static constexpr int kTileBytes =
      kKeyBytes + (kHoldsValues ? std::max(kKeyBytes, kStepBytes) : kKeyBytes + kStepBytes);

  T* v_tile;
  unsigned char* stages;
  T *q_tile, *dout_tile;          // tiles of the stage in use
  float *lse, *log2_sum, *delta;  // log2_sum: only with kTwoWords
  T *dscore_tile, *weight_tile;
  typename Base::Core::A values[kHoldsValues ? kKeyTiles : 1][kHoldsValues ? kHeadDim / Base::Core::kK : 1];
  Gradients gradients;

  __device__ Backward(const AttnGradParams& params, const Workspace& workspace, T* shared)
      : Base(params, workspace, shared),
        v_tile(k_tile + kKeys * RowTile::kStride),
        stages(reinterpret_cast<unsigned char*>(v_tile + (kHoldsValues ? 0 : kKeys * RowTile::kStride))) {}

  static constexpr int kSharedBytes = kTileBytes + static_cast<int>(sizeof(typename Base::Notes));

  __device__ void load_keys(int64_t row, int count) {
    load_tile<RowTile, kKeys, kThreads>(k_tile, row_pointer<const T>(p.k, b, hk, row), p.k.row_stride, count,
                                        static_cast<int>(p.head_dim));
    load_tile<RowTile, kKeys, kThreads>(v_tile, row_pointer<const T>(p.v, b, hk, row), p.v.row_stride, count,
                                        static_cast<int>(p.head_dim_v));
  }
  __device__ void isolate_keys() const { Visibility::isolate_keys(*this); }
  __device__ void hold_values() {
    unrolled<kKeyTiles, kHeadDim / Base::Core::kK>([&](int i, int step) {
      values[i][step] =
          RowTile::load_a(v_tile + score_key(i) * RowTile::kStride, RowTile::moved(places.a, step * Base::Core::kK));
    });
  }
  __device__ void end_head(int h) { Base::end_head(gradients, h); }

  __device__ void use_stage(int stage) {
    q_tile = reinterpret_cast<T*>(stages + stage * kStageBytes);
    dout_tile = q_tile + kQueries * RowTile::kStride;
    lse = reinterpret_cast<float*>(dout_tile + kQueries * RowTile::kStride);
    log2_sum = kTwoWords ? lse + kQueries : lse;
    delta = log2_sum + kQueries;
    unsigned char* const scores = stages + kStages * kStageBytes;
    dscore_tile = reinterpret_cast<T*>(scores + (kInRegisters ? stage * kScoreBytes : 0));
    weight_tile = reinterpret_cast<T*>(scores + kScoreBytes);
  }

  __device__ void load_queries(int stage, const QueryTile& tile) {
    const int h = tile.h, m = tile.m;
    use_stage(stage);
    const int64_t row = starts()->query + m * kQueries;
    const int rows = min(kQueries, extent()->length_q - m * kQueries);
    load_tile<RowTile, kQueries, kThreads>(q_tile, row_pointer<const T>(p.q, b, h, row), p.q.row_stride, rows,
                                           static_cast<int>(p.head_dim));
    load_tile<RowTile, kQueries, kThreads>(dout_tile, row_pointer<const T>(p.dout, b, h, row), p.dout.row_stride, rows,
                                           static_cast<int>(p.head_dim_v));
    ptx::cp_async_commit();
    const int64_t index = h * workspace.rows + (p.is_varlen() ? row : b * p.seqlen_q + row);
    for (int i = threadIdx.x; i < kQueries; i += kThreads) {
      if constexpr (kTwoWords) {
        const LseWords<float> words = i < rows ? workspace.words[index + i] : LseWords<float>::of_no_key();
        lse[i] = Gradients::kTwoWords ? words.top : first_word(words);
        log2_sum[i] = second_word(words);
      } else {
        lse[i] = i < rows ? workspace.lse[index + i] : infinity();
      }
      delta[i] = i < rows ? workspace.delta[index + i] : 0.f;
      gradients.load_row(delta + kQueries, i, p, b, h, row + i, i < rows);
    }
  }

  // dq += dS K
  __device__ void add_query_gradient(const QueryTile& now) const {
    Base::add_query_gradient(now, [&](QuerySums& sum) { this->multiply_keys(sum, dscore_tile, k_tile); });
  }

  // One step, with the query tile `now`. When there is `more`, the walk's next tile is loaded into its stage.
  __device__ void compute_step(int step, const QueryTile& now, bool more, const Walk& walk) {
    const int stage = step % kStages;
    use_stage(stage);
    if (kHeadDim > 64) this->recompute_places();
    Visibility::isolate_queries(*this, now);
    if constexpr (kInRegisters) {
#pragma unroll 1
      for (int part = 0; part < Base::kParts; ++part) {
        this->part_query = part * Base::kPartQueries;
        Scores weights, dscores;
        compute_scores(now, weights, dscores);
        accumulate_keys(dv, weights, dout_tile);
        accumulate_keys(dk, dscores, q_tile);
      }
      // With two stages a step has one barrier. After it all warps have stored their dS, the next step's queries have
      // arrived, and the queries of the step after the next may overwrite this step's.
      if (kStages == 2) ptx::cp_async_wait<0>();
      __syncthreads();
      if (more) load_queries(stage, walk.next(*this, step + kStages));
      add_query_gradient(now);
    } else {
      Scores weights, dscores;
      compute_scores(now, weights, dscores);
      this->store_scores(weight_tile, weights);
      __syncthreads();
      accumulate_keys(dv, weight_tile, dout_tile);
      accumulate_keys(dk, dscore_tile, q_tile);
      add_query_gradient(now);
      if (kStages == 2) ptx::cp_async_wait<0>();
      __syncthreads();
      if (more) load_queries(stage, walk.next(*this, step + kStages));
    }
  }

  // P^T and dS^T of this warp's part of a query tile. dS^T also goes to shared memory.
  __device__ void compute_scores(const QueryTile& now, Scores& weights, Scores& dscores) {
    score_product<RowTile, true>(weights, places, k_tile, score_key(0), q_tile, score_query());
    if constexpr (kHoldsValues) {
      score_product<T, kHeadDim>(
          dscores, [&](int i, int d) { return values[i][d / Base::Core::kK]; },
          [&](typename Base::Core::B(&pair)[2], int n, int d) {
            RowTile::load_b(pair, dout_tile + n * 8 * RowTile::kStride,
                            RowTile::moved(places.b + score_query() * RowTile::kRowBytes, d));
          });
    } else {
      score_product<RowTile>(dscores, places, v_tile, score_key(0), dout_tile, score_query());
    }
    const int first = now.m * kQueries + this->part_query;
    const bool unmasked = Visibility::is_whole(now) && first >= extent()->unmasked_begin &&
                          first + Base::kPartQueries <= extent()->unmasked_end &&
                          (!Gradients::kMasksEnd || first + Base::kPartQueries <= extent()->length_q);
    unmasked && !Gradients::kMasksAlways ? weigh_and_differentiate<false>(now, weights, dscores)
                                         : weigh_and_differentiate<true>(now, weights, dscores);
    this->store_scores(dscore_tile, dscores);
  }

  // weights: S^T becomes P^T with dropout applied; dscores: dP^T becomes dS^T.
  template <bool kMasked>
  __device__ void weigh_and_differentiate(const QueryTile& now, Scores& weights, Scores& dscores) {
    const int row0 = now.m * kQueries, key = first_score_key(), row = row0 + score_query();
    typename Dropping::template Columns<kKeyTiles> dropping(p, b, now.h, key, row);
    typename Visibility::template SeenBy<kKeyTiles, kScoreTiles> seen_by;
    if constexpr (kMasked) {
      seen_by = Visibility::template seen_by<kKeyTiles, kScoreTiles>(*this, now, row, key);
    }
    clear_rows_of_marked((kTwoWords ? log2_sum : lse) + score_query(), dscores);
    gradients.template weigh_and_differentiate<kMasked, kTwoWords>(this->step_of(now.h, row0, lse, log2_sum, delta),
                                                                   weights, dscores, seen_by, dropping);
  }
};

template <class T, int kHeadDim, Options kOptions, int kShared>
using WorkspaceOf = typename Backward<T, kHeadDim, kOptions, kShared>::Workspace;

template <class T, int kHeadDim, Options kOptions, int kShared>
__global__ void __launch_bounds__(Backward<T, kHeadDim, kOptions, kShared>::kThreads)
    backward_kernel(const __grid_constant__ AttnGradParams p,
                    const __grid_constant__ WorkspaceOf<T, kHeadDim, kOptions, kShared> workspace,
                    const __grid_constant__ TileOrder order) {
  if constexpr (kRunsHere<kShared>) {
    extern __shared__ __align__(16) unsigned char shared[];
    using Kernel = Backward<T, kHeadDim, kOptions, kShared>;
    Kernel kernel(p, workspace, reinterpret_cast<T*>(shared));
    const int heads = static_cast<int>(p.heads_k);
    const auto [head, block] = order.index(blockIdx.x / Kernel::kSplits, heads * static_cast<int>(p.batch));
    kernel.run(head / heads, head % heads, block, order.blocks);
  } else {
    __trap();
  }
}

template <class T, int kHeadDim, Options kOptions, int kShared>
WorkspaceOf<T, kHeadDim, kOptions, kShared> backward_workspace(const AttnGradParams& p) {
  constexpr BackwardTile kTile = backward_tile<T, kHeadDim, kOptions, kShared>();
  const BackwardWorkspace base(p, kTile.queries, int64_t{kTile.queries} * kHeadDim, kTile.splits);
  return WorkspaceOf<T, kHeadDim, kOptions, kShared>::complete(p, base, kTile.keys, kTile.warps);
}

template <class T, int kHeadDim, Options kOptions, int kShared>
void launch_main(const AttnGradParams& p, const WorkspaceOf<T, kHeadDim, kOptions, kShared>& workspace) {
  using Kernel = Backward<T, kHeadDim, kOptions, kShared>;
  if (p.batch * p.heads_k == 0) return;
  const auto kernel = backward_kernel<T, kHeadDim, kOptions, kShared>;
  const int64_t blocks = tile_count(p.seqlen_k, Kernel::kKeys);
  const int64_t at_once =
      resident_blocks(reinterpret_cast<const void*>(kernel), "backward", p, Kernel::kThreads, Kernel::kSharedBytes);
  launch(kernel, "backward", p, blocks * p.batch * p.heads_k * Kernel::kSplits, Kernel::kThreads, Kernel::kSharedBytes,
         workspace, backward_order(p, blocks, sizeof(T), at_once / Kernel::kSplits));
}

template <class T, int kHeadDim, Options kOptions, int kShared>
void launch_backward(const AttnGradParams& p) {
  // Plain kernels read dq in the layout of all others of the class.
  using Plain = Backward<T, kHeadDim, kPlain, kShared>;
  using Kernel = Backward<T, kHeadDim, kOptions, kShared>;
  static_assert(Plain::kWarps == Kernel::kWarps && Plain::kQueries == Kernel::kQueries &&
                Plain::kSplits == Kernel::kSplits);
  const auto workspace = backward_workspace<T, kHeadDim, kOptions, kShared>(p);
  launch_prepare<T>(p, workspace);
  find_delta_of_few_keys(p, workspace);
  launch_main<T, kHeadDim, kOptions, kShared>(p, workspace);
  launch_finish<Plain>(p, workspace);
  finish_biases(p, workspace);
}

// Calls body(size) with the shared memory of the kernel for this GPU, as a std::integral_constant.
template <class T, int kHeadDim, Options kOptions, class Body>
auto with_backward_size(const Body& body) {
  return with_shared_memory(most_shared_memory(), [&](auto size) {
    constexpr int kShared = decltype(size)::value, kOfKernel = size_of_same_tile<T, kHeadDim, kOptions, kShared>();
    static_assert(Backward<T, kHeadDim, kOptions, kOfKernel>::kSharedBytes <=
                  std::max(kShared, least_shared(sizeof(T), kHeadDim)));
    return body(std::integral_constant<int, kOfKernel>());
  });
}

template <class T, int kHeadDim, Options kOptions>
size_t backward_bytes(const AttnGradParams& p) {
  return with_backward_size<T, kHeadDim, kOptions>([&](auto size) {
    return static_cast<size_t>(backward_workspace<T, kHeadDim, kOptions, decltype(size)::value>(p).bytes);
  });
}

template <class T, int kHeadDim, Options kOptions>
void backward(const AttnGradParams& p) {
  with_backward_size<T, kHeadDim, kOptions>(
      [&](auto size) { launch_backward<T, kHeadDim, kOptions, decltype(size)::value>(p); });
}

}  // namespace flashattn_ext::sm80
