// The table of CUDA kernels: a row is one compiled kernel, for each of its element types. Everything that depends on
// which kernels exist reads this file:
//   - csrc/sources.py: the sources that a build compiles, the architectures of each, the bytes that each may spill (of
//     nvcc 13.0 for sm_80 or sm_90a, and at least a quarter more), and the page docs/cuda_kernels.md;
//   - cuda/choose.h: a call runs the first row that serves it (serves() in rows.h), unless a threshold there prefers
//     another stage, and supports() refuses a call that no row serves;
//   - the kernels: their tile;
//   - `flashattn-ext bench tune`: the tiles of a row that compete, of which the build has the first.
// To add a kernel, add a row; to remove one, delete its row. rows.h explains the columns and the sizes of a tile,
// stages.def what an array is. sources.py reads one row in each line, and a note behind it or above it. A note that
// ends in a colon is that of all rows below it that have none of their own.
//
// A class of head dims serves every call up to it, so rows are in ascending order; general kernels follow the kernels
// that they replace. The classes above 256 follow all others: their plain kernels track the largest logit, and would
// otherwise serve calls for which only the general kernels of smaller classes do.
//
// Notes are TFLOP/s on an H200 (bf16; full / causal, S = 4096 where none is named; rows with a Mask: one document /
// documents of a mean of 1024 tokens, both causal and S = 16384), of the first tile and of others, or what decided
// otherwise; the logs in lab/logs/ have the experiments.
#pragma once

#include "cuda/table/rows.h"

// clang-format off
namespace flashattn_ext::kernel_table {

constexpr sm90::ForwardOrder kInTurn = sm90::ForwardOrder::kInTurn, kOverlapped = sm90::ForwardOrder::kOverlapped;
constexpr sm90::BackwardOrder kApart = sm90::BackwardOrder::kApart, kApartOnce = sm90::BackwardOrder::kApartOnce,
                              kPairs = sm90::BackwardOrder::kPairs, kThreePhases = sm90::BackwardOrder::kThreePhases;

// Tiles: {warps, row tiles of a warp, keys, resident thread blocks[, stages[, warps along the columns of out]]}. Tiles
// with warps along the columns are those for 227, 163 and 99 KB of shared memory: the GPU chooses, not speed.
inline constexpr KernelRow<sm80::ForwardTile> kSm80Forward[] = {
    {k16Bit, 32,  kPlain,     kOtherGpus, 0,    {{4, 2, 128, 2}}},  // 220 / 201; class 64: 0.76 and 0.78 of that; no other tile was timed
    // 331 / 313; 4 x 2, 128 keys: 342 / 321, but the row with masks needs as many (invariant calls); 8 x 1, 64 keys: 276 / 264
    {k16Bit, 64,  kPlain,     kOtherGpus, 0,    {{4, 2, 64, 3}, {4, 2, 128, 2}, {8, 1, 64, 2}}},
    // 308 / 307, 2 stages 310 / 306; of two stages 99 KB hold one thread block: 230 / 218; 8 x 1, 64 keys: 240 / 230
    {k16Bit, 96,  kPlain,     kOtherGpus, 48,   {{4, 2, 64, 2}, {4, 2, 64, 2, 2}, {8, 1, 64, 1}}},
    // 383 / 365; 4 x 2, 32 keys: 327 / 308; 8 x 1, 64 keys: 282 / 269
    {k16Bit, 128, kPlain,     kOtherGpus, 0,    {{4, 2, 64, 2}, {4, 2, 32, 2}, {8, 1, 64, 1}}},
    // 315 / 302; 4 x 2, 32 keys: 314 / 302; 8 x 1, 64 keys: 203 / 198
    {k16Bit, 144, kPlain,     kOtherGpus, 16,   {{4, 2, 64, 2}, {4, 2, 32, 2}, {8, 1, 64, 1}}},
    // 316 / 305; 4 x 1, 32 keys: 257 / 252; 8 x 1, 32 keys: 236 / 226
    {k16Bit, 192, kPlain,     kOtherGpus, 16,   {{4, 1, 64, 2}, {4, 1, 32, 2}, {8, 1, 32, 1}}},
    // 337 / 328; 4 x 1, 32 keys: 298 / 293; 8 x 1, 32 keys: 269 / 262
    {k16Bit, 256, kPlain,     kOtherGpus, 16,   {{4, 1, 64, 2}, {4, 1, 32, 2}, {8, 1, 32, 1}}},
    // 255 / 247; of two thread blocks 240 / 232, with 128 keys 250 / 238; 4 x 1, four thread blocks: 232 / 225
    {k16Bit, 64,  kDropout,   kOtherGpus, 52,   {{4, 2, 64, 3}, {4, 2, 128, 2}, {4, 1, 64, 4}}},
    // 2 stages: 273 / 271; 4 x 2, 32 keys: 215 / 213; 8 x 1, 64 keys: 213 / 204
    {k16Bit, 96,  kDropout,   kOtherGpus, 16,   {{4, 2, 64, 2}, {4, 2, 64, 2, 2}, {8, 1, 64, 1}}},
    // 264 / 251; 4 x 2, 32 keys: 264 / 249; 8 x 1, 64 keys: 183 / 177
    {k16Bit, 128, kDropout,   kOtherGpus, 8,    {{4, 2, 64, 2}, {4, 2, 32, 2}, {8, 1, 64, 1}}},
    // 271 / 258; 4 x 2, 32 keys: 271 / 258; 8 x 1, 64 keys: 194 / 188
    {k16Bit, 144, kDropout,   kOtherGpus, 32,   {{4, 2, 64, 2}, {4, 2, 32, 2}, {8, 1, 64, 1}}},
    // 293 / 284; 4 x 1, 32 keys: 235 / 232; 8 x 1, 32 keys: 224 / 215
    {k16Bit, 192, kDropout,   kOtherGpus, 16,   {{4, 1, 64, 2}, {4, 1, 32, 2}, {8, 1, 32, 1}}},
    // 327 / 318; 4 x 1, 32 keys: 281 / 274; 8 x 1, 32 keys: 262 / 254
    {k16Bit, 256, kDropout,   kOtherGpus, 16,   {{4, 1, 64, 2}, {4, 1, 32, 2}, {8, 1, 32, 1}}},
    // 292 / 193; 4 x 2, 128 keys: 311 / 191; 8 x 1, 64 keys: 252 / 173
    {k16Bit, 64,  kMasks,     kOtherGpus, 80,   {{4, 2, 64, 3}, {4, 2, 128, 2}, {8, 1, 64, 2}}},
    // 363 / 244; 4 x 2, 32 keys: 287 / 206; 8 x 1, 64 keys: 254 / 177
    {k16Bit, 128, kMasks,     kOtherGpus, 32,   {{4, 2, 64, 2}, {4, 2, 32, 2}, {8, 1, 64, 1}}},
    // 344 / 245; 4 x 1, 32 keys: 272 / 207; 8 x 1, 32 keys: 252 / 183
    {k16Bit, 256, kMasks,     kEveryGpu,  16,   {{4, 1, 64, 2}, {4, 1, 32, 2}, {8, 1, 32, 1}}},
    {k16Bit, 64,  kScores,    kOtherGpus, 96,   {{4, 1, 64, 4}, {4, 2, 64, 2}, {4, 2, 128, 2}}},  // softcap 237 / 234; 4 x 2: 212 / 206, with 128 keys 232 / 224
    {k16Bit, 128, kScores,    kOtherGpus, 16,   {{4, 2, 64, 2}, {4, 1, 64, 2}, {4, 1, 32, 3}}},  // softcap 270 / 263; 4 x 1: 246 / 246, 32 keys 245 / 245
    // 157 / 115; 4 x 2, 64 keys: 148 / 108; 4 x 2, 32 keys: 115 / 88
    {k16Bit, 64,  kGeneral,   kEveryGpu,  256,  {{8, 1, 64, 2}, {4, 2, 64, 2}, {4, 2, 32, 2}}},
    {k16Bit, 128, kGeneral,   kEveryGpu,  16,   {{4, 2, 32, 2}}},  // 64 keys spill
    // 232 / 187; 4 x 1, 32 keys: 214 / 168; 8 x 1, 32 keys: 187 / 141
    {k16Bit, 256, kGeneral,   kEveryGpu,  176,  {{4, 1, 64, 2}, {4, 1, 32, 2}, {8, 1, 32, 1}}},
    {k16Bit, 384, kPlain,     kOtherGpus, 16,   {{8, 4, 128, 1, 4, 8}, {8, 4, 128, 1, 2, 8}, {4, 2, 64, 1, 3, 4}}},  // 274 / 259; computing the scores twice: 167 / 151
    {k16Bit, 512, kPlain,     kOtherGpus, 16,   {{8, 4, 128, 1, 4, 8}, {8, 4, 128, 1, 2, 8}, {4, 2, 64, 1, 3, 4}}},  // 290 / 279; computing the scores twice: 139 / 108
    {k16Bit, 512, kGeneral,   kEveryGpu,  16,   {{2, 1, 32, 2}}},  // 64 queries take 112 KB
    // the most queries, a power of two, that fit beside 32 keys in 99 KB of shared memory, in 163 KB at 512; at 64 the most that do not spill:
    {kFp32,  64,  kPlain,     kEveryGpu,  0,    {{8, 1, 32, 1}}},
    {kFp32,  96,  kPlain,     kEveryGpu,  32,   {{4, 2, 32, 1}}},
    {kFp32,  128, kPlain,     kEveryGpu,  0,    {{4, 2, 32, 1}}},
    {kFp32,  144, kPlain,     kEveryGpu,  320,  {{4, 1, 32, 1}}},
    {kFp32,  192, kPlain,     kEveryGpu,  640,  {{4, 1, 32, 1}}},
    {kFp32,  256, kPlain,     kEveryGpu,  1040, {{2, 1, 32, 1}}},
    {kFp32,  64,  kDropout,   kEveryGpu,  8,    {{8, 1, 32, 1}}},
    {kFp32,  96,  kDropout,   kEveryGpu,  32,   {{4, 2, 32, 1}}},
    {kFp32,  128, kDropout,   kEveryGpu,  8,    {{4, 2, 32, 1}}},
    {kFp32,  144, kDropout,   kEveryGpu,  224,  {{4, 1, 32, 1}}},
    {kFp32,  192, kDropout,   kEveryGpu,  784,  {{4, 1, 32, 1}}},
    {kFp32,  256, kDropout,   kEveryGpu,  1344, {{2, 1, 32, 1}}},
    {kFp32,  64,  kMasks,     kEveryGpu,  16,   {{8, 1, 32, 1}}},
    {kFp32,  128, kMasks,     kEveryGpu,  128,  {{4, 2, 32, 1}}},
    {kFp32,  256, kMasks,     kEveryGpu,  144,  {{2, 1, 32, 1}}},
    {kFp32,  64,  kGeneral,   kEveryGpu,  16,   {{8, 1, 32, 1}}},
    {kFp32,  128, kGeneral,   kEveryGpu,  688,  {{4, 2, 32, 1}}},
    {kFp32,  256, kGeneral,   kEveryGpu,  288,  {{2, 1, 32, 1}}},
    {kFp32,  384, kGeneral,   kEveryGpu,  272,  {{1, 1, 32, 1}}},
    {kFp32,  512, kGeneral,   kEveryGpu,  240,  {{2, 1, 32, 1}}},
    // copies of inputs in fp8; no other tiles were timed:
    {kBf16,  64,  kFp8Scores,  kOtherGpus, 16,   {{4, 2, 64, 2}}},
    {kBf16,  128, kFp8Scores,  kOtherGpus, 16,   {{4, 2, 64, 2}}},
    {kBf16,  256, kFp8Scores,  kOtherGpus, 16,   {{4, 1, 64, 2}}},
    // copies of inputs in fp8; the tiles of the general rows:
    {kBf16,  64,  kFp8General, kOtherGpus, 64,   {{8, 1, 64, 2}}},
    {kBf16,  128, kFp8General, kOtherGpus, 16,   {{4, 2, 32, 2}}},
    {kBf16,  256, kFp8General, kOtherGpus, 16,   {{4, 1, 64, 2}}},
    {kBf16,  512, kFp8General, kEveryGpu,  16,   {{2, 1, 32, 2}}},
};

// Tiles: {warps, keys, queries, warps along the keys of the scores, warps along the keys of dk and dv, thread blocks along the columns, stages of
// queries[, whether tiles are swizzled[, whether warps hold their values]]}, for 227, 163 and 99 KB of shared memory: the GPU chooses, not speed. Of
// less than 227 KB figures are of an H200 with as many thread blocks on a multiprocessor as those GPUs have. dq has the layout of a tile: those of one class, element size and memory
// have the same warps, queries and thread blocks.
inline constexpr KernelRow<sm80::BackwardTile> kSm80Backward[] = {
    // 264 / 244, 99 KB 241 / 224; values in registers: 244 / 227; 64 queries: 240 / 222; 32: 199 / 186, in 99 KB 183 / 175
    {k16Bit, 32,  kPlain,     kOtherGpus, 36,   {{4, 128, 128, 4, 4, 1, 1}, {4, 128, 128, 4, 4, 1, 1}, {4, 128, 64, 4, 4, 1, 1}}},
    // 312 / 288, 163 KB 306 / 284, 99 KB 279 / 259; 64 queries, 2 stages: 306 / 287; 32: 277 / 260; 64 keys in 99 KB: 230 / 219
    {k16Bit, 64,  kPlain,     kOtherGpus, 28,   {{4, 128, 128, 4, 4, 1, 1}, {4, 128, 64, 4, 4, 1, 1}, {4, 128, 64, 4, 4, 1, 1, true, true}}},
    // 270 / 253, 99 KB 238 / 229; 64 queries: 263 / 249, without values in registers: 256 / 244; 96 x 64 in 99 KB: 206 / 199
    {k16Bit, 96,  kPlain,     kOtherGpus, 32,   {{8, 128, 128, 8, 8, 1, 1, false, true}, {8, 128, 128, 8, 8, 1, 1, false, true}, {8, 128, 64, 4, 4, 1, 1, false, true}}},
    // 295 / 282, 163 KB 292 / 278, 99 KB 269 / 253; 64 keys in two thread blocks: 272 / 258; 32 queries in 99 KB: 222 / 214
    {k16Bit, 128, kPlain,     kOtherGpus, 36,   {{8, 128, 64, 4, 4, 1, 2}, {8, 128, 64, 4, 2, 1, 2, true}, {8, 128, 64, 8, 8, 1, 1, false, true}}},
    // 244 / 238, 99 KB 171 / 177; 48 keys in 99 KB: 133 / 134
    {k16Bit, 144, kPlain,     kOtherGpus, 16,   {{6, 96, 64, 3, 2, 1, 2}, {6, 96, 64, 3, 2, 1, 2}, {6, 96, 32, 3, 2, 1, 1}}},
    // 227 / 218, 163 KB 218 / 210, 99 KB 204 / 203; 96 keys: 210 / 216; 32 queries in 99 KB: 156 / 157
    {k16Bit, 192, kPlain,     kOtherGpus, 80,   {{8, 64, 64, 4, 2, 1, 2}, {8, 64, 64, 4, 2, 1, 2, true}, {8, 64, 64, 4, 2, 1, 1, false, true}}},
    // 237 / 228, 163 KB 213 / 213, 99 KB 179 / 184; values in registers: 219 / 211, in 163 KB 201 / 203; 32 x 32 in 99 KB: 128 / 127
    {k16Bit, 256, kPlain,     kOtherGpus, 112,  {{8, 64, 64, 4, 2, 1, 2}, {8, 64, 64, 4, 2, 1, 1}, {8, 64, 32, 4, 2, 1, 1, false, true}}},
    // the tiles of the plain rows of their classes, in 99 KB but at 64; kScores and kGeneral at 128 in 163 KB have room for one stage:
    {k16Bit, 64,  kDropout,   kOtherGpus, 68,   {{4, 128, 128, 4, 4, 1, 1}, {4, 128, 64, 4, 4, 1, 1}, {4, 64, 64, 4, 4, 1, 1}}},
    {k16Bit, 96,  kDropout,   kOtherGpus, 48,   {{8, 128, 128, 8, 8, 1, 1, false, true}, {8, 128, 128, 8, 8, 1, 1, false, true}, {8, 128, 64, 4, 4, 1, 1, false, true}}},
    {k16Bit, 128, kDropout,   kOtherGpus, 64,   {{8, 128, 64, 4, 4, 1, 2}, {8, 128, 64, 4, 2, 1, 2, true}, {8, 128, 64, 8, 8, 1, 1, false, true}}},
    {k16Bit, 144, kDropout,   kOtherGpus, 160,  {{6, 96, 64, 3, 2, 1, 2}, {6, 96, 64, 3, 2, 1, 2}, {6, 96, 32, 3, 2, 1, 1}}},
    {k16Bit, 192, kDropout,   kOtherGpus, 64,   {{8, 64, 64, 4, 2, 1, 2}, {8, 64, 64, 4, 2, 1, 2, true}, {8, 64, 64, 4, 2, 1, 1, false, true}}},
    {k16Bit, 256, kDropout,   kOtherGpus, 112,  {{8, 64, 64, 4, 2, 1, 2}, {8, 64, 64, 4, 2, 1, 1}, {8, 64, 32, 4, 2, 1, 1, false, true}}},
    {k16Bit, 64,  kMasks,     kOtherGpus, 176,  {{4, 128, 128, 4, 4, 1, 1}, {4, 128, 64, 4, 4, 1, 1}, {4, 64, 64, 4, 4, 1, 1}}},
    {k16Bit, 128, kMasks,     kOtherGpus, 64,   {{8, 128, 64, 4, 4, 1, 2}, {8, 128, 64, 4, 2, 1, 2, true}, {8, 128, 64, 8, 8, 1, 1, false, true}}},
    {k16Bit, 256, kMasks,     kEveryGpu,  256,  {{8, 64, 64, 4, 2, 1, 2}, {8, 64, 64, 4, 2, 1, 1}, {8, 64, 32, 4, 2, 1, 1, false, true}}},
    {k16Bit, 64,  kScores,    kOtherGpus, 208,  {{4, 128, 128, 4, 4, 1, 1}, {4, 128, 64, 4, 4, 1, 1}, {4, 64, 64, 4, 4, 1, 1}}},
    {k16Bit, 128, kScores,    kOtherGpus, 208,  {{8, 128, 64, 4, 4, 1, 2}, {8, 128, 64, 4, 2, 1, 1, true}, {8, 128, 64, 8, 8, 1, 1, false, true}}},
    {k16Bit, 64,  kGeneral,   kEveryGpu,  560,  {{4, 128, 128, 4, 4, 1, 1}, {4, 128, 64, 4, 4, 1, 1}, {4, 64, 64, 4, 4, 1, 1}}},
    {k16Bit, 128, kGeneral,   kEveryGpu,  752,  {{8, 128, 64, 4, 4, 1, 2}, {8, 128, 64, 4, 2, 1, 1, true}, {8, 128, 64, 8, 8, 1, 1, false, true}}},
    {k16Bit, 256, kGeneral,   kEveryGpu,  384,  {{8, 64, 64, 4, 2, 1, 2}, {8, 64, 64, 4, 2, 1, 1}, {8, 64, 32, 4, 2, 1, 1, false, true}}},
    {k16Bit, 384, kPlain,     kOtherGpus, 16,   {{8, 64, 32, 4, 2, 2, 2}, {8, 64, 32, 4, 2, 2, 1}, {2, 32, 16, 2, 2, 3, 1}}},
    {k16Bit, 512, kPlain,     kOtherGpus, 16,   {{8, 64, 32, 4, 2, 2, 1}, {4, 32, 32, 2, 1, 2, 1}, {1, 16, 16, 1, 1, 4, 1}}},
    {k16Bit, 512, kGeneral,   kEveryGpu,  16,   {{8, 64, 32, 4, 2, 2, 1}, {4, 32, 32, 2, 1, 2, 1}, {1, 16, 16, 1, 1, 4, 1}}},
    // no figures of other tiles for as much shared memory:
    {kFp32,  64,  kPlain,     kEveryGpu,  0,    {{8, 64, 64, 2, 2, 1, 2}, {8, 64, 64, 2, 2, 1, 2}, {4, 64, 32, 4, 4, 1, 2}}},
    {kFp32,  96,  kPlain,     kEveryGpu,  16,   {{3, 48, 16, 3, 3, 1, 2}, {3, 48, 16, 3, 3, 1, 2}, {3, 48, 16, 3, 3, 1, 2}}},
    {kFp32,  128, kPlain,     kEveryGpu,  0,    {{8, 64, 64, 2, 2, 1, 1}, {4, 32, 32, 2, 2, 1, 1}, {4, 32, 32, 2, 2, 1, 1}}},
    {kFp32,  144, kPlain,     kEveryGpu,  32,   {{3, 48, 16, 3, 3, 1, 2}, {3, 48, 16, 3, 3, 1, 2}, {3, 48, 16, 3, 3, 1, 1}}},
    {kFp32,  192, kPlain,     kEveryGpu,  416,  {{8, 64, 32, 4, 2, 1, 1}, {8, 64, 32, 4, 2, 1, 1}, {1, 16, 16, 1, 1, 2, 2}}},
    {kFp32,  256, kPlain,     kEveryGpu,  1040, {{4, 32, 32, 2, 1, 1, 1}, {4, 32, 32, 2, 1, 1, 1}, {1, 16, 16, 1, 1, 2, 1}}},
    // the tiles of the plain rows of their classes:
    {kFp32,  64,  kDropout,   kEveryGpu,  8,    {{8, 64, 64, 2, 2, 1, 2}, {8, 64, 64, 2, 2, 1, 2}, {4, 64, 32, 4, 4, 1, 2}}},
    {kFp32,  96,  kDropout,   kEveryGpu,  16,   {{3, 48, 16, 3, 3, 1, 2}, {3, 48, 16, 3, 3, 1, 2}, {3, 48, 16, 3, 3, 1, 2}}},
    {kFp32,  128, kDropout,   kEveryGpu,  8,    {{8, 64, 64, 2, 2, 1, 1}, {4, 32, 32, 2, 2, 1, 1}, {4, 32, 32, 2, 2, 1, 1}}},
    {kFp32,  144, kDropout,   kEveryGpu,  32,   {{3, 48, 16, 3, 3, 1, 2}, {3, 48, 16, 3, 3, 1, 2}, {3, 48, 16, 3, 3, 1, 1}}},
    {kFp32,  192, kDropout,   kEveryGpu,  400,  {{8, 64, 32, 4, 2, 1, 1}, {8, 64, 32, 4, 2, 1, 1}, {1, 16, 16, 1, 1, 2, 2}}},
    {kFp32,  256, kDropout,   kEveryGpu,  1152, {{4, 32, 32, 2, 1, 1, 1}, {4, 32, 32, 2, 1, 1, 1}, {1, 16, 16, 1, 1, 2, 1}}},
    {kFp32,  64,  kMasks,     kEveryGpu,  144,  {{8, 64, 64, 2, 2, 1, 2}, {8, 64, 64, 2, 2, 1, 2}, {4, 64, 32, 4, 4, 1, 2}}},
    {kFp32,  128, kMasks,     kEveryGpu,  416,  {{8, 64, 64, 2, 2, 1, 1}, {4, 32, 32, 2, 2, 1, 1}, {4, 32, 32, 2, 2, 1, 1}}},
    {kFp32,  256, kMasks,     kEveryGpu,  1600, {{4, 32, 32, 2, 1, 1, 1}, {4, 32, 32, 2, 1, 1, 1}, {1, 16, 16, 1, 1, 2, 1}}},
    {kFp32,  64,  kGeneral,   kEveryGpu,  176,  {{8, 64, 64, 2, 2, 1, 2}, {8, 64, 64, 2, 2, 1, 2}, {4, 64, 32, 4, 4, 1, 2}}},
    {kFp32,  128, kGeneral,   kEveryGpu,  624,  {{8, 64, 64, 2, 2, 1, 1}, {4, 32, 32, 2, 2, 1, 1}, {4, 32, 32, 2, 2, 1, 1}}},
    {kFp32,  256, kGeneral,   kEveryGpu,  1600, {{4, 32, 32, 2, 1, 1, 1}, {4, 32, 32, 2, 1, 1, 1}, {1, 16, 16, 1, 1, 2, 1}}},
    // no figures of other tiles for as much shared memory:
    {kFp32,  384, kGeneral,   kEveryGpu,  944,  {{4, 32, 32, 2, 1, 2, 1}, {1, 16, 16, 1, 1, 3, 1}, {1, 16, 16, 1, 1, 3, 1}}},
    {kFp32,  512, kGeneral,   kEveryGpu,  1280, {{2, 32, 16, 2, 2, 4, 1}, {1, 16, 16, 1, 1, 4, 1}, {1, 16, 16, 1, 1, 4, 1}}},
};

// Whole heads. Tiles: {keys of a step, warps at most, thread blocks of as many warps}. Notes are microseconds.
inline constexpr KernelRow<sm80::HeadsForwardTile> kSm80HeadsForward[] = {
    {k16Bit, 32,  kPlain, kEveryGpu, 8, {{64, 8, 3}}},  // 512x49, 6 heads: 21.1, and 128x128, 4 heads: 10.2; 32 keys: 22.6 and 12.1; 128 keys, 2 blocks: 24.0 and 10.2
    {k16Bit, 64,  kPlain, kEveryGpu, 8, {{64, 8, 2}}},  // 256x49, 16 heads: 39.2, and 64x197, 12 heads: 49.6; 32 keys in 5 blocks of 4 warps: 38.3 and 60.2
    {k16Bit, 128, kPlain, kEveryGpu, 48, {{64, 4, 3}}},  // 128x64, 16 heads: 39.9; 32 keys: 42.9
    // no figures of other tiles:
    {k16Bit, 32,  kAnyBias,  kEveryGpu, 0, {{64, 4, 5}}},
    {k16Bit, 64,  kAnyBias,  kEveryGpu, 40, {{64, 8, 2}}},
    {k16Bit, 32,  kUnlisted, kEveryGpu, 0, {{32, 8, 2}}},
    {k16Bit, 64,  kUnlisted, kEveryGpu, 0, {{32, 4, 3}}},
};

// Tiles: {queries of a tile at most, queries of a step, columns of dq of a warp, warps at most, blocks of as many warps}.
inline constexpr KernelRow<sm80::HeadsBackwardTile> kSm80HeadsBackward[] = {
    {k16Bit, 32,  kPlain, kEveryGpu,  4, {{128, 32, 32, 16, 1}}},  // 128x128, 4 heads: 19.4, and 512x49, 6 heads: 42.7; tiles of 64 queries: 21.4 and 42.7
    {k16Bit, 64,  kPlain, kEveryGpu,  4, {{64, 32, 32, 16, 1}}},  // 256x49, 16 heads: 86.7, and 32x128, 12 heads: 34.4; tiles of 128 queries: 121 and 36.3
    // 128x64, 16 heads: 111.6, where reads and writes take 67 at 4 TB/s; no figures of other tiles
    {k16Bit, 128, kPlain, kOtherGpus, 0, {{64, 32, 64, 8, 1}}},
    // no figures of other tiles:
    {k16Bit, 32,  kAnyBias,  kEveryGpu, 4, {{64, 32, 32, 16, 1}}},
    {k16Bit, 64,  kAnyBias,  kEveryGpu, 0, {{64, 16, 32, 16, 1}}},
    {k16Bit, 32,  kUnlisted, kEveryGpu, 0, {{64, 16, 32, 12, 1}}},
    {k16Bit, 64,  kUnlisted, kEveryGpu, 0, {{64, 16, 32, 8, 1}}},
};

// Short sequences on Hopper. Tiles: {keys of a step, resident thread blocks}. Notes are microseconds.
inline constexpr KernelRow<sm90::ShortForwardTile> kSm90ShortForward[] = {
    // as many keys as kBrief; 64x160, 12 heads: 30.0, and 8x256, 12 heads: 8.4; 128 keys in 3 blocks: 32.6 and 8.1
    {k16Bit, 64,  kPlain, kHopper, 0, {{64, 4}}},
};

// Tiles: {warpgroups, keys, stages of keys and values[, order[, two teams[, stages of queries]]]}. With dropout, keys are a multiple of 64, for which the generator
// draws bits together. Above 256 (forward_large.cuh) stages are parts of a tile of keys. How many keys a step takes
// decides the order of sums; it depends on nothing but the row, so that a sequence has the same bits in every batch.
inline constexpr KernelRow<sm90::ForwardTile> kSm90Forward[] = {
    // 552 / 495; 3 x 112 keys: 516 / 465; 2 x 192: 457 / 430
    {k16Bit, 64,         kPlain,     kHopper, 0,    {{3, 128, 3}, {3, 112, 3}, {2, 192, 2}}},
    // 577 / 527; 2 stages: 575 / 520; class 96: 546 / 495
    {k16Bit, 80,         kPlain,     kHopper, 0,    {{3, 112, 3}, {3, 112, 2}}},
    // 658 / 590; 3 x 96: 645 / 589; 2 x 128: 594 / 542
    {k16Bit, 96,         kPlain,     kHopper, 16,   {{3, 112, 2}, {3, 96, 2}, {2, 128, 3}}},
    // 717 / 645; 2 x 128: 696 / 629; 2 x 160: 699 / 626
    {k16Bit, 128,        kPlain,     kHopper, 0,    {{3, 80, 3}, {2, 128, 3}, {2, 160, 2}}},
    {k16Bit, 64,         kBrief,     kHopper, 0,    {{4, 64, 4, kOverlapped, false, 2}}},  // 12x256, 64 heads: 41.6 us; 5 stages and 1 of queries: 43.0; 48 keys: 50.5
    {k16Bit, 64,         kBriefFewTiles, kHopper, 0, {{2, 64, 8}}},  // as many keys as kBrief; figures: choose.h
    {k16Bit, 128,        kBrief,     kHopper, 0,    {{2, 128, 2, kOverlapped, false, 2}}},  // 32x256, 16 heads, causal: 41.0 us; 3 stages and 1 of queries: 43.4
    {k16Bit, 64,         kFewTiles,  kHopper, 0,    {{2, 128, 3}}},  // as many keys as the plain kernel's; figures: choose.h
    {k16Bit, 128,        kFewTiles,  kHopper, 0,    {{2, 80, 4}}},  // as many keys as the plain kernel's; figures: choose.h
    // 700 / 645; 2 x 112: 676 / 611; 2 x 96: 667 / 609; class 160: 0.92 / 0.89 of the rate
    {k16Bit, 144,        kPlain,     kHopper, 16,   {{3, 80, 2}, {2, 112, 2}, {2, 96, 2}}},
    // 743 / 695 (S = 8192); 2 x 128: 705 / 694; 2 x 112: 685 / 675
    {k16Bit, {192, 128}, kPlain,     kHopper, 0,    {{3, 80, 3}, {2, 128, 2}, {2, 112, 2}}},
    // 743 / 652; 2 x 96: 724 / 643; 2 x 112: 715 / 636; class 192: 665 / 593
    {k16Bit, 160,        kPlain,     kHopper, 0,    {{3, 64, 3}, {2, 96, 2}, {2, 112, 2}}},
    // 766 / 682; 2 x 112: 756 / 657; 2 x 80: 744 / 678
    {k16Bit, 192,        kPlain,     kHopper, 16,   {{2, 96, 2}, {2, 112, 2}, {2, 80, 2}}},
    {k16Bit, 256,        kPlain,     kHopper, 16,   {{2, 64, 2}, {2, 80, 2}}},  // 799 / 688; 2 x 80: 765 / 664
    // 364 / 343; 3 x 128: 354 / 333 (spills 8 bytes)
    {k16Bit, 64,         kDropout,   kHopper, 8,    {{2, 128, 3}, {3, 64, 4}, {2, 192, 2}}},
    // 459 / 432; 2 x 128: 445 / 422; 2 x 64: 422 / 406
    {k16Bit, 96,         kDropout,   kHopper, 16,   {{3, 64, 4}, {2, 128, 2}, {2, 64, 4}}},
    // 533 / 504; 3 x 64: 508 / 477
    {k16Bit, 128,        kDropout,   kHopper, 8,    {{2, 128, 3}, {3, 64, 3}, {2, 64, 4}}},
    // 516 / 494; 3 x 64: 518 / 494; 2 x 64, 2 stages: 513 / 484
    {k16Bit, 144,        kDropout,   kHopper, 16,   {{2, 64, 3}, {3, 64, 2}, {2, 64, 2}}},
    // 601 / 567; 2 x 64, 2 stages: 599 / 552
    {k16Bit, 192,        kDropout,   kHopper, 16,   {{2, 64, 3}, {2, 64, 2}}},
    {k16Bit, 256,        kDropout,   kHopper, 16,   {{2, 64, 2}}},  // 128 keys do not fit
    // 554 / 326; 2 x 192: 475 / 252; 2 x 128: 444 / 276
    {k16Bit, 64,         kIntervals, kHopper, 16,   {{3, 128, 3}, {2, 192, 2}, {2, 128, 3}}},
    // 658 / 353; 3 x 96: 642 / 355; 2 x 128: 586 / 332
    {k16Bit, 96,         kIntervals, kHopper, 32,   {{3, 112, 2}, {3, 96, 2}, {2, 128, 2}}},
    // 733 / 477 (spills 8 bytes); 2 x 160: 705 / 413; 2 x 128: 701 / 426
    {k16Bit, 128,        kIntervals, kHopper, 16,   {{3, 80, 3}, {2, 160, 2}, {2, 128, 2}}},
    // 749 / 458; 2 x 112: 692 / 409; 2 x 96: 685 / 415
    {k16Bit, 144,        kIntervals, kHopper, 32,   {{3, 80, 2}, {2, 112, 2}, {2, 96, 2}}},
    // 794 / 484; 2 x 112: 804 / 475; 2 x 80: 770 / 480
    {k16Bit, 192,        kIntervals, kHopper, 16,   {{2, 96, 2}, {2, 112, 2}, {2, 80, 2}}},
    {k16Bit, 256,        kIntervals, kHopper, 16,   {{2, 80, 2}, {2, 64, 2}}},  // 820 / 499; 2 x 64: 818 / 480
    {k16Bit, 64,         kBlocks,    kHopper, 0,    {{2, 64, 5, kOverlapped, true}}},  // sides divide a block of 128; half of the blocks of 65536 tokens: 427, without a mask 522
    {k16Bit, 128,        kBlocks,    kHopper, 0,    {{2, 128, 3}}},  // half of the blocks of 65536 tokens: 629, without a mask 678
    // 321 / 307 (spills 8 bytes); 2 x 160: 305 / 291; 2 x 128: 305 / 289
    {k16Bit, 64,         kScores,    kHopper, 48,   {{3, 96, 3}, {2, 160, 3}, {2, 128, 3}}},
    // 467 / 430; 3 x 96: 445 / 420; 2 x 128: 437 / 417
    {k16Bit, 96,         kScores,    kHopper, 576,  {{3, 112, 2}, {3, 96, 2}, {2, 128, 3}}},
    // 528 / 500; 3 x 80: 542 / 500; 2 x 160: 513 / 483
    {k16Bit, 128,        kScores,    kHopper, 16,   {{2, 128, 3}, {3, 80, 3}, {2, 160, 2}}},
    {k16Bit, 144,        kScores,    kHopper, 16,   {{2, 112, 2}, {2, 96, 2}}},  // 538 / 506; 2 x 96: 538 / 506
    // 634 / 592; 2 x 112: 638 / 577; 2 x 80: 628 / 570
    {k16Bit, 192,        kScores,    kHopper, 16,   {{2, 96, 2}, {2, 112, 2}, {2, 80, 2}}},
    {k16Bit, 256,        kScores,    kHopper, 16,   {{2, 64, 2}, {2, 80, 2}}},  // 681 / 629; 2 x 80: 704 / 624
    // 387 / 359 (spills 16 bytes); 2 x 192: 329 / 320; 2 x 128: 324 / 309
    {k16Bit, 64,         kBias,      kHopper, 32,   {{3, 128, 3}, {2, 192, 2}, {2, 128, 3}}},
    {k16Bit, 128,        kBias,      kHopper, 16,   {{2, 128, 2}, {2, 64, 3}}},  // 567 / 529; 2 x 64: 500 / 471
    {k16Bit, 256,        kBias,      kHopper, 16,   {{2, 64, 2}}},  // 80 keys do not fit
    // 272 / 180; 2 x 128: 256 / 165; 2 x 192: 249 / 145
    {k16Bit, 64,         kUnlisted,  kHopper, 32,   {{3, 64, 4}, {2, 128, 3}, {2, 192, 2}}},
    // 469 / 286; 2 x 64: 400 / 280; 3 x 64 spills in every step
    {k16Bit, 128,        kUnlisted,  kHopper, 1024, {{2, 128, 2}, {2, 64, 4}}},
    {k16Bit, 256,        kUnlisted,  kHopper, 304,  {{2, 64, 2}}},  // 128 keys do not fit
    // 588 / 559 (S = 8192); 128: 588 / 559; 96: 566 / 535
    {k16Bit, 384,        kPlain,     kHopper, 16,   {{1, 64, 5}, {1, 128, 4}, {1, 96, 6}}},
    // 646 / 595 (S = 8192); 128: 642 / 573; 96: 594 / 554
    {k16Bit, 512,        kPlain,     kHopper, 128,  {{1, 64, 4}, {1, 128, 4}, {1, 96, 6}}},
    {k16Bit, 384,        kDropout,   kHopper, 16,   {{1, 64, 5}}},  // the plain tile; not timed with dropout
    {k16Bit, 512,        kDropout,   kHopper, 128,  {{1, 64, 4}}},  // the plain tile; not timed with dropout
    // 644 / 609 (S = 8192); 3 x 128: 594 / 536
    {kE4m3,  64,         kFp8Scores,  kHopper, 112,  {{4, 128, 4, kInTurn}, {3, 128, 4, kInTurn}}},
    // 721 / 697 (S = 8192); 2 x 128: 613 / 588
    {kE4m3,  96,         kFp8Scores,  kHopper, 112,  {{3, 128, 4, kInTurn}, {2, 128, 4}}},
    // 902 / 849 (S = 8192); 2 x 128: 858 / 803; 2 x 128 in turn: 684 / 676
    {kE4m3,  128,        kFp8Scores,  kHopper, 144,  {{3, 128, 4, kInTurn}, {2, 128, 4}}},
    {kE4m3,  192,        kFp8Scores,  kHopper, 0,    {{2, 128, 3, kInTurn}}},  // 3 x 128 spills 568 bytes
    {kE4m3,  256,        kFp8Scores,  kHopper, 0,    {{2, 128, 3, kInTurn}}},  // 3 x 128 spills 1104 bytes
    {kE4m3,  64,         kFp8General, kHopper, 16,   {{2, 128, 4}}},  // 3 x 128 in turn spills 8 bytes; not timed
    // 766 / 376; 2 x 128 in turn: 707 / 395
    {kE4m3,  128,        kFp8General, kHopper, 16,   {{2, 128, 4}, {2, 128, 4, kInTurn}}},
    {kE4m3,  256,        kFp8General, kHopper, 16,   {{2, 128, 2, kInTurn}}},  // a third stage does not fit
    // prefills widen fp8 caches; the tiles of the plain row (64), of scores and of general rows:
    {kBf16,  64,         kFp8Scores,  kHopper, 32,   {{3, 128, 3}}},
    {kBf16,  128,        kFp8Scores,  kHopper, 16,   {{2, 128, 3}}},
    {kBf16,  256,        kFp8Scores,  kHopper, 16,   {{2, 64, 2}}},
    {kBf16,  64,         kFp8General, kHopper, 16,   {{3, 64, 4}}},
    {kBf16,  128,        kFp8General, kHopper, 16,   {{2, 128, 2}}},
    {kBf16,  256,        kFp8General, kHopper, 16,   {{2, 64, 2}}},
};

// Invariant calls without options, and with a Mask (cuda/sm90/invariant/invariant.cuh); other invariant calls run general kernels. Tiles
// as above. Both rows of a class have the same keys: a Mask that hides nothing of a row changes none of its bits.
inline constexpr KernelRow<sm90::ForwardTile> kSm90Invariant[] = {
    // the tiles of the plain rows of kSm90Forward:
    {k16Bit, 64,  kPlain,     kHopper, 16, {{3, 128, 3}}},
    {k16Bit, 128, kPlain,     kHopper, 32, {{3, 80, 3}}},
    {k16Bit, 256, kPlain,     kHopper, 16, {{2, 64, 2}}},
    {k16Bit, 64,  kIntervals, kHopper, 32, {{3, 128, 3}}},
    {k16Bit, 128, kIntervals, kHopper, 32, {{3, 80, 3}}},
    {k16Bit, 256, kIntervals, kHopper, 16, {{2, 64, 2}}},
};

// Some dozens of rows of a KV head (cuda/sm90/few_queries/pack_gqa.cuh). Tiles as in kSm90Forward.
inline constexpr KernelRow<sm90::ForwardTile> kSm90PackGqa[] = {
    // stages of 128 KB in all, as at 128:
    {k16Bit, 64,  kPlain, kHopper, 16, {{2, 128, 4}}},
    // 8x32x16384 / 1x32x65536, relative to a copy: 0.66 / 0.79; 3 stages: 0.68 / 0.77; 4 of 96 keys: 0.67 / 0.77; 6 of 64: 0.64 / 0.78
    {k16Bit, 128, kPlain, kHopper, 16, {{2, 128, 2}}},
    {k16Bit, 256, kPlain, kHopper, 16, {{2, 64, 2}}},
};

// Tiles: {keys, queries, stages of queries, stages of keys[, order]}. Dropout and the centres of rows (csrc/rules/bias.h) take some shared memory,
// but do not change the queries, which define the order of the sums of dq. General calls, and calls with scores above 128, run the general rows of
// kSm80Backward: in such a kernel for Hopper ptxas serialises wgmma (C7510), and it took 1.35 times the time.
inline constexpr KernelRow<sm90::BackwardTile> kSm90Backward[] = {
    // 559 / 488; 1 stage of keys: 557 / 495
    {k16Bit, 64,         kPlain,     kHopper, 0,   {{128, 128, 2, 2}, {128, 128, 2, 1}}},
    // dq apart, one turn: 527 / 466; two turns: 504 / 450; ping-pong: 450 / 405
    {k16Bit, 80,         kPlain,     kHopper, 0,   {{128, 64, 3, 1, kApartOnce}, {128, 64, 3, 1, kApart}, {128, 64, 3, 1}}},
    // dq apart, one turn: 571 / 507; two turns: 568 / 503; ping-pong: 512 / 463
    {k16Bit, 96,         kPlain,     kHopper, 0,   {{128, 64, 3, 1, kApartOnce}, {128, 64, 3, 1, kApart}, {128, 64, 3, 1}}},
    // dq apart: 644 / 575; both warpgroups in step, dq in between: 599 / 545
    {k16Bit, 128,        kPlain,     kHopper, 0,   {{128, 64, 3, 1, kApart}, {128, 64, 3, 1}, {128, 64, 2, 1, kApart}}},
    // 1.55 / 1.52 times the rate of class 192, and at D = 144 1.06 / 1.02 times that of a class 144; ping-pong spills 400 bytes (C7512)
    {k16Bit, 160,        kPlain,     kHopper, 0,   {{128, 64, 2, 1, kThreePhases}}},
    // 606 / 541; 64 keys: 432 / 410; 64 keys, 3 stages: 428 / 407
    {k16Bit, {192, 128}, kPlain,     kHopper, 0,   {{128, 64, 2, 1, kThreePhases}, {64, 64, 2, 1}, {64, 64, 3, 1}}},
    // 474 / 428; 3 stages: 468 / 441; 2 stages of keys: 467 / 443
    {k16Bit, 192,        kPlain,     kHopper, 32,  {{64, 64, 2, 1}, {64, 64, 3, 1}, {64, 64, 2, 2}}},
    // in pairs: 585 / 583 (S = 16384); 64 x 64: 525 / 522
    {k16Bit, 256,        kPlain,     kHopper, 416, {{128, 64, 2, 1, kPairs}, {64, 64, 2, 1}, {64, 64, 1, 2}}},
    // grouped heads for which adds_over_groups() in choose.h holds; the tiles of the plain rows:
    {k16Bit, 64,         kGroups,    kHopper, 0,   {{128, 128, 2, 2}}},
    {k16Bit, 80,         kGroups,    kHopper, 0,   {{128, 64, 3, 1, kApartOnce}}},
    {k16Bit, 96,         kGroups,    kHopper, 0,   {{128, 64, 3, 1, kApartOnce}}},
    {k16Bit, 128,        kGroups,    kHopper, 0,   {{128, 64, 3, 1, kApart}}},
    {k16Bit, 64,         kDropout,   kHopper, 8,   {{128, 128, 2, 1}}},  // a second stage of keys does not fit
    // dq apart, one turn: 465 / 424; two turns: 462 / 423; ping-pong: 422 / 390
    {k16Bit, 96,         kDropout,   kHopper, 16,  {{128, 64, 3, 1, kApartOnce}, {128, 64, 3, 1, kApart}, {128, 64, 3, 1}}},
    // dq apart: 544 / 497; ping-pong: 517 / 477
    {k16Bit, 128,        kDropout,   kHopper, 8,   {{128, 64, 3, 1, kApart}, {128, 64, 3, 1}, {128, 64, 2, 1}}},
    // 438 / 428; 64 keys: 360 / 340; 64 keys, 3 stages: 360 / 340
    {k16Bit, 144,        kDropout,   kHopper, 16,  {{128, 64, 2, 1}, {64, 64, 2, 1}, {64, 64, 3, 1}}},
    // 422 / 389; 3 stages: 421 / 399; 2 stages of keys: 408 / 391
    {k16Bit, 192,        kDropout,   kHopper, 32,  {{64, 64, 2, 1}, {64, 64, 3, 1}, {64, 64, 2, 2}}},
    // 447 / 409; 1 stage, 2 stages of keys: 357 / 344
    {k16Bit, 256,        kDropout,   kHopper, 16,  {{64, 64, 2, 1}, {64, 64, 1, 2}}},
    // 510 / 271; 1 stage of keys: 508 / 270
    {k16Bit, 64,         kIntervals, kHopper, 960, {{128, 128, 2, 2}, {128, 128, 2, 1}}},
    // 510 / 267; 2 stages: 494 / 245
    {k16Bit, 96,         kIntervals, kHopper, 944, {{128, 64, 3, 1}, {128, 64, 2, 1}}},
    // 593 / 347; 2 stages: 595 / 329
    {k16Bit, 128,        kIntervals, kHopper, 736, {{128, 64, 3, 1}, {128, 64, 2, 1}}},
    // 434 / 227; 2 stages: 393 / 216; and 2 of keys: 389 / 216; with 128 keys no room for the inspected stages of dout
    {k16Bit, 144,        kIntervals, kHopper, 672, {{64, 64, 3, 1}, {64, 64, 2, 1}, {64, 64, 2, 2}}},
    // 459 / 245; 2 stages: 445 / 239; and 2 of keys: 443 / 238
    {k16Bit, 192,        kIntervals, kHopper, 848, {{64, 64, 3, 1}, {64, 64, 2, 1}, {64, 64, 2, 2}}},
    // 469 / 257; 1 stage, 2 stages of keys: 337 / 202
    {k16Bit, 256,        kIntervals, kHopper, 976, {{64, 64, 2, 1}, {64, 64, 1, 2}}},
    {k16Bit, 64,         kBlocks,    kHopper, 64,  {{128, 128, 2, 2}}},  // the plain tile; half of the blocks of 65536 tokens: 496, without a mask 511; spills in the loading warp
    {k16Bit, 128,        kBlocks,    kHopper, 64,  {{128, 64, 3, 1, kApart}}},  // the plain tile; half of the blocks of 65536 tokens: 567, without a mask 610
    {k16Bit, 64,         kScores,    kHopper, 320, {{128, 128, 2, 1}}},  // a second stage of keys does not fit
    {k16Bit, 96,         kScores,    kHopper, 16,  {{128, 64, 2, 1}}},  // a third stage of queries does not fit
    {k16Bit, 128,        kScores,    kHopper, 16,  {{128, 64, 2, 1}}},  // a third stage of queries does not fit
    {k16Bit, 128,        kBias,      kHopper, 16,  {{128, 64, 2, 1}}},  // also for the class 64: bias tiles of 128 queries do not fit
    {k16Bit, 384,        kPlain,     kHopper, 160, {{64, 64, 2, 1}}},  // 315 / 305 (2x8x4096); a third stage of queries does not fit
    {k16Bit, 512,        kPlain,     kHopper, 656, {{64, 64, 2, 1}}},  // 360 / 342 (2x8x4096); a third stage of queries does not fit
};

// The backward of many short sequences (cuda/sm90/backward_short/heads.cuh). Tiles as in kSm90Backward.
inline constexpr KernelRow<sm90::BackwardTile> kSm90Heads[] = {
    // 32x32x512 full / causal 0.428 / 0.286 ms; kSm90Backward: 0.502 / 0.421
    {k16Bit, 64,  kPlain, kHopper, 60,  {{128, 128, 2, 2, kApart}}},
    // 32x16x512 causal 0.312 ms; kSm90Backward: 0.378
    {k16Bit, 128, kPlain, kHopper, 160, {{128, 64, 2, 2, kApart}}},
};

// Forward mode (cuda/sm80/derivatives/jvp.cuh): general kernels where a call has options, and in fp32. Tiles: {warps, row tiles of a warp, keys, resident thread blocks}.
inline constexpr KernelRow<sm80::ForwardTile> kSm80Jvp[] = {
    // no figures of other tiles:
    {k16Bit, 64,  kPlain,     kOtherGpus, 16,  {{4, 2, 32, 2}}},  // 311 / 290 (2x32x4096, H100)
    {k16Bit, 128, kPlain,     kOtherGpus, 16,  {{4, 1, 64, 2}}},  // 315 / 299 (2x16x4096, H100)
    {k16Bit, 256, kPlain,     kEveryGpu,  352, {{2, 1, 32, 2}}},
    // the tiles of the plain rows:
    {k16Bit, 64,  kGeneral,   kEveryGpu,  0,   {{4, 2, 32, 2}}},
    {k16Bit, 128, kGeneral,   kEveryGpu,  0,   {{4, 1, 64, 2}}},
    {k16Bit, 256, kGeneral,   kEveryGpu,  32,  {{2, 1, 32, 2}}},
    // no figures of other tiles:
    {kFp32,  64,  kGeneral,   kEveryGpu,  16,  {{4, 1, 32, 2}}},
    {kFp32,  128, kGeneral,   kEveryGpu,  352, {{2, 1, 32, 2}}},
    {kFp32,  256, kGeneral,   kEveryGpu,  256, {{1, 1, 32, 1}}},
};

// Forward mode on Hopper (cuda/sm90/derivatives/jvp.cuh). Tiles as in kSm90Forward, with the tangents of keys and values in each stage.
inline constexpr KernelRow<sm90::ForwardTile> kSm90Jvp[] = {
    {k16Bit, 64,  kPlain, kHopper, 0, {{2, 96, 3}, {2, 64, 4}}},  // 644 / 584; 2 x 64: 641 / 584
    {k16Bit, 96,  kPlain, kHopper, 0, {{2, 80, 2}, {2, 64, 2}}},  // 685 / 630; 2 x 64: 693 / 593
    {k16Bit, 128, kPlain, kHopper, 0, {{2, 64, 2}}},  // 751 / 675 (2x16x4096); 80 keys spill
};

// The backward with few queries for many keys (cuda/sm90/few_queries/backward.cuh). Tiles: {rows of a KV head, keys, stages of keys}.
inline constexpr KernelRow<sm90::FewQueriesTile> kSm90FewQueriesBackward[] = {
    // 8x16384 with 64 rows, relative to a copy: 0.74 (16:16 heads); the kernels for many queries: 0.49
    {k16Bit, 64,  kPlain, kHopper, 48, {{128, 64, 8}}},
    // the same, 32:8 heads: 0.76; those of decode/: 0.55
    {k16Bit, 128, kPlain, kHopper, 20, {{128, 64, 4}}},
};

// Second derivatives (cuda/sm80/derivatives/second.cuh). Tiles as in kSm80Backward.
inline constexpr KernelRow<sm80::BackwardTile> kSm80Second[] = {
    // no figures of other tiles:
    // 185 / 179 (2x32x4096, H100)
    {k16Bit, 64,  kPlain,     kOtherGpus, 16,   {{8, 64, 64, 4, 4, 1, 1}, {8, 64, 64, 4, 4, 1, 1}}},
    // 235 / 227 (2x16x4096, H100)
    {k16Bit, 128, kPlain,     kOtherGpus, 0,    {{8, 64, 64, 4, 2, 1, 1}, {4, 32, 32, 2, 2, 1, 1}}},
    {k16Bit, 256, kPlain,     kEveryGpu,  448,  {{8, 32, 64, 2, 2, 1, 1}, {2, 16, 32, 1, 1, 1, 1}}},
    // the tiles of the plain rows of their classes:
    {k16Bit, 64,  kGeneral,   kEveryGpu,  16,   {{8, 64, 64, 4, 4, 1, 1}, {8, 64, 64, 4, 4, 1, 1}}},
    {k16Bit, 128, kGeneral,   kEveryGpu,  16,   {{8, 64, 64, 4, 2, 1, 1}, {4, 32, 32, 2, 2, 1, 1}}},
    {k16Bit, 256, kGeneral,   kEveryGpu,  1040, {{8, 32, 64, 2, 2, 1, 1}, {2, 16, 32, 1, 1, 1, 1}}},
    // no figures of other tiles:
    {kFp32,  64,  kGeneral,   kEveryGpu,  32,   {{4, 32, 32, 2, 2, 1, 1}, {4, 32, 32, 2, 2, 1, 1}}},
    {kFp32,  128, kGeneral,   kEveryGpu,  1072, {{4, 32, 32, 2, 2, 1, 1}, {2, 32, 16, 2, 2, 1, 1}}},
    {kFp32,  256, kGeneral,   kEveryGpu,  5936, {{2, 16, 32, 1, 1, 1, 1}, {1, 16, 16, 1, 1, 1, 1}}},
};

// Second derivatives on Hopper. Tiles: {keys, queries, stages of queries}. With 128 keys each warpgroup has 64 of them
// (cuda/sm90/derivatives/second_apart.cuh), with 64 both have all (cuda/sm90/derivatives/second.cuh).
inline constexpr KernelRow<sm90::SecondTile> kSm90Second[] = {
    {k16Bit, 64,  kPlain, kHopper, 0, {{128, 64, 3}}},  // 495 / 469; 64 keys and 128 queries: 318 / 290
    {k16Bit, 128, kPlain, kHopper, 0, {{64, 64, 2}}},  // 446 / 399 (2x16x4096); a third stage does not fit
};

// Decoding (cuda/decode/split/split.cuh), on every GPU. Tiles: {row tiles of a warp, warps along the rows, warps along the columns, keys, stages, KV
// heads}. A class has a kernel for 16 rows and, up to 256, one for 64, for prefill and for speculative decoding with many query heads for
// each KV head; the most frequent classes also have one for 32, where the two warps of a team read the same keys. A call runs the smallest tile that
// holds its rows. Up to 256 columns each warp of a tile of 16 rows is a team and needs no barrier with other warps in the mainloop. Two resident
// thread blocks of four warps, each with 50 KB to 70 KB of loads in flight, saturate the memory bandwidth of a multiprocessor.
//
// In fp8 a warp of a tile of 32 rows has all of them up to 128 columns, so that it widens keys and values once. Rows of
// 64 bytes reach 0.7 of the memory bandwidth of an H200, so a tile for up to 8 rows reads those of two KV heads as one.
inline constexpr DecodeRow kDecode[] = {
    // no figures of other tiles:
    {k16Bit, 64,  0,   {1, 1, 1, 32, 3}},
    {k16Bit, 64,  0,   {1, 2, 1, 32, 4}},
    {k16Bit, 64,  0,   {2, 2, 1, 32, 4}},
    {k16Bit, 96,  16,  {1, 1, 1, 16, 3}},
    {k16Bit, 96,  16,  {2, 2, 1, 32, 2}},
    {k16Bit, 128, 0,   {1, 1, 1, 16, 3}},  // 0.85 / 0.89; 4 stages: 0.70 / 0.89; 2 of 32 keys: 0.74 / 0.87
    {k16Bit, 128, 0,   {1, 2, 1, 16, 4}},  // 0.81 / 0.60; 3 of 32 keys: 0.68 / 0.84; 2 row tiles, 3: 0.66 / 0.80
    {k16Bit, 128, 0,   {2, 2, 1, 32, 2}},  // 0.70 / 0.75; 3 or 4 of 16: 0.41 / 0.45; 4 warps, 3: 0.63 / 0.64
    {k16Bit, 192, 0,   {1, 1, 1, 16, 3}},
    {k16Bit, 192, 16,  {1, 4, 1, 32, 2}},
    {k16Bit, 256, 16,  {1, 1, 1, 16, 3}},
    {k16Bit, 256, 16,  {1, 4, 1, 32, 2}},
    {k16Bit, 512, 16,  {1, 1, 2, 16, 2}},
    {kFp32,  64,  16,  {1, 1, 1, 16, 3}},
    {kFp32,  64,  16,  {1, 4, 1, 32, 2}},
    {kFp32,  96,  16,  {1, 1, 1, 16, 3}},
    {kFp32,  96,  496, {1, 4, 1, 32, 2}},
    {kFp32,  128, 16,  {1, 1, 1, 16, 3}},
    {kFp32,  128, 688, {1, 4, 1, 32, 2}},
    {kFp32,  192, 32,  {1, 1, 1, 16, 2}},
    {kFp32,  192, 80,  {1, 4, 1, 32, 2}},
    {kFp32,  256, 32,  {1, 1, 1, 16, 2}},
    {kFp32,  256, 64,  {1, 4, 1, 32, 2}},
    {kFp32,  512, 80,  {1, 1, 2, 16, 2}},
    // 8x32768, one query: 0.87; 3 stages of 32 keys: 0.85; one KV head: 0.65
    {kE4m3,  64,  16,  {1, 1, 1, 16, 6, 2}},
    {kE4m3,  64,  16,  {1, 1, 1, 64, 3}},
    {kE4m3,  64,  16,  {2, 1, 1, 32, 4}},  // 8 queries: 0.67; 3 stages of 64 keys: 0.61; 6 of 16: 0.44
    {kE4m3,  64,  16,  {2, 2, 1, 64, 4}},
    {kE4m3,  128, 0,   {1, 1, 1, 16, 6}},  // 8x16384 / 1x131072, one query: 0.87 / 0.88; 3 of 32: 0.86 / 0.85
    {kE4m3,  128, 16,  {2, 1, 1, 32, 3}},  // 8 queries: 0.82; 6 of 16: 0.70; 4 of 16: 0.68
    {kE4m3,  128, 16,  {2, 2, 1, 32, 4}},
    {kE4m3,  256, 0,   {1, 1, 1, 16, 3}},  // one query: 0.84; 3 of 32, one thread block: 0.66
    {kE4m3,  256, 16,  {1, 2, 1, 16, 5}},  // 8 queries: 0.63; 6 stages: 0.49
    {kE4m3,  256, 16,  {1, 4, 1, 32, 4}},
    {kE4m3,  512, 16,  {1, 1, 2, 32, 2}},
};

// The backward with few queries (cuda/decode/few_queries/backward.cuh), on every GPU, by row tiles of 16 rows of a KV head. On Hopper
// kSm90FewQueriesBackward serves 17 rows and more if the rows of dk and dv are aligned.
inline constexpr FewQueriesRow kFewQueriesBackward[] = {
    // a call runs the smallest that holds its rows:
    {k16Bit, 64,  1, 0},
    {k16Bit, 64,  2, 0},
    {k16Bit, 64,  4, 0},
    {k16Bit, 128, 1, 0},
    {k16Bit, 128, 2, 0},
    {k16Bit, 128, 4, 12},
};

}  // namespace flashattn_ext::kernel_table
// clang-format on
