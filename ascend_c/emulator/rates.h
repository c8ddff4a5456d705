// Rates of the time model, per AIV on Atlas A2. Documented ones come from the vendor's tables of theoretical rates; the
// others are estimates and marked so.
#pragma once

namespace ascend_emulator {

constexpr double kGmBytesPerCycle = 37;  // estimate: 1.6 TB/s over 24 cores at 1.8 GHz
constexpr double kStartCycles = 16;      // estimate: start-up of one instruction, not published
constexpr double kScalarCycles = 20;     // estimate: one scalar access to UB

// Cycles per repeat of 256 bytes: 64 fp32 or 128 half lanes.
constexpr double kSimple = 1;  // Add, Mul, Max, Cast, Duplicate, Brcb ...
constexpr double per_repeat_slow(int size) {
  return size == 4 ? 2 : 4;
}  // Exp, Ln, Div: 32 lanes a cycle in either type
constexpr double kWholeReduce = 7;
constexpr double per_repeat_block_reduce(int size) { return size == 4 ? 1 : 7; }

}  // namespace ascend_emulator
