// A measurement, for the first run on an NPU: how fast the cube cores store sums. Every core multiplies once and stores
// the result many times, in rows as the kernels do, or in fractals; with no times it is an empty launch.
#pragma once

#include "cube.h"
#include "fix_rate_arguments.h"

namespace flashattn_ext {
namespace ascend {

class FixRate {
  static constexpr int32_t kInner = 16;  // lanes that the product sums over: one fractal
  static constexpr int32_t kMostColumns = FixRateArguments::kMostColumns;

 public:
  __aicore__ explicit FixRate(const FixRateArguments& arguments)
      : a(arguments),
        l1(AscendC::TPosition::A1, 0, kMostColumns * kInner),
        l0a(AscendC::TPosition::A2, 0, kRows * kInner),
        l0b(AscendC::TPosition::B2, 0, kMostColumns * kInner),
        l0c(AscendC::TPosition::CO1, 0, kRows * kMostColumns) {}

  __aicore__ void Run() {
    if (a.times == 0) return;
    Multiply();
    const AscendC::GlobalTensor<float> to =
        Global<float>((uint64_t)a.to, AscendC::GetBlockIdx() * FixRateArguments::kCoreBytes / 4);
    AscendC::FixpipeParamsV220 p;
    p.nSize = a.columns;
    p.mSize = kRows;
    p.srcStride = kRows;
    p.dstStride = a.fractals ? 2 * kRows : FixRateArguments::kPitch;  // fractals: blocks from strip to strip
    for (int32_t time = 0; time < a.times; ++time) {
      const int32_t region = time % FixRateArguments::kRegions;
      if (region == 0) AscendC::PipeBarrier<PIPE_FIX>();  // over what was stored a round ago
      const AscendC::GlobalTensor<float> part = to[region * kRows * FixRateArguments::kPitch];
      if (a.fractals)
        AscendC::Fixpipe<float, float, AscendC::CFG_NZ>(part, l0c, p);
      else
        AscendC::Fixpipe(part, l0c, p);
    }
  }

 private:
  __aicore__ void Multiply() {
    using namespace AscendC;
    InitConstValueParams<half> zeros;
    zeros.repeatTimes = 1;
    zeros.blockNum = kMostColumns;
    FillL1(l1, zeros, 0);
    SetFlag<HardEvent::MTE2_MTE1>(0);
    WaitFlag<HardEvent::MTE2_MTE1>(0);
    LoadData2DParams load;
    load.srcStride = 1;
    load.repeatTimes = kRows / 16;
    LoadData(l0a, l1, load);
    load.repeatTimes = kMostColumns / 16;
    LoadData(l0b, l1, load);
    SetFlag<HardEvent::MTE1_M>(0);
    WaitFlag<HardEvent::MTE1_M>(0);
    MmadParams p;
    p.m = kRows;
    p.n = a.columns;
    p.k = kInner;
    Mmad(l0c, l0a, l0b, p);
    SetFlag<HardEvent::M_FIX>(0);
    WaitFlag<HardEvent::M_FIX>(0);
  }

  const FixRateArguments& a;
  AscendC::LocalTensor<half> l1, l0a, l0b;
  AscendC::LocalTensor<float> l0c;
};

}  // namespace ascend
}  // namespace flashattn_ext
