// The entry points of one row of kernel_table.h for one element type.
#pragma once

#include "cuda/host/chunks.h"
#include "cuda/table/rows.h"
#include "derivative_params.h"

namespace flashattn_ext {

struct ForwardKernel {
  void (*run)(const AttnParams&) = nullptr;
  size_t workspace_bytes = 0;
  int least_shared = 0;  // of a thread block in bytes, if not all GPUs have it
  // Further workspace of a call; nullptr: none.
  size_t (*more_bytes)(const AttnParams&) = nullptr;
  bool reads_fp8 = false;  // reads fp8 inputs as they are; otherwise they are widened for it
  // How decoding runs an invariant kernel that adds up chunks of keys; nullptr: it does not.
  ChunkKernel (*chunks)() = nullptr;
};

struct BackwardKernel {
  void (*run)(const AttnGradParams&) = nullptr;
  size_t (*workspace_bytes)(const AttnGradParams&) = nullptr;
  bool (*serves)(const AttnGradParams&) = nullptr;  // nullptr: every call of its row
};

struct JvpKernel {
  void (*run)(const JvpParams&) = nullptr;
  size_t workspace_bytes = 0;
  int least_shared = 0;  // as in ForwardKernel
};

struct SecondKernel {
  void (*run)(const SecondParams&) = nullptr;
  size_t (*workspace_bytes)(const SecondParams&) = nullptr;
};

}  // namespace flashattn_ext
