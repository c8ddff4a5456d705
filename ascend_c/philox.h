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

  // `memory`: what is left of UB, the more the better. `row_blocks`: from row to row of the scores.
  __aicore__ void Init(const Arguments& a, const Words& memory, int32_t row_blocks) {
    using namespace AscendC;
    SetSaturationFlag<SaturationMode::FLOAT>(false);  // integers wrap
    threshold = a.dropout_threshold;
    pitch_blocks = row_blocks;
    low_half = memory;
    keys = low_half[8];
    lanes = keys[kPhiloxRounds * 2 * 8];
    const Words vectors = lanes[kLanes];
    most_tiles = Lesser(kScratchTiles, vectors.GetSize() / (6 * kLanes));
    for (int32_t w = 0; w < 4; ++w) state[w] = vectors[w * most_tiles * kLanes];
    low = vectors[4 * most_tiles * kLanes];
    high = vectors[5 * most_tiles * kLanes];
    const GlobalTensor<int64_t> rng = Global<int64_t>((uint64_t)a.rng_state);
    PhiloxKey key = philox_key(rng.GetValue(0), rng.GetValue(1));
    Duplicate(low_half, int32_t(0xffff), 8);
    for (int32_t round = 0; round < kPhiloxRounds; ++round) {
      Duplicate(keys[round * 16], int32_t(key.low + round * kPhiloxWeyl0), 8);
      Duplicate(keys[round * 16 + 8], int32_t(key.high + round * kPhiloxWeyl1), 8);
    }
    CreateVecIndex(lanes, int32_t(0), kLanes);
    Barrier();
  }

  // Zeros the dropped ones of rows x columns scores in UB, in each of `count` tensors; `row` and `key` are those of the
  // first score, multiples of 16 and 64. `scratch` is 4 KB that nobody else uses meanwhile.
  __aicore__ void Apply(const AscendC::LocalTensor<float>* s, int32_t tensors,
                        const AscendC::LocalTensor<float>& scratch, int32_t batch, int32_t head, int32_t row,
                        int32_t rows, int32_t key, int32_t columns) {
    x = scratch.ReinterpretCast<int32_t>();
    y = x[kScratchTiles * kLanes];
    const int32_t across = columns / kLanes, all = (rows + 15) / 16 * across;
    for (int32_t done = 0; done < all; done += most_tiles) {
      tiles = Lesser(most_tiles, all - done);
      Barrier();
      Count(batch, head, row / 16, key / kLanes, done, across);
      for (int32_t round = 0; round < kPhiloxRounds; ++round) Round(keys[round * 16], keys[round * 16 + 8]);
      for (int32_t byte = 0; byte < 16; ++byte) {
        Decide(state[byte / 4], byte % 4);
        const int32_t place = byte % 2 * 8 * pitch_blocks * 8 + byte / 4 * 16 + byte % 4 / 2 * 8;
        for (int32_t t = 0; t < tensors; ++t) Drop(s[t][place], done, across);
        Barrier();
      }
    }
  }

 private:
  static constexpr int32_t kScratchTiles = 8;  // of 64 keys at a time: the scratch holds two words of each lane

  __aicore__ static void Barrier() { AscendC::PipeBarrier<PIPE_V>(); }
  __aicore__ int32_t count() const { return tiles * kLanes; }

  // The counters of tiles [done, done + tiles), which go through the keys of a group of 16 rows first.
  __aicore__ void Count(int32_t batch, int32_t head, int32_t row16, int32_t key64, int32_t done, int32_t across) {
    using namespace AscendC;
    Duplicate(state[0], batch, count());
    for (int32_t t = 0; t < tiles; ++t) {
      Duplicate(state[1][t * kLanes], key64 + (done + t) % across, kLanes);
      Adds(state[2][t * kLanes], lanes, head * 64, kLanes);
      Duplicate(state[3][t * kLanes], row16 + (done + t) / across, kLanes);
    }
    Barrier();
  }

  __aicore__ void Round(const Words& key_low, const Words& key_high) {
    MultiplyWide(state[0], kPhiloxMultiplier0);  // low, high = product; state[0] is free
    Xor(state[3], high);
    XorKey(state[3], key_high);  // the next c2
    AscendC::Adds(state[0], low, int32_t(0), count());
    Barrier();
    MultiplyWide(state[2], kPhiloxMultiplier1);
    Xor(state[1], high);
    XorKey(state[1], key_low);  // the next c0
    // Now c0 = state[1], c1 = low, c2 = state[3], c3 = state[0].
    AscendC::Adds(state[2], low, int32_t(0), count());
    Barrier();
    const Words next[4] = {state[1], state[2], state[3], state[0]};
    for (int32_t w = 0; w < 4; ++w) state[w] = next[w];
  }

  // low, high = the halves of v * multiplier; v is lost.
  __aicore__ void MultiplyWide(const Words& v, uint32_t multiplier) {
    using namespace AscendC;
    const int32_t lower = multiplier & 0xffff, upper = multiplier >> 16, n = count();
    Muls(low, v, int32_t(multiplier), n);
    Shift(high, v, 16);
    Barrier();
    KeepLowHalf(v, v);
    Barrier();
    Muls(x, v, lower, n);
    Muls(y, high, lower, n);
    Muls(v, v, upper, n);
    Barrier();
    Muls(high, high, upper, n);
    Shift(x, x, 16);
    Barrier();
    Add(x, x, y, n);
    Barrier();
    KeepLowHalf(y, x);
    Shift(x, x, 16);
    Barrier();
    Add(y, y, v, n);
    Add(high, high, x, n);
    Barrier();
    Shift(y, y, 16);
    Barrier();
    Add(high, high, y, n);
    Barrier();
  }
  __aicore__ void Shift(const Words& to, const Words& from, uint32_t bits) {
    AscendC::ShiftRight(to.ReinterpretCast<uint32_t>(), from.ReinterpretCast<uint32_t>(), bits, count());
  }
  __aicore__ void KeepLowHalf(const Words& to, const Words& from) {
    AscendC::And(to.ReinterpretCast<uint16_t>(), from.ReinterpretCast<uint16_t>(), low_half.ReinterpretCast<uint16_t>(),
                 128, tiles, {1, 1, 0, 8, 8, 0});
  }
  // v ^= other: what either has, less what both have. x is lost.
  __aicore__ void Xor(const Words& v, const Words& other) { XorBlocks(v, other, {1, 1, 1, 8, 8, 8}); }
  __aicore__ void XorKey(const Words& v, const Words& key) { XorBlocks(v, key, {1, 1, 0, 8, 8, 0}); }
  __aicore__ void XorBlocks(const Words& v, const Words& other, const AscendC::BinaryRepeatParams& blocks) {
    using namespace AscendC;
    const LocalTensor<uint16_t> v16 = v.ReinterpretCast<uint16_t>(), other16 = other.ReinterpretCast<uint16_t>();
    And(x.ReinterpretCast<uint16_t>(), v16, other16, 128, tiles, blocks);
    Barrier();
    Or(v16, v16, other16, 128, tiles, blocks);
    Barrier();
    Sub(v, v, x, count());
    Barrier();
  }

  // Byte b of a word decides over 8 rows x 8 keys of each tile: x becomes all ones where it is below the threshold.
  __aicore__ void Decide(const Words& word, int32_t byte) {
    using namespace AscendC;
    const int32_t n = count();
    if (byte < 3) {
      ShiftLeft(x.ReinterpretCast<uint32_t>(), word.ReinterpretCast<uint32_t>(), uint32_t(24 - 8 * byte), n);
      Barrier();
    }
    Shift(x, byte < 3 ? x : word, 24);
    Barrier();
    Adds(x, x, -threshold, n);
    Barrier();
    ShiftRight(x, x, int32_t(31), n);
    Barrier();
  }
  // s &= x, for the tiles of each group of 16 rows.
  __aicore__ void Drop(const AscendC::LocalTensor<float>& s, int32_t done, int32_t across) {
    const uint8_t rows = pitch_blocks;
    for (int32_t t = 0; t < tiles;) {
      const int32_t group = (done + t) / across, from = (done + t) % across, n = Lesser(across - from, tiles - t);
      const AscendC::LocalTensor<uint16_t> s16 =
          s[group * 16 * pitch_blocks * 8 + from * kLanes].ReinterpretCast<uint16_t>();
      AscendC::And(s16, s16, x[t * kLanes].ReinterpretCast<uint16_t>(), 128, n, {rows, rows, 1, 8, 8, 8});
      t += n;
    }
  }

  int32_t threshold = 256, pitch_blocks = 0, tiles = 0, most_tiles = 0;
  Words low_half, keys, lanes, state[4], low, high, x, y;
};

}  // namespace ascend
}  // namespace flashattn_ext
