// Copies between GM and UB on MTE2 (load) and MTE3 (store), and from GM into L1 on MTE2.
#pragma once

#include "rates.h"
#include "tensor.h"

namespace AscendC {

struct DataCopyParams {  // lengths and gaps in blocks of 32 bytes
  ascend_emulator::Field<uint16_t> blockCount = 1, blockLen = 0;
  union {
    ascend_emulator::Field<uint16_t> srcStride = 0;
    ascend_emulator::Field<uint16_t> srcGap;
  };
  union {
    ascend_emulator::Field<uint16_t> dstStride = 0;
    ascend_emulator::Field<uint16_t> dstGap;
  };
  DataCopyParams() = default;
  DataCopyParams(ascend_emulator::Field<uint16_t> count, ascend_emulator::Field<uint16_t> len,
                 ascend_emulator::Field<uint16_t> srcStrideIn, ascend_emulator::Field<uint16_t> dstStrideIn)
      : blockCount(count), blockLen(len), srcStride(srcStrideIn), dstStride(dstStrideIn) {}
};

struct DataCopyExtParams {  // lengths in bytes; stride in bytes on the GM side, in blocks on the UB side
  ascend_emulator::Field<uint16_t> blockCount = 1;
  ascend_emulator::Field<uint32_t> blockLen = 0, srcStride = 0, dstStride = 0, rsv = 0;
  DataCopyExtParams() = default;
  DataCopyExtParams(ascend_emulator::Field<uint16_t> count, ascend_emulator::Field<uint32_t> len,
                    ascend_emulator::Field<uint32_t> srcStrideIn, ascend_emulator::Field<uint32_t> dstStrideIn,
                    ascend_emulator::Field<uint32_t> rsvIn)
      : blockCount(count), blockLen(len), srcStride(srcStrideIn), dstStride(dstStrideIn), rsv(rsvIn) {}
};

template <typename T>
struct DataCopyPadExtParams {
  bool isPad = false;
  ascend_emulator::Field<uint8_t> leftPadding = 0, rightPadding = 0;
  T paddingValue = T(0);
  DataCopyPadExtParams() = default;
  DataCopyPadExtParams(bool isPadValue, ascend_emulator::Field<uint8_t> left, ascend_emulator::Field<uint8_t> right,
                       T value)
      : isPad(isPadValue), leftPadding(left), rightPadding(right), paddingValue(value) {}
};

struct Nd2NzParams {  // sizes and matrix strides in elements, strides of the NZ side in blocks
  ascend_emulator::Field<uint16_t> ndNum = 0, nValue = 0, dValue = 0, srcNdMatrixStride = 0, srcDValue = 0,
                                   dstNzC0Stride = 0, dstNzNStride = 0, dstNzMatrixStride = 0;
  Nd2NzParams() = default;
};

}  // namespace AscendC

namespace ascend_emulator {

// Rows of `length` bytes; pitches from start to start.
struct Rows {
  uint32_t count;
  int64_t length, gm_pitch, ub_pitch;
  int64_t extent(int64_t pitch, int64_t row) const { return (count - 1) * pitch + row; }
};

// Contiguous rows in GM are merged into one.
inline double copy_cycles(const Rows& rows, double bytes_per_cycle) {
  const bool whole = rows.count == 1 || rows.gm_pitch == rows.length;
  const int64_t length = whole ? rows.count * rows.length : rows.length;
  const int64_t bytes = (length + kPiece - 1) / kPiece * kPiece * (whole ? 1 : rows.count);
  return kCopyStartCycles + double(bytes) / bytes_per_cycle;
}

// What surrounds each row in UB, in bytes; see DataCopyPad. `value` is one element.
struct Padding {
  int64_t left = 0, right = 0, element = 0;
  std::vector<uint8_t> value;  // empty: the first element of the row
};

// Whether DataCopyPad takes the tensor: the documents name two positions for these chips.
template <typename T>
void check_pad_position(const AscendC::LocalTensor<T>& tensor, Site site) {
  using AscendC::TPosition;
  if (memory_of(tensor.GetPosition()) == Memory::ub && tensor.GetPosition() != TPosition::VECIN &&
      tensor.GetPosition() != TPosition::VECOUT)
    fail(site, "DataCopyPad: the position of the tensor in UB is VECCALC; on these chips it must be VECIN or VECOUT");
}

template <typename T>
void load_rows(const char* name, const AscendC::LocalTensor<T>& dst, const AscendC::GlobalTensor<T>& src, Rows rows,
               Padding padding, Site site) {
  const int64_t row = padding.left + rows.length + padding.right;
  const int64_t extent = rows.extent(rows.gm_pitch, rows.length);
  src.check_extent(name, extent, site);
  auto [space, gm] = core().gm(src.GetPhyAddr(), size_t(extent), false, name, site);
  const uint32_t ub = dst.operand(name, "the destination", rows.extent(rows.ub_pitch, row), site);
  auto run = [space = space, gm = gm, ub, rows, padding](Access& access) {
    Space& local = access.ub();
    for (uint32_t r = 0; r < rows.count; ++r) {
      const size_t from = gm + r * size_t(rows.gm_pitch), to = ub + r * size_t(rows.ub_pitch);
      const size_t data = to + size_t(padding.left), end = data + size_t(rows.length);
      access.read(*space, from, size_t(rows.length));
      access.write(local, to, size_t(padding.left + rows.length + padding.right));
      std::memcpy(local.bytes + data, space->bytes + from, size_t(rows.length));
      const size_t element = size_t(padding.element);
      const uint8_t* value = padding.value.empty() ? local.bytes + data : padding.value.data();
      for (size_t at = to; at < data; ++at) local.bytes[at] = value[(at - to) % element];
      for (size_t at = end; at < end + size_t(padding.right); ++at) local.bytes[at] = value[(at - end) % element];
    }
  };
  core().issue(load_work(name, site, copy_cycles(rows, kLoadBytesPerCycle), *space, gm,
                         uint64_t(rows.count * rows.length), std::move(run)));
}

// dst = value, or dst += value in the tensor's type.
template <typename T>
void store_elements(Access& access, Space& space, size_t to, const T* values, size_t count, bool atomic) {
  access.write(space, to, count * sizeof(T), atomic);
  if (!atomic) {
    std::memcpy(space.bytes + to, values, count * sizeof(T));
    return;
  }
  access.add(space, [bytes = space.bytes + to, terms = std::vector<T>(values, values + count)] {
    for (size_t i = 0; i < terms.size(); ++i) {
      T sum;
      std::memcpy(&sum, bytes + i * sizeof(T), sizeof(T));
      sum = T(sum + terms[i]);
      std::memcpy(bytes + i * sizeof(T), &sum, sizeof(T));
    }
  });
}

template <typename T>
void store_rows(const char* name, const AscendC::GlobalTensor<T>& dst, const AscendC::LocalTensor<T>& src, Rows rows,
                Site site) {
  const int64_t extent = rows.extent(rows.gm_pitch, rows.length);
  dst.check_extent(name, extent, site);
  auto [space, gm] = core().gm(dst.GetPhyAddr(), size_t(extent), true, name, site);
  const uint32_t ub = src.operand(name, "the source", rows.extent(rows.ub_pitch, rows.length), site);
  auto run = [space = space, gm = gm, ub, rows, atomic = core().atomic_add](Access& access) {
    for (uint32_t r = 0; r < rows.count; ++r) {
      const size_t from = ub + r * size_t(rows.ub_pitch), to = gm + r * size_t(rows.gm_pitch);
      access.read(access.ub(), from, size_t(rows.length));
      store_elements(access, *space, to, reinterpret_cast<const T*>(access.ub().bytes + from),
                     size_t(rows.length) / sizeof(T), atomic);
    }
  };
  core().issue(gm_work(PIPE_MTE3, name, site, copy_cycles(rows, kStoreBytesPerCycle), *space, 0,
                       uint64_t(rows.count * rows.length), std::move(run)));
}

// The count form: the hardware drops a partial last block, which no kernel wants.
inline Rows count_rows(uint32_t count, size_t size, Site site) {
  const int64_t bytes = int64_t(count * size);
  if (bytes % kBlock)
    fail(site, format("DataCopy: %u elements are %lld bytes, not a multiple of 32: the tail would be dropped", count,
                      (long long)bytes));
  if (bytes == 0) fail(site, "DataCopy: the count is 0");
  return {1, bytes, bytes, bytes};
}

inline Rows block_rows(const AscendC::DataCopyParams& p, bool load, Site site) {
  p.blockCount.check("DataCopy: blockCount", site, 1, 4095);
  p.blockLen.check("DataCopy: blockLen", site, 1);
  p.srcStride.check("DataCopy: srcStride", site);
  p.dstStride.check("DataCopy: dstStride", site);
  const int64_t length = int64_t(p.blockLen) * kBlock;
  const int64_t source = length + int64_t(p.srcStride) * kBlock, target = length + int64_t(p.dstStride) * kBlock;
  return {p.blockCount, length, load ? source : target, load ? target : source};
}

inline Rows byte_rows(const AscendC::DataCopyExtParams& p, bool load, int64_t padding, Site site) {
  p.blockCount.check("DataCopyPad: blockCount", site, 1, 4095);
  p.blockLen.check("DataCopyPad: blockLen", site, 1, 2097151);
  p.srcStride.check("DataCopyPad: srcStride", site);
  p.dstStride.check("DataCopyPad: dstStride", site);
  const int64_t length = p.blockLen, gm_gap = load ? p.srcStride : p.dstStride,
                ub_gap = load ? p.dstStride : p.srcStride;
  const int64_t ub_row = (length + padding + kBlock - 1) / kBlock * kBlock;
  return {p.blockCount, length, length + gm_gap, ub_row + ub_gap * kBlock};
}

}  // namespace ascend_emulator

namespace AscendC {

template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const uint32_t count, Site site = Site::here()) {
  load_rows("DataCopy", dst, src, ascend_emulator::count_rows(count, sizeof(T), site), {}, site);
}

template <typename T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const uint32_t count, Site site = Site::here()) {
  store_rows("DataCopy", dst, src, ascend_emulator::count_rows(count, sizeof(T), site), site);
}

template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& repeatParams,
              Site site = Site::here()) {
  load_rows("DataCopy", dst, src, ascend_emulator::block_rows(repeatParams, true, site), {}, site);
}

template <typename T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& repeatParams,
              Site site = Site::here()) {
  store_rows("DataCopy", dst, src, ascend_emulator::block_rows(repeatParams, false, site), site);
}

template <typename T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& dataCopyParams,
                 const DataCopyPadExtParams<T>& padParams, Site site = Site::here()) {
  const int64_t size = sizeof(T);
  ascend_emulator::check_pad_position(dst, site);
  padParams.leftPadding.check("DataCopyPad: leftPadding (elements, at most 32 bytes)", site, 0, 32 / size);
  padParams.rightPadding.check("DataCopyPad: rightPadding (elements, at most 32 bytes)", site, 0, 32 / size);
  if (size == 8 && padParams.isPad && padParams.paddingValue != T(0))
    ascend_emulator::fail(site, "DataCopyPad: 64-bit types can only be padded with 0");
  ascend_emulator::Padding padding;
  padding.left = padParams.leftPadding * size;
  padding.right = padParams.rightPadding * size;
  const auto rows = ascend_emulator::byte_rows(dataCopyParams, true, padding.left + padding.right, site);
  const int64_t row = padding.left + rows.length + padding.right, rest = (32 - row % 32) % 32;
  padding.element = size;
  if (padParams.isPad) {
    padding.value.resize(size_t(size));
    std::memcpy(padding.value.data(), &padParams.paddingValue, size_t(size));
    padding.right += rest;
  } else if (padding.left == 0 && padding.right == 0) {
    padding.right = rest;
  } else {
    ascend_emulator::fail(site, "DataCopyPad: left or right padding without isPad leaves undefined values");
  }
  load_rows("DataCopyPad", dst, src, rows, padding, site);
}

template <typename T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& dataCopyParams,
                 Site site = Site::here()) {
  ascend_emulator::check_pad_position(src, site);
  store_rows("DataCopyPad", dst, src, ascend_emulator::byte_rows(dataCopyParams, false, 0, site), site);
}

// Rows of GM into the fractal layout NZ of L1: columns of 32 bytes one after the other, the last one filled with zeros.
// Several matrices are as many such copies.
template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const Nd2NzParams& p, Site site = Site::here()) {
  using ascend_emulator::kBlock;
  p.ndNum.check("Nd2Nz: ndNum", site, 0, 4095);
  p.srcNdMatrixStride.check("Nd2Nz: srcNdMatrixStride", site);
  p.dstNzMatrixStride.check("Nd2Nz: dstNzMatrixStride", site, 0, 16384);
  p.nValue.check("Nd2Nz: nValue", site, 0, 16384);
  p.dValue.check("Nd2Nz: dValue", site);
  p.srcDValue.check("Nd2Nz: srcDValue", site, 1);
  p.dstNzC0Stride.check("Nd2Nz: dstNzC0Stride", site, 1, 16384);
  p.dstNzNStride.check("Nd2Nz: dstNzNStride", site, 1, 16384);
  const int64_t rows = p.nValue, columns = p.dValue, pitch = p.srcDValue, c0 = kBlock / sizeof(T);
  const int64_t column_stride = p.dstNzC0Stride, row_stride = p.dstNzNStride, row_blocks = (columns + c0 - 1) / c0;
  const int64_t count = p.ndNum, size = sizeof(T);
  if (!count || !rows || !columns) return;
  const int64_t matrix = count > 1 ? p.srcNdMatrixStride * size : 0,
                to_matrix = count > 1 ? p.dstNzMatrixStride * size : 0;
  if (to_matrix % kBlock)
    ascend_emulator::fail(site, "Nd2Nz: matrices must begin at multiples of 32 bytes in L1 (dstNzMatrixStride)");
  const int64_t bytes = columns * size, extent = (count - 1) * matrix + (rows - 1) * pitch * size + bytes;
  src.check_extent("Nd2Nz", extent, site);
  auto [space, gm] = ascend_emulator::core().gm(src.GetPhyAddr(), size_t(extent), false, "Nd2Nz", site);
  const int64_t reach =
      (count - 1) * to_matrix + ((row_blocks - 1) * column_stride + (rows - 1) * row_stride + 1) * kBlock;
  const uint32_t l1 = dst.operand("Nd2Nz", "the destination", reach, site, ascend_emulator::Memory::l1);
  auto run = [=, space = space, gm = gm](ascend_emulator::Access& access) {
    ascend_emulator::Space& local = access.local(ascend_emulator::Memory::l1);
    for (int64_t n = 0; n < count * rows; ++n) {
      const int64_t m = n / rows, r = n % rows;
      const size_t from = gm + size_t(m * matrix + r * pitch * size);
      access.read(*space, from, size_t(bytes));
      for (int64_t b = 0; b < row_blocks; ++b) {
        const size_t to = l1 + size_t(m * to_matrix + (b * column_stride + r * row_stride) * kBlock);
        const size_t part = size_t(std::min<int64_t>(kBlock, bytes - b * kBlock));
        access.write(local, to, kBlock);
        std::memset(local.bytes + to, 0, kBlock);
        std::memcpy(local.bytes + to, space->bytes + from + size_t(b) * kBlock, part);
      }
    }
  };
  const ascend_emulator::Rows lengths = {uint32_t(count * rows), bytes, pitch * int64_t(sizeof(T)), 0};
  const double cycles = ascend_emulator::copy_cycles(lengths, ascend_emulator::kLoadBytesPerCycle);
  ascend_emulator::core().issue(
      ascend_emulator::load_work("Nd2Nz", site, cycles, *space, gm, uint64_t(count * rows * bytes), std::move(run)));
}

// Later stores on MTE3 and FIX add to GM instead of overwriting it.
template <typename T>
void SetAtomicAdd(Site site = Site::here()) {
  static_assert(std::is_same_v<T, float>, "the emulator's atomic additions support float only");
  ascend_emulator::core().atomic_add = true;
  ascend_emulator::core().atomic_site = site;
}
inline void SetAtomicNone() { ascend_emulator::core().atomic_add = false; }

}  // namespace AscendC
