// The step before the attention of a decoding call: appends new keys and values to the KV cache, and applies the rotary
// embedding to new keys and to queries (Rotary in params.h), or copies the queries as they are. A warp copies one
// row of one head.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "backend/key_locator.h"
#include "cuda/decode/split/kernels.h"
#include "cuda/host/call.h"
#include "cuda/host/launch.cuh"
#include "cuda/ptx/async.cuh"
#include "cuda/tile/fp8.cuh"
#include "cuda/tile/tile.cuh"
#include "cuda/tile/warp.cuh"

namespace flashattn_ext::decode {
namespace {

constexpr int kWarps = 8;

// Copies a row, rotated by the angles of `position`. A negative position means no rotation. If the types differ,
// elements are divided by descale and rounded once.
template <class To, class T>
__device__ void copy_row(To* to, const T* from, int columns, const Rotary& rotary, int64_t position,
                         float descale = 1) {
  const auto put = [&](float x, int c) { narrow(std::is_same_v<To, T> ? x : x / descale, to + c); };
  const int dim = position < 0 ? 0 : static_cast<int>(rotary.dim), half = dim / 2;
  const int64_t angle = min(max(position, int64_t{0}), rotary.rows - 1) * half;
  const T *const cos = static_cast<const T*>(rotary.cos) + angle, *const sin =
                                                                      static_cast<const T*>(rotary.sin) + angle;
  for (int c = static_cast<int>(threadIdx.x) % 32; c < columns; c += 32) {
    if (c >= dim) {
      if constexpr (std::is_same_v<To, T>) {
        to[c] = from[c];
      } else {
        put(widen(from[c]), c);
      }
      continue;
    }
    const bool is_second = rotary.interleaved ? c % 2 != 0 : c >= half;
    const int pair = rotary.interleaved ? c / 2 : c % half, apart = rotary.interleaved ? 1 : half;
    const float own = widen(from[c]), other = widen(from[is_second ? c - apart : c + apart]);
    const float turned = other * widen(sin[pair]);
    put(own * widen(cos[pair]) + (is_second ? turned : -turned), c);
  }
}

// The rows of a sequence are numbered: new keys, then new values, then queries. Within each the head varies fastest.
// Key: the type of the caches.
template <class Key>
__global__ void __launch_bounds__(kWarps * 32)
    append_kernel(const __grid_constant__ DecodeParams p, const __grid_constant__ TensorView q, int64_t sequence_rows) {
  using T = Widened<Key>;
  ptx::wait_for_previous_kernel();
  ptx::let_next_kernel_start();
  const int64_t b = blockIdx.x, new_rows = p.k_new.data ? p.cache.new_keys * p.heads_k : 0;
  const KeyLocator keys(p, b);
  const Sequence queries = query_sequence(p, b);
  const int64_t position = p.rotary.cos ? keys.first_new_row : -1;
  const bool rotates_each_row = p.rotary.cos && p.rotary.rotates_each_row;
  const int64_t step = static_cast<int64_t>(gridDim.y) * kWarps;
  for (int64_t row = static_cast<int64_t>(blockIdx.y) * kWarps + threadIdx.x / 32; row < sequence_rows; row += step) {
    if (row < 2 * new_rows) {
      const bool is_value = row >= new_rows;
      const int64_t index = is_value ? row - new_rows : row, i = index / p.heads_k, head = index % p.heads_k;
      if (i >= keys.new_keys) continue;
      const KeyRun at = keys.run_of_row(keys.first_new_row + i, 1);
      const TensorView &from = is_value ? p.v_new : p.k_new, &cache = is_value ? p.v : p.k;
      Key* const to = row_pointer<Key>(cache, at.entry, head, at.row);
      const int columns = static_cast<int>(is_value ? p.head_dim_v : p.head_dim);
      const int64_t angle = is_value || position < 0 ? -1 : position + i;
      if constexpr (kIsFloat8<Key>) {
        if (p.new_dtype == DType::kFloat8) {  // rotary embedding needs new keys in bfloat16
          copy_row(to, row_pointer<const Key>(from, b, head, i), columns, p.rotary, -1);
          continue;
        }
        const float descale = (is_value ? p.descale_v : p.descale_k).of(b, head);
        copy_row(to, row_pointer<const T>(from, b, head, i), columns, p.rotary, angle, descale);
      } else {
        copy_row(to, row_pointer<const T>(from, b, head, i), columns, p.rotary, angle);
      }
    } else {
      const int64_t index = row - 2 * new_rows, i = index / p.heads_q, head = index % p.heads_q;
      if (i >= queries.length) continue;
      copy_row(row_pointer<T>(q, b, head, queries.start + i), row_pointer<const T>(p.q, b, head, queries.start + i),
               static_cast<int>(p.head_dim), p.rotary, rotates_each_row ? position + i : position);
    }
  }
}

template <class Key>
void launch_append(const DecodeParams& p, const TensorView& q) {
  constexpr int64_t kMostBlocks = 65535;
  const int64_t new_rows = p.k_new.data ? 2 * p.cache.new_keys * p.heads_k : 0;
  const int64_t rows = new_rows + (q.data ? query_rows(p) * p.heads_q : 0);
  if (rows == 0 || p.batch == 0) return;
  const dim3 grid(static_cast<unsigned>(p.batch),
                  static_cast<unsigned>(std::min((rows + kWarps - 1) / kWarps, kMostBlocks)));
  launch_early(append_kernel<Key>, "decode_append", p, grid, kWarps * 32, 0, p, q, rows);
}

}  // namespace

void append(const DecodeParams& p, const TensorView& q) {
  if (p.is_fp8) return launch_append<Float8>(p, q);
  if (p.dtype == DType::kFloat16) return launch_append<__half>(p, q);
  if (p.dtype == DType::kBFloat16) return launch_append<__nv_bfloat16>(p, q);
  launch_append<float>(p, q);
}

}  // namespace flashattn_ext::decode
