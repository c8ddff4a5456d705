// The cube core's part of every matrix product: tiles from GM to L1 and on to L0, products, sums to GM. Two tiles of
// each operand and of the sums are in flight; flags say when a buffer holds its contents and when it is free again.
#pragma once

#include "core.h"
#include "schedule.h"

namespace flashattn_ext {
namespace ascend {

// Fills pieces of L1 with a value. The function is InitConstValue in CANN 8.5 and Fill in CANN 9.
// Callers pass the int 0, so that overload resolution prefers Fill where the headers have both.
template <typename Tensor, typename Params>
__aicore__ inline auto FillL1(const Tensor& to, const Params& p, int) -> decltype(Fill(to, p)) {
  return Fill(to, p);
}
template <typename Tensor, typename Params>
__aicore__ inline auto FillL1(const Tensor& to, const Params& p, long) -> decltype(InitConstValue(to, p)) {
  return InitConstValue(to, p);
}

// A matrix in L1, in columns of 32 bytes with `rows` (rounded up to 16) each.
template <typename T>
struct L1Tile {
  AscendC::LocalTensor<T> data;
  int32_t rows = 0;
  int32_t event = 0;
  __aicore__ AscendC::LocalTensor<T> From(int32_t column) const { return data[column * RoundUp(rows, 16)]; }
};

// How sums reach GM: they overwrite it, or are added to it. Two sums are in flight; flags order an addition only after
// the second-to-last one. Consecutive sums, which no flag orders, never add to the same rows.
enum class Store { replace, add };

template <typename T>
class CubeCore {
  using Sizes = SizesOf<sizeof(T)>;
  static constexpr int32_t kElement = sizeof(T);
  static constexpr int32_t kColumns = 32 / kElement;                         // columns of a fractal, which has 16 rows
  static constexpr int32_t kFractal = 16 * kColumns;                         // elements
  static constexpr int32_t kInner = Sizes::kInner;                           // lanes that a product sums over, at most
  static constexpr int32_t kLeft = kRows * kInner, kRight = kTile * kInner;  // elements of a stage in L0

 public:
  __aicore__ CubeCore()
      : l1(AscendC::TPosition::A1, 0, Sizes::kTiles.l1_bytes() / kElement),
        l0a(AscendC::TPosition::A2, 0, Sizes::kTiles.l0a_bytes() / kElement),
        l0b(AscendC::TPosition::B2, 0, Sizes::kTiles.l0b_bytes() / kElement),
        l0c(AscendC::TPosition::CO1, 0, Sizes::kTiles.l0c_bytes() / 4) {
    using namespace AscendC;
    if constexpr (kElement == 4) SetHF32Mode(false);  // which would round the factors to 11 bits
    for (int32_t e = 0; e < kRingEvent + kRing; ++e) SetFlag<HardEvent::MTE1_MTE2>(e);
    for (int32_t e = 0; e < 2; ++e) {
      SetFlag<HardEvent::M_MTE2>(kResidentEvent + e);
      SetFlag<HardEvent::M_MTE1>(kStageEvent + e);
    }
    for (int32_t e = 0; e < kSums; ++e) SetFlag<HardEvent::FIX_M>(e);
  }
  // Every flag has to be 0 again at the end.
  __aicore__ void Finish() {
    using namespace AscendC;
    for (int32_t e = 0; e < kRingEvent + kRing; ++e) WaitFlag<HardEvent::MTE1_MTE2>(e);
    for (int32_t e = 0; e < 2; ++e) {
      WaitFlag<HardEvent::M_MTE2>(kResidentEvent + e);
      WaitFlag<HardEvent::M_MTE1>(kStageEvent + e);
    }
    for (int32_t e = 0; e < kSums; ++e) WaitFlag<HardEvent::FIX_M>(e);
  }

  // One of the two large buffers for the operand of a whole task, or for the left operand of a step. They have no
  // "loaded" flag: no product reads them before the next LoadTile, whose flag follows all earlier MTE2 work.
  __aicore__ L1Tile<T> LoadResident(int32_t which, AscendC::GlobalTensor<T> from, int32_t rows, int32_t columns,
                                    int64_t pitch) {
    AscendC::WaitFlag<AscendC::HardEvent::M_MTE2>(kResidentEvent + which);
    return Load(TileAt(which * Sizes::kResidentBytes, kResidentEvent + which, rows), from, columns, pitch);
  }
  __aicore__ L1Tile<T> LoadWide(int32_t which, AscendC::GlobalTensor<T> from, int32_t rows, int32_t columns,
                                int64_t pitch) {
    return Load(TakeWide(which, rows), from, columns, pitch);
  }
  // The left operand of a step in parts: its empty buffer, and columns of it.
  __aicore__ L1Tile<T> TakeWide(int32_t which, int32_t rows) {
    const int32_t event = kWideEvent + which;
    AscendC::WaitFlag<AscendC::HardEvent::MTE1_MTE2>(event);
    return TileAt(2 * Sizes::kResidentBytes + which * Sizes::kWideBytes, event, rows);
  }
  __aicore__ void LoadColumns(const L1Tile<T>& wide, int32_t column, AscendC::GlobalTensor<T> from, int32_t columns,
                              int64_t pitch) {
    L1Tile<T> part = wide;
    part.data = wide.From(column);
    Load(part, from, columns, pitch);
  }
  // The next small buffer, for a tile that is used once. `paired`: its rows are paired (schedule.h).
  __aicore__ L1Tile<T> LoadTile(AscendC::GlobalTensor<T> from, int32_t rows, int32_t columns, int64_t pitch,
                                bool paired = false) {
    const int32_t which = ring++ % kRing, event = kRingEvent + which;
    const int32_t byte = 2 * (Sizes::kResidentBytes + Sizes::kWideBytes) + which * kTileBytes;
    AscendC::WaitFlag<AscendC::HardEvent::MTE1_MTE2>(event);
    const L1Tile<T> empty = TileAt(byte, event, rows);
    const L1Tile<T> tile = paired ? LoadPaired(empty, from, columns, pitch) : Load(empty, from, columns, pitch);
    AscendC::SetFlag<AscendC::HardEvent::MTE2_MTE1>(event);
    AscendC::WaitFlag<AscendC::HardEvent::MTE2_MTE1>(event);
    return tile;
  }
  // Called after the last product that reads the operand: a tile, a step's left operand, or a task's operand, whose
  // buffer is free when that product is complete.
  __aicore__ void Release(const L1Tile<T>& tile) { AscendC::SetFlag<AscendC::HardEvent::MTE1_MTE2>(tile.event); }
  __aicore__ void ReleaseResident(const L1Tile<T>& tile) { AscendC::SetFlag<AscendC::HardEvent::M_MTE2>(tile.event); }

  // The part of its left operand that a product reads.
  struct Left {
    const L1Tile<T>& tile;
    int32_t row, rows, column, columns;
    bool transposed;  // the product has the rows on its inside
    __aicore__ int32_t m() const { return transposed ? columns : rows; }
    __aicore__ int32_t k() const { return transposed ? rows : columns; }
  };

  // sums[m][n] (+)= left[m][k] right[n][k]^T, of at most 128 x 128 and kInner. `last_use` frees `right`.
  __aicore__ void MultiplyTransposed(const Left& left, const L1Tile<T>& right, int32_t column, int32_t n, bool begins,
                                     bool last_use) {
    BeginStage(left);
    AscendC::LoadData2DParams p;  // X in L1 has the same fractals as its transpose in L0B
    p.repeatTimes = RoundUp(n, 16) / 16 * (RoundUp(left.k(), kColumns) / kColumns);
    p.srcStride = 1;
    AscendC::LoadData(l0b[stage * kRight], right.From(column), p);
    if (last_use) Release(right);
    Multiply(left, n, begins);
  }

  // sums[m][n] (+)= left[m][k] right[k][n], of at most 128 x 128 and kInner. `last_use` frees `right`.
  __aicore__ void MultiplyPlain(const Left& left, const L1Tile<T>& right, int32_t n, bool begins, bool last_use) {
    BeginStage(left);
    const AscendC::LocalTensor<T> to = l0b[stage * kRight];
    if constexpr (kElement == 4) {
      LoadTransposed(to, right, 0, left.k(), 0, n);
    } else {
      AscendC::LoadData2DParams p;
      p.repeatTimes = RoundUp(n, 16) / 16;
      p.srcStride = RoundUp(left.k(), 16) / 16;
      p.ifTranspose = true;
      for (int32_t r = 0; r < RoundUp(left.k(), 16) / 16; ++r) {
        p.startIndex = r;
        AscendC::LoadData(to[r * 16 * RoundUp(n, 16)], right.data, p);
      }
    }
    if (last_use) Release(right);
    Multiply(left, n, begins);
  }

  // The order of calls: begin the sums, issue products, store the sums to GM. The sums 0 and 1 of 128 columns take
  // turns, or the caller says which: the sums 2, in the second half of 0, leave 64 columns to 0 and to themselves.
  __aicore__ void BeginSums() { BeginSums(sums == 1 ? 0 : 1); }
  __aicore__ void BeginSums(int32_t which) {
    sums = which;
    AscendC::WaitFlag<AscendC::HardEvent::FIX_M>(sums);
  }
  // Back to sums that were begun before others.
  __aicore__ void ResumeSums(int32_t which) { sums = which; }
  __aicore__ void StoreSums(const AscendC::GlobalTensor<float>& to, int32_t rows, int32_t columns, int32_t pitch,
                            Store how = Store::replace) {
    using namespace AscendC;
    SetFlag<HardEvent::M_FIX>(sums);
    WaitFlag<HardEvent::M_FIX>(sums);
    FixpipeParamsV220 p;
    p.nSize = RoundUp(columns, 16);  // every destination has room for them
    p.mSize = rows;
    p.srcStride = RoundUp(rows, 16);
    p.dstStride = pitch;
    if (how == Store::add) SetAtomicAdd<float>();
    Fixpipe(to, Sums(), p);
    if (how == Store::add) SetAtomicNone();
    SetFlag<HardEvent::FIX_M>(sums);
  }

 private:
  // An empty tile at a byte of L1.
  __aicore__ L1Tile<T> TileAt(int32_t byte, int32_t event, int32_t rows) const {
    L1Tile<T> tile;
    tile.data = l1[byte / kElement];
    tile.rows = rows;
    tile.event = event;
    return tile;
  }

  __aicore__ L1Tile<T> Load(const L1Tile<T>& tile, AscendC::GlobalTensor<T> from, int32_t columns, int64_t pitch) {
    CopyRows(tile, 0, 1, from, tile.rows, columns, pitch);
    ClearRows(tile, tile.rows, columns);
    ClearColumns(tile, columns);
    return tile;
  }

  __aicore__ L1Tile<T> LoadPaired(const L1Tile<T>& tile, AscendC::GlobalTensor<T> from, int32_t columns,
                                  int64_t pitch) {
    const int32_t rows = tile.rows;
    if (rows % 16) {  // the rows beyond the last one are interleaved with its group
      ClearRows(tile, rows / 16 * 16, columns);
      AscendC::PipeBarrier<PIPE_MTE2>();
    }
    for (int32_t row = 0; row < rows;) {
      const AscendC::GlobalTensor<T> next = from[row * pitch];
      if (rows - row >= 16 && pitch >= 1 && 8 * pitch <= kMaxPitch) {
        CopyPairs(tile, row, next, columns, pitch);
        row += 16;
      } else {
        CopyRows(tile, PairedIndex(row), 2, next, Lesser(8, rows - row), columns, pitch);
        row += 8;
      }
    }
    return tile;
  }

  // Zeroes rows up to a whole group of 16: a product reads them, and a NaN there may raise an error.
  __aicore__ static void ClearRows(const L1Tile<T>& tile, int32_t row, int32_t columns) {
    const int32_t all = RoundUp(tile.rows, 16);
    if (row == all) return;
    AscendC::InitConstValueParams<T> p;
    p.repeatTimes = RoundUp(columns, kColumns) / kColumns;
    p.blockNum = all - row;
    p.dstGap = row;
    FillL1(tile.data[row * kColumns], p, 0);
  }
  // In fp32 a fractal has 8 columns: where a product reads them as 16 of m or n, the last 8 may be missing.
  __aicore__ static void ClearColumns(const L1Tile<T>& tile, int32_t columns) {
    const int32_t loaded = RoundUp(columns, kColumns);
    if (loaded == RoundUp(columns, 16)) return;
    AscendC::InitConstValueParams<T> p;
    p.repeatTimes = 1;
    p.blockNum = RoundUp(tile.rows, 16);
    FillL1(tile.From(loaded), p, 0);
  }

  static constexpr int64_t kMaxPitch = 65535;  // from row to row, or from matrix to matrix

  // 16 rows, in pairs: two matrices of 8 rows, interleaved in L1.
  __aicore__ static void CopyPairs(const L1Tile<T>& tile, int32_t row, AscendC::GlobalTensor<T> from, int32_t columns,
                                   int64_t pitch) {
    AscendC::Nd2NzParams p;
    p.ndNum = 2;
    p.srcNdMatrixStride = 8 * pitch;
    p.dstNzMatrixStride = kColumns;
    p.nValue = 8;
    p.dValue = columns;
    p.srcDValue = pitch;
    p.dstNzC0Stride = RoundUp(tile.rows, 16);
    p.dstNzNStride = 2;
    AscendC::DataCopy(tile.data[row * kColumns], from, p);
  }
  // Into rows `at`, `at` + `step` and so on of the tile.
  __aicore__ void CopyRows(const L1Tile<T>& tile, int32_t at, int32_t step, AscendC::GlobalTensor<T> from, int32_t rows,
                           int32_t columns, int64_t pitch) {
    using namespace AscendC;
    const bool single = rows == 1 || pitch < 1 || pitch > kMaxPitch;
    Nd2NzParams p;
    p.ndNum = 1;
    p.nValue = single ? 1 : rows;
    p.dValue = columns;
    p.srcDValue = single ? columns : pitch;
    p.dstNzC0Stride = RoundUp(tile.rows, 16);
    p.dstNzNStride = step;
    DataCopy(tile.data[at * kColumns], from, p);
    for (int32_t r = 1; single && r < rows; ++r) DataCopy(tile.data[(at + r * step) * kColumns], from[r * pitch], p);
  }

  __aicore__ void BeginStage(const Left& left) {
    AscendC::WaitFlag<AscendC::HardEvent::M_MTE1>(kStageEvent + stage);
    const AscendC::LocalTensor<T> to = l0a[stage * kLeft];
    if constexpr (kElement == 4) {
      if (left.transposed) return LoadTransposed(to, left.tile, left.row, left.rows, left.column, left.columns);
    }
    const AscendC::LocalTensor<T> from = left.tile.From(left.column);
    const int32_t all = RoundUp(left.tile.rows, 16) / 16;  // fractals from column to column
    const int32_t outer = RoundUp(left.m(), 16) / 16, inner = RoundUp(left.k(), kColumns) / kColumns;
    AscendC::LoadData2DParams p;
    p.repeatTimes = inner;
    p.srcStride = left.transposed ? 1 : all;
    p.ifTranspose = left.transposed;
    for (int32_t f = 0; f < outer; ++f) {
      p.startIndex = left.row / 16 + (left.transposed ? f * all : f);
      AscendC::LoadData(to[f * inner * kFractal], from, p);
    }
  }
  // The transpose of rows and columns of a tile: LoadData2D cannot do it in fp32. As an image of one row and one
  // filter of one point, the tile is its own expansion.
  __aicore__ static void LoadTransposed(const AscendC::LocalTensor<T>& to, const L1Tile<T>& tile, int32_t row,
                                        int32_t rows, int32_t column, int32_t columns) {
    AscendC::LoadData3DParamsV2<T> p;
    p.l1H = 1;
    p.l1W = RoundUp(tile.rows, 16);
    p.channelSize = RoundUp(column + columns, 16);
    p.mStartPt = row;
    p.mExtension = RoundUp(rows, 16);
    p.kStartPt = column;
    p.kExtension = RoundUp(columns, 16);
    p.enTranspose = true;
    AscendC::LoadData(to, tile.data, p);
  }

  __aicore__ AscendC::LocalTensor<float> Sums() const {
    constexpr int32_t kHalf = kRows * kTile / 2;
    return l0c[sums == 2 ? kHalf : 2 * sums * kHalf];
  }

  __aicore__ void Multiply(const Left& left, int32_t n, bool begins) {
    using namespace AscendC;
    const int32_t m = left.m();
    SetFlag<HardEvent::MTE1_M>(stage);
    WaitFlag<HardEvent::MTE1_M>(stage);
    constexpr int32_t kOrdered = 10;  // the hardware orders accumulations of this many fractals and more
    if (!begins && RoundUp(m, 16) / 16 * (RoundUp(n, 16) / 16) < kOrdered) PipeBarrier<PIPE_M>();
    MmadParams p;  // whole fractals of n, because Fixpipe takes no less
    p.m = Greater(m, 2);
    p.n = RoundUp(n, 16);
    p.k = left.k();
    p.kDirectionAlign = kElement == 4 && left.transposed;  // how LoadTransposed lays out L0A
    p.cmatrixInitVal = begins;
    Mmad(Sums(), l0a[stage * kLeft], l0b[stage * kRight], p);
    SetFlag<HardEvent::M_MTE1>(kStageEvent + stage);
    stage ^= 1;
  }

  static constexpr int32_t kSums = 3;
  static_assert(kRingEvent + kRing - 1 <= kLastEvent, "free event ids");
  AscendC::LocalTensor<T> l1, l0a, l0b;
  AscendC::LocalTensor<float> l0c;
  int32_t ring = 0, stage = 0, sums = 0;
};

}  // namespace ascend
}  // namespace flashattn_ext
