// The rows of options.def as a table, and what follows from it: schemas of the ops, indices of arguments and gradients.
#pragma once

#include <array>
#include <string>
#include <string_view>

#include "params.h"  // FLASHATTN_SCORE_OPTIONS

namespace flashattn_ext {

enum class OptionType { kTensor, kInteger, kNumber, kFlag, kIntegers, kDtype };
// Which ops take an argument: `forward` and `backward`, or the decoding ops too.
enum class Takers { kForwardBackward, kEveryOp };
// What the first dimensions of a tensor are: the starts of sequences; heads; heads, or batch and heads; batch and
// heads of one entry each or of all, and in a packed call the heads alone; batch and KV heads (of a BlockMask also
// query heads) of one entry each or of all; blocks, of all batch entries and heads. kNone: no tensor.
enum class Dims { kNone, kSequences, kHeads, kBatchHeads, kScores, kBatchKvHeads, kBlocks };
enum class Gradient { kNone, kAlways, kIfNeeded };

struct Option {
  const char* name;
  OptionType type;
  Takers takers;
  double default_value;  // only integers, numbers and flags have one; the others are None by default
  Dims dims;
  Gradient gradient;
  bool is_of_distance = false;  // its gradient needs the centres of rows (bias.h)
};

inline constexpr Option kOptions[] = {
#define CALL_TENSOR(name, dims, takers, check) \
  {#name, OptionType::kTensor, Takers::takers, 0, Dims::dims, Gradient::kNone},
#define CALL_LEARNED(name, dims, takers, check) \
  {#name, OptionType::kTensor, Takers::takers, 0, Dims::dims, Gradient::kAlways},
#define CALL_BIAS(name, dims, takers, check) \
  {#name, OptionType::kTensor, Takers::takers, 0, Dims::dims, Gradient::kIfNeeded},
#define CALL_DISTANCE_BIAS(name, dims, takers, check) \
  {#name, OptionType::kTensor, Takers::takers, 0, Dims::dims, Gradient::kIfNeeded, true},
#define CALL_INTEGER(name, default_value, takers, accepts, expected) \
  {#name, OptionType::kInteger, Takers::takers, default_value, Dims::kNone, Gradient::kNone},
#define CALL_NUMBER(name, default_value, takers, accepts, expected) \
  {#name, OptionType::kNumber, Takers::takers, default_value, Dims::kNone, Gradient::kNone},
#define CALL_FLAG(name, default_value, takers) \
  {#name, OptionType::kFlag, Takers::takers, default_value, Dims::kNone, Gradient::kNone},
#define CALL_INTEGERS(name, takers, check) \
  {#name, OptionType::kIntegers, Takers::takers, 0, Dims::kNone, Gradient::kNone},
#define CALL_DTYPE(name, takers, check) {#name, OptionType::kDtype, Takers::takers, 0, Dims::kNone, Gradient::kNone},
#include "call/options.def"
};

// The name of a type in the schemas of the ops. A float is a `Scalar`, which may be symbolic (attn_call.h).
constexpr const char* schema_type(OptionType type) {
  switch (type) {
    case OptionType::kTensor:
      return "Tensor?";
    case OptionType::kInteger:
      return "SymInt";
    case OptionType::kNumber:
      return "Scalar";
    case OptionType::kFlag:
      return "bool";
    case OptionType::kDtype:
      return "ScalarType?";
    default:
      return "SymInt[]?";
  }
}

// The arguments of `forward` and `backward` begin with q, k, v and all options: kCallTensors tensors, then kCallOptions
// arguments of other types.
constexpr int count_tensors() {
  int count = 0;
  for (const Option& option : kOptions) count += option.type == OptionType::kTensor;
  return count;
}
constexpr int count_gradients() {
  int count = 0;
  for (const Option& option : kOptions) count += option.gradient != Gradient::kNone;
  return count;
}
inline constexpr int kQkv = 3;  // q, k, v
constexpr bool tensors_come_first() {
  for (int i = 0; i < count_tensors(); ++i) {
    if (kOptions[i].type != OptionType::kTensor) return false;
  }
  return true;
}
static_assert(tensors_come_first(), "options.def");
inline constexpr int kCallTensors = kQkv + count_tensors();
inline constexpr int kCallOptions = static_cast<int>(std::size(kOptions)) - count_tensors();

// The index of an option among the arguments of `forward` and `backward`; does not compile for an unknown name. The
// exception is an operand, because GCC 9 and 10 refuse every constant call of a function that ends with a statement
// `throw` after a loop.
constexpr int place_of(std::string_view name) {
  int i = 0;
  while (i < kCallTensors + kCallOptions - kQkv && kOptions[i].name != name) ++i;
  return i < kCallTensors + kCallOptions - kQkv ? kQkv + i : throw "no such option";
}

// A differentiable argument: its index, and whether its gradient is computed only if it is needed. In the order of the
// gradients among the results of the op `backward`.
struct Differentiable {
  int place = 0;
  bool if_needed = false;
};
inline constexpr std::array<Differentiable, kQkv + count_gradients()> kDifferentiable = [] {
  std::array<Differentiable, kQkv + count_gradients()> all{};
  for (int i = 0; i < kQkv; ++i) all[i].place = i;
  int next = kQkv;
  for (int i = 0; i < kCallTensors - kQkv; ++i) {
    const Gradient gradient = kOptions[i].gradient;
    if (gradient != Gradient::kNone) all[next++] = {kQkv + i, gradient == Gradient::kIfNeeded};
  }
  return all;
}();
// The last kBiases of them have a gradient only if it is needed.
inline constexpr int kBiases = [] {
  int count = 0;
  for (const Differentiable& input : kDifferentiable) count += input.if_needed;
  return count;
}();

// ", Tensor? cu_seqlens_q, ...": the options that an op takes, as a part of its schema.
inline std::string schema_of_options(Takers op) {
  std::string schema;
  for (const Option& option : kOptions) {
    if (op == Takers::kForwardBackward || option.takers == Takers::kEveryOp)
      schema += std::string(", ") + schema_type(option.type) + " " + option.name;
  }
  return schema;
}
// ", bool needs_dNAME" for each gradient that a backward computes if it is needed.
inline std::string schema_of_needs() {
  std::string schema;
  for (const Option& option : kOptions) {
    if (option.gradient == Gradient::kIfNeeded) schema += std::string(", bool needs_d") + option.name;
  }
  return schema;
}
// The names of the differentiable arguments, each after `prefix`, in the order of the gradients.
inline std::string differentiable_names(const std::string& prefix) {
  std::string names = prefix + "q" + prefix + "k" + prefix + "v";
  for (const Option& option : kOptions) {
    if (option.gradient != Gradient::kNone) names += prefix + option.name;
  }
  return names;
}
// ", Tensor? tNAME" for each of them: its tangent.
inline std::string schema_of_tangents() { return differentiable_names(", Tensor? t"); }
// "(Tensor dq, ...)": the results of a backward. Gradients that are not needed, or of tensors that are not given, are
// empty tensors.
inline std::string schema_of_gradients() { return "(" + differentiable_names(", Tensor d").substr(2) + ")"; }

}  // namespace flashattn_ext
