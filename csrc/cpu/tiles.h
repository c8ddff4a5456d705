// Tile sizes of the CPU kernels and the scratch memory that one worker needs.
#pragma once

#include "gemm.h"
#include "pack.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

// Queries and keys of one tile. Scores, operands and accumulators of a tile (about 1 MB at head_dim 128) live in the L2
// cache; dropout.h wants key tiles that start at multiples of 64 and query tiles that start at multiples of 16, and
// whole register tiles are multiples of kTileRows. One core of an EPYC 9004, GFLOP/s of 116, fp32, D=64, S=2048:
//   AVX-512  128x128 fwd  97 bwd 93   128x192 fwd 99 bwd 100   192x192 fwd 101 bwd 99   128x256 fwd 96 bwd 100
//   AVX2     128x128 fwd  88 bwd 83   128x192 fwd 89 bwd  92   192x192 fwd  91 bwd 92    96x128 fwd 90 bwd  89
template <class Real>
struct Tile {
  static constexpr int64_t kQueries = kVectorBytes == 32 ? 192 : 128;
  static constexpr int64_t kKeys = 192;
};
template <>
struct Tile<double> {  // half as large in every direction that counts, for the same memory
  static constexpr int64_t kQueries = 64;
  static constexpr int64_t kKeys = 64;
};

// Of the forward of one call: forced by force_cpu_tile(), or the above. The backward has constants: there, variables
// cost 2 %.
template <class Real>
inline CpuTile forward_tile(const AttnParams& p) {
  const CpuTile forced = static_cast<const CpuExecutor*>(p.stream)->forward_tile;
  return forced.queries ? forced : CpuTile{Tile<Real>::kQueries, Tile<Real>::kKeys};
}

// Lanes that the products treat at once; masks and ranges are decided per panel of this many queries.
template <class Op>
constexpr int64_t kPanel = kTileVectors * Op::S::kWidth;

constexpr int64_t kDropoutLanes = 16;  // queries in one word of keep bits

constexpr double kLog2E = 1.44269504088896340736;
constexpr double kLn2 = 0.69314718055994530942;

// Scores become powers of two. The sign of the scale is not in here: it goes into the transposed queries, so that the
// maximum of the scores is the maximum of the logits. Never 0, because 0 * -inf (a masked score) would be NaN.
template <class Real>
inline Real log2_scale(double softmax_scale) {
  return greater(static_cast<Real>(std::fabs(softmax_scale) * kLog2E), std::numeric_limits<Real>::min());
}

// Hands out 64-byte aligned pieces of one block; with base == nullptr it only measures.
class ScratchCarver {
 public:
  explicit ScratchCarver(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  T* take(int64_t count) {
    T* piece = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

// What one query tile against one key tile needs to know of the mask. Row and key numbers are relative to the tile.
template <class Op>
class TileMask {
 public:
  using Real = typename Op::Real;

  TileMask(const Mask& mask, int64_t row0, int64_t rows, int64_t key0, int64_t keys)
      : mask_(mask), row0_(row0), rows_(rows), key0_(key0), keys_(keys) {}

  // Keys that rows [begin, end) see, widened to whole pairs of bfloat16.
  IndexRange keys_of(int64_t begin, int64_t end) const {
    return clip(mask_.keys_of(row0_ + begin, row0_ + lesser(end, rows_)), key0_, keys_, Op::kPack);
  }
  // Rows that see keys [begin, end).
  IndexRange rows_of(int64_t begin, int64_t end) const {
    return clip(mask_.rows_of(key0_ + begin, key0_ + lesser(end, keys_)), row0_, rows_, Op::kPack);
  }
  // Keys for which the scores of the panel at `lane` are computed: all that the later products read, which go by groups
  // of kTileRows queries or keys.
  IndexRange panel_keys(int64_t lane) const {
    const int64_t begin = lane / kTileRows * kTileRows;
    const int64_t end = lesser(round_up(lane + kPanel<Op>, kTileRows), rows_);
    return clip(mask_.keys_of(row0_ + begin, row0_ + end), key0_, keys_, kTileRows);
  }
  bool panel_is_full(int64_t lane, IndexRange keys) const {
    return mask_.sees_all(row0_ + lane, row0_ + lesser(lane + kPanel<Op>, rows_), key0_ + keys.begin, key0_ + keys.end);
  }
  // Per lane the visible keys [first, last) as numbers of the compute type; none for lanes beyond the rows.
  void lane_limits(int64_t lane, int64_t lanes, Real* first, Real* last) const {
    for (int64_t i = lane; i < lane + lanes; ++i) {
      const bool inside = i < rows_;
      const IndexRange keys = inside ? mask_.keys_of(row0_ + i, row0_ + i + 1) : IndexRange{key0_, key0_};
      first[i] = static_cast<Real>(greater<int64_t>(keys.begin - key0_, -1));
      last[i] = static_cast<Real>(lesser<int64_t>(keys.end - key0_, keys_));
    }
  }

 private:
  static IndexRange clip(IndexRange range, int64_t origin, int64_t length, int64_t granule) {
    int64_t begin = greater<int64_t>(range.begin - origin, 0) / granule * granule;
    int64_t end = lesser(round_up(greater<int64_t>(range.end - origin, 0), granule), length);
    return {begin, greater(begin, end)};
  }

  Mask mask_;
  int64_t row0_, rows_, key0_, keys_;
};

// Keep bits of a tile: bits[key * groups + group], bit l for query 16 * group + l. See dropout.h for the mapping; eight
// generators (one for each row modulo 8) run side by side so that the compiler can vectorise them.
inline void fill_keep_bits(uint16_t* bits, int64_t groups, PhiloxKey philox_key, int32_t threshold, int64_t batch,
                           int64_t head, int64_t row0, int64_t rows, int64_t key0, int64_t keys) {
  for (int64_t group = 0; group < ceil_div(rows, kDropoutLanes); ++group) {
    for (int64_t chunk = 0; chunk < keys; chunk += 64) {
      for (int64_t column = 0; column < 8; ++column) {
        PhiloxWords words[8];
        for (int64_t r = 0; r < 8; ++r) {
          words[r] = dropout_words(philox_key, batch, head, row0 + group * kDropoutLanes + r, key0 + chunk + column);
        }
        for (int64_t j = column; j < 64 && chunk + j < keys; j += 8) {
          uint32_t word = 0;
          for (int64_t r = 0; r < 8; ++r) {
            const uint32_t low = dropout_byte(words[r], 0, j), high = dropout_byte(words[r], 8, j);
            word |= static_cast<uint32_t>(static_cast<int32_t>(low) < threshold) << r;
            word |= static_cast<uint32_t>(static_cast<int32_t>(high) < threshold) << (r + 8);
          }
          bits[(chunk + j) * groups + group] = static_cast<uint16_t>(word);
        }
      }
    }
  }
}

// The bits of kWidth lanes from `lane`.
template <class S>
inline uint32_t keep_lanes(const uint16_t* key_bits, int64_t lane) {
  return static_cast<uint32_t>(key_bits[lane / kDropoutLanes]) >> (lane % kDropoutLanes);
}

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
