// The dropout mask of csrc/dropout.h on the vector core. 64 lanes are the 64 counters of 16 query rows x 64 keys, so
// that a byte of a word is the decision of 8 rows x 8 keys: lane = (i % 8) * 8 + j % 8. The vector unit multiplies and
// adds 32-bit integers modulo 2^32, shifts them, and has And and Or of 16 bits; the rest is made of these.
#pragma once

#include "../csrc/dropout.h"
#include "schedule.h"

namespace flashattn_ext {
namespace ascend {

class Dropout {
 public:
  using Words = AscendC::LocalTensor<int32_t>;

  // Tiles are of 16 rows x 64 keys. The more of them an instruction works on the better: a step's at a time, where UB
  // has room for their words, otherwise a chunk's.
  static constexpr int32_t kStepTiles = 32, kChunkTiles = 8;
  static constexpr int32_t kConstantWords = 2 * 8 + kPhiloxRounds * 2 * 8 + kLanes;
  __aicore__ static constexpr int32_t WordsOf(int32_t tiles) { return 4 * tiles * kLanes; }
  __aicore__ static constexpr int32_t ScratchOf(int32_t tiles) { return 8 * tiles * kLanes; }
  static constexpr int32_t kApplyScratch = 4 * kChunkTiles * kLanes;

  // `row_blocks`: from row to row of the scores.
  __aicore__ void Init(const Arguments& a, const Words& constants, int32_t row_blocks) {
    using namespace AscendC;
    SetSaturationFlag<SaturationMode::FLOAT>(false);  // integers wrap
    threshold = a.dropout_threshold;
    pitch_blocks = row_blocks;
    low_halves = constants;
    low_bytes = constants[8];
    keys = constants[16];
    lanes = keys[kPhiloxRounds * 2 * 8];
    const GlobalTensor<int64_t> rng = Global<int64_t>((uint64_t)a.rng_state);
    PhiloxKey key = philox_key(rng.GetValue(0), rng.GetValue(1));
    Duplicate(low_halves, int32_t(0xffff), 8);
    Duplicate(low_bytes, int32_t(0x00ff00ff), 8);
    for (int32_t round = 0; round < kPhiloxRounds; ++round) {
      Duplicate(keys[round * 16], int32_t(key.low + round * kPhiloxWeyl0), 8);
      Duplicate(keys[round * 16 + 8], int32_t(key.high + round * kPhiloxWeyl1), 8);
    }
    CreateVecIndex(lanes, int32_t(0), kLanes);
    Barrier();
  }

  // Draws the words of rows x columns scores, at most `capacity` tiles; `row` and `key` are those of the first score,
  // multiples of 16 and 64. `to` keeps WordsOf(capacity) until they are applied, `scratch` has ScratchOf(capacity).
  __aicore__ void Draw(const Words& to, const Words& scratch, int32_t capacity, int32_t batch, int32_t head,
                       int32_t row, int32_t rows, int32_t key, int32_t columns) {
    vector = capacity * kLanes;
    across = columns / kLanes;
    tiles = (rows + 15) / 16 * across;
    for (int32_t v = 0; v < 4; ++v) {
      counter[v] = scratch[v * vector];
      free[v] = to[v * vector];  // where an odd number of rounds ends
    }
    static_assert(kPhiloxRounds % 2 == 1, "the last round writes what the first one did");
    SetTemporaries(scratch[4 * vector], vector);
    Barrier();
    Count(batch, head, row / 16, key / kLanes);
    for (int32_t round = 0; round < kPhiloxRounds; ++round) Round(keys[round * 16], keys[round * 16 + 8]);
    words = to;
  }

  // Zeros the dropped ones of 16 rows of scores in UB, the `group`-th 16 of those drawn.
  __aicore__ void Apply(const AscendC::LocalTensor<float>& s, const Words& scratch, int32_t group) {
    tiles = across;
    SetTemporaries(scratch, kChunkTiles * kLanes);
    Barrier();
    for (int32_t word = 0; word < 4; ++word) {
      Decide(words[word * vector + group * across * kLanes]);
      const Words decisions[4] = {x0, y0, x1, y1};
      for (int32_t byte = 0; byte < 4; ++byte)
        Drop(s[byte % 2 * 8 * pitch_blocks * 8 + word * 16 + byte / 2 * 8], decisions[byte]);
      Barrier();
    }
  }

 private:
  __aicore__ static void Barrier() { AscendC::PipeBarrier<PIPE_V>(); }
  __aicore__ int32_t count() const { return tiles * kLanes; }
  __aicore__ void SetTemporaries(const Words& scratch, int32_t size) {
    x0 = scratch;
    y0 = scratch[size];
    x1 = scratch[2 * size];
    y1 = scratch[3 * size];
  }

  // The counters: tiles go through the keys of a group of 16 rows first.
  __aicore__ void Count(int32_t batch, int32_t head, int32_t row16, int32_t key64) {
    using namespace AscendC;
    Duplicate(counter[0], batch, count());
    for (int32_t t = 0; t < tiles; ++t) {
      Duplicate(counter[1][t * kLanes], key64 + t % across, kLanes);
      Duplicate(counter[3][t * kLanes], row16 + t / across, kLanes);
    }
    Adds(counter[2], lanes, head * 64, kLanes, tiles, {1, 1, 8, 0});
    Barrier();
  }

  // The two products of a round side by side: what does not depend on each other shares a barrier.
  __aicore__ void Round(const Words& key_low, const Words& key_high) {
    using namespace AscendC;
    constexpr uint32_t kLower0 = kPhiloxMultiplier0 & 0xffff, kUpper0 = kPhiloxMultiplier0 >> 16;
    constexpr uint32_t kLower1 = kPhiloxMultiplier1 & 0xffff, kUpper1 = kPhiloxMultiplier1 >> 16;
    const Words low0 = free[0], high0 = free[1], low1 = free[2], high1 = free[3], a0 = counter[0], a1 = counter[2];
    Times(low0, a0, kPhiloxMultiplier0, low1, a1, kPhiloxMultiplier1);
    HighHalves(high0, a0, high1, a1);
    Barrier();
    LowHalves(a0, a0, a1, a1);
    Barrier();
    Times(x0, a0, kLower0, x1, a1, kLower1);
    Times(y0, high0, kLower0, y1, high1, kLower1);
    Barrier();
    Times(a0, a0, kUpper0, a1, a1, kUpper1);
    Times(high0, high0, kUpper0, high1, high1, kUpper1);
    HighHalves(x0, x0, x1, x1);
    Barrier();
    Sum(x0, y0, x1, y1);
    Barrier();
    LowHalves(y0, x0, y1, x1);
    Barrier();
    Sum(y0, a0, y1, a1);
    HighHalves(x0, x0, x1, x1);
    Barrier();
    HighHalves(y0, y0, y1, y1);
    Sum(high0, x0, high1, x1);
    Barrier();
    Sum(high0, y0, high1, y1);
    Barrier();
    Xor(high1, counter[1], high0, counter[3], {1, 1, 1, 8, 8, 8});
    Xor(high1, key_low, high0, key_high, {1, 1, 0, 8, 8, 0});
    for (int32_t v = 0; v < 4; ++v) free[v] = counter[v];
    counter[0] = high1;
    counter[1] = low1;
    counter[2] = high0;
    counter[3] = low0;
  }

  __aicore__ void Times(const Words& to0, const Words& from0, uint32_t by0, const Words& to1, const Words& from1,
                        uint32_t by1) {
    AscendC::Muls(to0, from0, int32_t(by0), count());
    AscendC::Muls(to1, from1, int32_t(by1), count());
  }
  __aicore__ void Sum(const Words& to0, const Words& from0, const Words& to1, const Words& from1) {
    AscendC::Add(to0, to0, from0, count());
    AscendC::Add(to1, to1, from1, count());
  }
  __aicore__ void HighHalves(const Words& to0, const Words& from0, const Words& to1, const Words& from1) {
    AscendC::ShiftRight(to0.ReinterpretCast<uint32_t>(), from0.ReinterpretCast<uint32_t>(), uint32_t(16), count());
    AscendC::ShiftRight(to1.ReinterpretCast<uint32_t>(), from1.ReinterpretCast<uint32_t>(), uint32_t(16), count());
  }
  __aicore__ void LowHalves(const Words& to0, const Words& from0, const Words& to1, const Words& from1) {
    Keep(to0, from0, low_halves);
    Keep(to1, from1, low_halves);
  }
  // to = from & what one block says.
  __aicore__ void Keep(const Words& to, const Words& from, const Words& block) {
    AscendC::And(to.ReinterpretCast<uint16_t>(), from.ReinterpretCast<uint16_t>(), block.ReinterpretCast<uint16_t>(),
                 128, tiles, {1, 1, 0, 8, 8, 0});
  }
  // v ^= w: what either has, less what both have.
  __aicore__ void Xor(const Words& v0, const Words& w0, const Words& v1, const Words& w1,
                      const AscendC::BinaryRepeatParams& blocks) {
    using namespace AscendC;
    const LocalTensor<uint16_t> a0 = v0.ReinterpretCast<uint16_t>(), b0 = w0.ReinterpretCast<uint16_t>();
    const LocalTensor<uint16_t> a1 = v1.ReinterpretCast<uint16_t>(), b1 = w1.ReinterpretCast<uint16_t>();
    And(x0.ReinterpretCast<uint16_t>(), a0, b0, 128, tiles, blocks);
    And(x1.ReinterpretCast<uint16_t>(), a1, b1, 128, tiles, blocks);
    Barrier();
    Or(a0, a0, b0, 128, tiles, blocks);
    Or(a1, a1, b1, 128, tiles, blocks);
    Barrier();
    Sub(v0, v0, x0, count());
    Sub(v1, v1, x1, count());
    Barrier();
  }

  // The bytes of a word, 0 in x0, 1 in y0, 2 in x1 and 3 in y1: each becomes all ones where it is below the threshold.
  __aicore__ void Decide(const Words& word) {
    using namespace AscendC;
    const int32_t n = count();
    Keep(x0, word, low_bytes);  // bytes 0 and 2, in halves
    ShiftRight(y0.ReinterpretCast<uint16_t>(), word.ReinterpretCast<uint16_t>(), uint16_t(8), 2 * n);  // bytes 1 and 3
    Barrier();
    const LocalTensor<int16_t> even = x0.ReinterpretCast<int16_t>(), odd = y0.ReinterpretCast<int16_t>();
    Adds(even, even, int16_t(-threshold), 2 * n);
    Adds(odd, odd, int16_t(-threshold), 2 * n);
    Barrier();
    ShiftRight(even, even, int16_t(15), 2 * n);
    ShiftRight(odd, odd, int16_t(15), 2 * n);
    Barrier();
    ShiftRight(x1, x0, int32_t(16), n);
    ShiftRight(y1, y0, int32_t(16), n);
    Barrier();
    ShiftLeft(x0, x0, int32_t(16), n);
    ShiftLeft(y0, y0, int32_t(16), n);
    Barrier();
    ShiftRight(x0, x0, int32_t(16), n);
    ShiftRight(y0, y0, int32_t(16), n);
    Barrier();
  }
  // s &= decisions
  __aicore__ void Drop(const AscendC::LocalTensor<float>& s, const Words& decisions) {
    const uint8_t rows = pitch_blocks;
    const AscendC::LocalTensor<uint16_t> s16 = s.ReinterpretCast<uint16_t>();
    AscendC::And(s16, s16, decisions.ReinterpretCast<uint16_t>(), 128, tiles, {rows, rows, 1, 8, 8, 8});
  }

  int32_t threshold = 256, pitch_blocks = 0;
  int32_t vector = 0, across = 0;            // lanes of a register; tiles of 16 rows
  int32_t tiles = 0;                         // that the next instructions work on
  Words low_halves, low_bytes, keys, lanes;  // constants
  Words words, counter[4], free[4], x0, y0, x1, y1;
};

}  // namespace ascend
}  // namespace flashattn_ext
