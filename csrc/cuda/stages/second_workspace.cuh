// The first and last stages of second derivatives (second.cuh of both architectures), and the data that they share with
// the main one.
#pragma once

#include "cuda/stages/backward_finish.cuh"
#include "derivative_params.h"

namespace flashattn_ext {

// The workspace of a backward, and r / keep_scale of every row, like its delta.
template <class Base>
struct SecondWorkspace : Base {
  float* r;

  SecondWorkspace(const AttnGradParams& p, const Base& base)
      : Base(base), r(reinterpret_cast<float*>(static_cast<char*>(p.workspace) + base.bytes)) {
    this->bytes += (p.heads_q * this->rows * 4 + 63) / 64 * 64;
  }
};

// delta and lse of every row, and r: the delta of a call that has tout in the place of out, and no dlse.
template <class T, class Workspace>
static void prepare_second(const SecondParams& p, const Workspace& workspace) {
  launch_prepare<T>(p, workspace);
  AttnGradParams of_tangents = p;
  of_tangents.out = p.tangents.out;
  of_tangents.dlse = {};
  BackwardWorkspace of_r = workspace;
  of_r.delta = workspace.r;
  of_r.zeroed_bytes = 0;
  launch_prepare<T>(of_tangents, of_r);
}

// What the gradient of a sink sums up beside the weight of the sink: delta (tsink - tlse) + r.
struct SecondOfRow {
  const float* r;

  __device__ __forceinline__ double operator()(const SecondParams& p, const BackwardWorkspace& workspace, int64_t b,
                                               int64_t h, int64_t row, int64_t at) const {
    const float tangent = p.tangents.sink ? static_cast<const float*>(p.tangents.sink)[h] : 0.f;
    return workspace.delta[at] * (static_cast<double>(tangent) - *row_statistic(p.tangents.lse, b, h, row)) + r[at];
  }
};

}  // namespace flashattn_ext
