#include "backend/slow_call.h"

namespace flashattn_ext {
namespace {

// An option without which a call may run the kernels for few queries. Whether a backend's kernels lack it is asked of
// the backend.
struct Candidate {
  bool (*is_in)(const AttnParams&);
  void (*move)(AttnParams* to, const AttnParams& from);
  const char* name;
  const char* remedy;
};

constexpr Candidate kCandidates[] = {
    {[](const AttnParams& p) { return p.has_intervals(); },
     [](AttnParams* to, const AttnParams& from) { to->intervals = from.intervals; }, "mask",
     "Where causal or window_size hide the same keys, pass them in its place; flash_attn_with_kvcache, which has no "
     "gradients, takes a mask too."},
    {[](const AttnParams& p) { return p.has_blocks(); },
     [](AttnParams* to, const AttnParams& from) { to->blocks = from.blocks; }, "mask",
     "Where causal or window_size hide the same keys, pass them in its place."},
    {[](const AttnParams& p) { return p.has_dropout(); },
     [](AttnParams* to, const AttnParams& from) { to->dropout_threshold = from.dropout_threshold; }, "dropout_p",
     "Pass dropout_p=0 in evaluation."},
    {[](const AttnParams& p) { return p.relative_bias != nullptr; },
     [](AttnParams* to, const AttnParams& from) { to->relative_bias = from.relative_bias; }, "relative_bias",
     "If it is proportional to the distance, pass alibi_slopes in its place."},
    {[](const AttnParams& p) { return p.bias.data != nullptr; },
     [](AttnParams* to, const AttnParams& from) { to->bias = from.bias; }, "bias",
     "If it only hides keys that causal or window_size hide too, or is proportional to the distance, pass these or "
     "alibi_slopes in its place."},
    {[](const AttnParams& p) { return p.centres.data != nullptr; },
     [](AttnParams* to, const AttnParams& from) { to->centres = from.centres; },
     "the gradient of alibi_slopes or relative_bias",
     "If it is not needed, detach the tensor or call under torch.no_grad()."},
    {[](const AttnParams& p) { return p.alibi_slopes != nullptr; },
     [](AttnParams* to, const AttnParams& from) { to->alibi_slopes = from.alibi_slopes; }, "alibi_slopes",
     "With as many queries those kernels add slopes faster."},
    {[](const AttnParams& p) { return p.invariant; },
     [](AttnParams* to, const AttnParams& from) { to->invariant = from.invariant; }, "invariant",
     "Pass invariant=False where bits may depend on the rest of the call."},
};

std::string queries_of(const AttnParams& p) {
  const std::string count = std::to_string(p.seqlen_q) + (p.seqlen_q == 1 ? " query" : " queries");
  return p.is_varlen() ? "sequences of up to " + count + " run"
                       : "the " + count + " of this call run" + (p.seqlen_q == 1 ? "s" : "");
}

// The reason where a backend has no kernels for few queries.
std::string why_always_slow(const Backend& backend, const AttnParams& p) {
  constexpr int64_t kMostRows = 128, kLeastKeys = 512;  // with fewer keys there is little to divide
  if (p.heads_k == 0 || p.seqlen_q * p.group_size() > kMostRows || p.seqlen_k < kLeastKeys) return {};
  return queries_of(p) + " the kernels of long sequences, because backend '" + backend.name +
         "' has no others: they do not divide keys, and one core computes all queries of a head of a sequence. Put "
         "enough sequences into a call to give every core a head.";
}

}  // namespace

std::string why_slow(const Backend& backend, const AttnParams& p) {
  if (p.batch * p.heads_q * p.seqlen_q == 0) return {};
  if (!backend.runs_few_queries) return why_always_slow(backend, p);
  if (backend.runs_few_queries(p)) return {};
  AttnParams plain = p;
  for (const Candidate& option : kCandidates) option.move(&plain, AttnParams());
  if (!backend.runs_few_queries(plain)) return {};

  std::string names, remedies;
  const auto describe = [&](const auto& is_named) {
    for (const Candidate& option : kCandidates) {
      if (!option.is_in(p) || !is_named(option)) continue;
      names += (names.empty() ? "" : " and ") + std::string(option.name);
      remedies += " " + std::string(option.remedy);
    }
  };
  describe([&](const Candidate& option) {
    AttnParams one = plain;
    option.move(&one, p);
    return !backend.runs_few_queries(one);
  });
  if (names.empty()) describe([](const Candidate&) { return true; });  // the kernels lack only the combination
  return queries_of(p) + " the kernels of long sequences, which do not divide keys among processors, because of " +
         names + "." + remedies;
}

}  // namespace flashattn_ext
