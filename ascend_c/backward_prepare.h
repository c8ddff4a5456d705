// First stage of the backward, on the vector cores alone: delta_i = <dout_i, out_i> - dlse_i for every row, zeros for
// the sums of the gradients, and with a Mask the checks for non-finite values (isolation.h).
#pragma once

#include "isolation.h"

namespace flashattn_ext {
namespace ascend {

template <typename T>
class BackwardPrepare : VectorCore {
 public:
  __aicore__ explicit BackwardPrepare(const Arguments& arguments)
      : a(arguments), width(RoundUp(arguments.head_dim_v, kLanes)) {
    const int32_t widest = RoundUp(Greater(a.head_dim, a.head_dim_v), kLanes);
    loaded_dout = Carve<T>(kRowsAtATime * widest);
    loaded_out = Carve<T>(kRowsAtATime * widest);
    dout = Carve<float>(kRowsAtATime * widest);
    out = Carve<float>(kRowsAtATime * widest);
    Zero(loaded_dout, kRowsAtATime * widest);
    Zero(loaded_out, kRowsAtATime * widest);
    delta = Carve<float>(kRowsAtATime);
    dlse = Carve<float>(kRowsAtATime);
    zeros = Carve<float>(kZeros);
    if (a.has_intervals()) check.SetMemory(Carve<float>(FiniteCheck::kFloats));
  }

  __aicore__ void Run() {
    using namespace AscendC;
    Duplicate(zeros, 0.0f, kZeros);
    SetFlag<HardEvent::V_MTE3>(0);
    WaitFlag<HardEvent::V_MTE3>(0);
    Clear(a.dq_sum, a.heads_q * a.rows_q * sum_pitch(a.head_dim));
    Clear(a.dk_sum, a.heads_k * a.rows_k * sum_pitch(a.head_dim));
    Clear(a.dv_sum, a.heads_k * a.rows_k * sum_pitch(a.head_dim_v));
    if (a.dalibi_slopes) Clear(a.slope_sums, a.slope_sums_count());
    if (a.drelative_bias) Clear(a.relative_sums, a.relative_sums_count());
    SetFlag<HardEvent::V_MTE2>(0);
    SetFlag<HardEvent::MTE3_V>(0);
    const int64_t batch = a.is_varlen() ? 1 : a.batch, rows = a.is_varlen() ? a.total_q : a.seqlen_q;
    if (a.has_intervals()) {  // overlaps with the stores of zeros
      const int64_t keys = a.is_varlen() ? a.total_k : a.seqlen_k;
      SetFlag<HardEvent::V_MTE2>(1);
      TensorCheck<T> tensors(loaded_dout, loaded_out, dout, out);  // in the buffers of delta
      tensors.Run(&check, a.q, batch, rows, a.heads_q, a.head_dim);
      tensors.Run(&check, a.k, batch, keys, a.heads_k, a.head_dim);
      tensors.Run(&check, a.v, batch, keys, a.heads_k, a.head_dim_v);
      WaitFlag<HardEvent::V_MTE2>(1);
    }
    const int64_t chunks = (rows + kRowsAtATime - 1) / kRowsAtATime;
    for (int64_t item = GetBlockIdx(); item < batch * a.heads_q * chunks; item += GetBlockNum()) {
      const int64_t row = item % chunks * kRowsAtATime, head = item / chunks % a.heads_q, b = item / chunks / a.heads_q;
      Delta(b, head, row, Lesser(kRowsAtATime, rows - row));
    }
    if (a.has_intervals()) check.Store(a, 1);
    WaitFlag<HardEvent::V_MTE2>(0);
    WaitFlag<HardEvent::MTE3_V>(0);
  }

 private:
  static constexpr int32_t kRowsAtATime = TensorCheck<T>::kRowsAtATime;
  static constexpr int32_t kZeros = 8192;

  __aicore__ void Clear(void* sums, int64_t elements) {
    for (int64_t at = AscendC::GetBlockIdx() * kZeros; at < elements; at += AscendC::GetBlockNum() * kZeros)
      AscendC::DataCopy(Global<float>((uint64_t)sums, at), zeros, elements - at < kZeros ? elements - at : kZeros);
  }

  __aicore__ void Load(const AscendC::LocalTensor<T>& to, const TensorView& view, int64_t b, int64_t head, int64_t row,
                       int32_t rows, int32_t dim) {
    LoadRows(to, RoundUp(dim, kLanes), Head<T>(view, b, head, row), view.row_stride, rows, dim);
  }

  __aicore__ void Delta(int64_t b, int64_t head, int64_t row, int32_t rows) {
    using namespace AscendC;
    WaitFlag<HardEvent::V_MTE2>(0);
    Load(loaded_dout, a.dout, b, head, row, rows, a.head_dim_v);
    Load(loaded_out, a.out, b, head, row, rows, a.head_dim_v);
    if (a.dlse.data) {
      const int64_t at = b * a.dlse.batch_stride + head * a.dlse.head_stride + row;
      DataCopyPad(dlse, Global<float>((uint64_t)a.dlse.data, at), DataCopyExtParams(1, rows * 4, 0, 0, 0),
                  DataCopyPadExtParams<float>(false, 0, 0, 0.0f));
    }
    SetFlag<HardEvent::MTE2_V>(0);
    WaitFlag<HardEvent::MTE2_V>(0);
    Widen(dout, loaded_dout, rows * width);
    Widen(out, loaded_out, rows * width);
    Barrier();
    Mul(dout, dout, out, rows * width);
    Barrier();
    const uint8_t pitch = width / 8;
    for (int32_t c = kLanes; c < a.head_dim_v; c += kLanes) {
      const int32_t lanes = Lesser(kLanes, a.head_dim_v - c);
      Add(dout, dout, dout[c], lanes, rows, {1, 1, 1, pitch, pitch, pitch});
      Barrier();
    }
    WaitFlag<HardEvent::MTE3_V>(0);
    WholeReduceSum(delta, dout, Lesser(kLanes, a.head_dim_v), rows, 1, 1, pitch);
    Barrier();
    if (a.dlse.data) Sub(delta, delta, dlse, rows);
    if (a.has_intervals()) {
      Barrier();
      check.Add(delta, 1, rows, 8);
    }
    SetFlag<HardEvent::V_MTE2>(0);
    SetFlag<HardEvent::V_MTE3>(0);
    WaitFlag<HardEvent::V_MTE3>(0);
    const int64_t at = head * a.rows_q + b * a.seqlen_q + row;
    DataCopyPad(Global<float>((uint64_t)a.delta, at), delta, DataCopyExtParams(1, rows * 4, 0, 0, 0));
    SetFlag<HardEvent::MTE3_V>(0);
  }

  const Arguments& a;
  int32_t width;
  AscendC::LocalTensor<T> loaded_dout, loaded_out;
  AscendC::LocalTensor<float> dout, out, delta, dlse, zeros;
  FiniteCheck check;
};

}  // namespace ascend
}  // namespace flashattn_ext
