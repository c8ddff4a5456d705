"""Which kernels calls run on a GPU that is not here: csrc/cuda/choose.h compiled by itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"

# Reads calls as words, one call in each line, and prints what they run.
PROGRAM = r"""
#include <cstdio>
#include <iostream>
#include <map>
#include <sstream>
#include <string>

#include "cuda/choose.h"

using namespace flashattn_ext;

constexpr const char* kStages[] = {
    "none",
#define STAGE(architecture, array, stage, header, entries) #array,
#include "cuda/table/stages.def"
};
constexpr const char* kWays[] = {"tiles", "chunks", "pack_gqa", "split", "prefill", "few_queries_backward"};
constexpr const char* kInputs[] = {"as_given", "aligned", "widened"};

TensorView rows_of(int64_t heads, int64_t columns, int64_t rows) {
  return {reinterpret_cast<void*>(4096), rows * heads * columns, heads * columns, columns};
}

int main() {
  std::string line;
  while (std::getline(std::cin, line)) {
    std::map<std::string, std::string> words;
    std::istringstream in(line);
    std::string op, word;
    in >> op;
    while (in >> word) words[word.substr(0, word.find('='))] = word.substr(word.find('=') + 1);
    const auto number = [&](const char* name, int64_t otherwise) {
      return words.count(name) ? std::stoll(words[name]) : otherwise;
    };
    DecodeParams p;
    AttnGradParams g;
    const auto fill = [&](AttnParams& call) {
      const std::string type = words.count("type") ? words["type"] : "bf16";
      call.dtype = type == "fp32" ? DType::kFloat32 : type == "fp8" ? DType::kFloat8 : DType::kBFloat16;
      call.is_fp8 = type == "fp8";
      call.batch = number("B", 1), call.seqlen_q = number("Sq", 1), call.seqlen_k = number("Sk", 1);
      call.heads_k = number("Hk", 1), call.heads_q = number("Hq", call.heads_k);
      call.head_dim = number("D", 128), call.head_dim_v = number("Dv", call.head_dim);
      call.q = call.out = rows_of(call.heads_q, call.head_dim, call.seqlen_q);
      call.k = call.v = rows_of(call.heads_k, call.head_dim, call.seqlen_k);
      if (number("causal", 0)) call.window_right = 0;
      if (number("mask", 0)) call.intervals.data = static_cast<const int32_t*>(call.q.data);
      if (number("blocks", 0)) call.blocks.lists = static_cast<const int32_t*>(call.q.data);
      if (number("bias", 0)) {
        const int64_t scores = call.seqlen_q * call.seqlen_k;
        call.bias = {call.q.data, call.dtype, call.heads_q * scores, scores, call.seqlen_k};
        if (number("bias", 0) == 32) call.bias.dtype = DType::kFloat32;
      }
      call.softcap = static_cast<double>(number("softcap", 0));
      if (number("dropout", 0)) call.dropout_threshold = 128;
      if (number("packed", 0)) {
        call.cu_seqlens_q = call.cu_seqlens_k = static_cast<const int32_t*>(call.q.data);
        call.total_q = number("rows", call.batch * call.seqlen_q), call.total_k = call.batch * call.seqlen_k;
      }
      call.invariant = number("invariant", 0) != 0;
      call.deterministic = number("deterministic", 0) != 0;
    };
    fill(p), fill(g);
    g.dk = g.dv = g.k, g.dbias = g.bias;
    if (number("sink", 0)) g.dsink = g.q.data;
    if (number("slopes", 0)) g.alibi_slopes = g.dalibi_slopes = g.q.data;
    if (number("bias_of_keys", 0)) g.bias.row_stride = g.dbias.row_stride = 0;
    p.cache.entries = p.batch, p.cache.page_size = p.seqlen_k;
    const Gpu gpu{static_cast<int>(number("processors", 132)), static_cast<int>(number("shared", 227)) * 1024};
    const Chooser chooser(number("sm80", 0) ? Family::kEveryGpu : Family::kHopper, gpu);
    const Choice choice = op == "decode" ? chooser.decode(p) : op == "backward" ? chooser.backward(g) : chooser.forward(p);
    const Options tile =
        choice.row.stage == Stage::kSm90Forward ? table_row<Stage::kSm90Forward>(choice.row).options : kPlain;
    std::printf("%s %s%s %s %d\n", kWays[int(choice.way)], kStages[int(choice.row.stage)],
                tile == kBrief           ? "Brief"
                : tile == kBriefFewTiles ? "BriefFewTiles"
                : tile == kFewTiles      ? "FewTiles"
                                         : "",
                kInputs[int(choice.inputs)], int(choice.transposes));
  }
}
"""

# A call, and its way, the array of its row, what happens to inputs before, and whether its kernel transposes values.
CALLS = {
    "forward Sq=4096 Sk=4096": "tiles kSm90ForwardFewTiles aligned 0",
    "forward Sq=4096 Sk=4096 sm80=1": "tiles kSm80Forward aligned 0",
    "forward Sq=4096 Sk=4096 type=fp32": "tiles kSm80Forward aligned 0",
    "forward Sq=4096 Sk=4096 D=512 mask=1": "tiles kSm80Forward aligned 0",
    # A BlockMask: no kernel of short sequences or few queries reads one, and on Hopper those without other options do.
    "forward Sq=4096 Sk=4096 blocks=1": "tiles kSm90Forward aligned 0",
    "forward Sq=4096 Sk=4096 blocks=1 softcap=30": "tiles kSm80Forward aligned 0",
    "forward Sq=4096 Sk=4096 D=192 blocks=1": "tiles kSm80Forward aligned 0",
    "forward B=256 Hk=16 Sq=49 Sk=49 D=64 blocks=1 sm80=1": "tiles kSm80Forward aligned 0",
    "forward B=256 Hk=16 Sq=49 Sk=49 D=64 blocks=1 softcap=30 sm80=1": "tiles kSm80Forward aligned 0",
    "forward Sq=1 Sk=4096 blocks=1": "tiles kSm90Forward aligned 0",
    "backward Sq=16 Sk=4096 blocks=1": "tiles kSm90Backward aligned 0",
    "backward Hk=2 Hq=8 Sq=1024 Sk=1024 blocks=1": "tiles kSm90Backward aligned 0",
    "backward B=33 Hk=4 Sq=512 Sk=512 causal=1 blocks=1": "tiles kSm90Backward aligned 0",
    "backward Sq=1024 Sk=1024 D=192 blocks=1": "tiles kSm80Backward aligned 0",
    # Short sequences, in whole heads: up to as many keys as they are faster with, and as shared memory holds.
    "forward B=256 Hk=16 Sq=49 Sk=49 D=64": "tiles kSm80HeadsForward aligned 0",
    "forward B=256 Hk=16 Sq=49 Sk=49 D=64 sm80=1": "tiles kSm80HeadsForward aligned 0",
    "forward B=256 Hk=16 Sq=49 Sk=49 D=64 deterministic=1": "tiles kSm90Forward aligned 0",
    "forward Sq=128 Sk=128 D=64": "tiles kSm90ShortForward aligned 0",
    "forward Sq=80 Sk=80 D=64 causal=1": "tiles kSm80HeadsForward aligned 0",
    "forward Sq=256 Sk=256 D=64": "tiles kSm90ShortForward aligned 0",
    "forward Sq=257 Sk=257 D=64 causal=1": "tiles kSm90ForwardFewTiles aligned 0",
    "forward Sq=208 Sk=208 D=64 sm80=1": "tiles kSm80HeadsForward aligned 0",
    "forward Sq=209 Sk=209 D=64 sm80=1": "tiles kSm80Forward aligned 0",
    "forward Sq=257 Sk=257 D=64 sm80=1": "tiles kSm80Forward aligned 0",
    "forward Sq=256 Sk=256 D=32": "tiles kSm80HeadsForward aligned 0",
    "forward Sq=64 Sk=64": "tiles kSm80HeadsForward aligned 0",
    "forward Sq=4096 Sk=64": "tiles kSm90ForwardFewTiles aligned 0",
    "forward Sq=65 Sk=65": "tiles kSm90Forward aligned 0",
    "forward Sq=65 Sk=65 sm80=1": "tiles kSm80HeadsForward aligned 0",
    "forward Sq=64 Sk=64 D=129": "tiles kSm90Forward aligned 0",
    "forward Sq=64 Sk=64 mask=1": "tiles kSm90Forward aligned 0",
    "forward Sq=64 Sk=64 D=64 mask=1": "tiles kSm80HeadsForward aligned 0",
    "forward Sq=65 Sk=65 D=64 mask=1": "tiles kSm90Forward aligned 0",
    "forward Sq=64 Sk=64 D=64 mask=1 bias=1": "tiles kSm80HeadsForward aligned 0",
    "forward Sq=96 Sk=96 D=32 mask=1 sm80=1": "tiles kSm80HeadsForward aligned 0",
    "forward Sq=64 Sk=64 D=64 mask=1 deterministic=1": "tiles kSm90Forward aligned 0",
    "forward Sq=64 Sk=64 softcap=30": "tiles kSm90Forward aligned 0",
    "forward Sq=64 Sk=64 softcap=30 D=64": "tiles kSm80HeadsForward aligned 0",
    "forward Sq=65 Sk=65 softcap=30 D=64": "tiles kSm90Forward aligned 0",
    "forward Sq=96 Sk=96 softcap=30 D=32": "tiles kSm80HeadsForward aligned 0",
    "forward Sq=256 Sk=256 softcap=30 D=64 sm80=1": "tiles kSm80HeadsForward aligned 0",
    # Packed ones, for which wgmma has no kernel, by the hints max_seqlen: rows beyond 2^26 are not numbered.
    "forward B=256 Hk=16 Sq=49 Sk=49 D=64 packed=1": "tiles kSm80HeadsForward aligned 0",
    "forward B=256 Hk=16 Sq=49 Sk=49 D=64 packed=1 sm80=1": "tiles kSm80HeadsForward aligned 0",
    "forward B=256 Hk=16 Sq=49 Sk=49 D=64 packed=1 deterministic=1": "tiles kSm90Forward aligned 0",
    "forward B=256 Hk=16 Sq=49 Sk=49 D=64 packed=1 invariant=1": "tiles kSm90Invariant aligned 0",
    "forward Sq=49 Sk=49 D=64 packed=1 rows=67108865": "tiles kSm90Forward aligned 0",
    "forward Sq=208 Sk=208 D=64 packed=1": "tiles kSm80HeadsForward aligned 0",
    "forward Sq=209 Sk=209 D=64 packed=1": "tiles kSm90Forward aligned 0",
    "forward Sq=256 Sk=256 D=32 packed=1": "tiles kSm80HeadsForward aligned 0",
    "forward Sq=64 Sk=64 packed=1": "tiles kSm80HeadsForward aligned 0",
    "forward Sq=65 Sk=65 packed=1": "tiles kSm90Forward aligned 0",
    "forward Sq=64 Sk=64 D=64 mask=1 packed=1": "tiles kSm80HeadsForward aligned 0",
    "forward Sq=65 Sk=65 D=64 mask=1 packed=1": "tiles kSm90Forward aligned 0",
    "backward B=256 Hk=16 Sq=49 Sk=49 D=64 packed=1": "tiles kSm80HeadsBackward aligned 0",
    "backward B=256 Hk=16 Sq=49 Sk=49 D=64 packed=1 deterministic=1": "tiles kSm90Backward aligned 0",
    "backward Sq=97 Sk=97 D=64 packed=1": "tiles kSm80HeadsBackward aligned 0",
    "backward Sq=129 Sk=129 D=64 packed=1": "tiles kSm90Backward aligned 0",
    "backward Sq=256 Sk=256 D=32 packed=1": "tiles kSm80HeadsBackward aligned 0",
    "backward Sq=97 Sk=97 D=64 packed=1 sm80=1": "tiles kSm80HeadsBackward aligned 0",
    "backward Sq=64 Sk=64 D=64 slopes=1 sink=1 packed=1": "tiles kSm80HeadsBackward aligned 0",
    "backward Sq=64 Sk=16 D=64 slopes=1 packed=1": "tiles kSm80Backward aligned 0",
    # Other tiles: where they have fewer empty products, or leave less of the GPU idle.
    "forward B=8 Hk=16 Sq=256 Sk=4096": "tiles kSm90ForwardBrief aligned 0",
    "forward B=8 Hk=16 Sq=256 Sk=4096 deterministic=1": "tiles kSm90ForwardFewTiles aligned 0",
    "forward B=8 Hk=16 Sq=128 Sk=4096": "tiles kSm90Forward aligned 0",
    "forward B=2 Hk=16 Sq=1024 Sk=512 D=64": "tiles kSm90ForwardBrief aligned 0",
    "forward B=1 Hk=20 Sq=1500 Sk=1500 D=40": "tiles kSm90ForwardFewTiles aligned 0",
    "forward B=1 Hk=20 Sq=1500 Sk=1500": "tiles kSm90ForwardFewTiles aligned 0",
    "forward B=1 Hk=20 Sq=1500 Sk=1500 processors=114": "tiles kSm90Forward aligned 0",
    "forward B=1 Hk=20 Sq=1500 Sk=1500 D=80": "tiles kSm90Forward aligned 0",
    "forward B=1 Hk=20 Sq=1500 Sk=1500 softcap=30": "tiles kSm90Forward aligned 0",
    "forward B=1 Hk=20 Sq=1500 Sk=1500 invariant=1": "tiles kSm90Invariant aligned 0",
    "forward B=16 Hk=12 Sq=512 Sk=512 D=64": "tiles kSm90ForwardBrief aligned 0",
    "forward B=4 Hk=8 Sq=1024 Sk=1024 D=64 causal=1": "tiles kSm90ForwardBriefFewTiles aligned 0",
    "forward B=4 Hk=8 Sq=768 Sk=768 D=64 causal=1": "tiles kSm90ForwardFewTiles aligned 0",
    "forward B=64 Hk=16 Sq=512 Sk=512 D=64": "tiles kSm90ForwardBrief aligned 0",
    "forward B=64 Hk=16 Sq=768 Sk=768 D=64": "tiles kSm90Forward aligned 0",
    # The forward of short sequences, or the tiles that have its bits if they fill the GPU.
    "forward B=64 Hk=12 Sq=256 Sk=256 D=64 causal=1": "tiles kSm90ForwardBrief aligned 0",
    "forward B=16 Hk=12 Sq=256 Sk=256 D=64": "tiles kSm90ShortForward aligned 0",
    "forward B=64 Hk=12 Sq=192 Sk=192 D=64": "tiles kSm90ShortForward aligned 0",
    "forward B=64 Hk=12 Sq=128 Sk=256 D=64": "tiles kSm90ShortForward aligned 0",
    "forward B=64 Hk=12 Sq=256 Sk=256 D=64 deterministic=1": "tiles kSm90ForwardFewTiles aligned 0",
    "forward B=8 Hk=16 Sq=1024 Sk=1024 causal=1": "tiles kSm90ForwardBrief aligned 0",
    "forward B=8 Hk=16 Sq=768 Sk=768": "tiles kSm90Forward aligned 0",
    "forward Sq=256 Sk=256": "tiles kSm90ForwardBrief aligned 0",
    "forward Sq=128 Sk=128 causal=1 D=112": "tiles kSm90ForwardBrief aligned 0",
    "forward Sq=192 Sk=192": "tiles kSm90ForwardFewTiles aligned 0",
    "forward Sq=256 Sk=257": "tiles kSm90ForwardFewTiles aligned 0",
    "forward Sq=256 Sk=256 D=96": "tiles kSm90Forward aligned 0",
    "forward Sq=256 Sk=256 deterministic=1": "tiles kSm90ForwardFewTiles aligned 0",
    "forward Sq=64 Sk=64 invariant=1": "tiles kSm90Invariant aligned 0",
    "forward Sq=64 Sk=64 type=fp32": "tiles kSm80Forward aligned 0",
    "forward Sq=208 Sk=208 D=64 sm80=1 shared=48": "tiles kSm80Forward aligned 0",
    # Few queries: tiles of decoding, PackGQA from 17 rows of a KV head on, and chunks of invariant calls.
    "forward Sq=1 Sk=4096": "split kDecode aligned 0",
    "forward Sq=1 Sk=511": "tiles kSm90Forward aligned 0",
    "forward Sq=1 Sk=4096 mask=1": "tiles kSm90Forward aligned 0",
    "forward Sq=9 Sk=4096 Hq=4": "pack_gqa kSm90PackGqa aligned 0",
    "forward Sq=9 Sk=4096 Hq=4 softcap=30": "split kDecode aligned 0",
    "forward Sq=9 Sk=4096 Hq=4 sm80=1": "split kDecode aligned 0",
    "forward Sq=33 Sk=4096": "tiles kSm90Forward aligned 0",
    "forward Sq=64 Sk=4096 Hq=4": "pack_gqa kSm90PackGqa aligned 0",
    "forward Sq=64 Sk=2048 Hq=4": "tiles kSm90Forward aligned 0",
    "forward Sq=128 Sk=1000000 Hq=4": "pack_gqa kSm90PackGqa aligned 0",
    "forward Sq=129 Sk=1000000 Hq=4": "tiles kSm90ForwardFewTiles aligned 0",
    "forward Sq=1 Sk=4096 invariant=1": "chunks kSm90Invariant aligned 0",
    "forward Sq=33 Sk=4096 invariant=1": "tiles kSm90Invariant aligned 0",
    "forward Sq=1 Sk=4096 D=512 type=fp32 shared=99": "tiles kSm80Forward aligned 0",
    # fp8: read as it is, transposed by the kernel or before it, or widened.
    "forward Sq=4096 Sk=2048 type=fp8": "tiles kSm90Forward aligned 1",
    "forward Sq=4096 Sk=2049 type=fp8": "tiles kSm90Forward aligned 0",
    "forward Sq=4096 Sk=4096 type=fp8 sm80=1": "tiles kSm80Forward widened 0",
    "forward Sq=1 Sk=4096 type=fp8": "split kDecode as_given 0",
    # Decoding: many queries and enough of them to fill the GPU are a prefill.
    "decode Sq=1 Sk=4096": "split kDecode as_given 0",
    "decode Sq=65 Sk=4096 Hk=32": "pack_gqa kSm90PackGqa as_given 0",
    "decode Sq=512 Sk=4096 Hk=32": "prefill kSm90Forward aligned 0",
    "decode Sq=512 Sk=4096 Hk=32 processors=257": "split kDecode as_given 0",
    "decode Sq=1 Sk=4096 invariant=1": "chunks kSm90Invariant aligned 0",
    "decode Sq=512 Sk=4096 invariant=1": "prefill kSm90Invariant aligned 0",
    # Backwards: general, of groups that add up, of many short sequences, with few queries.
    "backward B=8 Hk=32 Sq=4096 Sk=4096": "tiles kSm90Backward aligned 0",
    "backward Hk=2 Hq=8 Sq=1024 Sk=1024": "tiles kSm90Backward aligned 0",
    "backward B=33 Hk=4 Sq=512 Sk=512 causal=1": "tiles kSm90Heads aligned 0",
    "backward B=33 Hk=4 Sq=512 Sk=512": "tiles kSm90Backward aligned 0",
    "backward B=33 Hk=4 Sq=512 Sk=512 causal=1 deterministic=1": "tiles kSm90Backward aligned 0",
    "backward B=34 Hk=4 Sq=512 Sk=512 causal=1": "tiles kSm90Backward aligned 0",
    "backward B=256 Hk=16 Sq=49 Sk=49 D=64": "tiles kSm80HeadsBackward aligned 0",
    "backward B=256 Hk=16 Sq=49 Sk=49 D=64 deterministic=1": "tiles kSm90Backward aligned 0",
    "backward Sq=96 Sk=96 D=64": "tiles kSm80HeadsBackward aligned 0",
    "backward Sq=97 Sk=97 D=64": "tiles kSm90Backward aligned 0",
    "backward Sq=129 Sk=77 D=64": "tiles kSm90Backward aligned 0",
    "backward Sq=256 Sk=208 D=32": "tiles kSm80HeadsBackward aligned 0",
    "backward Sq=256 Sk=256 D=64 sm80=1": "tiles kSm80HeadsBackward aligned 0",
    "backward Sq=256 Sk=256 D=64 sm80=1 shared=99": "tiles kSm80Backward aligned 0",
    "backward Sq=513 Sk=77 D=64 sm80=1": "tiles kSm80Backward aligned 0",
    "backward Hk=1 Hq=4 Sq=64 Sk=64 D=64 causal=1": "tiles kSm80HeadsBackward aligned 0",
    "backward Hk=1 Hq=8 Sq=64 Sk=64 D=64 causal=1": "tiles kSm90Backward aligned 0",
    "backward Sq=49 Sk=49": "tiles kSm90Backward aligned 0",
    "backward Sq=49 Sk=49 sm80=1": "tiles kSm80HeadsBackward aligned 0",
    "backward Sq=64 Sk=64 sink=1 D=64": "tiles kSm80HeadsBackward aligned 0",
    "backward Sq=64 Sk=64 D=64 mask=1": "tiles kSm80HeadsBackward aligned 0",
    "backward Sq=65 Sk=65 D=64 mask=1 sm80=1": "tiles kSm80Backward aligned 0",
    "backward Sq=64 Sk=64 D=64 slopes=1": "tiles kSm80HeadsBackward aligned 0",
    "backward Sq=128 Sk=128 D=64 slopes=1 mask=1 sm80=1": "tiles kSm80HeadsBackward aligned 0",
    "backward Sq=64 Sk=16 D=64 slopes=1": "tiles kSm80Backward aligned 0",
    "backward Sq=64 Sk=64 D=64 slopes=1 deterministic=1": "tiles kSm90Backward aligned 0",
    "backward Sq=64 Sk=64 D=64 bias=1 bias_of_keys=1": "tiles kSm80HeadsBackward aligned 0",
    "backward Sq=128 Sk=128 D=64 bias=1 bias_of_keys=1": "tiles kSm80HeadsBackward aligned 0",
    "backward Sq=96 Sk=96 D=32 mask=1": "tiles kSm80HeadsBackward aligned 0",
    "backward Sq=96 Sk=96 D=32 mask=1 dropout=1": "tiles kSm80Backward aligned 0",
    "forward Sq=197 Sk=197 D=32 softcap=30": "tiles kSm80HeadsForward aligned 0",
    "forward Sq=197 Sk=197 D=32 softcap=30 mask=1": "tiles kSm90Forward aligned 0",
    "backward Sq=64 Sk=64 softcap=30 D=64": "tiles kSm80HeadsBackward aligned 0",
    "backward Sq=65 Sk=65 softcap=30 D=64": "tiles kSm90Backward aligned 0",
    "backward Sq=128 Sk=128 softcap=30 D=64 sm80=1": "tiles kSm80HeadsBackward aligned 0",
    # With a bias alone, of 16 bits, as many keys as fit; another one, and where it does not fit, the kernels of every option.
    "backward Sq=96 Sk=96 D=64 bias=1 sm80=1 shared=99": "tiles kSm80HeadsBackward aligned 0",
    "backward Sq=256 Sk=256 D=64 bias=1": "tiles kSm80HeadsBackward aligned 0",
    "backward Sq=197 Sk=197 D=64 bias=1": "tiles kSm80HeadsBackward aligned 0",
    "backward Sq=257 Sk=257 D=64 bias=1": "tiles kSm80Backward aligned 0",
    "backward Sq=600 Sk=64 D=64 bias=1": "tiles kSm90Backward aligned 0",
    "backward Sq=256 Sk=256 D=64 bias=1 sm80=1 shared=163": "tiles kSm80Backward aligned 0",
    "backward Sq=197 Sk=197 D=32 bias=1 sm80=1 shared=163": "tiles kSm80HeadsBackward aligned 0",
    "backward Sq=65 Sk=65 D=64 bias=32": "tiles kSm80Backward aligned 0",
    "backward Sq=64 Sk=64 D=64 bias=32": "tiles kSm80HeadsBackward aligned 0",
    "backward Sq=72 Sk=72 D=64 bias=1 softcap=30": "tiles kSm80Backward aligned 0",
    "forward Sq=128 Sk=128 D=64 bias=1": "tiles kSm90Forward aligned 0",
    "forward Sq=128 Sk=128 D=32 bias=1": "tiles kSm80HeadsForward aligned 0",
    "forward Sq=136 Sk=136 D=32 bias=1": "tiles kSm90Forward aligned 0",
    "forward Sq=197 Sk=197 D=64 bias=1": "tiles kSm80HeadsForward aligned 0",
    "forward Sq=197 Sk=197 D=64 bias=1 deterministic=1": "tiles kSm90Forward aligned 0",
    "forward Sq=232 Sk=232 D=32 bias=32": "tiles kSm80HeadsForward aligned 0",
    "forward Sq=233 Sk=233 D=32 bias=32": "tiles kSm90Forward aligned 0",
    "backward Sq=16 Sk=4096": "few_queries_backward kFewQueriesBackward aligned 0",
    "backward Sq=17 Sk=4096": "few_queries_backward kSm90FewQueriesBackward aligned 0",
    "backward Sq=64 Sk=4096 sm80=1 shared=99": "tiles kSm80Backward aligned 0",
    "backward Sq=64 Sk=4096 D=64 sm80=1 shared=99": "few_queries_backward kFewQueriesBackward aligned 0",
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("choose")
    (folder / "choose.cpp").write_text(PROGRAM)
    command = ["c++", "-std=c++17", f"-I{CSRC}", str(folder / "choose.cpp"), "-o", str(folder / "choose")]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "choose"


def choices(program: Path, calls: list[str]) -> list[str]:
    run = subprocess.run([program], input="\n".join(calls) + "\n", check=True, capture_output=True, text=True)
    return run.stdout.splitlines()


def test_calls_run_the_kernels_of_their_regime(program: Path) -> None:
    assert dict(zip(CALLS, choices(program, [*CALLS]), strict=True)) == CALLS


def test_the_batch_does_not_change_how_keys_are_split(program: Path) -> None:
    """The bits of a sequence with few queries are the same in every batch."""
    calls = [
        f"forward Sq={queries} Sk={keys} Hq=8 Hk=2 D={dim}"
        for queries in (1, 8, 32, 64)
        for keys in (512, 4096, 65536)
        for dim in (64, 128, 256)
    ]
    alone = choices(program, calls)
    assert len({*alone}) > 2
    for batch in (3, 200):
        assert choices(program, [f"{call} B={batch}" for call in calls]) == alone
