#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <limits>

#include "cuda/decode/split/decode.h"
#include "cuda/decode/split/kernels.h"
#include "cuda/decode/split/tiles.h"
#include "cuda/host/call.h"
#include "cuda/host/launch.cuh"
#include "cuda/ptx/async.cuh"
#include "cuda/stages/tile_order.cuh"
#include "cuda/tile/fp8.cuh"

namespace flashattn_ext::decode {
namespace {

// Stores the type of out.
template <class T>
auto combine_of(const DecodeParams& p, bool pairs = false) {
  const auto of = [&](auto out) {
    using Out = decltype(out);
    return pairs ? combine_pairs<Out> : combine<Out>;
  };
  if constexpr (kIsFloat8<T>) {
    if (p.out_dtype == DType::kFloat16) return of(__half());
    return p.out_dtype == DType::kFloat32 ? of(float()) : of(__nv_bfloat16());
  } else {
    return of(T());
  }
}

using Combine = void (*)(const DecodeParams&, const Plan&, int64_t, int, int);

Combine combine_of(const DecodeParams& p, int heads) {
  if (p.is_fp8) return combine_of<Float8>(p, heads > 1);
  if (p.dtype == DType::kFloat16) return combine_of<__half>(p);
  if (p.dtype == DType::kBFloat16) return combine_of<__nv_bfloat16>(p);
  return combine_of<float>(p);
}

__global__ void __launch_bounds__(256) forget_tasks_kernel(SplitTask* tasks, int count) {
  ptx::wait_for_previous_kernel();
  ptx::let_next_kernel_start();
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) tasks[i].parts = 0;
}

// The launch configuration of a call. It does not depend on sequence lengths, which are in device memory.
struct Launch {
  SplitKernel kernel;
  TileSizes tile;
  int warps, shared_bytes;
  Plan plan;            // its arrays are in the workspace
  int64_t split_tasks;  // entries of plan.split_tasks
  int64_t q_bytes;      // bytes of the rotated queries

  Launch(const DecodeParams& p, const SplitKernel& kernel) : kernel(kernel), tile(kernel.tile) {
    constexpr int kReservedBytes = 1024;  // reserved by the driver per thread block
    const int most = most_shared_memory() - kStaticBytes;
    const int64_t rows = p.seqlen_q * p.group_size();
    plan.group = static_cast<int>(p.group_size());
    const int teams = std::min(kMaxWarps / tile.team_warps, (most - tile.query_bytes) / tile.team_bytes);
    warps = teams * tile.team_warps;
    shared_bytes = tile.query_bytes + teams * tile.team_bytes;
    const int all_shared = shared_memory_of_multiprocessor();
    const int blocks_at_once = std::min(2, all_shared / (shared_bytes + kStaticBytes + kReservedBytes));
    divide(in_groups(p, tile.heads), rows, int64_t{std::max(1, blocks_at_once)} * multiprocessors());
    const KeyCache& cache = p.cache;
    plan.knows_lengths = plan.splits == 0 && !p.cu_seqlens_q && !p.cu_seqlens_k && !cache.seqlens && !cache.leftpad &&
                         !cache.block_table && !cache.batch_idx;
    if (tile.heads > 1) plan.slot_rows = tile.heads * tile.rows;
    q_bytes = p.rotary.cos ? query_rows(p) * batch_entries(p) * p.heads_q * p.head_dim * element_bytes(p) : 0;
  }

  bool has_wide_tile() const { return tile.rows > 32; }

  // The number of shares, at most `at_once`. If one a little smaller than that makes shares of tasks of equal length
  // begin and end with a task, fewer tasks are split and fewer thread blocks have two parts.
  static int64_t whole_shares(int64_t tasks, int64_t at_once) {
    if (tasks == 0) return 0;  // no sequences
    const int64_t shares = tasks <= at_once ? at_once / tasks * tasks : tile_count(tasks, tile_count(tasks, at_once));
    return 10 * shares >= 9 * at_once ? shares : at_once;
  }

  // Whether one thread block for each multiprocessor is enough. With a tile of 16 rows it reads keys of a plain 16-bit
  // call faster than memory delivers them (divide_alone). A few tasks are all split into many parts, and half as many
  // shares then have half as many partial results. Measured for these head dims, on an H200.
  bool runs_one_wave(const DecodeParams& p, int64_t tasks) const {
    const bool is_plain = !p.has_score_option() && !p.alibi_slopes && !p.has_intervals() && !p.cache.block_table;
    constexpr int64_t kFewTasks = 16;
    return tasks <= kFewTasks && tile.rows == 16 && kernel.columns <= 128 && key_bytes(p) == 2 && is_plain;
  }

  // Whether so many tasks are so short that one thread block for each ends before parts of them would be combined.
  bool has_short_tasks(const DecodeParams& p, int64_t tasks) const {
    constexpr int64_t kShortBytes = 256 << 10;
    const bool is_short = p.cache.capacity() * (p.head_dim + p.head_dim_v) * key_bytes(p) <= kShortBytes;
    return is_short && 3 * tasks >= multiprocessors() && tile.rows == 16 && key_bytes(p) == 2;
  }

  // Chooses how to divide the work (plan.h). at_once: resident thread blocks of the whole GPU.
  void divide(const DecodeParams& p, int64_t rows, int64_t at_once) {
    plan.part_keys = plan.head_tasks = 0;
    plan.slot_rows = tile.rows;
    if (p.splits_alone && p.num_splits == 0) return divide_alone(p, rows, at_once);
    const int64_t most_units = std::max<int64_t>(1, (p.cache.capacity() + kUnitKeys - 1) / kUnitKeys);
    const int64_t row_tiles = tile_count(rows, tile.rows), tasks = p.batch * p.heads_k * row_tiles;
    plan.row_tiles = static_cast<int>(row_tiles);
    const bool many = row_tiles > 1 && tasks >= 2 * at_once;
    // The kernel numbers the units of all tasks in 32 bits. A packed sequence may be longer than max_seqlen_q.
    const int64_t most_tiles = p.is_varlen() ? p.total_q * plan.group / tile.rows + p.batch : p.batch * row_tiles;
    const bool countable = most_tiles * p.heads_k <= std::numeric_limits<int32_t>::max() / most_units;
    const bool unsplit = many || !countable || has_short_tasks(p, tasks);
    const int64_t splits = p.num_splits > 0 ? std::min(p.num_splits, most_units) : unsplit ? 1 : 0;
    plan.most_parts = static_cast<int>(splits);
    if (splits == 0) {
      const int64_t units = tasks * most_units;
      const int64_t blocks =
          std::min(units, whole_shares(tasks, runs_one_wave(p, tasks) ? multiprocessors() : at_once));
      plan.splits = 0;
      plan.blocks = static_cast<int>(blocks);
      // Packed sequences may have fewer or more row tiles than the host assumes, so they have no entry per task.
      plan.by_task = !p.is_varlen() && p.seqlen_q > 0 && tasks <= blocks;
      split_tasks = plan.by_task ? tasks : blocks;
      plan.slots = static_cast<int>(2 * blocks);
    } else {
      // A packed sequence may be longer than max_seqlen_q, and a split sequence needs slots for all of its rows.
      if (splits > 1 && p.is_varlen()) plan.row_tiles = static_cast<int>(tile_count(p.total_q * plan.group, tile.rows));
      const int64_t all = p.batch * p.heads_k * plan.row_tiles;
      plan.splits = static_cast<int>(splits);
      plan.blocks = static_cast<int>(all * splits);
      plan.by_task = true;
      split_tasks = splits > 1 ? all : 0;
      plan.slots = static_cast<int>(splits > 1 ? all * splits : 0);
    }
  }

  // Shares with fixed parts. The length of a part depends only on the shapes of one sequence: enough parts for a single
  // sequence to keep the GPU busy, but parts long enough that the epilogue takes little of the time in large batches.
  // On an H200 one thread block with a tile of 16 rows reads 42 GB/s, which is more than the memory bandwidth per
  // multiprocessor, and one with a tile of 64 rows 23 GB/s.
  void divide_alone(const DecodeParams& p, int64_t rows, int64_t at_once) {
    const int64_t row_tiles = tile_count(rows, tile.rows), wanted = has_wide_tile() ? at_once : multiprocessors(),
                  parts = std::max<int64_t>(1, wanted / (p.heads_k * row_tiles));
    // The epilogue of a part takes about 1 us with a tile of 16 rows and 8 us with one of 64. With parts of least_bytes
    // that is at most a tenth and a quarter of the time of a part.
    const int64_t least_bytes = has_wide_tile() ? 512 << 10 : 256 << 10;
    const int64_t bytes_of_key = (p.head_dim + p.head_dim_v) * key_bytes(p);
    const int64_t keys = std::max((p.seqlen_k + parts - 1) / parts, least_bytes / bytes_of_key);
    const int64_t part_keys = (keys + kUnitKeys - 1) / kUnitKeys * kUnitKeys;
    const int64_t most_parts = tile_count(p.seqlen_k, part_keys);
    // A packed sequence that is split has at most row_tiles row tiles; one that is not split may have any number.
    const int64_t more_tiles = p.is_varlen() ? p.total_q * plan.group / tile.rows : 0;
    const int64_t all_parts = p.is_varlen() ? p.total_k / part_keys + p.batch : p.batch * most_parts;
    const int64_t units = p.heads_k * (all_parts * row_tiles + (p.is_varlen() ? more_tiles + p.batch : 0));
    plan.row_tiles = static_cast<int>(row_tiles);
    plan.part_keys = static_cast<int>(part_keys);
    plan.most_parts = static_cast<int>(most_parts);
    plan.head_tasks = static_cast<int>(p.is_varlen() ? more_tiles + p.batch : p.batch * row_tiles);
    plan.slots = static_cast<int>(most_parts > 1 ? units : 0);
    plan.slot_rows = static_cast<int>(std::min<int64_t>(tile.rows, rows));
    plan.splits = 0;
    plan.blocks = static_cast<int>(std::min(units, at_once));
    plan.by_task = true;
    split_tasks = p.heads_k * plan.head_tasks;
  }

  // Whether a task may have several parts, so that the combine kernel must run.
  bool combines() const { return split_tasks > 0 && plan.slots > 0; }
  // Marks all entries of plan.split_tasks as unused, because packed sequences do not write every entry.
  void forget_tasks(const DecodeParams& p) const {
    launch_early(forget_tasks_kernel, "decode_tasks", p, dim3(static_cast<unsigned>((split_tasks + 255) / 256)), 256, 0,
                 plan.split_tasks, static_cast<int>(split_tasks));
  }

  // Returns the size of the workspace in bytes. q: the rotated queries.
  size_t set_workspace(const DecodeParams& p, TensorView* q) {
    return plan.place(p, q_bytes, split_tasks, kernel.columns, q);
  }
};

// Whether rows can be read in 16-byte vectors, the last possibly partial.
bool in_vectors(const TensorView& t, int64_t element_bytes) { return rows_are_aligned(t, 0, element_bytes); }

}  // namespace

size_t workspace_bytes(const DecodeParams& p, const SplitKernel& kernel) {
  TensorView q;
  return Launch(p, kernel).set_workspace(p, &q);
}

void run(const DecodeParams& params, const SplitKernel& kernel) {
  if (params.batch == 0) return;
  if (params.heads_q == 0) return append(params, {});
  DecodeParams p = params;
  Launch launch(p, kernel);
  TensorView rotated;
  launch.set_workspace(p, &rotated);
  append(p, p.rotary.cos ? rotated : TensorView{});
  if (p.rotary.cos) p.q = rotated;
  const bool aligned = in_vectors(p.k, key_bytes(p)) && in_vectors(p.v, key_bytes(p));
  if (launch.plan.part_keys > 0 && launch.combines() && p.is_varlen()) launch.forget_tasks(p);
  kernel.run(p, launch.plan, launch.warps, launch.shared_bytes, aligned);
  if (launch.combines()) {
    combine_of(p, kernel.tile.heads)(p, launch.plan, launch.split_tasks, launch.plan.slot_rows, kernel.columns);
  }
}

}  // namespace flashattn_ext::decode
