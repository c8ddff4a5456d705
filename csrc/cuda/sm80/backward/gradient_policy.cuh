// Policies of the sm_80 backward (backward.cuh) for scores: how products become weights and dS, and what is summed up
// for the gradients of biases. A policy is a member of the kernel's object, and may hold registers there; every
// thread of a block calls its functions, and its branches are uniform for the block. T: the element type; kKeyTiles,
// kQueryTiles: of a warp's scores; step: a KeyTileStep.
//   Workspace                of the call
//   kMasksAlways             the mask of every score is checked, also in tiles that need none
//   kMasksEnd                the mask is also checked in a tile with rows after the last query. Their products are 0,
//                            but the bias of a distance that no pair has may be NaN
//   kTwoWords                weights always come from both words of lse; plain kernels of fp32 have them too
//   kRowBytes                of shared memory, behind lse and delta of a stage, for each query
//   load_row(more, i, ...)   fills them for query i of a stage; exists: whether it is within the sequence
//   weigh_and_differentiate<kMasked, kWords>(step, ...)
//                            S^T becomes P^T with dropout applied, dP^T becomes dS^T. kWords: whether both words of
//                            lse are there
//   end_head(...)            after the last query tile of a head, for the first split of the columns: store_bias_sums
#pragma once

#include "cuda/score/large_rows.cuh"
#include "cuda/sm80/shared/general_gradients.cuh"

namespace flashattn_ext::sm80 {

// No option of a score.
struct PlainGradients {
  using Workspace = BackwardWorkspace;
  static constexpr bool kMasksAlways = false, kMasksEnd = false, kTwoWords = false;
  static constexpr int kRowBytes = 0;

  static __device__ void load_row(float*, int, const AttnGradParams&, int, int, int64_t, bool) {}
  template <bool kMasked, bool kWords, class Step, class Scores, class SeenBy, class Dropping>
  __device__ void weigh_and_differentiate(const Step& step, Scores& weights, Scores& dscores, const SeenBy& seen_by,
                                          Dropping& dropping) {
    const int first = step.query + 2 * lane_in_quad();
    subtract_words_of_marked<kWords>(step, weights, step.workspace.score);
    flashattn_ext::weigh_and_differentiate<kMasked, kWords>(weights, dscores, step.workspace.score, step.lse + first,
                                                            step.log2_sum + first, step.delta + first, seen_by,
                                                            dropping);
  }
  template <class... Arguments>
  static __device__ void end_head(const Arguments&...) {}
};

// Options of a score and biases, found out at run time. Bias: TileBias or, of kernels without a bias of any shape,
// DistanceBias.
template <class T, class Bias>
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
  static constexpr bool kMasksAlways = Bias::kHasElements, kMasksEnd = true, kTwoWords = true;
  static constexpr int kRowBytes = kVectorBytes;
  // Calls that need exact sums run kernels with every bias (options_of).
  static constexpr RelativeGradient kRelative =
      Bias::kHasElements ? RelativeGradient::kInAnyOrderOrExact : RelativeGradient::kInAnyOrder;
  using Gradient = TileBiasGradient<Bias, T, kKeyTiles, kQueryTiles, kRelative, TileCentres>;

  BiasSums<kKeyTiles, Bias::kHasElements> sums;

  static __device__ void load_row(float* more, int i, const AttnGradParams& p, int b, int h, int64_t row, bool exists) {
    RowCentres centres{};
    if (p.centres.data && exists) {
      centres = *reinterpret_cast<const RowCentres*>(row_pointer<const float>(p.centres, b, h, row));
    }
    reinterpret_cast<RowCentres*>(more)[i] = centres;
  }
  template <bool kMasked, bool kWords, class Step, class Scores, class SeenBy, class Dropping>
  __device__ void weigh_and_differentiate(const Step& step, Scores& weights, Scores& dscores, const SeenBy& seen_by,
                                          Dropping& dropping) {
    const int first = step.query + 2 * lane_in_quad();
    const Bias bias(step.p, step.b, step.h, step.mask(), step.row0 + step.query, step.key);
    const TileCentres centres{reinterpret_cast<const RowCentres*>(step.more) + first};
    Gradient gradient{step.p, bias, step.workspace, centres, step.b, step.h, step.is_first_split, sums};
    flashattn_ext::weigh_and_differentiate<T, kMasked>(weights, dscores, step.workspace.score, bias, gradient,
                                                       step.lse + first, step.log2_sum + first, step.delta + first,
                                                       seen_by, dropping);
  }
  __device__ void end_head(const AttnGradParams& p, const Workspace& workspace, int b, int h, int n, int warp, int key,
                           int length_k) {
    store_bias_sums(sums, p, workspace, b, h, n, warp, key, length_k);
  }
};

}  // namespace flashattn_ext::sm80
