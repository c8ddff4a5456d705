// The backward of calls with few queries for many keys: such calls are bound by memory bandwidth, and the kernels of
// sm80/ and sm90/ would launch one thread block for each tile of keys, which all add to the same few rows of dq. Here
// the packed rows of a KV head are one tile, and thread blocks divide its keys (split-KV).
#pragma once

#include <cstddef>

#include "params.h"

namespace flashattn_ext {
struct BackwardWorkspace;
}

namespace flashattn_ext::decode {

struct BackwardPlan;

// The kernel of a row of the table, for calls with up to `rows` packed rows and `columns` columns.
struct FewRowsKernel {
  void (*run)(const AttnGradParams&, const BackwardWorkspace&, const BackwardPlan&) = nullptr;
  int columns = 0;
  int shared_bytes = 0;  // shared memory of a thread block; 0: it takes all of a multiprocessor
};

size_t few_rows_bytes(const AttnGradParams& p, const FewRowsKernel& kernel);
void run_few_rows(const AttnGradParams& p, const FewRowsKernel& kernel);

}  // namespace flashattn_ext::decode
