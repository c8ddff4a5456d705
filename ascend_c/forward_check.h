// Before a forward with a Mask, on the vector cores alone: whether V has a value that is not finite (isolation.h).
#pragma once

#include "isolation.h"

namespace flashattn_ext {
namespace ascend {

template <typename T>
class ForwardCheck : VectorCore {
 public:
  __aicore__ explicit ForwardCheck(const Arguments& arguments) : a(arguments) {
    const int32_t elements = kRowsAtATime * RoundUp(a.head_dim_v, kLanes);
    for (int32_t buffer = 0; buffer < 2; ++buffer) {
      loaded[buffer] = Carve<T>(elements);
      wide[buffer] = Carve<float>(elements);
      Zero(loaded[buffer], elements);
    }
    check.SetMemory(Carve<float>(FiniteCheck::kFloats));
    // The first loads overwrite the zeros.
    for (int32_t e = 0; e < 2; ++e) AscendC::SetFlag<AscendC::HardEvent::V_MTE2>(e);
  }

  __aicore__ void Run() {
    const int64_t batch = a.is_varlen() ? 1 : a.batch, rows = a.is_varlen() ? a.total_k : a.seqlen_k;
    TensorCheck<T> tensors(loaded[0], loaded[1], wide[0], wide[1]);
    tensors.Run(&check, a.v, batch, rows, a.heads_k, a.head_dim_v);
    check.Store(a, 0);
    for (int32_t e = 0; e < 2; ++e) AscendC::WaitFlag<AscendC::HardEvent::V_MTE2>(e);
  }

 private:
  static constexpr int32_t kRowsAtATime = TensorCheck<T>::kRowsAtATime;

  const Arguments& a;
  AscendC::LocalTensor<T> loaded[2];
  AscendC::LocalTensor<float> wide[2];
  FiniteCheck check;
};

}  // namespace ascend
}  // namespace flashattn_ext
