// Softmax of each row of a [rows, columns] half matrix, as a real kernel: double-buffered queues, tiles of 8 rows,
// columns in groups of 64 lanes. Usage: softmax MODE SEED BLOCKS ROWS COLUMNS INPUT OUTPUT
#include "harness.h"

using namespace AscendC;

class RowSoftmax {
 public:
  __aicore__ void Init(GM_ADDR x, GM_ADDR y, uint32_t rows, uint32_t columns, TPipe* pipe) {
    rows_ = rows;
    columns_ = columns;
    groups_ = (columns + 63) / 64;
    pitch_ = groups_ * 64;
    x_.SetGlobalBuffer((__gm__ half*)x, rows * columns);
    y_.SetGlobalBuffer((__gm__ half*)y, rows * columns);
    pipe->InitBuffer(in_, 2, kTile * pitch_ * sizeof(half));
    pipe->InitBuffer(out_, 2, kTile * pitch_ * sizeof(half));
    pipe->InitBuffer(scores_, kTile * pitch_ * sizeof(float));
    pipe->InitBuffer(partial_, kTile * 64 * sizeof(float));
    pipe->InitBuffer(row_, kTile * sizeof(float));
    pipe->InitBuffer(wide_row_, kTile * 8 * sizeof(float));
  }

  __aicore__ void Process() {
    const uint32_t tiles = (rows_ + kTile - 1) / kTile;
    for (uint32_t tile = GetBlockIdx(); tile < tiles; tile += GetBlockNum()) {
      const uint32_t first = tile * kTile, count = rows_ - first < kTile ? rows_ - first : kTile;
      CopyIn(first, count);
      Compute(count);
      CopyOut(first, count);
    }
  }

 private:
  static constexpr uint32_t kTile = 8;

  __aicore__ uint32_t GapBlocks() const { return pitch_ / 16 - (columns_ + 15) / 16; }
  __aicore__ uint32_t Lanes(uint32_t group) const { return group + 1 < groups_ ? 64 : columns_ - group * 64; }

  __aicore__ void CopyIn(uint32_t first, uint32_t count) {
    LocalTensor<half> x = in_.AllocTensor<half>();
    DataCopyExtParams rows(count, columns_ * sizeof(half), 0, GapBlocks(), 0);
    DataCopyPad(x, x_[first * columns_], rows, DataCopyPadExtParams<half>(false, 0, 0, half(0.0f)));
    in_.EnQue(x);
  }

  __aicore__ void Compute(uint32_t count) {
    LocalTensor<half> x = in_.DeQue<half>();
    LocalTensor<half> y = out_.AllocTensor<half>();
    LocalTensor<float> s = scores_.Get<float>(), wide = wide_row_.Get<float>();
    const uint32_t p = pitch_ / 8, p16 = pitch_ / 16;  // pitches in blocks
    for (uint32_t g = 0; g < groups_; ++g)
      Cast(s[g * 64], x[g * 64], RoundMode::CAST_NONE, Lanes(g), count, UnaryRepeatParams(1, 1, p, p16));
    in_.FreeTensor(x);
    PipeBarrier<PIPE_V>();

    ReduceRows<true>(count);
    for (uint32_t g = 0; g < groups_; ++g)
      Sub(s[g * 64], s[g * 64], wide, Lanes(g), count, BinaryRepeatParams(1, 1, 0, p, p, 1));
    PipeBarrier<PIPE_V>();
    for (uint32_t g = 0; g < groups_; ++g) Exp(s[g * 64], s[g * 64], Lanes(g), count, UnaryRepeatParams(1, 1, p, p));
    PipeBarrier<PIPE_V>();

    ReduceRows<false>(count);
    for (uint32_t g = 0; g < groups_; ++g)
      Div(s[g * 64], s[g * 64], wide, Lanes(g), count, BinaryRepeatParams(1, 1, 0, p, p, 1));
    PipeBarrier<PIPE_V>();
    for (uint32_t g = 0; g < groups_; ++g)
      Cast(y[g * 64], s[g * 64], RoundMode::CAST_RINT, Lanes(g), count, UnaryRepeatParams(1, 1, p16, p));
    PipeBarrier<PIPE_V>();
    out_.EnQue(y);
  }

  // wide_row_[row][8] = maximum or sum of the row.
  template <bool isMax>
  __aicore__ void ReduceRows(uint32_t count) {
    LocalTensor<float> s = scores_.Get<float>(), t = partial_.Get<float>(), row = row_.Get<float>();
    const uint32_t p = pitch_ / 8;
    Adds(t, s, 0.0f, Lanes(0), count, UnaryRepeatParams(1, 1, 8, p));
    Duplicate(row, 0.0f, kTile);  // Brcb reads eight rows, also in a short tile
    PipeBarrier<PIPE_V>();
    for (uint32_t g = 1; g < groups_; ++g) {
      const BinaryRepeatParams params(1, 1, 1, 8, 8, p);
      if (isMax)
        Max(t, t, s[g * 64], Lanes(g), count, params);
      else
        Add(t, t, s[g * 64], Lanes(g), count, params);
      PipeBarrier<PIPE_V>();
    }
    if (isMax)
      WholeReduceMax(row, t, Lanes(0), count, 1, 1, 8, ReduceOrder::ORDER_ONLY_VALUE);
    else
      WholeReduceSum(row, t, Lanes(0), count, 1, 1, 8);
    PipeBarrier<PIPE_V>();
    Brcb(wide_row_.Get<float>(), row, 1, BrcbRepeatParams(1, 8));
    PipeBarrier<PIPE_V>();
  }

  __aicore__ void CopyOut(uint32_t first, uint32_t count) {
    LocalTensor<half> y = out_.DeQue<half>();
    DataCopyPad(y_[first * columns_], y, DataCopyExtParams(count, columns_ * sizeof(half), GapBlocks(), 0, 0));
    out_.FreeTensor(y);
  }

  GlobalTensor<half> x_, y_;
  TQue<TPosition::VECIN, 1> in_;
  TQue<TPosition::VECOUT, 1> out_;
  TBuf<TPosition::VECCALC> scores_, partial_, row_, wide_row_;
  uint32_t rows_, columns_, groups_, pitch_;
};

extern "C" __global__ __aicore__ void row_softmax(GM_ADDR x, GM_ADDR y, uint32_t rows, uint32_t columns) {
  TPipe pipe;
  RowSoftmax op;
  op.Init(x, y, rows, columns, &pipe);
  op.Process();
}

int main(int, char** argv) {
  const uint32_t rows = uint32_t(std::atoi(argv[4])), columns = uint32_t(std::atoi(argv[5]));
  std::vector<uint8_t> x = read_file(argv[6]), y(x.size());
  ascend_emulator::GlobalMemory gm;
  gm.add("x", x.data(), x.size(), ascend_emulator::Use::input);
  gm.add("y", y.data(), y.size(), ascend_emulator::Use::output);
  print(ascend_emulator::launch(KERNEL_TYPE_AIV_ONLY, std::atoi(argv[3]), parse_options(argv[1], argv[2]), gm,
                                [&] { row_softmax(x.data(), y.data(), rows, columns); }));
  write_file(argv[7], y);
}
