#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <limits>

#include "../common/aligned_rows.h"
#include "../common/call.h"
#include "../common/device.h"
#include "../common/tile_order.cuh"
#include "decode.h"
#include "kernels.h"
#include "tiles.h"

namespace flashattn_ext::decode {
namespace {

// The entry points of one element type and class of head dims.
struct Kernels {
  TileSizes (*sizes[2])();  // narrow, wide
  void (*split[2])(const DecodeParams&, const Plan&, int, int, bool);
  void (*combine)(const DecodeParams&, const Plan&, int64_t, int, int);
  int columns;
};

template <class T, int kHeadDim>
Kernels kernels() {
  constexpr bool kHasWide = kHeadDim <= 256;
  return {{tile_sizes<T, kHeadDim, false>, tile_sizes<T, kHeadDim, kHasWide>},
          {split<T, kHeadDim, false>, split<T, kHeadDim, kHasWide>},
          combine<T>,
          kHeadDim};
}
template <class T>
Kernels kernels_of(int64_t head_dim) {
  if (head_dim <= 64) return kernels<T, 64>();
  if (head_dim <= 96) return kernels<T, 96>();
  if (head_dim <= 128) return kernels<T, 128>();
  if (head_dim <= 192) return kernels<T, 192>();
  if (head_dim <= 256) return kernels<T, 256>();
  return kernels<T, 512>();
}
Kernels kernels_of(const DecodeParams& p) {
  const int64_t head_dim = std::max(p.head_dim, p.head_dim_v);
  if (p.dtype == DType::kFloat16) return kernels_of<__half>(head_dim);
  if (p.dtype == DType::kBFloat16) return kernels_of<__nv_bfloat16>(head_dim);
  return kernels_of<float>(head_dim);
}

// Shared memory that a thread block may have for its tiles, beside its variables.
constexpr int kStaticBytes = 1024;
int most_shared_bytes() { return device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>() - kStaticBytes; }

// How a call is launched. Nothing here depends on lengths, which only the device knows.
struct Launch {
  Kernels kernels;
  bool is_wide;
  TileSizes tile;
  int warps, shared_bytes;
  Plan plan;            // its arrays begin at offsets of the workspace
  int64_t split_tasks;  // entries of that array
  int64_t slots;
  int64_t q_bytes;  // of the rotated queries

  explicit Launch(const DecodeParams& p) : kernels(kernels_of(p)) {
    constexpr int kReservedBytes = 1024;  // of the driver, for each thread block
    const int most = most_shared_bytes();
    const int64_t rows = p.seqlen_q * p.group_size();
    plan.group = static_cast<int>(p.group_size());
    const TileSizes narrow = kernels.sizes[0](), wide = kernels.sizes[1]();
    is_wide = rows > narrow.rows && wide.rows > narrow.rows && wide.query_bytes + wide.team_bytes <= most;
    tile = is_wide ? wide : narrow;
    const int teams = std::min(kMaxWarps / tile.team_warps, (most - tile.query_bytes) / tile.team_bytes);
    warps = teams * tile.team_warps;
    shared_bytes = tile.query_bytes + teams * tile.team_bytes;
    const int all_shared = device_attribute<cudaDevAttrMaxSharedMemoryPerMultiprocessor>();
    const int blocks_at_once = std::min(2, all_shared / (shared_bytes + kStaticBytes + kReservedBytes));
    divide(p, rows, int64_t{std::max(1, blocks_at_once)} * multiprocessors());
    q_bytes = p.rotary.cos ? query_rows(p) * batch_entries(p) * p.heads_q * p.head_dim * element_bytes(p) : 0;
  }

  // at_once: thread blocks that the GPU runs at a time.
  void divide(const DecodeParams& p, int64_t rows, int64_t at_once) {
    const int64_t most_units = std::max<int64_t>(1, (p.cache.capacity() + kUnitKeys - 1) / kUnitKeys);
    const int64_t row_tiles = tile_count(rows, tile.rows), tasks = p.batch * p.heads_k * row_tiles;
    plan.row_tiles = static_cast<int>(row_tiles);
    const bool many = row_tiles > 1 && tasks >= 2 * at_once;
    // Thread blocks count the units of all tasks in 32 bits. A packed sequence may have more tiles than max_seqlen_q.
    const int64_t most_tiles = p.is_varlen() ? p.total_q * p.group_size() / tile.rows + p.batch : p.batch * row_tiles;
    const bool countable = most_tiles * p.heads_k <= std::numeric_limits<int32_t>::max() / most_units;
    const int64_t splits = p.num_splits > 0 ? std::min(p.num_splits, most_units) : many || !countable ? 1 : 0;
    if (splits == 0) {
      const int64_t units = tasks * most_units;
      const int64_t blocks = std::min(units, at_once);
      plan.splits = 0;
      plan.blocks = static_cast<int>(blocks);
      // Whether there are as many tasks as the host counts: packed sequences may have fewer, or more tiles.
      plan.by_task = !p.is_varlen() && p.seqlen_q > 0 && tasks <= blocks;
      split_tasks = plan.by_task ? tasks : blocks;
      slots = 2 * blocks;
    } else {
      // A packed sequence may be longer than max_seqlen_q: one that is split needs slots for all of its rows.
      if (splits > 1 && p.is_varlen())
        plan.row_tiles = static_cast<int>(tile_count(p.total_q * p.group_size(), tile.rows));
      const int64_t all = p.batch * p.heads_k * plan.row_tiles;
      plan.splits = static_cast<int>(splits);
      plan.blocks = static_cast<int>(all * splits);
      plan.by_task = true;
      split_tasks = splits > 1 ? all : 0;
      slots = splits > 1 ? all * splits : 0;
    }
  }

  // Sets the arrays of the workspace and returns its bytes. q: where rotated queries go.
  size_t set_workspace(const DecodeParams& p, TensorView* q) {
    char* next = static_cast<char*>(p.workspace);
    const auto take = [&next](int64_t bytes) {
      char* const begin = next;
      next += (bytes + 63) / 64 * 64;
      return begin;
    };
    const int64_t row = p.heads_q * p.head_dim;
    *q = {take(q_bytes), p.is_varlen() ? 0 : p.seqlen_q * row, row, p.head_dim};
    plan.split_tasks = reinterpret_cast<SplitTask*>(take(split_tasks * static_cast<int64_t>(sizeof(SplitTask))));
    plan.partial_lse = reinterpret_cast<float*>(take(slots * tile.rows * 4));
    plan.partial_out = reinterpret_cast<float*>(take(slots * tile.rows * kernels.columns * 4));
    return static_cast<size_t>(next - static_cast<char*>(p.workspace));
  }
};

// Whether rows can be read in vectors of 16 bytes, the last of which may be cut short.
bool in_vectors(const TensorView& t, int64_t element_bytes) { return rows_are_aligned(t, 0, element_bytes); }

}  // namespace

std::string refuses(const DecodeParams& p) {
  constexpr int64_t kMostColumns = 512, kPageKeys = 16;
  if (p.dtype == DType::kFloat64) return "float64 is supported on the CPU only; use float32";
  if (std::max(p.head_dim, p.head_dim_v) > kMostColumns) {
    return "attention to a key-value cache takes head dims up to 512, got " + std::to_string(p.head_dim) + " and " +
           std::to_string(p.head_dim_v) + "; use the CPU backend";
  }
  const TileSizes tile = kernels_of(p).sizes[0]();
  if (tile.query_bytes + tile.team_bytes > most_shared_bytes()) {
    return "float32 with head dims above 256 needs a GPU whose thread blocks may have 168 KB of shared memory; use "
           "float16 or bfloat16";
  }
  if (p.cache.block_table && p.cache.page_size % kPageKeys != 0) {
    return "pages hold a multiple of 16 keys, got " + std::to_string(p.cache.page_size) +
           "; choose another page size, or use the CPU backend";
  }
  return {};
}

size_t workspace_bytes(const DecodeParams& p) {
  TensorView q;
  return Launch(p).set_workspace(p, &q);
}

void run(const DecodeParams& params) {
  if (params.batch * params.heads_q == 0) return;
  DecodeParams p = params;
  Launch launch(p);
  TensorView rotated;
  launch.set_workspace(p, &rotated);
  append(p, rotated);
  if (p.rotary.cos) p.q = rotated;
  const bool aligned = in_vectors(p.k, element_bytes(p)) && in_vectors(p.v, element_bytes(p));
  launch.kernels.split[launch.is_wide](p, launch.plan, launch.warps, launch.shared_bytes, aligned);
  if (launch.split_tasks > 0) {
    launch.kernels.combine(p, launch.plan, launch.split_tasks, launch.tile.rows, launch.kernels.columns);
  }
}

}  // namespace flashattn_ext::decode
