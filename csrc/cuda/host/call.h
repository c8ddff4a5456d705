// Sizes of a call, how its rows are placed in memory, and how arrays follow one another in its workspace.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "params.h"

namespace flashattn_ext {

inline int64_t bytes_of(DType type) { return type == DType::kFloat32 ? 4 : type == DType::kFloat8 ? 1 : 2; }
inline int64_t element_bytes(const AttnParams& p) { return bytes_of(p.dtype); }  // bytes of an element of q
inline int64_t out_bytes(const AttnParams& p) { return bytes_of(p.is_fp8 ? p.out_dtype : p.dtype); }
// The element size of the keys and values of a decoding call, which may be fp8 where q is not.
inline int64_t key_bytes(const AttnParams& p) { return bytes_of(p.is_fp8 ? DType::kFloat8 : p.dtype); }

// A tensor has this many batch entries of this many rows: a packed one is a single entry.
inline int64_t batch_entries(const AttnParams& p) { return p.is_varlen() ? 1 : p.batch; }
inline int64_t query_rows(const AttnParams& p) { return p.is_varlen() ? p.total_q : p.seqlen_q; }
inline int64_t key_rows(const AttnParams& p) { return p.is_varlen() ? p.total_k : p.seqlen_k; }

// Tiles of `tile` rows; at least one, because a sequence may have more rows than the host knows.
inline int64_t tile_count(int64_t rows, int64_t tile) { return std::max<int64_t>(1, (rows + tile - 1) / tile); }

// Bytes of q, dout and dq, which is summed in fp32, of the query heads of a KV head.
inline int64_t group_bytes(const AttnGradParams& p, int64_t element_bytes) {
  const int64_t row_bytes = p.head_dim * (element_bytes + 4) + p.head_dim_v * element_bytes;
  return p.seqlen_q * row_bytes * p.group_size();
}

// Whether rows of `columns` elements can be read in place: in whole 16-byte vectors.
inline bool rows_are_aligned(const TensorView& t, int64_t columns, int64_t element_bytes) {
  constexpr int64_t kVector = 16;  // bytes
  const auto aligned = [](int64_t bytes) { return bytes % kVector == 0; };
  return aligned(reinterpret_cast<int64_t>(t.data)) && aligned(columns * element_bytes) &&
         aligned(t.batch_stride * element_bytes) && aligned(t.head_stride * element_bytes) &&
         aligned(t.row_stride * element_bytes);
}

// The end of the memory that a [batch][heads][rows][columns] tensor occupies.
inline const void* end_of(const TensorView& t, int64_t batch, int64_t heads, int64_t rows, int64_t columns,
                          int64_t element_bytes) {
  const int64_t last = (batch - 1) * t.batch_stride + (heads - 1) * t.head_stride + (rows - 1) * t.row_stride;
  return static_cast<const char*>(t.data) + (last + columns) * element_bytes;
}

// Gives away a workspace from its beginning. With a workspace of nullptr the pointers have no meaning, and bytes() is
// the size that the call needs.
class Carver {
 public:
  explicit Carver(void* workspace) : begin_(static_cast<char*>(workspace)), next_(begin_) {}

  // An array of `count` elements, aligned for every vector load.
  template <class T>
  T* take(int64_t count) {
    constexpr int64_t kAlignment = 64;
    char* const array = next_;
    next_ += (count * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(array);
  }
  // What is left of the workspace.
  char* rest() const { return next_; }
  size_t bytes() const { return static_cast<size_t>(next_ - begin_); }

 private:
  char *begin_, *next_;
};

}  // namespace flashattn_ext
