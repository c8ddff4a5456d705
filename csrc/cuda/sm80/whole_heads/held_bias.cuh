// A bias of the inputs' 16 bits in shared memory, of some adjacent rows of a query head. The kernels of calls whose
// only option is such a bias copy it together with the rows of queries.
//
// The first element of a tile lies as far into a vector of 16 bytes as it does in memory, so that vectors can be copied
// whatever its alignment is (HeadBiasPlan). Tiles each row of which begins with a whole vector are read as matrices
// (has_matrices).
#pragma once

#include "cuda/score/bias.cuh"
#include "cuda/score/score_policy.cuh"
#include "cuda/sm80/whole_heads/head_rows.cuh"
#include "cuda/sm80/whole_heads/plan.h"

namespace flashattn_ext::sm80 {

constexpr int kBiasVector = kVectorBytes / 2;  // elements

// Elements before this one in its vector.
template <class T>
__device__ __forceinline__ int place_in_vector(const T* element) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(element) / sizeof(T) % kBiasVector);
}

// The element of the first key of a row of a bias or of its gradient.
template <class T>
__device__ __forceinline__ T* bias_row(const BiasView& bias, int64_t b, int64_t h, int64_t row) {
  return static_cast<T*>(bias.data) + b * bias.batch_stride + h * bias.head_stride + row * bias.row_stride;
}

// Calls body(row, begin) for the vectors of a tile in memory, which a team shares in the order of addresses. begin: the
// element of the row that a vector begins with; below 0 in the first vector of a row that begins `shift` elements into
// it. length: elements of a row.
template <class Body>
__device__ __forceinline__ void for_vectors(const Team& team, int rows, int length, int shift, const Body& body) {
  const int vectors = (shift + length + kBiasVector - 1) / kBiasVector;
  // A row has as many threads as the next power of two, or all of them.
  const int power = vectors > 1 ? 1 << (32 - __clz(vectors - 1)) : 1, columns = min(power, team.threads);
  const int step = team.threads / columns;
#pragma unroll 1
  for (int row = team.thread / columns; row < rows; row += step) {
#pragma unroll 1
    for (int i = team.thread % columns; i < vectors; i += columns) body(row, i * kBiasVector - shift);
  }
}
// Calls body(row, key) for the elements of a tile in the same order.
template <class Body>
__device__ __forceinline__ void for_elements(const Team& team, int rows, int keys, const Body& body) {
#pragma unroll 1
  for (int row = team.thread / 32; row < rows; row += team.threads / 32) {
#pragma unroll 4
    for (int key = team.thread % 32; key < keys; key += 32) body(row, key);
  }
}

// Where the first element lies in the part of shared memory that begins at `stage`. from: that element in memory.
template <class T>
__device__ __forceinline__ T* first_in_stage(const HeadBiasPlan& plan, unsigned char* stage, const T* from) {
  return reinterpret_cast<T*>(stage) + (plan.copy == BiasCopy::kElements ? 0 : place_in_vector(from));
}

// Starts copying a tile; its vectors arrive with the asynchronous copies of the caller. to, from: its first element.
template <class T>
__device__ __forceinline__ void load_bias(const Team& team, const HeadBiasPlan& plan, T* to, const T* from,
                                          int64_t row_stride, int rows, int keys) {
  if (plan.copy == BiasCopy::kElements) {
    return for_elements(team, rows, keys,
                        [&](int row, int key) { to[row * plan.pitch + key] = from[row * row_stride + key]; });
  }
  const bool is_run = plan.copy == BiasCopy::kRun;
  const int length = is_run ? rows * keys : keys;
  for_vectors(team, is_run ? 1 : rows, length, place_in_vector(from), [&](int row, int begin) {
    ptx::cp_async_part(to + row * plan.pitch + begin, from + row * row_stride + begin,
                       min(kBiasVector, length - begin) * static_cast<int>(sizeof(T)));
  });
}

// Whether a tile is read and written as matrices of 8 rows and 8 keys, each row of which is a vector.
template <class T>
__device__ __forceinline__ bool has_matrices(const HeadBiasPlan& plan, const T* first) {
  return plan.copy != BiasCopy::kRun && place_in_vector(first) == 0;
}

// Whether some element of the warp is infinite, NaN or so large that adding it takes more than one operation (add_log).
// All lanes of the warp call it.
template <class T, int N>
__device__ __forceinline__ bool has_large(const uint32_t (&bias)[N][2]) {
  constexpr bool kIsHalf = std::is_same_v<T, __half>;
  constexpr float kMost = kIsHalf ? 65504.f : kNarrowsFrom<float>;
  uint32_t most = 0;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t size = bias[n][r] & 0x7FFF7FFFu;
      most = kIsHalf ? ptx::max_f16x2(most, size) : ptx::max_bf16x2(most, size);
    }
  }
  const float2 sizes = TensorCore<T>::unpack(most);
  return __any_sync(~0u, !(sizes.x <= kMost && sizes.y <= kMost)) != 0;
}

// Products become logits with their bias, in units of log2. bias: for each column tile the two elements of rows g and
// g + 8. All lanes of the warp call it.
template <class T, int N>
__device__ __forceinline__ void make_biased_logits(float (&x)[N][4], const uint32_t (&bias)[N][2], float factor) {
  const auto each = [&](const auto& add_one) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 pair = TensorCore<T>::unpack(bias[n][r]);
        float &even = x[n][2 * r], &odd = x[n][2 * r + 1];
        even = __fmul_rn(even, factor), odd = __fmul_rn(odd, factor);
        add_one(even, pair.x), add_one(odd, pair.y);
      }
    }
  };
  if (has_large<T>(bias)) {
    each([](float& logit, float own) { add_log<T>(logit, own); });
  } else {
    each([](float& logit, float own) { logit = fmaf(own, kLog2E<float>, logit); });
  }
}

// The policy of scores of the forward (score_policy.cuh). The warp has the bias of its rows in shared memory.
template <class T>
struct HeldBiasScores : UncentredScores {
  struct Rule {
    float factor;
    static Rule of(const AttnParams& p) { return {GeneralScore::of(p).factor}; }
  };

  HeadBiasPlan plan;
  const T* first;  // the element of the first row and key

  __device__ __forceinline__ void hold(const HeadBiasPlan& plan, const T* first) {
    this->plan = plan;
    this->first = first;
  }
  template <class CoordinatesOf, int N>
  __device__ __forceinline__ StoredLogit make_logits(const AttnParams& p, const Rule& rule, float (&x)[1][N][4],
                                                     const CoordinatesOf& coordinates, Nothing) const {
    uint32_t bias[N][2];
    if (has_matrices(plan, first)) {
      read_matrices(bias, coordinates().key);
    } else {
      read_elements(bias, p, coordinates());
    }
    make_biased_logits<T>(x[0], bias, rule.factor);
    return {};
  }

 private:
  template <int N>
  __device__ __forceinline__ void read_matrices(uint32_t (&bias)[N][2], int key) const {
    const T* const row = first + lane() % 16 * plan.pitch + key + lane() / 16 * 8;
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      uint32_t x[4];
      ptx::ldmatrix(x, row + 8 * n);
#pragma unroll
      for (int i = 0; i < 4; ++i) bias[n + i / 2][i % 2] = x[i];
    }
  }
  // Reads 0 in place of elements outside of the bias. Scores of keys that do not exist are hidden afterwards; rows that
  // do not exist are not stored.
  template <int N, class Coordinates>
  __device__ __forceinline__ void read_elements(uint32_t (&bias)[N][2], const AttnParams& p,
                                                const Coordinates& coordinates) const {
    const int keys_left = static_cast<int>(p.seqlen_k) - coordinates.key - 2 * lane_in_quad();
    const int rows_left = static_cast<int>(p.seqlen_q) - coordinates.row - quad();
    const uint16_t* const own =
        reinterpret_cast<const uint16_t*>(first) + quad() * plan.pitch + coordinates.key + 2 * lane_in_quad();
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint16_t* const pair = own + 8 * r * plan.pitch + 8 * n;
        const bool has_row = 8 * r < rows_left;
        const uint32_t even = has_row && 8 * n < keys_left ? pair[0] : 0;
        const uint32_t odd = has_row && 8 * n + 1 < keys_left ? pair[1] : 0;
        bias[n][r] = even | odd << 16;
      }
    }
  }
};

}  // namespace flashattn_ext::sm80
