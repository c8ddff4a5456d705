// DecodeCall: the arguments of a decoding call with a KV cache as the ops receive them, their order, and their checks.
#pragma once

#include <string>

#include "call/attn_call.h"

namespace flashattn_ext {

// The schema arguments of both ops. The appending op writes to the caches.
std::string decode_schema(bool appends);

// The AttnCall's k and v are the caches, [entries, page_size, Hk, D]; q and the result are [B, Sq, Hq, D], or packed
// with cu_seqlens. Options that decoding does not take keep their defaults.
struct DecodeCall : AttnCall {
  std::optional<at::Tensor> k_new, v_new;            // [B, new keys, Hk, D]: appended
  std::optional<at::Tensor> rotary_cos, rotary_sin;  // [positions, rotary dim / 2]
  std::optional<at::Tensor> cache_seqlens;           // int32 [B]
  std::optional<at::Tensor> cache_batch_idx;         // int32 [B]
  std::optional<at::Tensor> cache_leftpad;           // int32 [B]
  std::optional<at::Tensor> block_table;             // int32 [B, pages of a sequence]
  c10::SymInt cache_seqlen;  // length of every sequence, without cache_seqlens; -1: the whole cache
  bool rotary_interleaved;
  c10::SymInt num_splits;
  bool returns_max_logits;

  c10::SymInt new_keys() const { return k_new ? k_new->sym_size(1) : c10::SymInt(0); }
  c10::SymInt page_size() const { return k.sym_size(1); }
  // Keys that the cache can hold for a sequence.
  c10::SymInt capacity() const { return block_table ? block_table->sym_size(1) * page_size() : page_size(); }
  // Whether each row of q has its own rotary position, following flash-attn 2; otherwise all rows have the first one.
  bool has_window() const { return causal || window_left != -1 || window_right != -1; }
};

DecodeCall read_decode_call(Arguments* arguments);

void validate(const DecodeCall& call);

}  // namespace flashattn_ext
