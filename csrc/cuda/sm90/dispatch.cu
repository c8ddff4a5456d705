// The backend "cuda-sm90": Hopper kernels for 16-bit types; calls that have none run the sm80/ kernels whose rows are
// for every GPU.
#include "cuda/dispatch.cuh"
#include "cuda/sm90/fp8/transposed_values.h"
#include "cuda/sm90/shared/tiles.h"

namespace flashattn_ext {
namespace {

struct Sm90 : EveryGpu {
  static constexpr const char *kName = "cuda-sm90", *kGpus = "Hopper";
  static constexpr Family kFamily = Family::kHopper;

  static std::string refuses_device() {
    if (compute_capability() == 90) return {};
    return wrong_device("9.0", "use 'cuda-sm80' there");
  }

  static void run_forward(const Choice& choice, const AttnParams& p) {
    const TableRow& row = choice.row;
    if (row.stage == Stage::kSm90Forward) return kernel_of<Stage::kSm90Forward>(row).forward(p, choice.transposes);
    if (row.stage == Stage::kSm90Invariant) return kernel_of<Stage::kSm90Invariant>(row).invariant(p);
    if (row.stage == Stage::kSm90ShortForward) return kernel_of<Stage::kSm90ShortForward>(row).forward_short(p);
    EveryGpu::run_forward(choice, p);
  }
  static size_t forward_bytes(const Choice& choice, const AttnParams& p) {
    const TableRow& row = choice.row;
    if (row.stage == Stage::kSm90Forward) {
      const bool has_tiles = row.type == kE4m3 && !choice.transposes;
      return sm90::kForwardBytes + (has_tiles ? sm90::transposed_bytes(p) : 0);
    }
    if (row.stage == Stage::kSm90Invariant) {
      return sm90::kForwardBytes + kernel_of<Stage::kSm90Invariant>(row).invariant_bytes(p);
    }
    return EveryGpu::forward_bytes(choice, p);
  }
  static ChunkKernel chunk_kernel(const TableRow& row) {
    ChunkKernel kernel = chunk_tile(row);
    kernel.run = kernel_of<Stage::kSm90Invariant>(row).invariant_chunks;
    return kernel;
  }
  static decode::PackGqaKernel pack_gqa_kernel(const TableRow& row) {
    decode::PackGqaKernel kernel = pack_gqa_tile(row);
    kernel.run = kernel_of<Stage::kSm90PackGqa>(row).pack_gqa;
    return kernel;
  }
  static decode::FewQueriesKernel few_queries_kernel(const TableRow& row) {
    if (row.stage != Stage::kSm90FewQueriesBackward) return EveryGpu::few_queries_kernel(row);
    return {kernel_of<Stage::kSm90FewQueriesBackward>(row).few_queries_backward,
            table_row<Stage::kSm90FewQueriesBackward>(row).head_dims.qk};
  }
  static void run_backward(const TableRow& row, const AttnGradParams& p) {
    if (row.stage == Stage::kSm90Backward) return kernel_of<Stage::kSm90Backward>(row).backward(p);
    if (row.stage == Stage::kSm90Heads) return kernel_of<Stage::kSm90Heads>(row).heads(p);
    EveryGpu::run_backward(row, p);
  }
  static size_t backward_bytes(const TableRow& row, const AttnGradParams& p) {
    if (row.stage == Stage::kSm90Backward) return kernel_of<Stage::kSm90Backward>(row).backward_bytes(p);
    if (row.stage == Stage::kSm90Heads) return kernel_of<Stage::kSm90Heads>(row).heads_bytes(p);
    return EveryGpu::backward_bytes(row, p);
  }
  static void run_jvp(const TableRow& row, const JvpParams& p) {
    if (row.stage == Stage::kSm90Jvp) return kernel_of<Stage::kSm90Jvp>(row).jvp(p);
    EveryGpu::run_jvp(row, p);
  }
  static size_t jvp_bytes(const TableRow& row) { return row.stage == Stage::kSm90Jvp ? sm90::kForwardBytes : 0; }
  static void run_second(const TableRow& row, const SecondParams& p) {
    if (row.stage == Stage::kSm90Second) return kernel_of<Stage::kSm90Second>(row).second(p);
    EveryGpu::run_second(row, p);
  }
  static size_t second_bytes(const TableRow& row, const SecondParams& p) {
    if (row.stage == Stage::kSm90Second) return kernel_of<Stage::kSm90Second>(row).second_bytes(p);
    return EveryGpu::second_bytes(row, p);
  }
};

}  // namespace

const Backend& cuda_sm90_backend() {
  static const Backend backend = Dispatch<Sm90>::backend();
  return backend;
}

}  // namespace flashattn_ext
