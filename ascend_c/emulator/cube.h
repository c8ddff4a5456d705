// The cube core: L1 -> L0A and L0B (MTE1), Mmad (M), L0C -> GM (FIX). Layouts, index of element (row, column):
//   L1   NZ  columns of 32 bytes one after the other, each with all rows
//   L0A  ZZ  fractals of 16 rows x 32 bytes, row of fractals by row of fractals
//   L0B  ZN  the fractals of the transpose, K outermost
//   L0C  NZ  columns of 16 one after the other, fp32
#pragma once

#include "copy.h"
#include "vector.h"

namespace AscendC {

struct LoadData2DParams {  // strides and gaps in fractals of 512 bytes
  ascend_emulator::Field<uint16_t> startIndex = 0;
  ascend_emulator::Field<uint16_t> dstGap = 0;
  ascend_emulator::Field<uint16_t> srcStride = 0;
  bool ifTranspose = false;
  ascend_emulator::Field<uint8_t> repeatTimes = 0;
  ascend_emulator::Field<uint8_t> sid = 0, addrMode = 0;
  LoadData2DParams() = default;
};

template <typename T>
struct LoadData3DParamsV2 {  // an image in L1, [channels / C0][height][width][C0], as the matrix that a filter sees
  uint8_t padList[4] = {0, 0, 0, 0};
  ascend_emulator::Field<uint16_t> l1H = 0, l1W = 0, channelSize = 0;
  ascend_emulator::Field<uint16_t> kExtension = 0, mExtension = 0, kStartPt = 0, mStartPt = 0;
  ascend_emulator::Field<uint8_t> strideW = 1, strideH = 1, filterW = 1, filterH = 1;
  ascend_emulator::Field<uint8_t> dilationFilterW = 1, dilationFilterH = 1;
  bool enTranspose = false, enSmallK = false;
  T padValue = T(0);
  bool filterSizeW = false, filterSizeH = false, fMatrixCtrl = false;
  LoadData3DParamsV2() = default;
};

struct MmadParams {
  ascend_emulator::Field<uint16_t> m = 0, n = 0, k = 0;
  bool isBias = false;
  ascend_emulator::Field<int32_t> fmOffset = 0;
  bool enSsparse = false, enWinogradA = false, enWinogradB = false;
  ascend_emulator::Field<uint8_t> unitFlag = 0;
  bool kDirectionAlign = false;
  bool cmatrixSource = false;
  bool cmatrixInitVal = true;
  MmadParams() = default;
};

template <typename T>
struct InitConstValueParams {  // blocks of 32 bytes in L1
  ascend_emulator::Field<uint16_t> repeatTimes = 0, blockNum = 0, dstGap = 0;
  T initValue = T(0);
  InitConstValueParams() = default;
  InitConstValueParams(ascend_emulator::Field<uint16_t> repeats, ascend_emulator::Field<uint16_t> blocks,
                       ascend_emulator::Field<uint16_t> gap, T value)
      : repeatTimes(repeats), blockNum(blocks), dstGap(gap), initValue(value) {}
};

enum QuantMode_t { NoQuant, F322F16, F322BF16 };
enum class CO2Layout : uint8_t { NZ, ROW_MAJOR };
struct FixpipeConfig {
  CO2Layout format;
};
constexpr FixpipeConfig CFG_NZ = {CO2Layout::NZ}, CFG_ROW_MAJOR = {CO2Layout::ROW_MAJOR};

struct FixpipeParamsV220 {  // srcStride: rows of the L0C tile; dstStride: elements of a GM row
  ascend_emulator::Field<uint16_t> nSize = 0, mSize = 0, srcStride = 0;
  ascend_emulator::Field<uint32_t> dstStride = 0;
  QuantMode_t quantPre = NoQuant;
  uint64_t deqScalar = 0;
  ascend_emulator::Field<uint16_t> ndNum = 1, srcNdStride = 0, dstNdStride = 0;
  bool reluEn = false;
  ascend_emulator::Field<uint8_t> unitFlag = 0;
  bool isChannelSplit = false;
  FixpipeParamsV220() = default;
};

inline void SetHF32Mode(bool hf32Mode) {
  constexpr int kCtrlHf32 = ascend_emulator::kCtrlHf32;
  uint64_t& ctrl = ascend_emulator::core().ctrl;
  ctrl = hf32Mode ? ctrl | uint64_t(1) << kCtrlHf32 : ctrl & ~(uint64_t(1) << kCtrlHf32);
}

inline void SetMMRowMajor() {}  // the order of computing inside a tile; results are the same

}  // namespace AscendC

namespace ascend_emulator {

constexpr int kEdge = 16;  // rows of a fractal

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One of 16 rows x 16 columns of a 16-bit type.
inline void transpose_fractal(uint8_t* to, const uint8_t* from) {
  for (int r = 0; r < kEdge; ++r)
    for (int c = 0; c < kEdge; ++c) std::memcpy(to + (c * kEdge + r) * 2, from + (r * kEdge + c) * 2, 2);
}

}  // namespace ascend_emulator

namespace AscendC {

// initValue into repeatTimes pieces of L1, blockNum blocks each, dstGap blocks apart. (L0A and L0B: not emulated.)
template <typename T>
void Fill(const LocalTensor<T>& dst, const InitConstValueParams<T>& p, Site site = Site::here()) {
  using namespace ascend_emulator;
  constexpr int64_t kMost = 32767;
  p.repeatTimes.check("Fill: repeatTimes", site, 0, kMost);
  p.blockNum.check("Fill: blockNum", site, 0, kMost);
  p.dstGap.check("Fill: dstGap", site, 0, kMost);
  const int64_t repeats = p.repeatTimes, length = int64_t(p.blockNum) * kBlock, pitch = length + p.dstGap * kBlock;
  if (!repeats || !length) return;
  const uint32_t to = dst.operand("Fill", "the destination", (repeats - 1) * pitch + length, site, Memory::l1);
  auto run = [=, value = p.initValue](Access& access) {
    Space& l1 = access.local(Memory::l1);
    for (int64_t r = 0; r < repeats; ++r) {
      access.write(l1, to + size_t(r * pitch), size_t(length));
      for (int64_t at = 0; at < length; at += sizeof(T)) std::memcpy(l1.bytes + to + r * pitch + at, &value, sizeof(T));
    }
  };
  const double cycles = kStartCycles + double(repeats * length) / kLoadBytesPerCycle;
  core().issue({PIPE_MTE2, "Fill", site, cycles, 0, 0, {}, std::move(run)});
}

// Fractal startIndex + r * srcStride of L1 becomes fractal r * (1 + dstGap) of L0A or L0B.
template <typename T>
void LoadData(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LoadData2DParams& p,
              Site site = Site::here()) {
  using ascend_emulator::kFractal;
  using ascend_emulator::Memory;
  p.startIndex.check("LoadData: startIndex", site);
  p.repeatTimes.check("LoadData: repeatTimes", site, 1, 255);
  p.srcStride.check("LoadData: srcStride", site);
  p.dstGap.check("LoadData: dstGap", site);
  if (p.ifTranspose && sizeof(T) != 2) ascend_emulator::fail(site, "LoadData: ifTranspose requires a 16-bit type");
  if (dst.memory() != Memory::l0a && dst.memory() != Memory::l0b)
    ascend_emulator::fail(site, "LoadData: the destination must be in L0A or L0B");
  const int64_t start = p.startIndex, repeats = p.repeatTimes, stride = p.srcStride, step = 1 + p.dstGap;
  const Memory to_memory = dst.memory();
  const uint32_t from =
      src.operand("LoadData", "the source", (start + (repeats - 1) * stride + 1) * kFractal, site, Memory::l1);
  const uint32_t to =
      dst.operand("LoadData", "the destination", ((repeats - 1) * step + 1) * kFractal, site, to_memory);
  auto run = [=, transpose = p.ifTranspose](ascend_emulator::Access& access) {
    ascend_emulator::Space &l1 = access.local(Memory::l1), &l0 = access.local(to_memory);
    for (int64_t r = 0; r < repeats; ++r) {
      const size_t source = from + size_t(start + r * stride) * kFractal, target = to + size_t(r * step) * kFractal;
      access.read(l1, source, kFractal, false, true);
      access.write(l0, target, kFractal);
      l0.row_fractals.erase(target);
      if (transpose)
        ascend_emulator::transpose_fractal(l0.bytes + target, l1.bytes + source);
      else
        std::memcpy(l0.bytes + target, l1.bytes + source, kFractal);
      // Rows of L1 that were never written stay unwritten here; Mmad reads valid lanes alone.
      uint8_t* known = l0.valid.data() + target / 2;
      const uint8_t* source_known = l1.valid.data() + source / 2;
      if (transpose)
        for (int i = 0; i < 256; ++i) known[i] = source_known[i % 16 * 16 + i / 16];
      else
        std::memcpy(known, source_known, kFractal / 2);
    }
  };
  const double rate =
      to_memory == Memory::l0a ? ascend_emulator::kL0aBytesPerCycle : ascend_emulator::kL0bBytesPerCycle;
  const double cycles = ascend_emulator::kStartCycles + double(repeats * kFractal) / rate;
  ascend_emulator::core().issue({PIPE_MTE1, "LoadData", site, cycles, 0, 0, {}, std::move(run)});
}

// The transpose of mExtension rows and kExtension columns of a matrix of fp32 in L1 (NZ, l1W rows), which is an
// image of one row under a filter of one point. In L0A rows of fractals are as long as a multiple of 16 lanes. No
// other use of this instruction is emulated.
template <typename T>
void LoadData(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LoadData3DParamsV2<T>& p,
              Site site = Site::here()) {
  using namespace ascend_emulator;
  static_assert(std::is_same_v<T, float>, "the emulator supports this instruction for float only");
  const Memory to_memory = dst.memory();
  if (to_memory != Memory::l0a && to_memory != Memory::l0b)
    fail(site, "LoadData: the destination must be in L0A or L0B");
  const bool point = p.filterW == 1 && p.filterH == 1 && p.strideW == 1 && p.strideH == 1 && p.dilationFilterW == 1 &&
                     p.dilationFilterH == 1 && !p.filterSizeW && !p.filterSizeH && p.l1H == 1;
  const bool pads = p.padList[0] || p.padList[1] || p.padList[2] || p.padList[3];
  if (!point || pads || !(p.enTranspose || to_memory == Memory::l0b))
    fail(site, "LoadData 3D: the emulator supports only images of one row and a 1x1 filter, without padding");
  p.l1W.check("LoadData 3D: l1W", site, 1, 32767);
  p.channelSize.check("LoadData 3D: channelSize", site, 1);
  p.mStartPt.check("LoadData 3D: mStartPt", site, 0, 32767);
  p.mExtension.check("LoadData 3D: mExtension", site, 1);
  p.kExtension.check("LoadData 3D: kExtension", site, 1);
  p.kStartPt.check("LoadData 3D: kStartPt", site);
  constexpr int64_t kColumns = kBlock / sizeof(T);
  const int64_t height = p.l1W, row = p.mStartPt, rows = p.mExtension, column = p.kStartPt, columns = p.kExtension;
  if (p.channelSize % 4 || column % kColumns || columns % kColumns)
    fail(site, "LoadData 3D: channelSize must be a multiple of 4, kStartPt and kExtension multiples of 8 for fp32");
  if (row + rows > ceil_div(height, kEdge) * kEdge || column + columns > p.channelSize)
    fail(
        site,
        format("LoadData 3D: rows %lld..%lld and columns %lld..%lld are outside an image of %lld rows and %lld columns",
               (long long)row, (long long)(row + rows - 1), (long long)column, (long long)(column + columns - 1),
               (long long)height, (long long)p.channelSize));
  const int64_t blocks = ceil_div(column + columns, kColumns);
  const uint32_t from =
      src.operand("LoadData 3D", "the source", ((blocks - 1) * height + row + rows) * kBlock, site, Memory::l1);
  const int64_t inner = ceil_div(rows, kEdge) * (kEdge / kColumns), outer = ceil_div(columns, kEdge);
  const uint32_t to = dst.operand("LoadData 3D", "the destination", inner * outer * int64_t(kFractal), site, to_memory);
  auto run = [=](Access& access) {
    Space &l1 = access.local(Memory::l1), &l0 = access.local(to_memory);
    for (int64_t b = column / kColumns; b < blocks; ++b)
      access.read(l1, from + size_t(b * height + row) * kBlock, size_t(rows) * kBlock, false, true);
    access.write(l0, to, size_t(inner * outer) * kFractal);
    l0.row_fractals.erase(l0.row_fractals.lower_bound(to),
                          l0.row_fractals.lower_bound(to + size_t(inner * outer) * kFractal));
    if (to_memory == Memory::l0a) l0.row_fractals[to] = inner;
    for (int64_t i = 0; i < columns; ++i)
      for (int64_t j = 0; j < rows; ++j) {
        const size_t source = from + size_t((column + i) / kColumns * height + row + j) * kBlock +
                              size_t((column + i) % kColumns) * sizeof(T);
        const int64_t fractal =
            to_memory == Memory::l0a ? i / kEdge * inner + j / kColumns : j / kColumns * outer + i / kEdge;
        const size_t target = to + size_t(fractal) * kFractal + size_t(i % kEdge * kColumns + j % kColumns) * sizeof(T);
        std::memcpy(l0.bytes + target, l1.bytes + source, sizeof(T));
        std::memcpy(l0.valid.data() + target / 2, l1.valid.data() + source / 2, sizeof(T) / 2);
      }
  };
  const double rate = to_memory == Memory::l0a ? kL0aBytesPerCycle : kL0bBytesPerCycle;
  const double cycles = kStartCycles + double(inner * outer * kFractal) / rate;
  core().issue({PIPE_MTE1, "LoadData 3D", site, cycles, 0, 0, {}, std::move(run)});
}

}  // namespace AscendC

namespace ascend_emulator {

// An operand of Mmad in L0A or L0B: rows (m or n) x k, in fractals of 16 rows x 32 bytes.
template <typename T>
struct CubeOperand {
  static constexpr int64_t kColumns = kBlock / sizeof(T);
  const char* name;
  Memory memory;
  uint32_t address;
  int64_t rows, k;
  int64_t row_step, column_step;  // fractals from one to the next below it, and to the next beside it

  size_t at(int64_t i, int64_t j) const {
    return address + size_t((i / kEdge * row_step + j / kColumns * column_step) * kFractal) +
           size_t(i % kEdge * kColumns + j % kColumns) * sizeof(T);
  }
  // As rows x k, or as k x rows.
  std::vector<float> load(Access& access, bool k_first) const {
    Space& l0 = access.local(memory);
    std::vector<float> values(size_t(rows * k));
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < k; ++j) {
        if (j % kColumns == 0) access.read(l0, at(i, j), size_t(std::min(kColumns, k - j)) * sizeof(T));
        values[size_t(k_first ? j * rows + i : i * k + j)] = float(access.load<T>(l0, at(i, j)));
      }
    return values;
  }
  // Lanes of the last fractals beyond rows and k are read and do not count, but a NaN there may raise an execution
  // error.
  bool has_nan_outside(Access& access) const {
    Space& l0 = access.local(memory);
    for (int64_t i = 0; i < ceil_div(rows, kEdge) * kEdge; ++i)
      for (int64_t j = i < rows ? k : 0; j < ceil_div(k, kColumns) * kColumns; ++j)
        if (std::isnan(float(access.load<T>(l0, at(i, j))))) return true;
    return false;
  }
};

}  // namespace ascend_emulator

namespace AscendC {

// c[m][n] (+)= a[m][k] * b[k][n]. The sizes give the layout of all three; with kDirectionAlign k is laid out as a
// multiple of 16 in fp32, too.
template <typename T>
void Mmad(const LocalTensor<float>& c, const LocalTensor<T>& a, const LocalTensor<T>& b, const MmadParams& p,
          Site site = Site::here()) {
  static_assert(std::is_same_v<T, half> || std::is_same_v<T, bfloat16_t> || std::is_same_v<T, float>,
                "the emulator's Mmad supports half, bfloat16_t and float");
  using namespace ascend_emulator;
  if (sizeof(T) == 4 && (core().ctrl >> kCtrlHf32 & 1))
    fail(site, "Mmad: fp32 may be rounded to HF32 (11-bit mantissa) until SetHF32Mode(false) is called");
  p.m.check("Mmad: m", site, 0, 4095);
  p.n.check("Mmad: n", site, 0, 4095);
  p.k.check("Mmad: k", site, 0, 4095);
  if (p.m == 1) fail(site, "Mmad: m = 1 reads A as a vector (GEMV); pass 2");
  p.unitFlag.check("Mmad: unitFlag (not emulated)", site, 0, 0);
  if (p.cmatrixSource) fail(site, "Mmad: a bias table is not emulated");
  const int64_t m = p.m, n = p.n, k = p.k;
  if (!m || !n || !k) return;
  constexpr int64_t kColumns = CubeOperand<T>::kColumns;
  const int64_t m1 = ceil_div(m, kEdge), n1 = ceil_div(n, kEdge);
  const int64_t k1 = ceil_div(k, p.kDirectionAlign ? kEdge : kColumns) * (p.kDirectionAlign ? kEdge / kColumns : 1);
  const CubeOperand<T> left{"A", Memory::l0a, a.operand("Mmad", "A", m1 * k1 * kFractal, site, Memory::l0a), m, k, k1,
                            1};
  const CubeOperand<T> right{"B", Memory::l0b, b.operand("Mmad", "B", k1 * n1 * kFractal, site, Memory::l0b), n, k,
                             1,   n1};
  const uint32_t at_c = c.operand("Mmad", "C", m1 * n1 * 2 * kFractal, site, Memory::l0c);
  auto run = [=, init = p.cmatrixInitVal, report = &core().report(), refuses_nan = core().refuses_nan(),
              saturates = saturates_floats()](Access& access) {
    Space& l0c = access.local(Memory::l0c);
    const std::map<size_t, int64_t>& loaded = access.local(Memory::l0a).row_fractals;
    const auto rows = loaded.find(left.address);
    if (rows != loaded.end() && rows->second != k1 && m1 > 1)
      report->error(site.text() +
                    format(": Mmad: LoadData 3D wrote rows of %lld fractals into A, but with k = %lld and "
                           "kDirectionAlign %s a row has %lld",
                           (long long)rows->second, (long long)k, p.kDirectionAlign ? "true" : "false", (long long)k1));
    if (m1 * n1 >= 10) access.set_in_order();  // smaller tiles need a PipeBarrier<PIPE_M> between accumulations
    for (const CubeOperand<T>& operand : {left, right})
      if (operand.has_nan_outside(access))
        report->error(site.text() + format(": Mmad: a NaN in lanes of %s beyond m = %lld, n = %lld, k = %lld may "
                                           "raise an execution error; clear them",
                                           operand.name, (long long)m, (long long)n, (long long)k));
    const std::vector<float> rows_a = left.load(access, false), rows_b = right.load(access, true);
    const auto is_nan = [](float value) { return std::isnan(value); };
    if (refuses_nan)
      for (const auto* operand : {&rows_a, &rows_b})
        if (std::any_of(operand->begin(), operand->end(), is_nan))
          report->error(site.text() + format(": Mmad: a NaN in %s may raise an execution error",
                                             operand == &rows_a ? left.name : right.name));
    std::vector<float> sums(static_cast<size_t>(n));
    for (int64_t i = 0; i < m; ++i) {
      const auto place = [&](int64_t j) {
        return at_c + size_t(((j / kEdge * m1 * kEdge + i) * kEdge + j % kEdge) * 4);
      };
      for (int64_t j = 0; j < n; j += kEdge) {
        const size_t bytes = size_t(std::min<int64_t>(kEdge, n - j)) * 4;
        if (!init) access.read(l0c, place(j), bytes, true);
        access.write(l0c, place(j), bytes);
      }
      for (int64_t j = 0; j < n; ++j) sums[size_t(j)] = init ? 0.0f : access.load<float>(l0c, place(j));
      for (int64_t l = 0; l < k; ++l) {
        const float factor = rows_a[size_t(i * k + l)];
        const float* row = &rows_b[size_t(l * n)];
        for (int64_t j = 0; j < n; ++j) sums[size_t(j)] += factor * row[j];
      }
      const auto is_finite = [](float value) { return std::isfinite(value); };
      if (saturates && !std::all_of(sums.begin(), sums.end(), is_finite)) report_saturation(report, "Mmad", site);
      for (int64_t j = 0; j < n; ++j) std::memcpy(l0c.bytes + place(j), &sums[size_t(j)], 4);
    }
  };
  // 16 x 16 x 16 a cycle, in fp32 16 x 16 x 4.
  const double cycles = kStartCycles + double(m1 * n1 * ceil_div(k, sizeof(T) == 4 ? 4 : kEdge));
  core().issue({PIPE_M, "Mmad", site, cycles, 0, 0, {}, std::move(run)});
}

// L0C to row-major GM, rounded to the destination's type.
template <typename T, typename U, const FixpipeConfig& config = CFG_ROW_MAJOR>
void Fixpipe(const GlobalTensor<T>& dst, const LocalTensor<U>& src, const FixpipeParamsV220& p,
             Site site = Site::here()) {
  using namespace ascend_emulator;
  static_assert(std::is_same_v<U, float>, "the emulator's Fixpipe supports float only");
  const bool strips = config.format == CO2Layout::NZ;  // strips of 16 columns follow each other
  const QuantMode_t mode = std::is_same_v<T, half> ? F322F16 : std::is_same_v<T, bfloat16_t> ? F322BF16 : NoQuant;
  if (p.quantPre != mode) fail(site, "Fixpipe: quantPre does not match the type of the destination");
  p.nSize.check("Fixpipe: nSize", site, 1, 4095);
  p.mSize.check("Fixpipe: mSize", site, 1, strips ? 65535 : 8192);
  p.srcStride.check("Fixpipe: srcStride", site);
  p.ndNum.check("Fixpipe: ndNum (the emulator supports one matrix)", site, 1, 1);
  p.unitFlag.check("Fixpipe: unitFlag (not emulated)", site, 0, 0);
  const int64_t m = p.mSize, n = p.nSize, rows = p.srcStride, pitch = p.dstStride;
  if (n % kEdge)
    core().report().warning(
        site.text() + format(": Fixpipe: nSize %lld, but the documentation requires a multiple of 16", (long long)n));
  if (strips && (n % kEdge || pitch * int64_t(kBlock) < m * kEdge * int64_t(sizeof(T))))
    fail(site,
         format("Fixpipe: strips of 16 of %lld columns and %lld rows overlap or end early at dstStride %lld blocks",
                (long long)n, (long long)m, (long long)pitch));
  if (!strips && pitch < n)
    fail(site, format("Fixpipe: rows of %lld elements overlap at dstStride %lld", (long long)n, (long long)pitch));
  if (rows % kEdge)
    fail(site, format("Fixpipe: srcStride %lld must be a multiple of 16, the rows of an L0C fractal", (long long)rows));
  const int64_t strip = m * kEdge * int64_t(sizeof(T)), strip_pitch = pitch * kBlock, count = n / kEdge;
  const int64_t extent = strips ? (count - 1) * strip_pitch + strip : ((m - 1) * pitch + n) * int64_t(sizeof(T));
  dst.check_extent("Fixpipe", extent, site);
  auto [space, gm] = core().gm(dst.GetPhyAddr(), size_t(extent), true, "Fixpipe", site);
  const int64_t reach = ((n - 1) / kEdge * rows + m) * kEdge * 4;
  const uint32_t from = src.operand("Fixpipe", "the source", reach, site, Memory::l0c);
  auto run = [=, space = space, gm = gm, atomic = core().atomic_add](Access& access) {
    Space& l0c = access.local(Memory::l0c);
    std::vector<T> row(static_cast<size_t>(n));
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        const size_t at = from + size_t(((j / kEdge) * rows + i) * kEdge + j % kEdge) * 4;
        if (j % kEdge == 0) access.read(l0c, at, size_t(std::min<int64_t>(kEdge, n - j)) * 4);
        row[size_t(j)] = T(access.load<float>(l0c, at));
      }
      if (strips)
        for (int64_t s = 0; s < count; ++s)
          store_elements(access, *space, gm + size_t(s * strip_pitch) + size_t(i * kEdge) * sizeof(T),
                         row.data() + s * kEdge, size_t(kEdge), atomic);
      else
        store_elements(access, *space, gm + size_t(i * pitch) * sizeof(T), row.data(), row.size(), atomic);
    }
  };
  const Rows rows_of_gm = strips ? Rows{uint32_t(count), strip, strip_pitch, 0}
                                 : Rows{uint32_t(m), n * int64_t(sizeof(T)), pitch * int64_t(sizeof(T)), 0};
  const double cycles = copy_cycles(rows_of_gm, kFixBytesPerCycle);
  core().issue(gm_work(PIPE_FIX, "Fixpipe", site, cycles, *space, 0, uint64_t(m * n) * sizeof(T), std::move(run)));
}

}  // namespace AscendC
