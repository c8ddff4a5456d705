// Forward calls, dense and packed, with few queries for many keys: such calls are bound by memory bandwidth, so they
// run on the decoding kernels, as if the keys were in a KV cache. The kernels of sm80/ and sm90/ would launch one
// thread block per tile of a query head: too few blocks, each of which walks over all keys.
#pragma once

#include <cstddef>

#include "backend/cached_call.h"

namespace flashattn_ext {
struct BackwardWorkspace;
}

namespace flashattn_ext::decode {

struct BackwardPlan;
struct PackedKernel;

// With fewer keys split-KV gains little, forward or backward.
constexpr int64_t kLeastSplitKeys = 512;
// The most queries of a sequence with which a forward runs here, unless kernels of packed rows (packed.h) serve it.
constexpr int64_t kMostFewQueries = 64;

// Whether a forward call runs here. The choice does not depend on the batch size, so that the results of a sequence are
// bit-identical in every batch. The kernels of sm80/ and sm90/ keep the calls with a Mask (they skip its hidden tiles),
// dropout, a dense or a relative bias, or `centres` (an output for the gradients of biases), and invariant calls.
// packed: the kernel of packed rows for the call, or nullptr.
bool is_few_rows(const AttnParams& p, const PackedKernel* packed);

// Whether an invariant dense call has so few queries for its keys that it runs in chunks (chunks.h), if its kernel has
// them.
bool has_few_queries(const AttnParams& p);

// A kernel of the backward for calls with up to `rows` packed rows and `columns` columns.
struct FewRowsKernel {
  int rows = 0, columns = 0;
  // The bytes of shared memory that a thread block takes. nullptr: a thread block takes all of a multiprocessor.
  int (*shared_bytes)() = nullptr;
  void (*run)(const AttnGradParams&, const BackwardWorkspace&, const BackwardPlan&) = nullptr;
};

// The same for the backward: dense float16 and bfloat16 calls with head dims up to 128, without softcap and biases,
// whose packed rows of one KV head fit in a tile. With more rows the kernels of sm80/ and sm90/ keep the tensor cores
// busy.
// own: the kernel of the architecture for such a call, which otherwise runs a kernel for every GPU; may be nullptr.
bool is_few_rows(const AttnGradParams& p, const FewRowsKernel* own);
size_t few_rows_bytes(const AttnGradParams& p, const FewRowsKernel* own);
void run_few_rows(const AttnGradParams& p, const FewRowsKernel* own);

}  // namespace flashattn_ext::decode
