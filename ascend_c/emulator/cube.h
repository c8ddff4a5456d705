// The cube core: L1 -> L0A and L0B (MTE1), Mmad (M), L0C -> GM (FIX). Layouts, index of element (row, column):
//   L1   NZ  columns of 32 bytes one after the other, each with all rows
//   L0A  ZZ  fractals of 16 rows x 32 bytes, row of fractals by row of fractals
//   L0B  ZN  the fractals of the transpose, K outermost
//   L0C  NZ  columns of 16 one after the other, fp32
#pragma once

#include "copy.h"

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
  if (p.ifTranspose && sizeof(T) != 2) ascend_emulator::fail(site, "LoadData: ifTranspose takes types of 16 bits");
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
      if (transpose)
        ascend_emulator::transpose_fractal(l0.bytes + target, l1.bytes + source);
      else
        std::memcpy(l0.bytes + target, l1.bytes + source, kFractal);
      // Rows of L1 that nobody wrote stay unwritten here; Mmad reads valid lanes alone.
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

// c[m][n] (+)= a[m][k] * b[k][n]. Lanes beyond m, n and k do not count; the sizes give the layout of all three.
template <typename T>
void Mmad(const LocalTensor<float>& c, const LocalTensor<T>& a, const LocalTensor<T>& b, const MmadParams& p,
          Site site = Site::here()) {
  static_assert(std::is_same_v<T, half> || std::is_same_v<T, bfloat16_t>,
                "the emulator multiplies half and bfloat16_t");
  using namespace ascend_emulator;
  p.m.check("Mmad: m", site, 0, 4095);
  p.n.check("Mmad: n", site, 0, 4095);
  p.k.check("Mmad: k", site, 0, 4095);
  if (p.m == 1) fail(site, "Mmad: m = 1 reads A as a vector (GEMV); pass 2");
  p.unitFlag.check("Mmad: unitFlag (not emulated)", site, 0, 0);
  if (p.cmatrixSource) fail(site, "Mmad: a bias table is not emulated");
  const int64_t m = p.m, n = p.n, k = p.k;
  if (!m || !n || !k) return;
  const int64_t m1 = ceil_div(m, kEdge), n1 = ceil_div(n, kEdge), k1 = ceil_div(k, kEdge);
  const uint32_t at_a = a.operand("Mmad", "A", m1 * k1 * kFractal, site, Memory::l0a);
  const uint32_t at_b = b.operand("Mmad", "B", k1 * n1 * kFractal, site, Memory::l0b);
  const uint32_t at_c = c.operand("Mmad", "C", m1 * n1 * 2 * kFractal, site, Memory::l0c);
  auto run = [=, init = p.cmatrixInitVal](Access& access) {
    Space &l0a = access.local(Memory::l0a), &l0b = access.local(Memory::l0b), &l0c = access.local(Memory::l0c);
    if (m1 * n1 >= 10) access.set_in_order();  // smaller tiles need a PipeBarrier<PIPE_M> between accumulations
    const size_t count_a = size_t(m * k), count_b = size_t(k * n), count_c = size_t(n);
    std::vector<float> rows_a(count_a), rows_b(count_b), sums(count_c);
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < k; ++j) {
        const size_t at = at_a + size_t((i / kEdge * k1 + j / kEdge) * kFractal + (i % kEdge * kEdge + j % kEdge) * 2);
        if (j % kEdge == 0) access.read(l0a, at, size_t(std::min<int64_t>(kEdge, k - j)) * 2);
        rows_a[size_t(i * k + j)] = float(access.load<T>(l0a, at));
      }
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < k; ++j) {
        const size_t at = at_b + size_t((j / kEdge * n1 + i / kEdge) * kFractal + (i % kEdge * kEdge + j % kEdge) * 2);
        if (j % kEdge == 0) access.read(l0b, at, size_t(std::min<int64_t>(kEdge, k - j)) * 2);
        rows_b[size_t(j * n + i)] = float(access.load<T>(l0b, at));
      }
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
      for (int64_t j = 0; j < n; ++j) std::memcpy(l0c.bytes + place(j), &sums[size_t(j)], 4);
    }
  };
  const double cycles = kStartCycles + double(m1 * n1 * k1);
  core().issue({PIPE_M, "Mmad", site, cycles, 0, 0, {}, std::move(run)});
}

// L0C to row-major GM, rounded to the destination's type.
template <typename T, typename U, const FixpipeConfig& config = CFG_ROW_MAJOR>
void Fixpipe(const GlobalTensor<T>& dst, const LocalTensor<U>& src, const FixpipeParamsV220& p,
             Site site = Site::here()) {
  using namespace ascend_emulator;
  static_assert(std::is_same_v<U, float>, "the emulator drains float");
  if (config.format != CO2Layout::ROW_MAJOR) fail(site, "Fixpipe: only CFG_ROW_MAJOR is emulated");
  const QuantMode_t mode = std::is_same_v<T, half> ? F322F16 : std::is_same_v<T, bfloat16_t> ? F322BF16 : NoQuant;
  if (p.quantPre != mode) fail(site, "Fixpipe: quantPre does not fit the type of the destination");
  p.nSize.check("Fixpipe: nSize", site, 1, 4095);
  p.mSize.check("Fixpipe: mSize", site, 1, 8192);
  p.srcStride.check("Fixpipe: srcStride", site);
  p.ndNum.check("Fixpipe: ndNum (this emulator takes one matrix)", site, 1, 1);
  p.unitFlag.check("Fixpipe: unitFlag (not emulated)", site, 0, 0);
  const int64_t m = p.mSize, n = p.nSize, rows = p.srcStride, pitch = p.dstStride;
  if (rows % kEdge)
    fail(site, format("Fixpipe: srcStride %lld, the rows of an L0C tile are a multiple of 16", (long long)rows));
  const int64_t extent = ((m - 1) * pitch + n) * int64_t(sizeof(T));
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
      store_elements(access, *space, gm + size_t(i * pitch) * sizeof(T), row.data(), row.size(), atomic);
    }
  };
  const double cycles = kStartCycles + double(m * n) * sizeof(T) / kFixBytesPerCycle;
  core().issue(gm_work(PIPE_FIX, "Fixpipe", site, cycles, *space, 0, uint64_t(m * n) * sizeof(T), std::move(run)));
}

}  // namespace AscendC
