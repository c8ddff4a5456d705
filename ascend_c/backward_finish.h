// Last stage of the backward, on the vector cores alone: the sums of dq, dk and dv are scaled and rounded into the
// outputs, and dsink_h = -sum_i exp(sink_h - lse_i) * delta_i, in the order of the rows.
#pragma once

#include "vector.h"

namespace flashattn_ext {
namespace ascend {

template <typename T>
class BackwardFinish : VectorCore {
 public:
  __aicore__ explicit BackwardFinish(const Arguments& arguments) : a(arguments) {
    sums = Carve<float>(2 * kRowsAtATime * kMaxHeadDim);
    rounded = Carve<T>(2 * kRowsAtATime * kMaxHeadDim);
    lse = Carve<float>(kRowsOfSink);
    delta = Carve<float>(kRowsOfSink);
    total = Carve<float>(kLanes);
    result = Carve<float>(8);
  }

  __aicore__ void Run() {
    using namespace AscendC;
    for (int32_t e = 0; e < 2; ++e) {
      SetFlag<HardEvent::V_MTE2>(e);
      SetFlag<HardEvent::MTE3_V>(e);
    }
    Convert(a.dq, a.dq_sum, a.rows_q, a.heads_q, a.head_dim, a.scale);
    Convert(a.dk, a.dk_sum, a.rows_k, a.heads_k, a.head_dim, a.scale);
    Convert(a.dv, a.dv_sum, a.rows_k, a.heads_k, a.head_dim_v, a.inverse_keep);
    if (a.dsink)
      for (int32_t head = GetBlockIdx(); head < a.heads_q; head += GetBlockNum()) Sink(head);
    for (int32_t e = 0; e < 2; ++e) {
      WaitFlag<HardEvent::V_MTE2>(e);
      WaitFlag<HardEvent::MTE3_V>(e);
    }
  }

 private:
  static constexpr int32_t kRowsAtATime = 32;
  static constexpr int32_t kRowsOfSink = 1024;

  // `rows` of all batch entries together: packed ones are one entry.
  __aicore__ void Convert(const TensorView& view, void* from, int64_t rows, int64_t heads, int32_t dim, float scale) {
    const int64_t batch = a.is_varlen() ? 1 : a.batch, per_entry = batch ? rows / batch : 0;
    const int64_t chunks = (per_entry + kRowsAtATime - 1) / kRowsAtATime;
    for (int64_t item = AscendC::GetBlockIdx(); item < batch * heads * chunks; item += AscendC::GetBlockNum()) {
      const int64_t row = item % chunks * kRowsAtATime, head = item / chunks % heads, b = item / chunks / heads;
      const int64_t at = (head * rows + b * per_entry + row) * sum_pitch(dim);
      ConvertChunk(Head<T>(view, b, head, row), view.row_stride, Global<float>((uint64_t)from, at),
                   Lesser(kRowsAtATime, per_entry - row), dim, scale);
    }
  }
  __aicore__ void ConvertChunk(const AscendC::GlobalTensor<T>& to, int64_t stride,
                               const AscendC::GlobalTensor<float>& from, int32_t rows, int32_t dim, float scale) {
    using namespace AscendC;
    const int32_t buffer = chunk++ % 2, pitch = sum_pitch(dim), count = rows * pitch;
    const LocalTensor<float> x = sums[buffer * kRowsAtATime * kMaxHeadDim];
    const LocalTensor<T> y = rounded[buffer * kRowsAtATime * kMaxHeadDim];
    WaitFlag<HardEvent::V_MTE2>(buffer);
    DataCopy(x, from, count);
    SetFlag<HardEvent::MTE2_V>(buffer);
    WaitFlag<HardEvent::MTE2_V>(buffer);
    Muls(x, x, scale, count);
    Barrier();
    WaitFlag<HardEvent::MTE3_V>(buffer);
    Round(y, x, count);
    SetFlag<HardEvent::V_MTE2>(buffer);
    SetFlag<HardEvent::V_MTE3>(buffer);
    WaitFlag<HardEvent::V_MTE3>(buffer);
    constexpr int32_t kElement = sizeof(T);
    const int32_t gap = Blocks<T>(pitch) - Blocks<T>(dim);
    DataCopyPad(to, y, DataCopyExtParams(rows, dim * kElement, gap, (stride - dim) * kElement, 0));
    SetFlag<HardEvent::MTE3_V>(buffer);
  }

  __aicore__ void Sink(int32_t head) {
    using namespace AscendC;
    const float sink = Global<float>((uint64_t)a.sink).GetValue(head);
    Barrier();
    Duplicate(total, 0.0f, kLanes);
    Barrier();
    for (int32_t b = 0; b < a.batch; ++b) {
      const Sequence queries = QueriesOf(a, b);
      for (int64_t row = 0; row < queries.length; row += kRowsOfSink) {
        const int64_t at = b * a.lse.batch_stride + head * a.lse.head_stride + queries.start + row;
        const int64_t entry = a.is_varlen() ? 0 : b * a.seqlen_q;
        AddRows(sink, at, head * a.rows_q + entry + queries.start + row, Lesser(kRowsOfSink, queries.length - row));
      }
    }
    WaitFlag<HardEvent::MTE3_V>(0);
    WholeReduceSum(result, total, kLanes, 1, 1, 1, 8);
    Barrier();
    Muls(result, result, -1.0f, 1);
    SetFlag<HardEvent::V_MTE3>(0);
    WaitFlag<HardEvent::V_MTE3>(0);
    DataCopyPad(Global<float>((uint64_t)a.dsink, head), result, DataCopyExtParams(1, 4, 0, 0, 0));
    SetFlag<HardEvent::MTE3_V>(0);
  }
  // total += exp(sink - lse) * delta
  __aicore__ void AddRows(float sink, int64_t lse_at, int64_t delta_at, int32_t rows) {
    using namespace AscendC;
    const DataCopyExtParams copy(1, rows * 4, 0, 0, 0);
    const DataCopyPadExtParams<float> no_padding(false, 0, 0, 0.0f);
    WaitFlag<HardEvent::V_MTE2>(0);
    DataCopyPad(lse, Global<float>((uint64_t)a.lse.data, lse_at), copy, no_padding);
    DataCopyPad(delta, Global<float>((uint64_t)a.delta, delta_at), copy, no_padding);
    SetFlag<HardEvent::MTE2_V>(0);
    WaitFlag<HardEvent::MTE2_V>(0);
    Maxs(lse, lse, kLowest, rows);  // -inf where the sink is -inf too
    Barrier();
    Muls(lse, lse, -1.0f, rows);
    Barrier();
    Adds(lse, lse, sink, rows);
    Barrier();
    Exp(lse, lse, rows);
    Barrier();
    Mul(lse, lse, delta, rows);
    Barrier();
    for (int32_t r = 0; r < rows; r += kLanes) {
      Add(total, total, lse[r], Lesser(kLanes, rows - r));
      Barrier();
    }
    SetFlag<HardEvent::V_MTE2>(0);
  }

  const Arguments& a;
  int32_t chunk = 0;
  AscendC::LocalTensor<float> sums, lse, delta, total, result;
  AscendC::LocalTensor<T> rounded;
};

}  // namespace ascend
}  // namespace flashattn_ext
