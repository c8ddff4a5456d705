// The split-KV attention kernel of decoding: the epilogue of a part, and the launch.
#pragma once

#include "cuda/decode/split/split_loads.cuh"
#include "cuda/decode/split/split_parts.cuh"
#include "cuda/decode/split/split_tile.cuh"
#include "cuda/host/launch.cuh"

namespace flashattn_ext::decode {

template <class Key, int kHeadDim, int kTileRows>
__device__ __forceinline__ void Split<Key, kHeadDim, kTileRows>::store_sums() {
  float* const own = sums(team());
  const int rows = tile_rows();
  each_row([&](int i, int r) {
    const int row = lane_row() + 16 * i + 8 * r;
    const float sum = softmax[i].total(r);
    if ((kHeads == 1 ? row : row % kRows) >= rows) return;
    if (lane_in_quad() == 0 && warp_column() == 0) row_sums[team() * kAllRows + row] = {softmax[i].max[r], sum};
    // The largest logit is stored after the columns of the row, in the padding.
    if (lane_in_quad() == r && warp_column() == 0) own[row * kSumStride + kHeadDim] = softmax[i].largest_logit;
    if constexpr (kHeads == 2) {
      auto& columns = reinterpret_cast<float (&)[2][kChunkTiles / 2][4]>(out[0][i]);
      Format::store_sums(own + row * kSumStride, columns[r], r);
    } else {
      for_chunks(
          [&](int c) { Format::store_sums(own + row * kSumStride + warp_column() + c * kChunkColumns, out[c][i], r); });
    }
  });
}

template <class Key, int kHeadDim, int kTileRows>
__device__ __forceinline__ auto Split<Key, kHeadDim, kTileRows>::combine_teams(int i, int column) const -> Combined {
  constexpr int kMostTeams = kMaxWarps / kTeamWarps;
  Combined all;
  float max = -infinity(), sum = 0;
  RowSum own[kMostTeams];
#pragma unroll
  for (int n = 0; n < kMostTeams; ++n) own[n] = n < teams ? row_sums[n * kAllRows + i] : RowSum{-infinity(), 0.f};
#pragma unroll
  for (int n = 0; n < kMostTeams; ++n) max = fmaxf(max, own[n].max);
  if (!Format::kSoftmaxHasSink) {
    const float sink = p.has_sink && part().is_first ? head_sink(p, row(i).head) : -infinity();
    max = fmaxf(max, sink);
    if (sink_counts(sink)) sum = ptx::ex2(sink - finite_max(max));
  }
#pragma unroll
  for (int n = 0; n < kMostTeams; ++n) {
    if (own[n].sum == 0) continue;
    const float weight = ptx::ex2(own[n].max - finite_max(max));
    const float4 values = *reinterpret_cast<const float4*>(sums(n) + i * kSumStride + column);
    sum += own[n].sum * weight;
    all.x[0] += values.x * weight, all.x[1] += values.y * weight;
    all.x[2] += values.z * weight, all.x[3] += values.w * weight;
  }
  const float factor = sum == 0 ? 0.f : 1 / sum * Format::value_factor(p, part().b, key_head(i));
#pragma unroll
  for (int e = 0; e < 4; ++e) all.x[e] = sum == 0 ? 0.f : all.x[e] * factor;
  all.row = {max, sum};
  return all;
}

template <class Key, int kHeadDim, int kTileRows>
__device__ __forceinline__ float Split<Key, kHeadDim, kTileRows>::largest_logit(int i) const {
  float largest = -infinity();
#pragma unroll 1
  for (int n = 0; n < teams; ++n) largest = fmaxf(largest, sums(n)[i * kSumStride + kHeadDim]);
  return largest;
}

// Combines the teams and stores the output or the partial result. A thread handles four columns of a row at a time;
// the one that has column 0 also stores the row's statistics.
template <class Key, int kHeadDim, int kTileRows>
__device__ __forceinline__ void Split<Key, kHeadDim, kTileRows>::store_rows() {
  constexpr int kGroups = kHeadDim / 4;
  constexpr int kUnrolled = kAllRows > 16 ? 2 : 1;  // wide tiles: the accumulators no longer occupy registers
  const int rows = tile_rows(), vectors = kHeads * rows * kGroups;
  const int64_t first_query = query_sequence(p, part().b).start;
#pragma unroll kUnrolled
  for (int v = thread; v < vectors; v += blockDim.x) {
    const int row = v / kGroups, column = v % kGroups * 4;
    const int i = kHeads == 1 || row < rows ? row : row - rows + kRows;
    if (column >= static_cast<int>(p.head_dim_v)) continue;
    const Combined all = combine_teams(i, column);
    part().slot < 0 ? store_output(all, i, column, first_query) : store_partial(all, i, column);
  }
}

template <class Key, int kHeadDim, int kTileRows>
__device__ __forceinline__ void Split<Key, kHeadDim, kTileRows>::store_output(const Combined& all, int i, int column,
                                                                              int64_t first_query) {
  const Row at = row(i);
  const int64_t query = first_query + at.query;
  Format::store(p, all.x, part().b, at.head, query, column, static_cast<int>(p.head_dim_v));
  if (column != 0) return;
  store_lse(p, part().b, at.head, query, all.row.max, all.row.sum);
  if (p.row_maxima.data) store_largest(p, part().b, at.head, query, largest_logit(i));
}

template <class Key, int kHeadDim, int kTileRows>
__device__ __forceinline__ void Split<Key, kHeadDim, kTileRows>::store_partial(const Combined& all, int i, int column) {
  // Rows of two heads alternate in a slot.
  const int row = kHeads == 1 ? i : i % kRows * kHeads + i / kRows;
  const int64_t slot_row = static_cast<int64_t>(part().slot) * plan.slot_rows + row;
  *reinterpret_cast<float4*>(plan.partial_out + slot_row * kHeadDim + column) =
      make_float4(all.x[0], all.x[1], all.x[2], all.x[3]);
  if (column != 0) return;
  plan.partial_sums[slot_row] = all.row;
  if (p.row_maxima.data) plan.partial_largest[slot_row] = largest_logit(i);
}

template <class Key, int kHeadDim, int kTileRows>
__global__ void __launch_bounds__(kMaxWarps * 32, 1)
    split_kernel(const __grid_constant__ DecodeParams p, const __grid_constant__ Plan plan,
                 const __grid_constant__ GeneralScore score, bool aligned) {
  extern __shared__ __align__(128) unsigned char shared[];
  using Kernel = Split<Key, kHeadDim, kTileRows>;
  if (!plan.knows_lengths) Kernel::begin_memory_accesses();
  Kernel split(p, plan, score, aligned, shared);
  plan.splits > 0 ? split.run_fixed() : split.run_share();
}

template <class Key, int kHeadDim, int kTileRows>
void split(const DecodeParams& p, const Plan& plan, int warps, int shared_bytes, bool aligned) {
  launch_early(split_kernel<Key, kHeadDim, kTileRows>, "decode", p, dim3(static_cast<unsigned>(plan.blocks)),
               warps * 32, shared_bytes, in_groups(p, Split<Key, kHeadDim, kTileRows>::kHeads), plan,
               GeneralScore::of(p), aligned);
}

}  // namespace flashattn_ext::decode
