// Decoding on GPUs of compute capability 8.0 and newer, shared by both CUDA backends.
#pragma once

#include <cstddef>

#include "cuda/decode/split/tiles.h"
#include "params.h"

namespace flashattn_ext::decode {

struct Plan;

constexpr int kStaticBytes = 1024;  // at least the static shared variables of a thread block

// The kernel of a row of the table.
struct SplitKernel {
  void (*run)(const DecodeParams&, const Plan&, int warps, int shared_bytes, bool aligned) = nullptr;
  TileSizes tile;
  int columns = 0;  // the class of head dims
};

size_t workspace_bytes(const DecodeParams& p, const SplitKernel& kernel);
void run(const DecodeParams& p, const SplitKernel& kernel);

}  // namespace flashattn_ext::decode
