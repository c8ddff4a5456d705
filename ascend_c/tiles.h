// Sizes of tiles and buffers on Atlas A2 and A3, and the numbers of flags. docs/ascend_kernels.md shows who uses what.
#pragma once

#include <cstdint>

namespace flashattn_ext {
namespace ascend {

constexpr int32_t kRows = 128;  // query rows of a task; each vector core takes a half
constexpr int32_t kKeys = 512;  // keys that the cube hands over at a time: one flag for 64 K scores
constexpr int32_t kTile = 128;  // edge of a tile in L0 (32 KB of 16-bit operands, 64 KB of sums)
constexpr int32_t kMaxHeadDim = 256;
constexpr int32_t kAhead = 2;  // how many blocks of scores the cube computes before it needs their probabilities
constexpr int32_t kSlots = kAhead + 1;  // of the workspace

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
constexpr int32_t kResidentBytes = kRows * kMaxHeadDim * 2;  // Q of a task, two tasks; backward: K and V of a task
constexpr int32_t kWideBytes = kRows * kKeys * 2;            // P of a step, two steps; backward: P and dS of a step
constexpr int32_t kTileBytes = kTile * kTile * 2;
constexpr int32_t kRing = 3;  // tiles that are used once
static_assert(2 * kResidentBytes + 2 * kWideBytes + kRing * kTileBytes <= 512 * 1024 - 256, "L1");
static_assert(2 * kTileBytes <= 64 * 1024, "L0A and L0B hold two tiles each");
static_assert(2 * kTile * kTile * 4 <= 128 * 1024, "L0C holds two tiles");

// Event ids between MTE2 and MTE1, both directions.
constexpr int32_t kResidentEvent = 0;  // and 1
constexpr int32_t kWideEvent = 2;      // and 3
constexpr int32_t kRingEvent = 4;      // .. 4 + kRing - 1

// --- flags between the cores of a block
constexpr uint16_t kScoresReady = 0;         // cube -> vector, when a block of scores is in the workspace
constexpr uint16_t kProbabilitiesReady = 1;  // vector -> cube
constexpr uint16_t kPartialReady = 2;        // cube -> vector: P V of a block

// --- vector core
constexpr int32_t kLanes = 64;          // fp32 of one repeat
constexpr int32_t kChunkRows = 16;      // rows of scores in UB at a time; also the rows of one call of the generator
constexpr int32_t kPitch = kKeys + 16;  // fp32 of a row in UB: 66 blocks, so that neighbouring rows lie in other banks
constexpr int32_t kPartialRows = 32;    // rows of P V in UB at a time
constexpr int32_t kGradRows = 32;       // backward: rows of scores in UB at a time
constexpr int32_t kGradPitch = kTile + 16;  // fp32 of a row: 18 blocks
constexpr int32_t kStatisticsRing = 4;      // tasks whose max and sum are in use; kAhead + 1 are in flight
constexpr int32_t kWorkBytes = 188416;      // of UB: what lies behind is scratch of the API
static_assert(kStatisticsRing > kAhead, "a task that waits for its last product keeps its statistics");

}  // namespace ascend
}  // namespace flashattn_ext
