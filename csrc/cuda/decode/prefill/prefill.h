// Decoding calls with many queries (prefill), and all invariant ones. The first are compute-bound like any forward;
// both run as varlen calls of the forward kernels.
//
// A cache without pages is read in place as a packed tensor: is_prefill requires its batch stride to be a multiple of
// its row stride. Pages are gathered into contiguous rows first, which costs little compared with the attention of many
// queries; so are keys and values in fp8, which become bfloat16.
// Sequence b becomes sequence 2b of the varlen call; the device computes its bounds. Sequence 2b + 1 covers the rows
// between the end of sequence b and the start of sequence b + 1, and has no queries.
#pragma once

#include <cstddef>
#include <string>

#include "params.h"

namespace flashattn_ext::decode {

// Why an invariant call cannot run here; empty if it can.
std::string refuses_prefill(const DecodeParams& p);

// Whether the chunks of an invariant call (chunks.h) can read keys and values from pages in place. The varlen call then
// counts the keys as if they were gathered, and has no copy of them.
bool reads_pages(const DecodeParams& p);

// in_pages: reads_pages(p), for calls in chunks; otherwise false.
// Bytes of workspace in addition to the workspace of the forward.
size_t prefill_bytes(const DecodeParams& p, bool in_pages = false);

// Appends, rotates and gathers, and returns the varlen call. Its workspace begins after the prefill_bytes(p) used here.
AttnParams begin_prefill(const DecodeParams& p, bool in_pages = false);
// The varlen call without launching anything, for the size of its workspace.
AttnParams packed_call(const DecodeParams& p, bool in_pages = false);
// A counter in the workspace, which begin_prefill zeroes.
int* zeroed_counter(const DecodeParams& p, bool in_pages);
// Copies the log-sum-exps and row maxima of a dense call from the packed layout to p.lse and p.row_maxima.
void finish_prefill(const DecodeParams& p, const AttnParams& packed);

}  // namespace flashattn_ext::decode
