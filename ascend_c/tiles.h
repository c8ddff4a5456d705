// Sizes of tiles and buffers on Atlas A2 and A3, and the numbers of flags. docs/ascend_kernels.md shows their users.
#pragma once

#include "../csrc/params.h"

namespace flashattn_ext {
namespace ascend {

constexpr int32_t kTile = 128;  // edge of a tile of sums in L0C (64 KB)
constexpr int32_t kMaxHeadDim = 256;
// The number of steps of scores by which the cube runs ahead of their weights, and the workspace slots for it. The
// short steps at the ends of a causal row or of a document need three to hide the latency of flags; steps of the
// backward are longer.
constexpr int32_t kAhead = 3, kSlots = kAhead + 1;
constexpr int32_t kGradAhead = 2, kGradSlots = kGradAhead + 1;
constexpr int32_t kRing = 3;               // tiles in L1 that are used once
constexpr int32_t kStatisticsRing = 4;     // tasks whose max and sum are in use; kAhead + 1 are in flight
constexpr int32_t kLanes = 64;             // fp32 elements of one repeat
constexpr int32_t kGroupRows = 16;         // rows that the dropout generator works on at a time
constexpr int32_t kTileBytes = 32 * 1024;  // bytes of an operand: kTile rows or columns, and what a product sums over

// Bytes of each memory of a core.
constexpr int32_t kUbBytes = 188416;  // the rest is scratch of the API
constexpr int32_t kL1Bytes = 512 * 1024 - 256;
constexpr int32_t kL0Bytes = 64 * 1024;  // bytes of L0A, and as many of L0B
constexpr int32_t kL0cBytes = 128 * 1024;

// Tile sizes of the forward, and the bytes that they need in each memory.
struct Tiling {
  int32_t rows;                    // queries of a task; each vector core takes a half
  int32_t keys;                    // keys that the cube hands over at a time
  int32_t element = 2;             // bytes of an input
  int32_t head_dim = kMaxHeadDim;  // the largest one

  // Lanes that one product sums over: half as many in fp32.
  FLASHATTN_HOST_DEVICE constexpr int32_t inner() const { return kTileBytes / kTile / element; }
  // Rows of scores in UB at a time: 8 K scores, but not more than 32 rows.
  FLASHATTN_HOST_DEVICE constexpr int32_t chunk_rows() const {
    const int32_t most = rows < 64 ? rows / 2 : 32, chunk = 8192 / keys / 8 * 8;
    return chunk > most ? most : chunk < 8 ? 8 : chunk;
  }
  // fp32 values per row in UB: two blocks more than its keys, so that adjacent rows start in different banks. A row of
  // P has room for the scratch of a row reduction.
  FLASHATTN_HOST_DEVICE constexpr int32_t pitch() const { return (keys < 128 ? 128 : keys) + 16; }
  // Rows of P V in UB at a time, in the place of scores.
  FLASHATTN_HOST_DEVICE constexpr int32_t partial_rows() const {
    const int32_t fitting = chunk_rows() * pitch() / kMaxHeadDim / 8 * 8;
    return fitting < 32 ? fitting : 32;
  }

  FLASHATTN_HOST_DEVICE constexpr int32_t resident_bytes() const {
    return rows * kMaxHeadDim * element;
  }  // Q of a task
  // Keys of P in L1 at a time: a step's, or half of a long step's.
  FLASHATTN_HOST_DEVICE constexpr int32_t wide_keys() const { return keys < 512 ? keys : 512; }
  FLASHATTN_HOST_DEVICE constexpr int32_t wide_bytes() const { return rows * wide_keys() * element; }
  FLASHATTN_HOST_DEVICE constexpr int32_t left_bytes() const { return rows * inner() * element; }
  FLASHATTN_HOST_DEVICE constexpr int32_t sum_bytes() const { return rows * kTile * 4; }

  FLASHATTN_HOST_DEVICE constexpr int32_t l1_bytes() const {
    return 2 * (resident_bytes() + wide_bytes()) + kRing * kTileBytes;
  }
  FLASHATTN_HOST_DEVICE constexpr int32_t l0a_bytes() const { return 2 * left_bytes(); }
  FLASHATTN_HOST_DEVICE constexpr int32_t l0b_bytes() const { return 2 * kTileBytes; }
  FLASHATTN_HOST_DEVICE constexpr int32_t l0c_bytes() const { return 2 * sum_bytes(); }
  // Bytes without dropout, which gets the rest. ForwardVector carves it up.
  FLASHATTN_HOST_DEVICE constexpr int32_t ub_bytes(int32_t head_dim_v) const {
    const int32_t width = (head_dim_v + kLanes - 1) / kLanes * kLanes, half = rows / 2;
    const int32_t scores = 2 * chunk_rows() * pitch();
    const int32_t of_rows = 2 * kStatisticsRing + kSlots + 1 + 8, of_chunk_rows = 2, scale = 8;
    return scores * (4 + element) + (half * (width + of_rows) + chunk_rows() * of_chunk_rows + scale) * 4;
  }
};

constexpr Tiling kTiling = {128, 512};                    // one flag for 64 K scores
constexpr Tiling kTilingOfFp32 = {kTiling.rows, 128, 4};  // products take four times as long: a flag for 16 K scores
// Long steps: half as many products with V to store, and half as many flags. UB has room for chunks of 8 rows.
constexpr Tiling kTilingOfLongSteps = {kTiling.rows, 1024, kTiling.element, kTile};
constexpr int32_t kRows = kTiling.rows;

// Sizes that follow from the size of an input in bytes. kLongSteps: of the forward's kernels for long steps.
template <int32_t kElement, bool kLongSteps = false>
struct SizesOf {
  static constexpr Tiling kTiles = kLongSteps ? kTilingOfLongSteps : kElement == 4 ? kTilingOfFp32 : kTiling;
  static_assert(kTiles.rows % 32 == 0 && kTiles.keys % kLanes == 0, "whole groups of 16 for each core, whole repeats");
  static_assert(kTiles.l1_bytes() <= kL1Bytes, "L1");
  static_assert(kTiles.l0a_bytes() <= kL0Bytes, "L0A");
  static_assert(kTiles.l0b_bytes() <= kL0Bytes, "L0B");
  static_assert(kTiles.l0c_bytes() <= kL0cBytes, "L0C");
  static_assert(kTiles.ub_bytes(kTiles.head_dim) <= kUbBytes, "UB");

  static constexpr int32_t kInner = kTiles.inner();
  static constexpr int32_t kKeys = kTiles.keys, kWideKeys = kTiles.wide_keys();
  static constexpr int32_t kQueries = kElement == 4 ? 128 : 512;  // backward: of a step, with kTile keys

  // Workspace of one core, in bytes; every row begins on a multiple of 512. Scores, dP and P V are fp32.
  static constexpr int64_t kScoreBytes = int64_t{kRows} * kKeys * 4;
  static constexpr int64_t kProbabilityBytes = int64_t{kRows} * kKeys * kElement;
  static constexpr int32_t kPartialPitch = kTiles.head_dim;
  static constexpr int64_t kPartialBytes = int64_t{kRows} * kPartialPitch * 4;
  static constexpr int64_t kForwardWorkspaceBytes = kSlots * (kScoreBytes + kProbabilityBytes + kPartialBytes);
  static constexpr int64_t kBackwardScoreBytes = int64_t{kQueries} * kTile * 4;
  static constexpr int64_t kBackwardRoundedBytes = int64_t{kQueries} * kTile * kElement;  // P or dS
  static constexpr int64_t kBackwardWorkspaceBytes = kGradSlots * 2 * (kBackwardScoreBytes + kBackwardRoundedBytes);

  // With a Mask: rows of a core that isolation.h copies, in all slots. Forward: values; backward: queries, dout, keys.
  static constexpr int32_t kIsolatedForward = kSlots * kKeys, kIsolatedBackward = kGradSlots * (2 * kQueries + kTile);

  // Cube core.
  static constexpr int32_t kResidentBytes = kTiles.resident_bytes();  // Q of a task, two tasks; backward: K and V
  static constexpr int32_t kWideBytes = kTiles.wide_bytes();          // P of wide_keys(), twice; backward: P and dS
  static_assert(kRows == kTile && kBackwardRoundedBytes <= kWideBytes, "the backward's K, P and dS");

  // Vector core.
  static constexpr int32_t kChunkRows = kTiles.chunk_rows();
  static constexpr int32_t kPitch = kTiles.pitch();
  static constexpr int32_t kPartialRows = kTiles.partial_rows();
  static constexpr int32_t kGradRows = kElement == 4 ? 16 : 32;  // backward: rows of scores in UB at a time
  static_assert(kLongSteps || kChunkRows % kGroupRows == 0, "the generator works on whole groups");
  static_assert(kPartialRows > 0 && kChunkRows % 8 == 0, "whole blocks of statistics");
};

constexpr int64_t kWorkspaceAlignment = 512;

// Event ids within a cube core.
constexpr int32_t kResidentEvent = 0;  // and 1: from M to MTE2, when a task's operand may be overwritten
constexpr int32_t kWideEvent = 0;      // and 1: from MTE1 to MTE2, when a step's left operand may be
constexpr int32_t kRingEvent = 2;      // .. 2 + kRing - 1: between MTE2 and MTE1, both directions
constexpr int32_t kStageEvent = 0;     // and 1: from M to MTE1, when a stage of L0 may be overwritten

// Flags between the cores of a block.
constexpr uint16_t kScoresReady = 0;         // cube -> vector, when a block of scores is in the workspace
constexpr uint16_t kProbabilitiesReady = 1;  // vector -> cube
constexpr uint16_t kPartialReady = 2;        // cube -> vector: P V of a block

constexpr int32_t kGradPitch = kTile + 16;  // backward: fp32 of a row in UB, 18 blocks
static_assert(kStatisticsRing > kAhead, "a task that waits for its last product keeps its statistics");

}  // namespace ascend
}  // namespace flashattn_ext
