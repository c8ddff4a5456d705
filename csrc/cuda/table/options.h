// Options: those that a call uses, and those that the policies of a kernel support. Kernels check every other
// property of a call at run time.
#pragma once

#include "params.h"

namespace flashattn_ext {

// A set of options. sources.py reads one in each line.
enum Options : unsigned {
  kPlain = 0,               // none of the options below
  kDropout = 1,             // weights are dropped
  kIntervals = 2,           // a Mask
  kScores = 4,              // an option of a score (params.h), ALiBi or a relative bias
  kBias = 8,                // a bias of any shape in the inputs' 16 bits, whose tiles TMA can copy
  kOtherBiasOrOrigin = 16,  // any other bias, gradients of biases that few kernels can form, an origin that places rows
  kAnyBias = 24,            // the two above, kBias and kOtherBiasOrOrigin
  kBlocks = 256,            // a BlockMask
  kMasks = 258,             // a Mask or a BlockMask: no call has both
  kUnlisted = 31,           // all of the above but a BlockMask
  kGeneral = 287,           // all of the above
  kGroups = 64,     // in a backward the query heads of a group add up their dk and dv. Kernels run these calls alone
  kBrief = 128,     // a forward whose queries and keys fill these tiles better. Kernels run these calls alone
  kFewTiles = 512,  // a forward in smaller tiles, with the same bits, so that fewer multiprocessors are idle
  kBriefFewTiles = 640,  // the smaller tiles of kBrief
  kFp8 = 32,  // inputs that were fp8: descales, and an out of another dtype. Kernels run either these calls or others
  kFp8Scores = 36,   // kFp8 and an option of a score
  kFp8General = 54,  // every option that calls in fp8 may have: of a score, a Mask, an origin that places rows
};
constexpr Options operator|(Options a, Options b) { return static_cast<Options>(static_cast<unsigned>(a) | b); }
constexpr bool includes(Options all, Options some) { return (some & ~all) == 0; }

// Whether the address and the strides of a bias or of its gradient are multiples of 16 bytes, so that TMA can copy
// tiles of it. The stride of a dimension of extent 1 means nothing.
inline bool is_copyable(const AttnParams& p, const BiasView& bias) {
  const int vector = bias.dtype == DType::kFloat32 ? 4 : 8;
  auto aligned = [&](int64_t stride, int64_t count) { return count <= 1 || stride % vector == 0; };
  return reinterpret_cast<uintptr_t>(bias.data) % 16 == 0 && aligned(bias.row_stride, p.seqlen_q) &&
         aligned(bias.head_stride, p.heads_q) && aligned(bias.batch_stride, p.batch);
}

// Whether TMA can copy tiles of the bias: its elements also have the inputs' type.
inline bool has_copyable_bias(const AttnParams& p) {
  return p.bias.dtype == p.dtype && p.dtype != DType::kFloat32 && is_copyable(p, p.bias);
}

// Whether a call has the gradient of a bias that all rows share.
inline bool has_gradient_of_keys(const AttnGradParams& p) {
  return p.dbias.data && p.dbias.row_stride == 0 && p.seqlen_q > 1;
}

// Whether TMA can add or store tiles of the gradient of that bias. A gradient that all rows share is summed up
// in registers instead, which only the sm_80 kernels do.
inline bool has_copyable_bias_gradient(const AttnGradParams& p) {
  return !has_gradient_of_keys(p) && is_copyable(p, p.dbias);
}

inline Options options_of(const AttnParams& p) {
  Options all = kPlain;
  if (p.is_fp8) all = all | kFp8;
  if (p.has_dropout()) all = all | kDropout;
  if (p.has_intervals()) all = all | kIntervals;
  if (p.has_blocks()) all = all | kBlocks;
  if (p.has_score_option() || p.alibi_slopes || p.relative_bias) all = all | kScores;
  if (p.bias.data) all = all | (has_copyable_bias(p) ? kBias : kOtherBiasOrOrigin);
  return p.origin.length_mask == 0 ? all | kOtherBiasOrOrigin : all;  // an origin places the rows
}

// Whether the call sums dS of rows that see a handful of keys, for the gradient of slopes or of a relative bias. There
// dS nearly cancels in a row, so that rounding delta or the weights to 16 bits would be most of the sum.
constexpr int kFewKeys = 16;
inline bool sums_rows_of_few_keys(const AttnGradParams& p) {
  return (p.dalibi_slopes || p.drelative_bias) && p.seqlen_k <= kFewKeys;
}

// The options of a backward. Only general kernels have exact sums of a relative bias's gradient (RelativeGradient),
// the gradient of a bias whose tiles TMA cannot add or store, and dS from weights in fp32.
inline Options options_of(const AttnGradParams& p) {
  const Options all = options_of(static_cast<const AttnParams&>(p));
  const bool exact = p.drelative_bias && p.deterministic, uncopyable = p.dbias.data && !has_copyable_bias_gradient(p);
  return exact || uncopyable || sums_rows_of_few_keys(p) ? all | kOtherBiasOrOrigin : all;
}

// The options of the kernel that runs an invariant call. A row that a Mask hides nothing from has the bits of a call
// without one: kernels for a Mask alone have the steps of the plain kernels, and all other calls run general kernels.
constexpr Options invariant_options(Options options) {
  if (options & kFp8) return kFp8General;
  return includes(kIntervals, options) ? options : kUnlisted;
}

// Stands in for what a policy does not need.
struct Nothing {};

// For error messages.
constexpr const char* words(Options options) {
  switch (options) {
    case kPlain:
      return "no option";
    case kDropout:
      return "dropout";
    case kIntervals:
      return "a Mask";
    case kBlocks:
      return "a BlockMask";
    case kScores:
#define CALL_SCORE(name, ...) #name ", "
      return FLASHATTN_SCORE_OPTIONS(CALL_SCORE) "ALiBi or a relative bias";
#undef CALL_SCORE
    case kBias:
      return "a bias";
    default:
      return "several options, a bias that is not copyable or an origin";
  }
}

}  // namespace flashattn_ext
