// Last stage of the backward, on the vector cores alone: the sums of dq, dk and dv are scaled and rounded into the
// outputs, and dsink_h = -sum_i exp(sink_h - lse_i) * delta_i, in the order of the rows.
#pragma once

#include "bias_gradients.h"

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
    Convert(a.dq, a.dq_sum, a.rows_q, a.heads_q, a.head_dim, a.score.softmax_scale);
    Convert(a.dk, a.dk_sum, a.rows_k, a.heads_k, a.head_dim, a.score.softmax_scale);
    Convert(a.dv, a.dv_sum, a.rows_k, a.heads_k, a.head_dim_v, a.inverse_keep);
    if (a.dsink)
      for (int32_t head = GetBlockIdx(); head < a.heads_q; head += GetBlockNum()) Sink(head);
    if (a.dalibi_slopes) {
      const int64_t entries = a.alibi_batch_stride ? a.batch * a.heads_q : a.heads_q;
      for (int64_t entry = GetBlockIdx(); entry < entries; entry += GetBlockNum())
        Slope(entry / a.heads_q, entry % a.heads_q);
    }
    if (a.drelative_bias) {
      const int64_t chunks = (2 * a.relative_reach + kEntries) / kEntries;
      for (int64_t item = GetBlockIdx(); item < a.heads_q * chunks; item += GetBlockNum())
        Relative(item / chunks, item % chunks * kEntries);
    }
    for (int32_t e = 0; e < 2; ++e) {
      WaitFlag<HardEvent::V_MTE2>(e);
      WaitFlag<HardEvent::MTE3_V>(e);
    }
  }

 private:
  static constexpr int32_t kRowsAtATime = 32;
  static constexpr int32_t kRowsOfSink = 1024, kEntries = kRowsOfSink;

  // `rows`: of all batch entries together; packed sequences count as one entry.
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
    StoreTotal(a.dsink, head, -1.0f);
  }
  // Stores the sum over the lanes of `total`, times a sign, as an element of an fp32 tensor.
  __aicore__ void StoreTotal(void* to, int64_t at, float sign) {
    using namespace AscendC;
    WaitFlag<HardEvent::MTE3_V>(0);
    WholeReduceSum(result, total, kLanes, 1, 1, 1, 8);
    Barrier();
    Muls(result, result, sign, 1);
    SetFlag<HardEvent::V_MTE3>(0);
    WaitFlag<HardEvent::V_MTE3>(0);
    DataCopyPad(Global<float>((uint64_t)to, at), result, DataCopyExtParams(1, 4, 0, 0, 0));
    SetFlag<HardEvent::MTE3_V>(0);
  }
  __aicore__ void ClearTotal() {
    Barrier();
    AscendC::Duplicate(total, 0.0f, kLanes);
    Barrier();
  }
  // Adds sums in the workspace to `total`, in their order.
  __aicore__ void AddSums(const void* sums, int64_t at, int64_t count) {
    using namespace AscendC;
    for (int64_t done = 0; done < count; done += kRowsOfSink) {
      const int32_t some = Lesser(kRowsOfSink, count - done);
      LoadSums(lse, sums, at + done, some);
      for (int32_t r = 0; r < some; r += kLanes) {
        Add(total, total, lse[r], Lesser(kLanes, some - r));
        Barrier();
      }
      SetFlag<HardEvent::V_MTE2>(0);
    }
  }
  // The caller sets V_MTE2 once the vector unit has finished with them.
  __aicore__ void LoadSums(const AscendC::LocalTensor<float>& to, const void* sums, int64_t at, int32_t count) {
    using namespace AscendC;
    WaitFlag<HardEvent::V_MTE2>(0);
    DataCopyPad(to, Global<float>((uint64_t)sums, at), DataCopyExtParams(1, count * 4, 0, 0, 0),
                DataCopyPadExtParams<float>(false, 0, 0, 0.0f));
    SetFlag<HardEvent::MTE2_V>(0);
    WaitFlag<HardEvent::MTE2_V>(0);
  }

  // dslope = -sum g |d|, over one batch entry or over all of them.
  __aicore__ void Slope(int64_t entry, int64_t head) {
    ClearTotal();
    const int64_t end = a.alibi_batch_stride ? entry + 1 : a.batch;
    for (int64_t b = entry; b < end; ++b) {
      const Sequence keys = KeysOf(a, b);
      AddSums(a.slope_sums, SlopeSumsAt(a, b, head, keys), (keys.length + kRows - 1) / kRows * 2);
    }
    StoreTotal(a.dalibi_slopes, entry * a.alibi_batch_stride + head, -1.0f);
  }

  // Entries of a relative bias, summed in the order of batch entries and vector cores. The entries at the ends also get
  // the sums of all farther distances.
  __aicore__ void Relative(int64_t head, int64_t begin) {
    using namespace AscendC;
    const int64_t last = 2 * a.relative_reach, out = head * (last + 1);
    const int32_t count = Lesser(kEntries, last + 1 - begin);
    Barrier();
    Duplicate(delta, 0.0f, kEntries);
    Barrier();
    for (int64_t part = 0; part < 2 * a.batch; ++part) {
      LoadSums(lse, a.relative_sums, (part * a.heads_q + head) * a.relative_pitch + kDiagonalMargin + begin, count);
      Add(delta, delta, lse, count);
      Barrier();
      SetFlag<HardEvent::V_MTE2>(0);
    }
    WaitFlag<HardEvent::MTE3_V>(0);
    SetFlag<HardEvent::V_MTE3>(0);
    WaitFlag<HardEvent::V_MTE3>(0);
    DataCopyPad(Global<float>((uint64_t)a.drelative_bias, out + begin), delta,
                DataCopyExtParams(1, count * 4, 0, 0, 0));
    SetFlag<HardEvent::MTE3_V>(0);
    if (begin == 0) RelativeEnd(head, 0, last == 0 ? 2 * kDiagonalMargin + 1 : kDiagonalMargin + 1, out);
    if (begin + count - 1 == last && last > 0)
      RelativeEnd(head, kDiagonalMargin + last, kDiagonalMargin + 1, out + last);
  }
  __aicore__ void RelativeEnd(int64_t head, int64_t first, int64_t distances, int64_t out) {
    ClearTotal();
    for (int64_t part = 0; part < 2 * a.batch; ++part)
      AddSums(a.relative_sums, (part * a.heads_q + head) * a.relative_pitch + first, distances);
    AscendC::PipeBarrier<PIPE_MTE3>();  // over what was stored with its neighbours
    StoreTotal(a.drelative_bias, out, 1.0f);
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
    Maxs(lse, lse, kLowest, rows);  // -inf if the sink is -inf too
    Barrier();
    Muls(lse, lse, -1.0f, rows);
    Barrier();
    if (sink > kHighest)
      Duplicate(lse, 0.0f, rows);  // the sink has all the weight
    else
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
