// The time model: a small kernel for each fact in rates.h. Prints the report, whose span and cycles the test knows.
// Usage: times CASE NUMBER
#include "harness.h"

using namespace AscendC;

namespace {

constexpr uint32_t kBytes = 64 * 1024;

// `pieces` copies, which together are 64 KB.
__aicore__ void CopyInPieces(GM_ADDR from, uint32_t pieces) {
  InitSocState();
  const LocalTensor<float> ub(TPosition::VECIN, 0, kBytes / 4);
  GlobalTensor<float> gm;
  gm.SetGlobalBuffer((__gm__ float*)from);
  const uint32_t elements = kBytes / 4 / pieces;
  for (uint32_t p = 0; p < pieces; ++p) DataCopy(ub[p * elements], gm[p * elements], elements);
}

// 64 rows of `bytes`, each at the start of 512 bytes.
__aicore__ void CopyRows(GM_ADDR from, uint32_t bytes) {
  InitSocState();
  const LocalTensor<float> ub(TPosition::VECIN, 0, kBytes / 4);
  GlobalTensor<uint8_t> gm;
  gm.SetGlobalBuffer((__gm__ uint8_t*)from);
  DataCopyPad(ub.ReinterpretCast<uint8_t>(), gm, DataCopyExtParams(64, bytes, 512 - bytes, 0, 0),
              DataCopyPadExtParams<uint8_t>(false, 0, 0, 0));
}

// Two cores copy 16 KB each, `distance` bytes apart.
__aicore__ void CopyBesideEachOther(GM_ADDR from, uint32_t distance) {
  InitSocState();
  const LocalTensor<float> ub(TPosition::VECIN, 0, 16 * 1024 / 4);
  GlobalTensor<float> gm;
  gm.SetGlobalBuffer((__gm__ float*)(from + GetBlockIdx() * distance));
  DataCopy(ub, gm, 4096);
}

// `loads` loads into L0A, 32 KB each, then 16 copies, which the scalar unit issues when the queue of MTE1 has room.
__aicore__ void LoadAndCopy(GM_ADDR from, uint32_t loads) {
  InitSocState();
  const LocalTensor<half> l1(TPosition::A1, 0, 64 * 1024), l0a(TPosition::A2, 0, 16 * 1024);
  Fill(l1, InitConstValueParams<half>(1, 1024, 0, half(0.0f)));
  SetFlag<HardEvent::MTE2_MTE1>(0);
  WaitFlag<HardEvent::MTE2_MTE1>(0);
  LoadData2DParams load;
  load.repeatTimes = 64;
  load.srcStride = 1;
  for (uint32_t n = 0; n < loads; ++n) {
    LoadData(l0a, l1, load);
    PipeBarrier<PIPE_MTE1>();
  }
  GlobalTensor<half> gm;
  gm.SetGlobalBuffer((__gm__ half*)from);
  Nd2NzParams copy;
  copy.ndNum = 1;
  copy.nValue = 128;
  copy.dValue = 128;
  copy.srcDValue = 128;
  copy.dstNzC0Stride = 128;
  copy.dstNzNStride = 1;
  for (int n = 0; n < 16; ++n) {
    DataCopy(l1[32 * 1024], gm, copy);
    PipeBarrier<PIPE_MTE2>();
  }
}

}  // namespace

int main(int, char** argv) {
  const std::string name = argv[1];
  const uint32_t number = uint32_t(std::stoul(argv[2]));
  std::vector<uint8_t> bytes(2 * kBytes);
  ascend_emulator::GlobalMemory gm;
  gm.add("x", bytes.data(), bytes.size(), ascend_emulator::Use::input);
  const bool cube = name == "load_and_copy";
  print(ascend_emulator::launch(cube ? KERNEL_TYPE_MIX_AIC_1_2 : KERNEL_TYPE_AIV_ONLY, name == "beside" ? 2 : 1, {}, gm,
                                [&] {
                                  GM_ADDR x = bytes.data();
                                  if (name == "pieces") CopyInPieces(x, number);
                                  if (name == "rows") CopyRows(x, number);
                                  if (name == "beside") CopyBesideEachOther(x, number);
                                  if (cube) {
                                    if ASCEND_IS_AIC {
                                      LoadAndCopy(x, number);
                                    }
                                  }
                                  PipeBarrier<PIPE_ALL>();
                                }));
  return 0;
}
