// Products of a warpgroup with wgmma: operands are tiles in panels (cuda/tile/panels.cuh) and packed accumulators. Each
// starts a group of products and returns; ptx::wgmma_wait and ptx::hold end it. Those named issue_... are parts of a
// group: ptx::hold of their accumulators and ptx::wgmma_fence come before them, ptx::wgmma_commit after them.
#pragma once

#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/panels.cuh"

namespace flashattn_ext::sm90 {

// Address: how operands are addressed. In the backward 64-bit additions would go through vector registers, and the
// 32-bit ones of ptx::Descriptor do not; in the forward uint64_t takes five instructions fewer per step.

// 64 rows of a tile times 8 N rows of another: c = rows * columns^T + (adds ? c : 0).
template <int kHeadDim, class Address = ptx::Descriptor, int N, class T, int kPanels, int kRows, int kColumns>
__device__ __forceinline__ void issue_score_product(float (&c)[N][4], const T (&rows)[kPanels][kRows][kPanelColumns],
                                                    int first_row, const T (&columns)[kPanels][kColumns][kPanelColumns],
                                                    bool adds = false, int first_column = 0) {
  static_assert(N * 8 <= kColumns);
  const Address a = ptx::swizzled_descriptor(&rows[0][first_row], 0),
                b = ptx::swizzled_descriptor(&columns[0][first_column], 0);
#pragma unroll
  for (int d = 0; d < kHeadDim; d += 16) {
    const int panel = d / kPanelColumns, step = d % kPanelColumns / 16;
    ptx::wgmma<ptx::kMajorK, ptx::kMajorK>(c, a + panel * kRows * 8 + step * 2, b + panel * kColumns * 8 + step * 2,
                                           adds || d > 0, T());
  }
}
// c += rows * columns^T with the rows in registers, as load_fragments loads them.
template <int N, class T, int kSteps, int kPanels, int kColumns>
__device__ __forceinline__ void issue_score_product(float (&c)[N][4], const uint32_t (&rows)[kSteps][4],
                                                    const T (&columns)[kPanels][kColumns][kPanelColumns],
                                                    int first_column) {
  const auto b = ptx::swizzled_descriptor(&columns[0][first_column], 0);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    ptx::wgmma<ptx::kMajorK>(c, rows[step], b + step / 4 * kColumns * 8 + step % 4 * 2, T());
  }
}
template <int kHeadDim, class Address = ptx::Descriptor, class T, int kPanels, int kRows, int kColumns>
__device__ __forceinline__ void score_product(float (&c)[kColumns / 8][4],
                                              const T (&rows)[kPanels][kRows][kPanelColumns], int first_row,
                                              const T (&columns)[kPanels][kColumns][kPanelColumns]) {
  ptx::hold(c);
  ptx::wgmma_fence();
  issue_score_product<kHeadDim, Address>(c, rows, first_row, columns);
  ptx::wgmma_commit();
}

// sum += a * rows, in instructions of at most kMostTiles tiles of columns.
template <int kMostTiles = 32, class Address = ptx::Descriptor, int N, class T, int kSteps, int kPanels, int kRows>
__device__ __forceinline__ void issue_accumulate(float (&sum)[N][4], const uint32_t (&a)[kSteps][4],
                                                 const T (&rows)[kPanels][kRows][kPanelColumns]) {
  static_assert(kSteps * 16 == kRows);
  constexpr int kParts = N > kMostTiles ? 2 : 1, kPart = N / kParts;
  static_assert(kParts == 1 || kPart % 8 == 0, "whole panels");
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const Address b = ptx::swizzled_descriptor(rows[part * kPart / 8], kRows * 128);
    auto& columns = *reinterpret_cast<float (*)[kPart][4]>(&sum[part * kPart]);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) ptx::wgmma<ptx::kMajorMN>(columns, a[step], b + step * 128, T());
  }
}
template <int kMostTiles = 32, class Address = ptx::Descriptor, int N, class T, int kSteps, int kPanels, int kRows>
__device__ __forceinline__ void accumulate(float (&sum)[N][4], const uint32_t (&a)[kSteps][4],
                                           const T (&rows)[kPanels][kRows][kPanelColumns]) {
  ptx::hold(sum);
  ptx::wgmma_fence();
  issue_accumulate<kMostTiles, Address>(sum, a, rows);
  ptx::wgmma_commit();
}

// sum += a * rows, both from shared memory: `a` has 64 rows, and a panel for each 64 of `rows`, which are the 8 N
// columns of a panel from `column` on.
template <int N, class T, int kScorePanels, int kRows>
__device__ __forceinline__ void issue_accumulate(float (&sum)[N][4], const T (&a)[kScorePanels][64][kPanelColumns],
                                                 const T (&rows)[kRows][kPanelColumns], int column) {
  static_assert(kScorePanels * kPanelColumns == kRows);
  const auto b = ptx::swizzled_descriptor(&rows[0][column], 0);
#pragma unroll
  for (int panel = 0; panel < kScorePanels; ++panel) {
    const auto steps = ptx::swizzled_descriptor(a[panel], 0);
#pragma unroll
    for (int step = 0; step < kPanelColumns / 16; ++step) {
      ptx::wgmma<ptx::kMajorK, ptx::kMajorMN>(sum, steps + step * 2, b + (panel * 4 + step) * 128, true, T());
    }
  }
}

// sum += a * rows, both from shared memory: 64 rows of a tile of 64 columns, from first_row on.
template <int N, class T, int kAllRows, int kPanels>
__device__ __forceinline__ void accumulate(float (&sum)[N][4], const T (&a)[kAllRows][kPanelColumns], int first_row,
                                           const T (&rows)[kPanels][kPanelColumns][kPanelColumns]) {
  const auto steps = ptx::swizzled_descriptor(a[first_row], 0), b = ptx::swizzled_descriptor(rows, kPanelColumns * 128);
  ptx::hold(sum);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kPanelColumns / 16; ++step) {
    ptx::wgmma<ptx::kMajorK, ptx::kMajorMN>(sum, steps + step * 2, b + step * 128, true, T());
  }
  ptx::wgmma_commit();
}

// c = a^T * rows + (adds ? c : 0), both from shared memory; `a` has 64 columns. panel_bytes: from `rows` to the
// panel of its columns from 64 on.
template <int N, class T, int kRows>
__device__ __forceinline__ void issue_transposed_product(float (&c)[N][4], const T (&a)[kRows][kPanelColumns],
                                                         const T (&rows)[kRows][kPanelColumns], int panel_bytes,
                                                         bool adds = false) {
  const auto columns = ptx::swizzled_descriptor(a, 0), b = ptx::swizzled_descriptor(rows, panel_bytes);
#pragma unroll
  for (int step = 0; step < kRows / 16; ++step) {
    ptx::wgmma<ptx::kMajorMN, ptx::kMajorMN>(c, columns + step * 128, b + step * 128, adds || step > 0, T());
  }
}
template <int N, class T, int kRows>
__device__ __forceinline__ void transposed_product(float (&c)[N][4], const T (&a)[kRows][kPanelColumns],
                                                   const T (&rows)[kRows][kPanelColumns],
                                                   int panel_bytes = kRows * 128) {
  ptx::hold(c);
  ptx::wgmma_fence();
  issue_transposed_product(c, a, rows, panel_bytes);
  ptx::wgmma_commit();
}

}  // namespace flashattn_ext::sm90
