// The dropout mask of csrc/rules/dropout.h on the vector core. 64 lanes are the 64 counters of a tile of 16 query rows
// x 64 keys, so that a byte of a word is the decision of 8 rows x 8 keys: lane = (i % 8) * 8 + j % 8. The vector unit
// multiplies and adds 32-bit integers modulo 2^32, shifts them, and has And and Or of 16 bits; the rest is made of
// these.
//
// The first of the seven rounds do not see the whole counter (l: the lane, with the head):
//
//   round  multiplies c0 of  multiplies c2 of
//     1    batch             l                 BeginHead
//     2    l, key            row               BeginKeys
//     3    l, row            l, key            BeginRows, BeginKeys
//     4    l, row, key       l, row, key       Draw, and so the rounds behind it
#pragma once

#include "../csrc/rules/dropout.h"
#include "vector.h"

namespace flashattn_ext {
namespace ascend {

class Dropout {
 public:
  using Words = AscendC::LocalTensor<int32_t>;

  // Instructions are more efficient over more tiles: over a whole step where UB has room for its words, otherwise over
  // a chunk of rows.
  __aicore__ static constexpr int32_t WordsOf(int32_t tiles) { return 4 * tiles * kLanes; }
  __aicore__ static constexpr int32_t ScratchOf(int32_t tiles) { return 8 * tiles * kLanes; }
  // The results of the rounds before the fourth, for this many tiles across the rows and across the keys.
  __aicore__ static constexpr int32_t PartsOf(int32_t groups, int32_t across) {
    return (2 + 2 * groups + 3 * across) * kLanes + groups * 8;
  }
  static constexpr int32_t kConstantWords = (2 + 2 * (kPhiloxRounds - 4)) * 8;
  // Apply: four masks of a tile's words; ApplyRounded: two of them.
  __aicore__ static constexpr int32_t MasksOf(int32_t tiles) { return 4 * 4 * tiles * kLanes; }

  __aicore__ void Init(const Arguments& a, const Words& constants) {
    using namespace AscendC;
    // Sums and products of integers wrap while bit 53 of CTRL is 0. SetSaturationFlag<SaturationMode::INT> does the
    // same, but only headers of mid-2026 and later have it.
    set_ctrl(sbitset0(get_ctrl(), 53));
    threshold = a.dropout_threshold;
    origin_batch = int32_t(a.origin.batch);
    origin_head = int32_t(a.origin.head);
    origin_row = int32_t(a.origin.row);
    origin_key = int32_t(a.origin.key);
    const GlobalTensor<int64_t> rng = Global<int64_t>((uint64_t)a.rng_state);
    key = philox_key(rng.GetValue(0), rng.GetValue(1));
    numbers = constants;
    low_bytes = constants[8];
    keys = constants[16];
    static_assert(kConstantWords >= kLanes, "there is room for a repeat, of which eight numbers are kept");
    CountLanes(numbers);
    Duplicate(low_bytes, int32_t(0x00ff00ff), 8);
    FLASHATTN_ROLLED for (int32_t round = 4; round < kPhiloxRounds; ++round) {
      Duplicate(KeyLow(round), int32_t(LowOf(round)), 8);
      Duplicate(KeyHigh(round), int32_t(HighOf(round)), 8);
    }
    Barrier();
  }

  // The memory of the parts until the words are drawn, and of the words of up to `capacity` tiles until they are
  // applied.
  __aicore__ void SetMemory(const Words& parts, int32_t max_groups, int32_t max_across, const Words& to,
                            int32_t capacity) {
    head_high = parts;
    head_low = parts[kLanes];
    row_high = parts[2 * kLanes];
    row_low = row_high[max_groups * kLanes];
    key_high = row_low[max_groups * kLanes];
    key_low = key_high[max_across * kLanes];
    key_other = key_low[max_across * kLanes];
    row_constant = key_other[max_across * kLanes];
    words = to;
    vector = capacity * kLanes;
  }
  // Scratch of the next calls: ScratchOf(tiles), where tiles is at least the number across rows or keys, and for
  // drawing at least the capacity. Its contents need not survive from call to call.
  __aicore__ void SetScratch(const Words& scratch, int32_t tiles) {
    for (int32_t r = 0; r < 8; ++r) registers[r] = scratch[r * tiles * kLanes];
  }

  // Round 1 of a head: c2 = head * 64 + lane.
  __aicore__ void BeginHead(int32_t batch, int32_t head) {
    using namespace AscendC;
    tiles = 1;
    batch_product = uint64_t(kPhiloxMultiplier0) * uint32_t(origin_batch + batch);
    Barrier();
    FLASHATTN_ROLLED for (int32_t lane = 0; lane < kLanes; lane += 8)
        Adds(registers[0][lane], numbers, int32_t((origin_head + head) * 64 + lane), 8);
    Barrier();
    const Product p = {registers[0], head_high, head_low, registers[1], registers[2]};
    Multiply(1, p);
  }

  // The part that depends only on the row, for groups of 16 rows from `row` on.
  __aicore__ void BeginRows(int32_t row, int32_t count) {
    groups = tiles = (count + 15) / 16;
    const Words x = registers[0], t = registers[1];
    Barrier();
    for (int32_t g = 0; g < groups; ++g) {
      const uint32_t c2 = High(batch_product) ^ uint32_t((origin_row + row) / 16 + g) ^ HighOf(0);
      const uint64_t product = uint64_t(kPhiloxMultiplier1) * c2;
      AscendC::Duplicate(t[g * kLanes], int32_t(High(product) ^ LowOf(1)), kLanes);
      AscendC::Duplicate(row_constant[g * 8], int32_t(uint32_t(product) ^ LowOf(2)), 8);
    }
    SetConstants(HighOf(2), HighOf(3));
    Barrier();
    Xor(x, t, head_low, kRepeated);
    const Product p = {x, row_high, row_low, registers[2], x};
    Multiply(0, p);
    Xor(row_high, row_high, registers[6], kConstant);
    Xor(row_low, row_low, registers[7], kConstant);
  }

  // The part that depends only on the key.
  __aicore__ void BeginKeys(int32_t key_begin, int32_t columns) {
    across = tiles = columns / kLanes;
    const Words x = registers[0], t = registers[1], z = registers[3];
    Barrier();
    for (int32_t k = 0; k < across; ++k)
      AscendC::Duplicate(t[k * kLanes], int32_t(uint32_t((origin_key + key_begin) / kLanes + k) ^ LowOf(0)), kLanes);
    SetConstants(uint32_t(batch_product) ^ HighOf(1), LowOf(3));
    Barrier();
    Xor(x, t, head_high, kRepeated);
    const Product p0 = {x, z, key_other, registers[2], x};
    Multiply(0, p0);
    Xor(z, z, registers[6], kConstant);
    const Product p1 = {z, key_high, key_low, registers[2], x};
    // Beside the product: Xor(key_low, key_low, registers[7]).
    FLASHATTN_ROLLED for (int32_t stage = 0; stage < kStages; ++stage) {
      Advance(1, p1, stage);
      if (stage == 1) OrAndWith(key_low, registers[7], kConstant);
      if (stage == 2) Subtract(key_low, registers[4], registers[5]);
      Barrier();
    }
  }

  // The words of the rows and keys that began.
  __aicore__ void Draw() {
    drawn_across = across;
    tiles = groups * across;
    const uint8_t stride = 8 * across;
    const Operand by_key = {key_high, 1, 0, 8}, by_key_low = {key_low, 1, 0, 8}, by_key_other = {key_other, 1, 0, 8};
    const Operand by_row = {row_high, 1, 8, 0}, by_row_low = {row_low, 1, 8, 0}, of_row = {row_constant, 0, 1, 0};
    const Words h0 = registers[0], h1 = registers[1], b0 = registers[2], b1 = registers[3], t = registers[4],
                g = registers[5], x = Word(0), z = Word(2);
    Words c1 = Word(1), c3 = Word(3), low1 = registers[6], low0 = registers[7];
    Barrier();
    OrAnd(x, h0, by_key, of_row);
    OrAnd(z, h1, by_row, by_key_other);
    Barrier();
    Subtract(x, x, h0);
    Subtract(z, z, h1);
    Barrier();
    FLASHATTN_ROLLED for (int32_t round = 3; round < kPhiloxRounds; ++round) {
      const Product p0 = {x, h0, low0, b0, x}, p1 = {z, h1, low1, b1, g};
      FLASHATTN_ROLLED for (int32_t stage = 0; stage < kStages; ++stage) {
        Advance(0, p0, stage);
        Advance(1, p1, stage);
        if (round > 3) MixKey(stage, c1, c3, t, round);
        Barrier();
      }
      if (round == 3) {
        OrAnd(x, t, {h1, 1, stride, 8}, by_key_low);
        OrAnd(z, g, {h0, 1, stride, 8}, by_row_low);
      } else {
        Or(x, h1, c1);
        And(t, h1, c1);
        Or(z, h0, c3);
        And(g, h0, c3);
      }
      Barrier();
      Subtract(x, x, t);
      Subtract(z, z, g);
      Barrier();
      const Words free1 = c1, free3 = c3;
      c1 = low1;
      c3 = low0;
      low1 = free1;
      low0 = free3;
    }
    static_assert((kPhiloxRounds - 3) % 2 == 0, "the last lower halves lie with the words");
  }

  // All of it, where nothing of a part is needed twice.
  __aicore__ void Draw(int32_t batch, int32_t head, int32_t row, int32_t rows, int32_t key_begin, int32_t columns) {
    BeginHead(batch, head);
    BeginRows(row, rows);
    BeginKeys(key_begin, columns);
    Draw();
  }

  // Zeros the dropped ones of fp32 scores in UB, of `count` groups of 16 rows, which are the `group`-th and so on of
  // those drawn. `pitch`: blocks from row to row. Of one group also a part of the keys: those of `across` tiles from
  // `tile` on, where `s` begins.
  __aicore__ void Apply(const AscendC::LocalTensor<float>& s, int32_t pitch, const Words& scratch, int32_t group,
                        int32_t count, int32_t tile, int32_t across) {
    using namespace AscendC;
    const int32_t parity = Compare(scratch, group * drawn_across + tile, count * across), all = 2 * parity;
    const Words upper = scratch[all];
    ShiftRight(upper, scratch, int32_t(31), all);  // the sign of the upper half
    Barrier();
    ShiftLeft(scratch, scratch, int32_t(16), all);
    Barrier();
    ShiftRight(scratch, scratch, int32_t(31), all);
    Barrier();
    const uint8_t rows = pitch;
    const LocalTensor<uint16_t> s16 = s.ReinterpretCast<uint16_t>();
    FLASHATTN_ROLLED for (int32_t byte = 0; byte < 4; ++byte) {
      for (int32_t g = 0; g < count; ++g) {
        const LocalTensor<uint16_t> to = s16[((g * 16 + byte % 2 * 8) * pitch + byte / 2) * 16];
        const Words mask = scratch[byte / 2 * all + byte % 2 * parity + g * 4 * across * kLanes];
        AscendC::And(to, to, mask.ReinterpretCast<uint16_t>(), 128, 4 * across, {rows, rows, 1, 2, 2, 8});
      }
    }
    Barrier();
  }

  // Drops one group of 16-bit scores, whose columns are paired (schedule.h), as the bytes of a word are.
  __aicore__ void ApplyRounded(const AscendC::LocalTensor<uint16_t>& s, int32_t pitch, const Words& scratch,
                               int32_t group) {
    using namespace AscendC;
    const int32_t parity = Compare(scratch, group * drawn_across, drawn_across);
    const LocalTensor<int16_t> signs = scratch.ReinterpretCast<int16_t>();
    ShiftRight(signs, signs, int16_t(15), 4 * parity);
    Barrier();
    const uint8_t rows = pitch;
    const LocalTensor<uint16_t> masks = scratch.ReinterpretCast<uint16_t>(), below = s[8 * pitch * 16];
    AscendC::And(s, s, masks, 128, 4 * drawn_across, {rows, rows, 1, 1, 1, 8});
    AscendC::And(below, below, masks[2 * parity], 128, 4 * drawn_across, {rows, rows, 1, 1, 1, 8});
  }

 private:
  __aicore__ static void Barrier() { AscendC::PipeBarrier<PIPE_V>(); }
  __aicore__ static uint32_t High(uint64_t x) { return uint32_t(x >> 32); }
  // The key of a round, counted from 0.
  __aicore__ uint32_t LowOf(int32_t round) const { return key.low + round * kPhiloxWeyl0; }
  __aicore__ uint32_t HighOf(int32_t round) const { return key.high + round * kPhiloxWeyl1; }
  __aicore__ Words KeyLow(int32_t round) const { return keys[(round - 4) * 16]; }
  __aicore__ Words KeyHigh(int32_t round) const { return keys[(round - 4) * 16 + 8]; }

  // M x = 2^32 high + low, for the round's multipliers. With x = 2^16 h + r and M = 2^16 m + n (m and n of 16 bits),
  //
  //   high = m h + floor(F / 2^16),   F = n h + m r + n r / 2^16,
  //
  // and F below 2^32. As M x - low is a multiple of 2^32, F - low / 2^16 is one of 2^16: floor(F / 2^16) comes out of
  // (F' - floor(low / 2^16)) / 2^16 with any F' that is by less than 2^16 too large. F' = n h + (m + 1) r is, and is
  // (m + 1) x + (n - 2^16 (m + 1)) h modulo 2^32.
  //
  // F of the second multiplier is too large for 32 bits. That of its complement N = 2^32 - M is not:
  //   N x = 2^32 (x - high) - low,
  // so that low is added where it was subtracted.
  struct Product {
    Words x, high, low, sum, other;  // `other` may be x of the first multiplier
  };
  static constexpr int32_t kStages = 7;

  // The multiples of a product's x and h, and whether they are those of the complement N.
  struct Factors {
    uint32_t whole, sum, low_part, high_part;
    bool complement;
  };
  __aicore__ static Factors FactorsOf(int32_t which) {
    constexpr uint32_t kUsed[2] = {kPhiloxMultiplier0, 0u - kPhiloxMultiplier1};
    constexpr uint32_t kUpper[2] = {kUsed[0] >> 16, kUsed[1] >> 16}, kLower[2] = {kUsed[0] & 0xffff, kUsed[1] & 0xffff};
    static_assert((uint64_t(kUpper[0]) + 1 + kLower[0]) * 0xffff + 0xffff < uint64_t(1) << 32, "F' fits");
    static_assert((uint64_t(kUpper[1]) + 1 + kLower[1]) * 0xffff + 0xffff < uint64_t(1) << 32, "F' fits");
    if (which == 0) return {kPhiloxMultiplier0, kUpper[0] + 1, kLower[0] - ((kUpper[0] + 1) << 16), kUpper[0], false};
    return {kPhiloxMultiplier1, kUpper[1] + 1, kLower[1] - ((kUpper[1] + 1) << 16), 0u - kUpper[1], true};
  }

  // Consecutive stages need a barrier between them.
  __aicore__ void Advance(int32_t which, const Product& p, int32_t stage) {
    const Factors f = FactorsOf(which);
    switch (stage) {
      case 0:
        ShiftDown(p.high, p.x);
        Times(p.low, p.x, f.whole);
        Times(p.sum, p.x, f.sum);
        break;
      case 1:
        ShiftDown(p.other, p.low);
        break;
      case 2:
        if (f.complement)
          Plus(p.sum, p.sum, p.other);
        else
          Subtract(p.sum, p.sum, p.other);
        break;
      case 3:
        Times(p.other, p.high, f.low_part);
        break;
      case 4:
        Plus(p.sum, p.sum, p.other);
        Times(p.high, p.high, f.high_part);
        break;
      case 5:
        ShiftDown(p.sum, p.sum);
        if (f.complement) Plus(p.high, p.high, p.x);
        break;
      case 6:
        if (f.complement)
          Subtract(p.high, p.high, p.sum);
        else
          Plus(p.high, p.high, p.sum);
        break;
    }
  }
  __aicore__ void Multiply(int32_t which, const Product& p) {
    FLASHATTN_ROLLED for (int32_t stage = 0; stage < kStages; ++stage) {
      Advance(which, p, stage);
      Barrier();
    }
  }

  // Beside the stages of two products: c1 ^= key.low, c3 ^= key.high.
  __aicore__ void MixKey(int32_t stage, const Words& c1, const Words& c3, const Words& t, int32_t round) {
    if (stage >= 6) return;
    const Words c = stage < 3 ? c1 : c3, k = stage < 3 ? KeyLow(round) : KeyHigh(round);
    const AscendC::BinaryRepeatParams by_block(1, 1, 0, 8, 8, 0);
    if (stage % 3 == 0)
      AscendC::Or(Bits(t), Bits(c), Bits(k), 128, tiles, by_block);
    else if (stage % 3 == 1)
      AscendC::And(Bits(c), Bits(c), Bits(k), 128, tiles, by_block);
    else
      Subtract(c, t, c);
  }

  // What the tiles of groups of rows x keys take: from block to block of a tile, from group to group, from key to key.
  struct Operand {
    const Words& data;
    int32_t block, group, key;
  };
  // Along the longer of the two sides at a time: either of one, and both of them.
  __aicore__ void OrAnd(const Words& either, const Words& both, const Operand& a, const Operand& b) {
    const bool along_keys = across >= groups;
    const int32_t outer = along_keys ? groups : across;
    const uint8_t repeats = along_keys ? across : groups, block_a = a.block, block_b = b.block;
    const uint8_t to = along_keys ? 8 : 8 * across;
    const uint8_t step_a = along_keys ? a.key : a.group, step_b = along_keys ? b.key : b.group;
    const AscendC::BinaryRepeatParams blocks(1, block_a, block_b, to, step_a, step_b);
    for (int32_t o = 0; o < outer; ++o) {
      const int32_t at = o * kLanes * (along_keys ? across : 1);
      const Words x = a.data[o * 8 * (along_keys ? a.group : a.key)];
      const Words y = b.data[o * 8 * (along_keys ? b.group : b.key)];
      AscendC::Or(Bits(either[at]), Bits(x), Bits(y), 128, repeats, blocks);
      AscendC::And(Bits(both[at]), Bits(x), Bits(y), 128, repeats, blocks);
    }
  }

  __aicore__ static AscendC::LocalTensor<uint16_t> Bits(const Words& words) {
    return words.ReinterpretCast<uint16_t>();
  }
  __aicore__ void Times(const Words& to, const Words& from, uint32_t by) {
    AscendC::Muls(to, from, int32_t(by), kLanes, tiles, {1, 1, 8, 8});
  }
  __aicore__ void Plus(const Words& to, const Words& a, const Words& b) {
    AscendC::Add(to, a, b, kLanes, tiles, {1, 1, 1, 8, 8, 8});
  }
  __aicore__ void Subtract(const Words& to, const Words& from, const Words& what) {
    AscendC::Sub(to, from, what, kLanes, tiles, {1, 1, 1, 8, 8, 8});
  }
  // to = from / 2^16
  __aicore__ void ShiftDown(const Words& to, const Words& from) {
    AscendC::ShiftRight(to.ReinterpretCast<uint32_t>(), from.ReinterpretCast<uint32_t>(), uint32_t(16), kLanes, tiles,
                        {1, 1, 8, 8});
  }
  __aicore__ void Or(const Words& to, const Words& a, const Words& b) {
    AscendC::Or(Bits(to), Bits(a), Bits(b), 128, tiles, {1, 1, 1, 8, 8, 8});
  }
  __aicore__ void And(const Words& to, const Words& a, const Words& b) {
    AscendC::And(Bits(to), Bits(a), Bits(b), 128, tiles, {1, 1, 1, 8, 8, 8});
  }
  static constexpr int32_t kRepeated = 1, kConstant = 0;  // from block to block of w
  // to = v ^ w, w being one tile or one block for all of v: what either has, less what both have.
  __aicore__ void Xor(const Words& to, const Words& v, const Words& w, int32_t block) {
    OrAndWith(v, w, block);
    Barrier();
    Subtract(to, registers[4], registers[5]);
    Barrier();
  }
  // What either has, and what both have, into registers 4 and 5.
  __aicore__ void OrAndWith(const Words& v, const Words& w, int32_t block) {
    const uint8_t block_w = block;
    AscendC::Or(Bits(registers[4]), Bits(v), Bits(w), 128, tiles, {1, 1, block_w, 8, 8, 0});
    AscendC::And(Bits(registers[5]), Bits(v), Bits(w), 128, tiles, {1, 1, block_w, 8, 8, 0});
  }
  __aicore__ void SetConstants(uint32_t first, uint32_t second) {
    AscendC::Duplicate(registers[6], int32_t(first), 8);
    AscendC::Duplicate(registers[7], int32_t(second), 8);
  }

  // Bytes less the threshold, in 16 bits, of so many tiles from the `first` on: bytes 0 and 2 of the four words of each
  // tile, then bytes 1 and 3. Returns how many lanes of 32 bits lie between those.
  __aicore__ int32_t Compare(const Words& to, int32_t first, int32_t drawn) {
    using namespace AscendC;
    const int32_t parity = 4 * drawn * kLanes;
    Barrier();
    FLASHATTN_ROLLED for (int32_t word = 0; word < 4; ++word) {
      const Words from = Word(word)[first * kLanes];
      AscendC::And(Bits(to[word * kLanes]), Bits(from), Bits(low_bytes), 128, drawn, {1, 1, 0, 32, 8, 0});
      ShiftRight(Bits(to[parity + word * kLanes]), Bits(from), uint16_t(8), 128, drawn, {1, 1, 32, 8});
    }
    Barrier();
    const LocalTensor<int16_t> bytes = to.ReinterpretCast<int16_t>();
    Adds(bytes, bytes, int16_t(-threshold), 4 * parity);
    Barrier();
    return parity;
  }
  __aicore__ Words Word(int32_t word) const { return words[word * vector]; }

  int32_t threshold = 256;
  int32_t origin_batch = 0, origin_head = 0, origin_row = 0, origin_key = 0;  // csrc/params.h
  PhiloxKey key;
  uint64_t batch_product = 0;      // the product of round 1 that depends on the batch entry
  int32_t vector = 0;              // lanes of a register
  int32_t groups = 0, across = 0;  // begun groups: 16 rows each, 64 keys each
  int32_t drawn_across = 0;
  int32_t tiles = 0;               // tiles of the next instructions
  Words numbers, low_bytes, keys;  // constants, the first one from 0 to 7
  Words head_high, head_low, row_high, row_low, row_constant, key_high, key_low, key_other;
  Words words, registers[8];
};

}  // namespace ascend
}  // namespace flashattn_ext
