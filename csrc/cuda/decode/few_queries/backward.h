// The backward of calls with few queries for many keys: such calls are bound by memory bandwidth, and the kernels of
// sm80/ and sm90/ would launch one thread block for each tile of keys, which all add to the same few rows of dq. Here
// the rows of a KV head (of all its query heads) are one tile, and thread blocks divide its keys (split-KV).
#pragma once

#include <cstddef>

#include "params.h"

namespace flashattn_ext {
struct BackwardWorkspace;
}

namespace flashattn_ext::decode {

struct BackwardPlan;

// The kernel of a row of the table, for calls with up to `rows` rows of a KV head and `columns` columns.
struct FewQueriesKernel {
  void (*run)(const AttnGradParams&, const BackwardWorkspace&, const BackwardPlan&) = nullptr;
  int columns = 0;
  int shared_bytes = 0;  // shared memory of a thread block; 0: it takes all of a multiprocessor
};

size_t few_queries_backward_bytes(const AttnGradParams& p, const FewQueriesKernel& kernel);
void run_few_queries_backward(const AttnGradParams& p, const FewQueriesKernel& kernel);

}  // namespace flashattn_ext::decode
