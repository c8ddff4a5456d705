// Sizes of tiles and buffers on Atlas A2 and A3, and the numbers of flags. docs/ascend_kernels.md shows who uses what.
#pragma once

#include "../csrc/portable.h"

namespace flashattn_ext {
namespace ascend {

constexpr int32_t kTile = 128;  // edge of a tile in L0 (32 KB of 16-bit operands, 64 KB of sums)
constexpr int32_t kMaxHeadDim = 256;
constexpr int32_t kAhead = 2;  // how many blocks of scores the cube computes before it needs their probabilities
constexpr int32_t kSlots = kAhead + 1;  // of the workspace
constexpr int32_t kRing = 3;            // tiles in L1 that are used once
constexpr int32_t kStatisticsRing = 4;  // tasks whose max and sum are in use; kAhead + 1 are in flight
constexpr int32_t kLanes = 64;          // fp32 of one repeat
constexpr int32_t kTileBytes = kTile * kTile * 2;

// What there is of each memory of a core.
constexpr int32_t kUbBytes = 188416;  // what lies behind is scratch of the API
constexpr int32_t kL1Bytes = 512 * 1024 - 256;
constexpr int32_t kL0Bytes = 64 * 1024;  // of L0A, and of L0B
constexpr int32_t kL0cBytes = 128 * 1024;

// How large the pieces are that the forward works on, and what that takes of each memory.
struct Tiling {
  int32_t rows;  // queries of a task; each vector core takes a half
  int32_t keys;  // that the cube hands over at a time

  // Rows of scores in UB at a time: 8 K scores, but not more than 32 rows.
  FLASHATTN_HOST_DEVICE constexpr int32_t chunk_rows() const {
    const int32_t most = rows < 64 ? rows / 2 : 32, chunk = 8192 / keys / 8 * 8;
    return chunk > most ? most : chunk < 8 ? 8 : chunk;
  }
  // fp32 of a row in UB: two blocks more than its keys, so that neighbouring rows lie in other banks. P's half of it
  // has room for what a reduction of the row needs.
  FLASHATTN_HOST_DEVICE constexpr int32_t pitch() const { return (keys < 128 ? 128 : keys) + 16; }
  // Rows of P V in UB at a time, in the place of scores.
  FLASHATTN_HOST_DEVICE constexpr int32_t partial_rows() const {
    const int32_t fitting = chunk_rows() * pitch() / kMaxHeadDim / 8 * 8;
    return fitting < 32 ? fitting : 32;
  }

  FLASHATTN_HOST_DEVICE constexpr int32_t resident_bytes() const { return rows * kMaxHeadDim * 2; }  // Q of a task
  FLASHATTN_HOST_DEVICE constexpr int32_t wide_bytes() const { return rows * keys * 2; }             // P of a step
  FLASHATTN_HOST_DEVICE constexpr int32_t left_bytes() const { return rows * kTile * 2; }
  FLASHATTN_HOST_DEVICE constexpr int32_t sum_bytes() const { return rows * kTile * 4; }

  FLASHATTN_HOST_DEVICE constexpr int32_t l1_bytes() const {
    return 2 * (resident_bytes() + wide_bytes()) + kRing * kTileBytes;
  }
  FLASHATTN_HOST_DEVICE constexpr int32_t l0a_bytes() const { return 2 * left_bytes(); }
  FLASHATTN_HOST_DEVICE constexpr int32_t l0b_bytes() const { return 2 * kTileBytes; }
  FLASHATTN_HOST_DEVICE constexpr int32_t l0c_bytes() const { return 2 * sum_bytes(); }
  // Without dropout, which takes what is left. ForwardVector carves it up.
  FLASHATTN_HOST_DEVICE constexpr int32_t ub_bytes(int32_t head_dim_v) const {
    const int32_t width = (head_dim_v + kLanes - 1) / kLanes * kLanes, half = rows / 2;
    const int32_t scores = 2 * chunk_rows() * pitch();
    const int32_t of_rows = 2 * kStatisticsRing + kSlots + 1 + 8, of_chunk_rows = 2 + 8;
    return scores * 6 + (half * (width + of_rows) + chunk_rows() * of_chunk_rows) * 4;
  }
};

// Another one is compiled for comparison only (make emulator-tilings): the forward alone, in fp16 and without dropout.
#if defined(FLASHATTN_EXT_ASCEND_ROWS)
constexpr bool kForwardAlone = true;
constexpr Tiling kTiling = {FLASHATTN_EXT_ASCEND_ROWS, FLASHATTN_EXT_ASCEND_KEYS};
#else
constexpr bool kForwardAlone = false;
constexpr Tiling kTiling = {128, 512};  // one flag for 64 K scores
#endif
static_assert(kTiling.rows % 32 == 0 && kTiling.keys % kLanes == 0, "whole groups of 16 for each core, whole repeats");
constexpr int32_t kL1Taken = kTiling.l1_bytes(), kL0aTaken = kTiling.l0a_bytes();
constexpr int32_t kL0bTaken = kTiling.l0b_bytes(), kL0cTaken = kTiling.l0c_bytes();
static_assert(kL1Taken <= kL1Bytes, "L1");
static_assert(kL0aTaken <= kL0Bytes, "L0A");
static_assert(kL0bTaken <= kL0Bytes, "L0B");
static_assert(kL0cTaken <= kL0cBytes, "L0C");
static_assert(kTiling.ub_bytes(kMaxHeadDim) <= kUbBytes, "UB");

constexpr int32_t kRows = kTiling.rows;
constexpr int32_t kKeys = kTiling.keys;

// --- workspace of one core, in bytes; every row begins on a multiple of 512
constexpr int64_t kScoreBytes = int64_t{kRows} * kKeys * 4;
constexpr int64_t kProbabilityBytes = int64_t{kRows} * kKeys * 2;
constexpr int64_t kPartialBytes = int64_t{kRows} * kMaxHeadDim * 4;
constexpr int64_t kForwardWorkspaceBytes = kSlots * (kScoreBytes + kProbabilityBytes + kPartialBytes);
constexpr int64_t kWorkspaceAlignment = 512;

// Backward: kTile keys and up to kQueries queries a step; scores and dP in fp32, P and dS in 16 bits.
constexpr int32_t kQueries = 512;
constexpr int64_t kBackwardScoreBytes = int64_t{kQueries} * kTile * 4;
constexpr int64_t kBackwardRoundedBytes = int64_t{kQueries} * kTile * 2;
constexpr int64_t kBackwardWorkspaceBytes = kSlots * 2 * (kBackwardScoreBytes + kBackwardRoundedBytes);

// --- cube core
constexpr int32_t kResidentBytes = kTiling.resident_bytes();  // Q of a task, two tasks; backward: K and V of a task
constexpr int32_t kWideBytes = kTiling.wide_bytes();          // P of a step, two steps; backward: P and dS of a step
static_assert(kForwardAlone || (kRows == kTile && kQueries * kTile * 2 <= kWideBytes), "the backward's K, P and dS");

// Event ids between MTE2 and MTE1, both directions.
constexpr int32_t kResidentEvent = 0;  // and 1
constexpr int32_t kWideEvent = 2;      // and 3
constexpr int32_t kRingEvent = 4;      // .. 4 + kRing - 1
// From M to MTE1: on these chips TPipe sets flags 0, 1 and 2 itself, and its destructor waits for them.
constexpr int32_t kStageEvent = 3;  // and 4

// --- flags between the cores of a block
constexpr uint16_t kScoresReady = 0;         // cube -> vector, when a block of scores is in the workspace
constexpr uint16_t kProbabilitiesReady = 1;  // vector -> cube
constexpr uint16_t kPartialReady = 2;        // cube -> vector: P V of a block

// --- vector core
constexpr int32_t kChunkRows = kTiling.chunk_rows();
constexpr int32_t kPitch = kTiling.pitch();
constexpr int32_t kPartialRows = kTiling.partial_rows();
constexpr int32_t kGradRows = 32;           // backward: rows of scores in UB at a time
constexpr int32_t kGradPitch = kTile + 16;  // fp32 of a row: 18 blocks
static_assert(kForwardAlone || kChunkRows == 16, "the generator works on 16 rows at a time");
static_assert(kPartialRows > 0 && kChunkRows % 8 == 0, "whole blocks of statistics");
static_assert(kStatisticsRing > kAhead, "a task that waits for its last product keeps its statistics");

}  // namespace ascend
}  // namespace flashattn_ext
