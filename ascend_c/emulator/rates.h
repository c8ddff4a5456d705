// Rates of the time model, per core of Atlas A2, in cycles at 1.8 GHz and bytes per cycle. Documented ones come from
// the vendor's tables of theoretical rates and its list of the hardware's limits (asc-devkit, docs/zh: "Cube" and
// "Vector" theoretical performance; hardware limits of NPU architecture 2201); the others are estimates and marked so.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ascend_emulator {

// Memory. Estimates: what a core gets of L2 while all 24 are busy. They were set together, so that a plain pipeline
// (256 keys a hand-over, four ahead, PV after S) lands where the best published forward of D=128 does: 45 to
// 48 % of the cube's peak, held up by the cube's stores, which is its authors' own diagnosis.
constexpr double kLoadBytesPerCycle = 64;   // MTE2: GM -> L1 or UB
constexpr double kStoreBytesPerCycle = 64;  // MTE3: UB -> GM
constexpr double kFixBytesPerCycle = 46;    // FIX: L0C -> GM
// Limits of 2201: a copy of less than 16 KB does not reach the full bandwidth. One of 16 KB gets nine tenths of it
// here.
constexpr double kCopyStartCycles = 28;
// Limits of 2201: a copy is cut into pieces of 128, 256 and 512 bytes, and rounded up to them.
constexpr int64_t kPiece = 128;
// Limits of 2201: simultaneous accesses of several cores to one range of 512 bytes are serialised, which costs 10 to 20
// %.
constexpr double kSameAddress = 1.15;
constexpr int64_t kSameAddressBytes = 512;
// Documented.
constexpr double kL0aBytesPerCycle = 256;  // MTE1: L1 -> L0A
constexpr double kL0bBytesPerCycle = 128;  // MTE1: L1 -> L0B

// Limits of 2201: the queues of MTE1 and M hold 32 instructions; the scalar unit waits while one is full.
constexpr size_t kQueueEntries = 32;

// Latencies, estimates.
constexpr double kStartCycles = 16;       // start-up of a load from L1 or of a product
constexpr double kVectorStartCycles = 4;  // start-up of a vector instruction, which may overlap the one before
constexpr double kBarrierCycles = 12;     // PipeBarrier: the next instruction waits for the last one's result
constexpr double kScalarCycles = 20;      // one scalar access to UB or GM
constexpr double kCallCycles = 6;         // the scalar unit, per instruction: addresses, strides, mask
constexpr double kIssueCycles = 1;        // the scalar unit, per flag or barrier
constexpr double kCrossCoreCycles = 900;  // from a CrossCoreSetFlag to the wait: half of a round trip of 1 us

// Vector unit, cycles per repeat of 256 bytes: 64 fp32 or 128 half lanes. Documented.
constexpr double kSimple = 1;  // Add, Mul, Max, Cast, Duplicate, Brcb ...
constexpr double per_repeat_slow(int size) {
  return size == 4 ? 2 : 4;
}  // Exp, Ln, Div: 32 lanes a cycle in either type
constexpr double kWholeReduce = 7;
constexpr double per_repeat_block_reduce(int size) { return size == 4 ? 1 : 7; }
constexpr double kGatherLanesPerCycle = 5;
constexpr double kGatherMaskBytesPerCycle = 128;  // 32 lanes of 4 bytes, 64 of 2

}  // namespace ascend_emulator
