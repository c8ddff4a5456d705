// Policies of the sm_80 backward (backward.cuh) for scores: how products become weights and dS, and what is summed up
// for the gradients of biases. A policy is a member of the kernel's object, and may hold registers there; every
// thread of a block calls its functions, and its branches are uniform for the block. Kernel: Backward; T: the element
// type; kKeyTiles, kQueryTiles: of a warp's scores.
//   Workspace                of the call
//   kMasksAlways             the mask of every score is checked, also in tiles that need none
//   kTwoWords                weights always come from both words of lse; plain kernels of fp32 have them too
//   kRowBytes                of shared memory, behind lse and delta of a stage, for each query
//   load_row(kernel, ...)    fills them for query i of a stage; exists: whether it is within the sequence
//   weigh_and_differentiate(kernel, ...)
//                            S^T becomes P^T with dropout applied, dP^T becomes dS^T
//   end_head(kernel, h)      after the last query tile of a head
#pragma once

#include "cuda/score/large_rows.cuh"
#include "cuda/sm80/shared/general_gradients.cuh"

namespace flashattn_ext::sm80 {

// No option of a score.
template <class Kernel>
struct PlainGradients {
  using Workspace = BackwardWorkspace;
  static constexpr bool kMasksAlways = false, kTwoWords = false;
  static constexpr int kRowBytes = 0;

  __device__ void load_row(const Kernel&, int, int, int64_t, bool) {}
  template <bool kMasked, class Scores, class SeenBy, class Dropping>
  __device__ void weigh_and_differentiate(const Kernel& kernel, int h, int row0, Scores& weights, Scores& dscores,
                                          const SeenBy& seen_by, Dropping& dropping) {
    constexpr bool kWords = Kernel::kTwoWords;
    const int first = kernel.score_query() + 2 * t();
    subtract_words_of_marked<kWords>(kernel, weights, kernel.workspace.score, h, row0);
    flashattn_ext::weigh_and_differentiate<kMasked, kWords>(weights, dscores, kernel.workspace.score,
                                                            kernel.lse + first, kernel.log2_sum + first,
                                                            kernel.delta + first, seen_by, dropping);
  }
  __device__ void end_head(const Kernel&, int) {}
};

// Options of a score and biases, found out at run time. Bias: TileBias or, of kernels without a bias of any shape,
// DistanceBias.
template <class Kernel, class T, class Bias>
struct GeneralGradients {
  using Workspace = GeneralWorkspace;
  // The centres of a row (rules/bias.h), which are kept behind its statistics.
  struct RowCentres {
    float values[kCentres];
  };
  struct TileCentres {
    const RowCentres* first;  // centres of the lane's first row
    __device__ __forceinline__ float2 pair(Centre which, int n) const {
      return {first[8 * n].values[which], first[8 * n + 1].values[which]};
    }
  };
  static_assert(sizeof(RowCentres) <= kVectorBytes);
  static constexpr int kKeyTiles = Bias::kKeys / 16, kQueryTiles = Bias::kRows / 8;
  static constexpr bool kMasksAlways = Bias::kHasElements, kTwoWords = true;
  static constexpr int kRowBytes = kVectorBytes;
  // Calls that need exact sums run kernels with every bias (options_of).
  static constexpr RelativeGradient kRelative =
      Bias::kHasElements ? RelativeGradient::kInAnyOrderOrExact : RelativeGradient::kInAnyOrder;
  using Gradient = TileBiasGradient<Bias, T, kKeyTiles, kQueryTiles, kRelative, TileCentres>;

  BiasSums<kKeyTiles, Bias::kHasElements> sums;

  __device__ void load_row(const Kernel& kernel, int i, int h, int64_t row, bool exists) {
    RowCentres centres{};
    if (kernel.p.centres.data && exists) {
      centres = *reinterpret_cast<const RowCentres*>(row_pointer<const float>(kernel.p.centres, kernel.b, h, row));
    }
    row_centres(kernel)[i] = centres;
  }
  template <bool kMasked, class Scores, class SeenBy, class Dropping>
  __device__ void weigh_and_differentiate(const Kernel& kernel, int h, int row0, Scores& weights, Scores& dscores,
                                          const SeenBy& seen_by, Dropping& dropping) {
    const int query = kernel.score_query(), first = query + 2 * t();
    const Bias bias(kernel.p, kernel.b, h, kernel.mask(), row0 + query, kernel.first_score_key());
    const TileCentres centres{row_centres(kernel) + first};
    Gradient gradient{kernel.p, bias, kernel.workspace, centres, kernel.b, h, kernel.split() == 0, sums};
    flashattn_ext::weigh_and_differentiate<T, kMasked>(weights, dscores, kernel.workspace.score, bias, gradient,
                                                       kernel.lse + first, kernel.log2_sum + first,
                                                       kernel.delta + first, seen_by, dropping);
  }
  __device__ void end_head(const Kernel& kernel, int h) { store_bias_sums(kernel, sums, h); }

 private:
  static __device__ RowCentres* row_centres(const Kernel& kernel) {
    return reinterpret_cast<RowCentres*>(kernel.delta + Kernel::kQueries);
  }
};

}  // namespace flashattn_ext::sm80
