// The backend "cuda-sm90": Hopper kernels for 16-bit types; calls that have none run the sm80/ kernels whose rows are
// for every GPU.
#include "cuda/dispatch.cuh"
#include "cuda/sm80/kernels.h"
#include "cuda/sm90/kernels.h"
#include "cuda/stages/tile_order.cuh"

namespace flashattn_ext {
namespace {

// Whether the query heads of a group add up their dk and dv (QueryHeads in backward_heads.cuh), in any order, instead
// of sharing a walk. It costs the additions, and pays in two cases. Walks over whole groups leave multiprocessors idle:
// few of them are in one round, or there is one round only, in which causal walks differ in length. Or, with a right
// bound, thread blocks soon read different query heads, since their walks differ in length, and the group is larger
// than the L2 cache holds for all that run together.
bool adds_over_groups(const AttnGradParams& p) {
  constexpr int64_t kKeys = 128, kLargeGroup = 24 << 20;  // bytes
  if (p.deterministic || p.heads_q <= p.heads_k) return false;
  const int64_t tiles = tile_count(p.seqlen_k, kKeys) * p.batch * p.heads_k, at_once = multiprocessors();
  const bool bounded = p.window_right != kUnbounded;
  if (4 * tiles < 3 * at_once || (bounded && tiles <= at_once)) return true;
  return bounded && p.window_left == kUnbounded && group_bytes(p, 2) >= kLargeGroup;
}

struct Sm90 {
  static constexpr const char *kName = "cuda-sm90", *kGpus = "Hopper";

  static std::string refuses_device() {
    if (compute_capability() == 90) return {};
    return wrong_device("9.0", "use 'cuda-sm80' there");
  }
  static const ForwardKernel* forward(const KernelCall& call) {
    if (call.is_invariant) {
      if (const ForwardKernel* const kernel = RowKernels<sm90::InvariantRows>::first(call, true)) return kernel;
    }
    if (const ForwardKernel* const own = RowKernels<sm90::ForwardRows>::first(call, true)) return own;
    if (call.type == kE4m3) return forward(widened_call(call));
    return RowKernels<sm80::ForwardRows>::first(call, true);
  }
  static const decode::PackedKernel* packed(const KernelCall& call) {
    return RowKernels<sm90::PackedRows>::first(call, true);
  }
  static const decode::FewRowsKernel* few_rows_backward(const KernelCall& call) {
    return RowKernels<sm90::ResidentRows>::first(call, true);
  }
  static const BackwardKernel* special_backward(const AttnGradParams& p, const KernelCall& call) {
    const BackwardKernel* const heads = RowKernels<sm90::HeadRows>::first(call, true);
    if (heads && heads->serves(p)) return heads;
    KernelCall grouped = call;
    grouped.options = call.options | kGroups;
    return adds_over_groups(p) ? RowKernels<sm90::BackwardRows>::first(grouped, true) : nullptr;
  }
  static const BackwardKernel* backward(const KernelCall& call) {
    const BackwardKernel* const own = RowKernels<sm90::BackwardRows>::first(call, true);
    return own ? own : RowKernels<sm80::BackwardRows>::first(call, true);
  }
  static const JvpKernel* jvp(const KernelCall& call) {
    const JvpKernel* const own = RowKernels<sm90::JvpRows>::first(call, true);
    return own ? own : RowKernels<sm80::JvpRows>::first(call, true);
  }
  static const SecondKernel* second(const KernelCall& call) {
    const SecondKernel* const own = RowKernels<sm90::SecondRows>::first(call, true);
    return own ? own : RowKernels<sm80::SecondRows>::first(call, true);
  }
};

}  // namespace

const Backend& cuda_sm90_backend() {
  static const Backend backend = Dispatch<Sm90>::backend();
  return backend;
}

}  // namespace flashattn_ext
