// Calls with a cache and many queries: they are bound by arithmetic, like any forward, and run as packed calls of the
// forward kernels.
//
// Entries of a cache without pages follow one another at multiples of the row stride, so that the caches are packed
// tensors as they are. Pages are gathered first: a copy that takes little beside the arithmetic. Sequence b is sequence
// 2b of the packed call, which begins and ends where the device finds it. Sequence 2b + 1, what is between its end and
// the next one's beginning, has no queries.
#pragma once

#include <cstddef>

#include "../../params.h"

namespace flashattn_ext::decode {

bool is_prefill(const DecodeParams& p);

// The workspace that the packed call needs beside that of its forward.
size_t prefill_bytes(const DecodeParams& p);

// Appends, rotates and gathers, and returns the packed call; its own workspace begins after what this one takes.
AttnParams begin_prefill(const DecodeParams& p);
// The packed call, for the question what workspace it needs: nothing runs.
AttnParams packed_call(const DecodeParams& p);
// Brings the log-sum-exps of the packed call to their places.
void finish_prefill(const DecodeParams& p, const AttnParams& packed);

}  // namespace flashattn_ext::decode
