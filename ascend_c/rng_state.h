// {seed, offset} of a call, for one vector core. A captured graph finds them in the generator's memory on the device,
// which other values are written to before each replay: MTE2 reads them there, not the scalar unit, whose cache may
// hold those of the last time.
#pragma once

#include "schedule.h"

namespace flashattn_ext {
namespace ascend {

__aicore__ inline void WriteRngState(const RngStateArguments& a) {
  using namespace AscendC;
  constexpr int32_t kWordsOfBlock = 8;
  TPipe pipe;
  TBuf<TPosition::VECCALC> ub;
  pipe.InitBuffer(ub, 3 * kWordsOfBlock * sizeof(int32_t));
  const LocalTensor<int32_t> words = ub.Get<int32_t>();
  const LocalTensor<int32_t> seed = words, offset = words[kWordsOfBlock], state = words[2 * kWordsOfBlock];
  const DataCopyExtParams one(1, sizeof(int64_t), 0, 0, 0), two(1, 2 * sizeof(int64_t), 0, 0, 0);
  const DataCopyPadExtParams<int32_t> no_padding(false, 0, 0, 0);
  if (a.source.seed_pointer) DataCopyPad(seed, Global<int32_t>((uint64_t)a.source.seed_pointer), one, no_padding);
  if (a.source.offset_pointer) DataCopyPad(offset, Global<int32_t>((uint64_t)a.source.offset_pointer), one, no_padding);
  SetFlag<HardEvent::MTE2_S>(0);
  WaitFlag<HardEvent::MTE2_S>(0);
  int64_t seed_value = a.source.seed, offset_value = a.source.offset;
  if (a.source.seed_pointer) seed_value = seed.ReinterpretCast<int64_t>().GetValue(0);
  if (a.source.offset_pointer) offset_value += offset.ReinterpretCast<int64_t>().GetValue(0);
  const LocalTensor<int64_t> result = state.ReinterpretCast<int64_t>();
  result.SetValue(0, seed_value);
  result.SetValue(1, offset_value);
  SetFlag<HardEvent::S_MTE3>(0);
  WaitFlag<HardEvent::S_MTE3>(0);
  DataCopyPad(Global<int32_t>((uint64_t)a.state), state, two);
}

}  // namespace ascend
}  // namespace flashattn_ext
