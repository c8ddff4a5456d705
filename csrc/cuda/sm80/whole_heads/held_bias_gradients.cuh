// The policy of gradients (heads_gradients.cuh) of calls whose only option is a bias of the inputs' 16 bits. A tile of
// queries has its bias in shared memory (held_bias.cuh), and a gradient that no other score shares takes its place
// there, element by element: what a warp reads in a step it overwrites in the same step. When all warps have done that,
// the tile is written to memory in the order of addresses. A shared gradient is added to memory in fp32.
#pragma once

#include "cuda/score/large_rows.cuh"
#include "cuda/score/scores.cuh"
#include "cuda/sm80/whole_heads/heads_gradients.cuh"
#include "cuda/sm80/whole_heads/held_bias.cuh"

namespace flashattn_ext::sm80 {

// The bias of a tile of queries, and its gradient. Kernel: HeadsBackward.
template <class Kernel>
struct HeldBiasGradient {
  using T = typename Kernel::Element;
  static constexpr int kStep = Kernel::kStep, kTiles = kStep / 8;

  const Kernel& kernel;
  const typename Kernel::QueryTile& tile;
  T* const first;  // in shared memory, of the first row and key

  __device__ __forceinline__ void load() const {
    const BiasView& bias = kernel.p.bias;
    const T* const from = bias_row<const T>(bias, kernel.b, tile.h, tile.row);
    load_bias(block_team(), plan(), first, from, bias.row_stride, tile.rows, kernel.length_k());
  }
  // The products of the queries from `query` on become logits with their bias, in units of log2.
  __device__ __forceinline__ void add_to(float (&products)[kTiles][4], int query) const {
    uint32_t bias[kTiles][2];
    read(bias, query);
    make_biased_logits<T>(products, bias, kernel.rule.factor);
  }
  // dS^T of the queries from `query` on takes the place of their bias.
  template <class A, int kSteps>
  __device__ __forceinline__ void replace(const A (&packed)[kSteps], int query) const {
    if (!takes_its_place()) return;
    if (has_matrices(plan(), first)) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) store_matrices(packed[k].x, query + kRowStep * k);
      return;
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      for_own_pairs(query + kRowStep * k, [&](int i, uint16_t* pair, const bool (&exist)[2]) {
        if (exist[0]) pair[0] = static_cast<uint16_t>(packed[k].x[i]);
        if (exist[1]) pair[plan().pitch] = static_cast<uint16_t>(packed[k].x[i] >> 16);
      });
    }
  }
  // Writes zeros over the bias of the queries that do not see the warp's keys: those outside of the steps that cover
  // [begin, end).
  __device__ __forceinline__ void clear(int begin, int end) const {
    const typename TensorCore<T>::A zeros[1] = {};
    const int after = begin < end ? begin + (end - begin + kStep - 1) / kStep * kStep : 0;
#pragma unroll 1
    for (int query = 0; query < tile.rows; query += kRowStep) {
      if (query < begin || query >= after) replace(zeros, query);
    }
  }
  // Writes the gradient to memory. All warps have passed a barrier after their last step.
  __device__ __forceinline__ void store() const {
    if (!takes_its_place()) return;
    const int64_t stride = kernel.p.dbias.row_stride;
    const int pitch = plan().pitch, keys = kernel.length_k();
    T* const to = bias_row<T>(kernel.p.dbias, kernel.b, tile.h, tile.row);
    const bool is_run = plan().copy == BiasCopy::kRun;
    const bool has_vectors = is_run ? stride == pitch : stride % kBiasVector == 0;
    if (!has_vectors || place_in_vector(to) != place_in_vector(first)) {
      return for_elements(block_team(), tile.rows, keys,
                          [&](int row, int key) { to[row * stride + key] = first[row * pitch + key]; });
    }
    const int length = is_run ? tile.rows * keys : keys;
    for_vectors(block_team(), is_run ? 1 : tile.rows, length, place_in_vector(to), [&](int row, int begin) {
      T* const target = to + row * stride + begin;
      const T* const source = first + row * pitch + begin;
      if (begin >= 0 && begin + kBiasVector <= length) {
        *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source);
        return;
      }
      for (int i = max(-begin, 0); i < min(kBiasVector, length - begin); ++i) target[i] = source[i];
    });
  }

  // Adds dS^T of a step to a gradient that several scores share. The gradient is contiguous (bias_gradient_buffers), so
  // that a row has at most 256 elements.
  __device__ __forceinline__ void add_to_memory(const float (&dscores)[kTiles][4], int query) const {
    const int stride = static_cast<int>(kernel.p.dbias.row_stride), key = kernel.key();
    float* const to = bias_row<float>(kernel.p.dbias, kernel.b, tile.h, tile.row + query) + key;
    const int rows = tile.rows - query, keys = kernel.length_k() - key;
#if __CUDA_ARCH__ >= 900
    const bool aligned = stride % 4 == 0 && reinterpret_cast<uintptr_t>(to) % kVectorBytes == 0;
    if (aligned && keys >= kRowStep && rows >= kStep) return add_vectors(to, stride, dscores);
#endif
    each_element<1, kTiles>([&](int, int n, int e) {
      const int row = 2 * lane_in_quad() + 8 * n + e % 2, own = quad() + e / 2 * 8;
      ptx::add_if(row < rows && own < keys, to + row * stride + own, dscores[n][e]);
    });
  }

 private:
  __device__ __forceinline__ const HeadBiasPlan& plan() const { return kernel.plan.bias; }
  // Whether the gradient takes the place of the bias.
  __device__ __forceinline__ bool takes_its_place() const { return kernel.p.dbias.data && !kernel.rule.dbias_is_sum; }

  // The bias of a step, in pairs of neighbouring queries: [8 queries][key g or g + 8]. Elements outside
  // of the bias are read as anything: the mask hides their scores.
  __device__ __forceinline__ void read(uint32_t (&bias)[kTiles][2], int query) const {
    if (has_matrices(plan(), first)) {
#pragma unroll
      for (int n = 0; n < kTiles; n += 2) {
        uint32_t x[4];
        ptx::ldmatrix_transposed(x, matrix_row(query + 8 * n));
#pragma unroll
        for (int i = 0; i < 4; ++i) bias[n + i / 2][i % 2] = x[i];
      }
      return;
    }
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      for_own_pairs(query + 8 * n, [&](int i, const uint16_t* pair, const bool (&exist)[2]) {
        const uint32_t even = exist[0] ? pair[0] : 0, odd = exist[1] ? pair[plan().pitch] : 0;
        bias[n + i / 2][i % 2] = even | odd << 16;
      });
    }
  }
  // This lane's row of the four matrices of 16 queries and the warp's keys, in the order of an operand of mma.sync.
  __device__ __forceinline__ T* matrix_row(int query) const {
    return first + (query + lane() % 8 + lane() / 16 * 8) * plan().pitch + kernel.key() + lane() / 8 % 2 * 8;
  }
  __device__ __forceinline__ void store_matrices(const uint32_t (&x)[4], int query) const {
#if __CUDA_ARCH__ >= 900
    ptx::stmatrix_transposed(matrix_row(query), x);
#else
    T* const own = first + (query + quad()) * plan().pitch + kernel.key() + 2 * lane_in_quad();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      *reinterpret_cast<uint32_t*>(own + i / 2 * 8 * plan().pitch + i % 2 * 8) = ptx::transpose_8x8(x[i]);
    }
#endif
  }
  // Calls body(i, pair, exist) for the words of such an operand: pair is the element of the even query, and that of the
  // odd one is a row below.
  template <class Body>
  __device__ __forceinline__ void for_own_pairs(int query, const Body& body) const {
    const int pitch = plan().pitch, key = kernel.key() + quad(), row = query + 2 * lane_in_quad();
    uint16_t* const own = reinterpret_cast<uint16_t*>(first) + row * pitch + key;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool has_key = key + i % 2 * 8 < kernel.length_k();
      const int left = tile.rows - row - i / 2 * 8;
      const bool exist[2] = {has_key && left > 0, has_key && left > 1};
      body(i, own + i / 2 * 8 * pitch + i % 2 * 8, exist);
    }
  }

#if __CUDA_ARCH__ >= 900
  // Four lanes, whose keys are neighbours, exchange their elements of four queries: each then adds the four keys of
  // one.
  static __device__ __forceinline__ void add_vectors(float* to, int stride, const float (&dscores)[kTiles][4]) {
    const int query = quad() % 4, row = 2 * lane_in_quad() + query % 2 + query / 2 * 8;
    to += row * stride + quad() / 4 * 4;
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float x[4] = {dscores[n][2 * r], dscores[n][2 * r + 1], dscores[n + 1][2 * r], dscores[n + 1][2 * r + 1]};
        transpose_quad<4>(x);
        ptx::add_vector(to + n * 8 * stride + r * 8, x);
      }
    }
  }
#endif
};

// The rule of scores that are logits with their bias, in units of log2.
struct BiasedLogits {
  static constexpr float factor = 1;
  static __device__ __forceinline__ float stored(float logit) { return logit; }
};
// A weight of 0 has no gradient, even if another operand is not finite: the bias may mask the score.
__device__ __forceinline__ float gradient_of(const BiasedLogits&, float, float weight, float dp, float delta) {
  return weight == 0 ? 0.f : weight * (dp - delta);
}

struct BiasedHeadGradients : StatelessGradients {
  using StatelessGradients::StatelessGradients;
  struct Rule {
    float softmax_scale, factor;
    bool dbias_is_sum;

    static Rule of(const AttnGradParams& p, const HeadsBackwardPlan& plan) {
      const GeneralWorkspace workspace = heads_workspace(p, plan);
      return {workspace.score.softmax_scale, workspace.score.factor, workspace.dbias_is_sum};
    }
    __device__ __forceinline__ float gradient_scale() const { return softmax_scale; }
    static __device__ __forceinline__ float keep_scale() { return 1; }
  };
  static __device__ __forceinline__ float2 statistics(const LseWords<float>& words) {
    return {words.top, second_word(words)};
  }

  template <class Kernel, class Tile, class Stage, int N>
  static __device__ __forceinline__ void weigh_and_differentiate(const Kernel& kernel, const Tile& tile,
                                                                 const Stage& now, int query, Nothing,
                                                                 float (&weights)[1][N][4], float (&dscores)[1][N][4]) {
    const HeldBiasGradient<Kernel> held{kernel, tile, now.bias};
    const int row = tile.row + query, key = kernel.key(), first = query + 2 * lane_in_quad();
    if (has_mark<8 * N>(now.log2_sum + query)) clear_rows_of_one_weight(dscores, now.log2_sum + query);
    held.add_to(weights[0], query);
    const auto mask = kernel.mask();
    const Limits all = mask.rows_of_all(key, key + kRowStep);
    NoDropout::Columns<1> dropping(kernel.p, kernel.b, tile.h, key, row);
    if (row >= all.begin && row + 8 * N <= all.end) {
      flashattn_ext::weigh_and_differentiate<false, true>(weights, dscores, BiasedLogits(), now.lse + first,
                                                          now.log2_sum + first, now.delta + first, SeenBy<1>(),
                                                          dropping);
    } else {
      flashattn_ext::weigh_and_differentiate<true, true>(
          weights, dscores, BiasedLogits(), now.lse + first, now.log2_sum + first, now.delta + first,
          SeenBy<1>(mask, row + 2 * lane_in_quad(), key + quad()), dropping);
    }
    if (kernel.p.dbias.data && kernel.rule.dbias_is_sum) held.add_to_memory(dscores[0], query);
  }
};

}  // namespace flashattn_ext::sm80
