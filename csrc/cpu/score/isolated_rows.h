// Keeps non-finite inputs out of results that do not see them. In a product along keys or rows a masked pair has the
// weight 0, but 0 * NaN is NaN. In partial tiles of a Mask, rows with an inf or a NaN are therefore left out of the
// product and added one by one to the results that see them.
#pragma once

#include "cpu/score/panel_mask.h"
#include "cpu/vectors/pack.h"

namespace flashattn_ext {
namespace FLASHATTN_ISA {

inline bool is_finite(float x) { return (float_bits(x) & 0x7F800000u) != 0x7F800000u; }
inline bool is_finite(BFloat16 x) { return (x.bits & 0x7F80u) != 0x7F80u; }
inline bool is_finite(Float16 x) { return (x.bits & 0x7C00u) != 0x7C00u; }
inline bool is_finite(Float8 x) { return (x.bits & 0x7Fu) != 0x7Fu; }
inline bool is_finite(double x) { return x - x == 0; }

template <class In>
inline bool is_finite_row(const In* row, int64_t n) {
  int infinite = 0;
  for (int64_t d = 0; d < n; ++d) infinite |= !is_finite(row[d]);
  return !infinite;
}

// The non-finite rows of a tile of one input.
template <class In, class Op>
class IsolatedRows {
  using Real = typename Op::Real;
  using Unit = typename Op::Unit;

 public:
  // For tiles of at most `rows` rows. Takes no memory unless `wanted`.
  IsolatedRows(bool wanted, int64_t rows, int64_t units, ScratchCarver* carve)
      : units_(units),
        finite_(carve->take<Unit>(wanted ? rows * units : 0)),
        numbers_(carve->take<int32_t>(wanted ? rows : 0)) {}

  // Finds the non-finite rows among `rows` rows of `columns` elements. Returns the rows that the product reads:
  // `staged`, or a copy in which the non-finite rows are 0.
  FLASHATTN_SHARED StagedRows<Op> find(const In* from, int64_t stride, int64_t rows, int64_t columns,
                                       StagedRows<Op> staged) {
    locate(from, stride, rows, columns);
    if (count_ == 0) return staged;
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(finite_ + r * units_, staged.data + r * staged.stride, units_ * sizeof(Unit));
    }
    for (int64_t n = 0; n < count_; ++n) std::memset(finite_ + numbers_[n] * units_, 0, units_ * sizeof(Unit));
    return {finite_, units_};
  }
  // Finds them for a product that does not read non-finite rows anyway.
  FLASHATTN_SHARED void locate(const In* from, int64_t stride, int64_t rows, int64_t columns) {
    from_ = from;
    stride_ = stride;
    columns_ = columns;
    count_ = 0;
    for (int64_t r = 0; r < rows; ++r) {
      if (!is_finite_row(from + r * stride, columns)) numbers_[count_++] = static_cast<int32_t>(r);
    }
  }
  bool any() const { return count_ > 0; }

  // to[r] += weight(r, n) * (row n) for every non-finite row n and every r that seen(n, body) passes to body.
  template <class Seen, class Weight>
  void add(Real* to, int64_t to_stride, Seen seen, Weight weight) const {
    for (int64_t i = 0; i < count_; ++i) {
      const int64_t n = numbers_[i];
      seen(n, [&](int64_t r) { add_row(to + r * to_stride, weight(r, n), from_ + n * stride_); });
    }
  }

 private:
  FLASHATTN_SHARED void add_row(Real* to, Real weight, const In* row) const {
    for (int64_t d = 0; d < columns_; ++d) to[d] += weight * static_cast<Real>(widen(row[d]));
  }

  int64_t units_;
  Unit* finite_;  // [rows][units]
  int32_t* numbers_;
  const In* from_ = nullptr;
  int64_t stride_ = 0, columns_ = 0, count_ = 0;
};

// Calls body(row) for the rows of a tile that see a key.
struct RowsThatSee {
  const KeyRows& limits;
  template <class Body>
  void operator()(int64_t key, Body body) const {
    for (int64_t row = 0; row < limits.words * kWordLanes; ++row) {
      if (limits.sees(row, key)) body(row);
    }
  }
};

}  // namespace FLASHATTN_ISA
}  // namespace flashattn_ext
