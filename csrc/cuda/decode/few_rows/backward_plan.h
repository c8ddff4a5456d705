// How the backward with few queries divides a call into work (split-KV). A task is one KV head of one sequence. A part
// is one split of its keys. A thread block computes one part, for all packed rows of the KV head.
#pragma once

#include "cuda/stages/backward_workspace.h"

namespace flashattn_ext::decode {

constexpr int kBackwardWarps = 4;  // per thread block
// A kernel has at most one row tile (16 packed rows) for each warp.
constexpr int kMostRowTiles = kBackwardWarps;

struct BackwardPlan {
  int group;      // query heads per KV head (GQA)
  int rows;       // packed rows of a KV head: all heads of query 0, then of query 1, and so on
  int part_keys;  // keys per part, a multiple of the keys per step of a thread block
  int parts;      // parts per KV head
  float* dq;      // partial dq of each part: [B][Hk][parts][rows][kHeadDim]
};

// The entry points of the kernels for every GPU. Each compiled source instantiates them for one element type and
// kHeadDim.
template <class T, int kHeadDim, int kRowTiles>
int backward_shared_bytes();
template <class T, int kHeadDim, int kRowTiles>
void backward(const AttnGradParams& p, const BackwardWorkspace& workspace, const BackwardPlan& plan);

}  // namespace flashattn_ext::decode
