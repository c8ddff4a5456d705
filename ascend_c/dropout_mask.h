// The dropout mask, written out for users: a byte for each score, 1 where it is kept. On the vector cores alone.
// Dropout is applied to ones in place of scores, as in the forward, and the result is converted to bytes: 16 rows and
// up to 512 keys at a time.
#pragma once

#include <kernel_operator.h>  // before the shared headers: it defines what they compile to

#include "philox.h"
#include "vector.h"

namespace flashattn_ext {
namespace ascend {

class DropoutMask : VectorCore {
 public:
  __aicore__ explicit DropoutMask(const Arguments& arguments) : a(arguments) {
    ones = Carve<float>(kChunkRows * kPitch);
    halves = Carve<half>(kChunkRows * kKeys);
    bytes = Carve<uint8_t>(kChunkRows * kKeys);
    constexpr int32_t kAcross = kKeys / kLanes;
    constexpr int32_t kMasks = Dropout::MasksOf(kAcross), kScratch = Dropout::ScratchOf(kAcross);
    scratch = Carve<int32_t>(kMasks > kScratch ? kMasks : kScratch);
    dropout.Init(a, Carve<int32_t>(Dropout::kConstantWords));
    dropout.SetMemory(Carve<int32_t>(Dropout::PartsOf(1, kAcross)), 1, kAcross,
                      Carve<int32_t>(Dropout::WordsOf(kAcross)), kAcross);
    dropout.SetScratch(scratch, kAcross);
  }

  __aicore__ void Run() {
    using namespace AscendC;
    const int64_t row_groups = (a.seqlen_q + kChunkRows - 1) / kChunkRows,
                  key_blocks = (a.seqlen_k + kKeys - 1) / kKeys;
    SetFlag<HardEvent::MTE3_V>(0);
    for (int64_t item = GetBlockIdx(); item < a.batch * a.heads_q * row_groups * key_blocks; item += GetBlockNum()) {
      const int64_t row_group = item / key_blocks, head = row_group / row_groups;  // head: of all batch entries
      Chunk(head, row_group % row_groups * kChunkRows, item % key_blocks * kKeys);
    }
    WaitFlag<HardEvent::MTE3_V>(0);
  }

 private:
  static constexpr int32_t kChunkRows = kGroupRows, kKeys = 512, kPitch = kKeys + 16;  // scores drawn at a time

  __aicore__ void Chunk(int64_t head, int64_t row, int64_t key) {
    using namespace AscendC;
    const int32_t rows = Lesser(kChunkRows, a.seqlen_q - row), keys = Lesser(kKeys, a.seqlen_k - key);
    Duplicate(ones, 1.0f, kChunkRows * kPitch);
    dropout.Draw(head / a.heads_q, head % a.heads_q, row, rows, key, RoundUp(keys, kLanes));
    dropout.Apply(ones, kPitch / 8, scratch, 0, 1, 0, RoundUp(keys, kLanes) / kLanes);
    for (int32_t column = 0; column < kKeys; column += kLanes)
      Cast(halves[column], ones[column], RoundMode::CAST_RINT, kLanes, kChunkRows, {1, 1, kKeys / 16, kPitch / 8});
    Barrier();
    WaitFlag<HardEvent::MTE3_V>(0);
    Cast(bytes, halves, RoundMode::CAST_RINT, kChunkRows * kKeys);
    SetFlag<HardEvent::V_MTE3>(0);
    WaitFlag<HardEvent::V_MTE3>(0);
    const int64_t at = (head * a.seqlen_q + row) * a.seqlen_k + key;
    DataCopyPad(Global<uint8_t>((uint64_t)a.keep_mask, at), bytes,
                DataCopyExtParams(rows, keys, (kKeys - RoundUp(keys, 32)) / 32, a.seqlen_k - keys, 0));
    SetFlag<HardEvent::MTE3_V>(0);
  }

  const Arguments& a;
  Dropout dropout;
  AscendC::LocalTensor<float> ones;
  AscendC::LocalTensor<half> halves;
  AscendC::LocalTensor<uint8_t> bytes;
  AscendC::LocalTensor<int32_t> scratch;
};

}  // namespace ascend
}  // namespace flashattn_ext
