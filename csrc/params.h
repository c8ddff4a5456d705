// AttnParams and AttnGradParams: all arguments of a kernel, in plain trivially copyable structs.
//
// call_params.cpp fills them after validation and a Backend (backend.h) reads them, so that kernels need no torch
// types. Dense and varlen calls share one struct: varlen has cu_seqlens != nullptr, a batch stride of 0 and rows packed
// along one axis.
#pragma once

#include <cstddef>
#include <cstdint>

// Lets the shared definitions (rules/) compile as host C++, CUDA and Ascend C alike. On the host
// they are always inlined: the CPU kernels compile them once for each instruction set, and the linker must not merge
// those copies.
#if defined(__CUDACC__)
#define FLASHATTN_HOST_DEVICE __host__ __device__ __forceinline__
#elif defined(__CCE_AICORE__) || defined(__NPU_ARCH__)
#define FLASHATTN_HOST_DEVICE __aicore__ inline
#define FLASHATTN_NO_DOUBLE  // the scalar unit has no fp64
#else
#define FLASHATTN_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace flashattn_ext {

// kFloat8: e4m3fn (4 bits of exponent, 3 of mantissa, largest value 448, no infinities).
enum class DType : int32_t { kFloat16, kBFloat16, kFloat32, kFloat64, kFloat8 };

constexpr int64_t kLargestHeadDim = 512;  // validate.cpp refuses larger ones

// A [B, S, H, D] view with a contiguous last dimension; strides are in elements and may be 0 (expanded) or anything
// else.
struct TensorView {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
};

// A per-row statistic: [B, Hq, Sq], or [Hq, total_q] with batch_stride 0 for varlen. fp32, or fp64 for fp64 inputs.
struct RowView {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
};

// An additive bias [B, Hq, Sq, Sk] of a dense call, or its gradient. The last dimension is contiguous; strides are in
// elements, and 0 in dimensions in which the bias is broadcast.
struct BiasView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
};

// fp32 factors [B, Hk] of fp8 elements. Strides are in elements, and 0 where one entry serves all.
struct DescaleView {
  const float* data = nullptr;  // nullptr: 1
  int64_t batch_stride = 0;
  int64_t head_stride = 0;

  FLASHATTN_HOST_DEVICE float of(int64_t batch, int64_t key_head) const {
    return data ? data[batch * batch_stride + key_head * head_stride] : 1.0f;
  }
};

// A Mask (mask.h): for every key the one interval of rows that see it. [B or 1, Hm, Sk] pairs, or [Hm, total_k] pairs
// in varlen calls, each (first, last) with last exclusive, in rows of its own sequence. Strides are in pairs. The
// values are not validated.
struct IntervalView {
  const int32_t* data = nullptr;
  int64_t heads = 1;  // Hm; divides heads_q
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  // Extremes of the pairs of every kMaskGranule keys, counted from the first key of a batch entry or of the packed
  // keys, followed by the extremes of every kMaskGranule * kMaskSuper keys: see mask.h. Strides are in extremes.
  const int32_t* extremes = nullptr;
  int64_t extremes_batch_stride = 0;
  int64_t extremes_head_stride = 0;
};

// A BlockMask, as rules/mask.h describes it: [B or 1, Hm, L] words and blocks of bits. Strides are in words.
struct BlockMaskView {
  const int32_t* lists = nullptr;
  const uint32_t* bits = nullptr;
  int64_t heads = 1;  // Hm; divides heads_q
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t entries = 0;         // N, of each of the two lists of a head
  int64_t partial_blocks = 0;  // P: on a device, where nothing has checked the entries, they may name more
};

constexpr int64_t kUnbounded = -1;  // a window side without a limit

// The place of a call in a larger one. Dropout counts batch entries, heads, rows and keys from here.
struct Origin {
  int64_t batch = 0, head = 0, row = 0, key = 0;
  // Row i is at the position of key i + shift + (length_mask & (Sk - Sq)): aligned at the bottom right, or, if the
  // origin gives row and key, at the position of key i + shift for all lengths; this shift is row - key plus the one of
  // the larger call. The bit mask replaces a branch, which costs registers in the Hopper backward with dropout.
  int32_t shift = 0;
  int32_t length_mask = -1;
};

// The options of a score: numbers that change what the logit of a product is (score.h). From a row come an argument of
// the ops (options.def), a field of AttnParams, the value there (call_params.cpp), and the refusal of backends that do
// not compute the option (refuses_score_options).
//
// CALL_SCORE(name, off, takers, accepts, expected, effective)
//
// off: the default, of a call without the option. takers, accepts, expected: as of CALL_NUMBER in options.def.
// effective: what kernels get for a `value`; `off` where the value changes no logit.
#define FLASHATTN_SCORE_OPTIONS(CALL_SCORE)                            \
  CALL_SCORE(softcap, 0, kEveryOp, std::isfinite(value) && value >= 0, \
             "softcap: expected a finite number above 0, or 0 for none", value < kUncapped ? value : 0)

struct AttnParams {
  DType dtype = DType::kFloat32;  // the dtype of q; except in fp8 calls, every input and out have it too
  // Keys and values are fp8, and q is, or in a decoding call may be bfloat16. The value of an element is
  // element * descale. No dropout and no biases; out has the dtype out_dtype.
  bool is_fp8 = false;
  DType out_dtype = DType::kBFloat16;  // the dtype of out in fp8 calls: kBFloat16, kFloat16 or kFloat32
  DescaleView descale_q, descale_k, descale_v;

  // Sizes. For varlen seqlen_q and seqlen_k are the max_seqlen arguments: hints for the grid, never used for
  // addressing.
  int64_t batch = 0;
  int64_t seqlen_q = 0;
  int64_t seqlen_k = 0;
  int64_t heads_q = 0;
  int64_t heads_k = 0;     // divides heads_q; query head h reads KV head h / (heads_q / heads_k)
  int64_t head_dim = 0;    // D, of q and k
  int64_t head_dim_v = 0;  // Dv, of v and out

  // Varlen only: [B + 1] each, and the number of rows that the packed tensors really have.
  const int32_t* cu_seqlens_q = nullptr;
  const int32_t* cu_seqlens_k = nullptr;
  int64_t total_q = 0;
  int64_t total_k = 0;

  TensorView q;    // [B, Sq, Hq, D]
  TensorView k;    // [B, Sk, Hk, D]
  TensorView v;    // [B, Sk, Hk, Dv]
  TensorView out;  // [B, Sq, Hq, Dv]
  // bias.h: [B, Hq, Sq, kCentres] in the dtype of lse, which the forward writes and the backward reads. data ==
  // nullptr: not wanted; a backward then takes all of them as 0.
  TensorView centres;
  RowView lse;  // [B, Hq, Sq], natural logarithm
  // The log-sum-exp of each row in two words, whose sum it is in units of log2 (lse_words.h): [B, Hq, Sq, 2] in the
  // dtype of lse, which the forward writes and the derivatives read. data == nullptr: not wanted; derivatives then take
  // it from lse alone.
  TensorView lse_words;
  // Written by the forward: the largest visible logit of each row, -inf for a fully masked row. It ignores the sink and
  // dropout. [B, Hq, Sq] in the dtype of lse; data == nullptr: not wanted.
  RowView row_maxima;

  // Key j is visible to query i when
  //   i + Sk - Sq - window_left <= j <= i + Sk - Sq + window_right,
  // with origin.shift in place of Sk - Sq where the origin places rows. causal is window_right = 0.
  int64_t window_left = kUnbounded;
  int64_t window_right = kUnbounded;
  double softmax_scale = 1.0;
  IntervalView intervals;  // data == nullptr: no Mask

  Origin origin;

#define CALL_SCORE(name, off, ...) double name = off;
  FLASHATTN_SCORE_OPTIONS(CALL_SCORE)
#undef CALL_SCORE
  // bias.h: additive terms, after the options of a score. Each is absent when its data is nullptr. Slopes and the
  // relative bias are fp32 (fp64 for fp64 inputs).
  const void* alibi_slopes = nullptr;  // [Hq], or [B, Hq] with alibi_batch_stride = Hq
  int64_t alibi_batch_stride = 0;
  const void* relative_bias = nullptr;  // [Hq, 2 * relative_reach + 1], contiguous
  int64_t relative_reach = 0;
  BiasView bias;

  // One extra logit per head in the softmax denominator: sink[h], or 0 for smooth softmax (sink == nullptr).
  bool has_sink = false;
  const void* sink = nullptr;  // [Hq] fp32 (fp64 for fp64 inputs)

  // dropout.h: keep a score when its random byte is below the threshold; 256 keeps everything (no dropout).
  int32_t dropout_threshold = 256;
  const int64_t* rng_state = nullptr;  // with dropout {seed, offset}, in device memory

  bool deterministic = false;
  // In the forward, the bits of out and lse of a row depend only on its query, on the keys and values that it sees and
  // their positions in the sequence, and on the options. A backward ignores it.
  bool invariant = false;

  BlockMaskView blocks;  // lists == nullptr: no BlockMask; dense calls only, and not together with intervals

  // Device memory of the size that the Backend returned, 64-byte aligned, uninitialised.
  void* workspace = nullptr;
  void* stream = nullptr;  // CPU: const CpuExecutor*; CUDA: cudaStream_t; Ascend: aclrtStream

  FLASHATTN_HOST_DEVICE bool is_varlen() const { return cu_seqlens_q != nullptr; }
#if !defined(FLASHATTN_NO_DOUBLE)
  FLASHATTN_HOST_DEVICE bool has_score_option() const {
#define CALL_SCORE(name, off, ...) || name != off
    return false FLASHATTN_SCORE_OPTIONS(CALL_SCORE);
#undef CALL_SCORE
  }
#endif
  FLASHATTN_HOST_DEVICE bool has_bias() const { return alibi_slopes || relative_bias || bias.data; }
  FLASHATTN_HOST_DEVICE bool has_intervals() const { return intervals.data != nullptr; }
  FLASHATTN_HOST_DEVICE bool has_blocks() const { return blocks.lists != nullptr; }
  FLASHATTN_HOST_DEVICE bool has_mask() const { return has_intervals() || has_blocks(); }
  FLASHATTN_HOST_DEVICE bool has_dropout() const { return dropout_threshold < 256; }
  FLASHATTN_HOST_DEVICE int64_t group_size() const { return heads_q / heads_k; }
};

struct AttnGradParams : AttnParams {
  TensorView dout;        // [B, Sq, Hq, Dv], dtype of q
  RowView dlse;           // [B, Hq, Sq] in the dtype of lse; data == nullptr when lse has no gradient
  TensorView dq;          // [B, Sq, Hq, D]
  TensorView dk;          // [B, Sk, Hk, D]
  TensorView dv;          // [B, Sk, Hk, Dv]
  void* dsink = nullptr;  // [Hq] fp32 (fp64 for fp64 inputs); nullptr when the sink needs no gradient

  // Gradients of the biases, in the shapes above; nullptr where not needed. ops.cpp zeroes them, but for a dbias of
  // which the backend writes every element (Backend::writes_bias_gradient).
  void* dalibi_slopes = nullptr;   // fp32 (fp64 for fp64 inputs)
  void* drelative_bias = nullptr;  // fp32 (fp64 for fp64 inputs)
  // Not broadcast: in the dtype of the bias, and a kernel writes each visible element once. Broadcast (a stride of 0 in
  // a dimension above 1): fp32 or fp64 sums over the scores of an element.
  BiasView dbias;
};

// Layout of the KV cache of a decoding call; key_locator.h reads it. The caches themselves are AttnParams::k and v,
// [entries, page_size, Hk, D]: an entry is a page with a block table, else the whole cache of one sequence. The
// values of the tensors are not validated: the locator clamps them.
struct KeyCache {
  int64_t entries = 0;
  int64_t page_size = 0;                 // keys of one entry
  const int32_t* block_table = nullptr;  // [B, pages_per_sequence]: the entry of each page; nullptr: no pages
  int64_t block_table_stride = 0;        // elements from one sequence to the next
  int64_t pages_per_sequence = 1;        // 1 without a block table
  const int32_t* batch_idx = nullptr;    // [B]: the entry of each sequence; nullptr: sequence b has entry b (or pages)
  // Keys of a sequence before the call appends new ones, including leftpad: [B], or `seqlen` for all. A packed call has
  // AttnParams::cu_seqlens_k instead, whose differences are the lengths.
  const int32_t* seqlens = nullptr;
  int64_t seqlen = 0;
  const int32_t* leftpad = nullptr;  // [B]: padding rows in front of the keys of a sequence
  int64_t new_keys = 0;              // keys that this call appends to every sequence
  // Whether k and v are the packed tensors of a call without a cache: one entry, with the rows of each sequence given
  // by cu_seqlens_k.
  bool is_packed = false;

  // Maximum number of keys of a sequence.
  FLASHATTN_HOST_DEVICE int64_t capacity() const { return pages_per_sequence * page_size; }
};

// Rotary position embedding (Su et al. 2021) of q and of new keys: pairs of elements of a row are rotated by an angle
// that grows with the row's position. Pair n is the elements 2n and 2n + 1 where interleaved, else n and n + dim / 2.
struct Rotary {
  const void* cos = nullptr;  // [rows, dim / 2] contiguous, dtype of q; nullptr: nothing is rotated
  const void* sin = nullptr;
  int64_t rows = 0;  // larger positions are clamped to rows - 1
  int64_t dim = 0;   // elements of a row that are rotated, from the first on
  bool interleaved = true;
  // Whether row i of q has the position of new key i (causal calls and windows); otherwise all rows have the
  // position of new key 0.
  bool rotates_each_row = false;
};

// Decoding with a KV cache, forward only: new keys and values are appended to the caches, then q [B, Sq, Hq, D] (or
// packed, with cu_seqlens) attends to the cached keys of its sequence. seqlen_k is the capacity of the cache, in packed
// calls max_seqlen_k. No dropout, relative_bias, bias or origin in calls
// with a KV cache.
struct DecodeParams : AttnParams {
  KeyCache cache;
  TensorView k_new;  // [B, new_keys, Hk, D], dtype of q; data == nullptr: nothing is appended
  // The dtype of k_new and v_new where the cache is fp8: kFloat8, or kBFloat16, whose values divided by descale_k and
  // descale_v are appended.
  DType new_dtype = DType::kFloat8;
  TensorView v_new;  // [B, new_keys, Hk, Dv]
  Rotary rotary;
  // Number of KV splits of a sequence (split_keys in key_locator.h); 0: the backend chooses.
  int64_t num_splits = 0;
  // With num_splits = 0. true: the splits of a sequence depend only on that sequence, the maximum numbers of queries
  // and keys of a sequence, and the device. false: the CUDA backend may balance the splits over the whole batch.
  bool splits_alone = false;
  // With a Mask: its intervals describe the last mask_keys keys of every sequence. The Mask hides no earlier key;
  // causal and the window still apply.
  int64_t mask_keys = 0;
};

// The caller's thread pool, behind a function pointer so that the CPU kernels need no torch header.
struct CpuExecutor {
  int num_threads = 1;
  // Calls body(context, worker) once for each worker in [0, workers), possibly concurrently, and returns when all are
  // done.
  void (*run)(int workers, void (*body)(void* context, int worker), void* context) = nullptr;
};

}  // namespace flashattn_ext
