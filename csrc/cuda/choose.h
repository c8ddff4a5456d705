// Which kernels a call runs. Every threshold between compiled kernels is here, with the figure behind it, and becomes
// one Choice, which workspace sizes, runs, supports() and `slow` read. How a kernel divides its work is in its folder.
//
// This is host code without CUDA's headers: tests/builds/test_choose.py runs it for several sizes of GPUs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>

#include "backend/cached_call.h"
#include "cuda/choice.h"
#include "cuda/decode/few_queries/backward_plan.h"
#include "cuda/decode/few_queries/pack_gqa.h"
#include "cuda/decode/prefill/cache_rows.h"
#include "cuda/decode/prefill/chunks.h"
#include "cuda/decode/split/decode.h"
#include "cuda/decode/split/tiles.h"
#include "cuda/host/call.h"
#include "cuda/host/unit_plan.h"
#include "cuda/kernel_calls.h"
#include "cuda/sm80/shared/tiles.h"
#include "cuda/sm80/whole_heads/plan.h"
#include "cuda/sm90/forward_short/plan.h"
#include "cuda/sm90/fp8/transposed_values.h"
#include "cuda/sm90/shared/tiles.h"
#include "cuda/table/stages.h"
#include "rules/mask.h"

namespace flashattn_ext {

class Chooser {
 public:
  Chooser(Family family, const Gpu& gpu) : family_(family), gpu_(gpu) {}

  // --- rows, whether or not the GPU has the shared memory that they need ---------------------------------------------

  TableRow forward_row(const KernelCall& call) const {
    if (!is_hopper()) return first<Stage::kSm80Forward>(sm80_forward_call(widened_call(call)));
    if (call.is_invariant) {
      if (const TableRow row = first<Stage::kSm90Invariant>(call)) return row;
    }
    if (const TableRow row = first<Stage::kSm90Forward>(call)) return row;
    if (call.type == kE4m3) return forward_row(widened_call(call));
    return first<Stage::kSm80Forward>(sm80_forward_call(call));
  }
  TableRow backward_row(const KernelCall& call) const {
    const TableRow own = hoppers<Stage::kSm90Backward>(call);
    return own ? own : first<Stage::kSm80Backward>(call);
  }
  TableRow jvp_row(const AttnParams& p) const {
    const KernelCall call = backward_call(p, options_of(p));
    const TableRow own = hoppers<Stage::kSm90Jvp>(call);
    return own ? own : first<Stage::kSm80Jvp>(call);
  }
  TableRow second_row(const AttnParams& p) const {
    const KernelCall call = backward_call(p, options_of(p));
    const TableRow own = hoppers<Stage::kSm90Second>(call);
    return own ? own : first<Stage::kSm80Second>(call);
  }

  // --- calls ---------------------------------------------------------------------------------------------------------

  Choice forward(const AttnParams& p) const {
    const KernelCall call = forward_call(p);
    if (const TableRow row = short_forward_row(p, call)) return {row};
    if (const TableRow row = heads_forward_row(p, call)) return {row};
    Choice choice{tiled_forward_row(p, call)};
    const bool is_narrow = p.dtype == DType::kFloat8;  // a prefill has already widened its keys and values
    if (p.invariant && prefers_chunks(p) && has_chunks(cached_call(p), choice.row)) {
      choice.way = Way::kChunks;
    } else if (const Choice few = few_queries(p); few.row) {
      choice = few;
      choice.inputs = is_narrow ? Inputs::kAsGiven : Inputs::kAligned;
    } else {
      if (is_narrow && choice.row.type != kE4m3) choice.inputs = Inputs::kWidened;
      choice.transposes = transposes_itself(p, choice.row);
    }
    return choice;
  }

  Choice decode(const DecodeParams& p) const {
    // A prefill aligns its rows. Its packed sequences, which may have any order, must not be forwards with few queries.
    const TableRow pack_gqa = pack_gqa_row(p);
    if (!is_prefill(p, static_cast<bool>(pack_gqa))) return split_kv(p, has_aligned_rows(p) ? pack_gqa : TableRow{});
    const TableRow row = forward_row(forward_call(p));
    const bool in_chunks = p.invariant && has_chunks(p, row);
    return {row, in_chunks ? Way::kChunks : Way::kPrefill};
  }

  Choice backward(const AttnGradParams& p) const {
    const KernelCall call = backward_call(p, options_of(p));
    if (const TableRow row = few_queries_backward_row(p, call)) return {row, Way::kFewQueriesBackward};
    if (const TableRow row = heads_backward_row(p, call)) return {row};
    if (const TableRow row = hoppers<Stage::kSm90Heads>(call); row && runs_by_heads(p, row)) return {row};
    KernelCall grouped = call;
    grouped.options = call.options | kGroups;
    if (is_hopper() && adds_over_groups(p)) {
      if (const TableRow row = first<Stage::kSm90Backward>(grouped)) return {row};
    }
    return {backward_row(call)};
  }

  // Whether the GPU has the shared memory for the smallest tile of decoding.
  bool has_shared_memory(const DecodeParams& p) const {
    const decode::TileSizes tile = decode::sizes_of(key_type(p), kernel_table::kDecode[first_split_row(p)]);
    return tile.query_bytes + tile.team_bytes <= gpu_.block_shared - decode::kStaticBytes;
  }

 private:
  // The first row of a stage that serves a call.
  template <Stage kStage>
  TableRow first(const KernelCall& call) const {
    int i = 0;
    for (const auto& row : RowsOf<kStage>::kTable) {
      if (serves(row, call) && !(is_hopper() && row.gpus == kOtherGpus)) return {kStage, i, call.type};
      ++i;
    }
    return {};
  }
  template <Stage kStage>
  TableRow hoppers(const KernelCall& call) const {
    return is_hopper() ? first<kStage>(call) : TableRow{};
  }
  bool is_hopper() const { return family_ == Family::kHopper; }

  // --- forwards with few queries for many keys, and decoding ---------------------------------------------------------
  // Such calls are bound by memory bandwidth. The kernels of sm80/ and sm90/ would launch one thread block for each
  // tile of a query head: too few blocks, each of which walks over all keys. The choices do not depend on the batch
  // size, so that the results of a sequence are bit-identical in every batch.

  static constexpr int64_t kLeastSplitKeys = 512;  // with fewer keys split-KV gains little, forward or backward
  // The most queries of a sequence with which a forward is split: the tiles of the kernels of sm90/, which launch one
  // thread block for each query head and query tile, have enough rows from about 32 queries on.
  static constexpr int64_t kFewQueries = 32;
  // The most with long keys, unless PackGQA kernels serve the call; and with these, above which the kernels of
  // sm90/ are as fast even for one long sequence.
  static constexpr int64_t kMostFewQueries = 64, kMostPackGqaQueries = 128;

  // The most queries by the shapes of one sequence. packs: whether PackGQA kernels serve the call.
  static int64_t most_few_queries(const AttnParams& p, bool packs) {
    // On an H200, 64 queries have 0.98 of the speed of a copy if the batch fills the GPU and every query head has its
    // own keys. Where several query heads share keys, PackGQA kernels are 1.1 to 1.8 times as fast with 64 queries from
    // 4096 keys on (with 2048 and batches of 8 they are 0.8 times), and as fast with 128. So other calls are split only
    // for sequences so long that large batches of them are rare: one sequence alone fills the GPU then, and is up to 4
    // times as fast.
    constexpr int64_t kLongBytes = 128 << 20, kLeastPackGqaKeys = 4096;
    const bool is_long = p.seqlen_k * p.heads_k * (p.head_dim + p.head_dim_v) * key_bytes(p) >= kLongBytes;
    if (is_long) return packs ? kMostPackGqaQueries : kMostFewQueries;
    return packs && p.group_size() > 1 && p.seqlen_k >= kLeastPackGqaKeys ? kMostFewQueries : kFewQueries;
  }

  // Whether an invariant dense call has so few queries for its keys that it runs in chunks, if its kernel has them.
  static bool prefers_chunks(const AttnParams& p) {
    return !p.is_varlen() && !p.has_mask() && p.batch * p.heads_q > 0 && p.seqlen_q > 0 && p.seqlen_q <= kFewQueries &&
           p.seqlen_k >= kLeastSplitKeys;
  }
  // Whether the forward's row has chunks, and room for the call in them.
  static bool has_chunks(const DecodeParams& p, const TableRow& row) {
    constexpr int64_t kMostBytes = 256 << 20;  // bytes of partial results of several queries
    if (row.stage != Stage::kSm90Invariant) return false;
    const ChunkKernel kernel = chunk_tile(row);
    if (p.is_varlen() || p.seqlen_q > kernel.rows || p.head_dim_v > decode::kMostChunkColumns) return false;
    const int64_t rows = decode::partial_rows(p, kernel);
    return rows <= std::numeric_limits<int32_t>::max() &&
           (p.seqlen_q == 1 || rows * decode::columns_of(p) * 4 <= kMostBytes);
  }

  // The choice of a forward that is split; a forward that is not has no row here. The kernels of sm80/ and sm90/ keep
  // the calls with a Mask or a BlockMask (they skip its hidden tiles), dropout, a dense or a relative bias, or
  // `centres` (an output for the gradients of biases), and invariant calls. The rows of the others are aligned, or
  // copies of them will be.
  Choice few_queries(const AttnParams& p) const {
    constexpr int64_t kWideColumns = 256, kMostNarrowRows = 64;  // above kWideColumns a tile has 16 rows
    // These come first, because every forward asks. Without query heads there may be no KV heads to divide by.
    static_assert(kMostPackGqaQueries >= kMostFewQueries && kMostPackGqaQueries >= kFewQueries);
    if (p.seqlen_q > kMostPackGqaQueries || p.seqlen_k < kLeastSplitKeys || p.heads_q == 0) return {};
    if (p.invariant || p.has_mask() || p.has_dropout() || p.relative_bias || p.bias.data || p.centres.data) return {};
    const DecodeParams call = cached_call(p);
    const TableRow pack_gqa = pack_gqa_row(call);
    if (p.seqlen_q > most_few_queries(p, static_cast<bool>(pack_gqa))) return {};
    if (std::max(p.head_dim, p.head_dim_v) > kWideColumns && p.seqlen_q * p.group_size() > kMostNarrowRows) return {};
    // The kernel numbers the units (decode/split/plan.h) in 32 bits.
    const int64_t tiles = p.seqlen_q * p.group_size() / 16 + 1,
                  units = batch_entries(p) * key_rows(p) / decode::kUnitKeys + p.batch;
    if (p.heads_k * units > std::numeric_limits<int32_t>::max() / (2 * tiles)) return {};
    if (p.dtype == DType::kFloat64 || !has_shared_memory(call)) return {};
    return split_kv(call, pack_gqa);
  }

  // pack_gqa: the PackGQA kernel, if the call has one and its rows are aligned.
  Choice split_kv(const DecodeParams& p, const TableRow& pack_gqa) const {
    if (pack_gqa) return {pack_gqa, Way::kPackGqa, Inputs::kAsGiven};
    return {split_row(p), Way::kSplit, Inputs::kAsGiven};
  }

  // The PackGQA kernel for a call whose rows are aligned; none: it runs tiles of decoding.
  TableRow pack_gqa_row(const DecodeParams& p) const {
    const TableRow row = hoppers<Stage::kSm90PackGqa>(forward_call(p));
    if (!row || p.is_fp8 || p.invariant || p.num_splits > 0 || p.cache.block_table) return {};
    if ((p.is_varlen() && !p.splits_alone) || p.seqlen_q > kMostPackGqaQueries) return {};
    if (p.batch * p.heads_q * query_rows(p) == 0 || p.cache.entries == 0 || p.seqlen_k < kLeastSplitKeys) return {};
    const decode::PackGqaKernel kernel = pack_gqa_tile(row);
    // Tiles of 16 rows of the other kernels are as fast; in a forward with more than 128 columns 0.86 times. Few
    // queries leave most rows of a block empty, which costs nothing as long as there is one tile.
    const int64_t rows = p.seqlen_q * p.group_size(), least = kernel.columns > 128 ? 9 : 17;
    const int64_t padded = tile_count(p.seqlen_q, decode::kBlockRows) * decode::kBlockRows * p.group_size();
    // Works are numbered in 32 bits.
    const int64_t tiles = p.batch * p.heads_k * tile_count(padded, kernel.rows);
    if (tiles > std::numeric_limits<int32_t>::max() / (2 * decode::kMostParts)) return {};
    return rows >= least && (padded <= kernel.rows || 2 * rows >= padded) ? row : TableRow{};
  }

  static unsigned key_type(const DecodeParams& p) {
    if (p.is_fp8) return kE4m3;
    return p.dtype == DType::kFloat16 || p.dtype == DType::kBFloat16 ? type_bit(p.dtype) : kFp32;
  }
  // The row of the smallest tile of the class of head dims.
  static int first_split_row(const DecodeParams& p) {
    const unsigned type = key_type(p);
    const int columns = decode::class_of(type, std::max(p.head_dim, p.head_dim_v));
    int i = 0;
    while (!(kernel_table::kDecode[i].types & type) || kernel_table::kDecode[i].head_dim != columns) ++i;
    return i;
  }
  // The smallest tile that holds all rows of a KV head, otherwise the largest one that the GPU has shared memory for.
  TableRow split_row(const DecodeParams& p) const {
    const unsigned type = key_type(p);
    const int64_t rows = p.heads_k > 0 ? p.seqlen_q * p.group_size() : 0;
    const int begin = first_split_row(p), columns = kernel_table::kDecode[begin].head_dim;
    TableRow found;
    int held = 0;  // rows of its tile
    for (int i = begin; i < static_cast<int>(std::size(kernel_table::kDecode)); ++i) {
      const DecodeRow& row = kernel_table::kDecode[i];
      if (!(row.types & type) || row.head_dim != columns) continue;
      if (found && rows <= held) break;
      const decode::TileSizes sizes = decode::sizes_of(type, row);
      if (sizes.heads > 1 && !has_adjacent_heads(p, sizes.heads, columns)) continue;
      if (found && sizes.query_bytes + sizes.team_bytes > gpu_.block_shared - decode::kStaticBytes) break;
      found = {Stage::kDecode, i, type};
      held = sizes.rows;
    }
    return found;
  }
  // Whether rows of `heads` adjacent KV heads are one row in memory, which a tile of as many heads reads.
  static bool has_adjacent_heads(const DecodeParams& p, int heads, int kernel_columns) {
    const auto adjacent = [&](const TensorView& t, int64_t columns) {
      return columns == kernel_columns && t.head_stride == columns && rows_are_aligned(t, 0, key_bytes(p));
    };
    return p.heads_k % heads == 0 && adjacent(p.k, p.head_dim) && adjacent(p.v, p.head_dim_v);
  }

  // packs: whether a PackGQA kernel computes the call if it is no prefill.
  bool is_prefill(const DecodeParams& p, bool packs) const {
    using namespace decode;
    if (p.invariant) return p.batch * p.heads_q > 0 && packed_queries(p) > 0;
    // With fewer queries, or with fewer query tiles than half of the multiprocessors, the forward kernels do not fill
    // the GPU; split-KV does. Gathering pages pays off if every key is used by many rows.
    constexpr int64_t kManyRows = 1024, kTileQueries = 128;
    if (p.num_splits > 0) return false;  // bit-identical in every batch: the kernel must not depend on the batch size
    // Calls that the forward computes on the decoding kernels stay there: these would read a widened copy as fp8.
    if (p.seqlen_q <= (packs ? kMostPackGqaQueries : kMostFewQueries) || p.has_intervals() || p.cache.entries == 0)
      return false;
    if (p.alibi_batch_stride % 2 != 0) return false;
    // Fp8 queries are not widened here, and keys and values are widened in whole vectors only.
    const bool odd_descales = (p.descale_k.batch_stride | p.descale_v.batch_stride) % 2 != 0;
    if (p.is_fp8 && (p.dtype == DType::kFloat8 || odd_descales || (p.head_dim | p.head_dim_v) % 8 != 0)) return false;
    if (2 * p.batch * p.heads_q * tile_count(p.seqlen_q, kTileQueries) < gpu_.multiprocessors) return false;
    if (!p.is_fp8 && !is_aligned(p)) return false;
    if (!has_even_rows(p, p.out) || !(p.rotary.cos || has_even_rows(p, p.q)) || packed_queries(p) > kMostRows)
      return false;
    if (gathers(p)) {
      // The copy must not exceed the size of the cache: block tables may have room for far more pages.
      return p.seqlen_q * p.group_size() >= kManyRows &&
             all_rows(p) <= std::min(kMostRows, p.cache.entries * p.cache.page_size);
    }
    return entry_rows(p, p.k) > 0 && entry_rows(p, p.k) == entry_rows(p, p.v) && all_rows(p) <= kMostRows;
  }

  // --- short sequences, whose keys a thread block has in shared memory ---------------------------------------------
  // Figures are microseconds on an H200 in bf16. The batch size decides between kernels with the same bits only (see
  // above): kFewTiles and kPlain, and the forward of short sequences, kBrief and kBriefFewTiles.

  // wgmma, for dense calls, beside sm80/whole_heads and the forward of long sequences: 64x197 12x64 48.7, 52 and 59;
  // 32x128 12x64 9.4, 11.5 and 11.9; 64x77 12x64 16.3, 16.4 and 22.1. The class of 32 columns has no kernel.
  static bool prefers_short_forward(const AttnParams& p) {
    return p.seqlen_k > 80 && p.seqlen_k <= sm90::kMostBoxRows && std::max(p.head_dim, p.head_dim_v) > 32;
  }
  // mma.sync, beside sm80/ and sm90/: 64x256 8x32 26.6, 42.6 and 36.2; 32x256 16x64 58 and 48 (sm80/); 128x64
  // 16x128 39.5, 73.9 and 48.0. With options, beside sm90/: a bias 256x64 6x32 24.8 and 47.1, 64x96 12x64 33.1
  // and 28.6, by its own kernel 128x128 4x32 16.1 and 19.5, but 64x128 8x64 30.1 and 20.4; one whose rows TMA cannot
  // copy 64x197 12x64 142 and 180, 64x227 4x32 52.8 and 61.6, but 16x255 12x32 62.7 and 53.9. Slopes 64x197 12x32 70
  // and 85, 64x96 12x64 28.0 and 24.6; documents 64x128 12x32 46.5 and 34.1. Beside sm80/: 64x256 12x64 145 and 181;
  // but dropout 64x128 12x64 41.9 and 36.0.
  int64_t most_keys_of_whole_heads(const AttnParams& p, Options kernel, int columns) const {
    const Options options = options_of(p);
    if (kernel == kPlain && is_hopper() && columns > 64) return p.seqlen_q <= 512 ? 64 : 0;
    if (kernel == kPlain && is_hopper() && columns > 32 && (!p.is_varlen() || p.seqlen_q > 512)) return 80;
    if (kernel == kPlain) return columns > 64 ? 128 : columns > 32 ? 208 : sm80::kMostHeadKeys;
    if (is_hopper() && options & kOtherBiasOrOrigin) return columns > 32 ? 208 : 232;
    if (is_hopper() && columns > 32) return 64;
    if (is_hopper()) return kernel == kAnyBias ? 128 : options == kScores ? 208 : 96;
    return options & (kScores | kBias | kOtherBiasOrOrigin) ? sm80::kMostHeadKeys : 96;
  }
  // The backward, beside sm80/ and the faster ones of sm90/: 64x197 12x32 87.8, 174 and 101; 64x256 8x32 68.4, 132 and
  // 64.7; 64x96 12x64 67.5, 103 and 70.0; 64x128 12x64 78.5, 124 and 67.9. With dropout beside sm80/: 64x64 12x64 42.5
  // and 67.6, 64x96 102 and 90. With the forward: a bias alone 64x256 4x32 119 and 226;
  // on Hopper documents 64x96 12x32 81.7 and 124, 64x128 12x32 139 and 129, 64x96 12x64 142 and 134; slopes 64x96
  // 12x32 88.5 and 122; a bias of keys 64x96 12x64 146 and 235, 64x128 12x64 185 and 257. Packed, where sm90/ has the
  // general kernel alone, 32x128 12x64 52.5 and 64.2, 64x256 8x32 107 and 143, but 64x197 12x64 233 and 214.
  int64_t most_keys_of_whole_heads(const AttnGradParams& p, Options kernel, int columns) const {
    if (kernel == kPlain && is_hopper() && columns > 32) return p.is_varlen() ? 128 : 96;
    if (kernel == kPlain && is_hopper()) return p.is_varlen() ? sm80::kMostHeadKeys : 208;
    if (kernel == kPlain) return columns > 64 ? 128 : sm80::kMostHeadKeys;
    if (kernel == kAnyBias) return sm80::kMostHeadKeys;
    const Options options = options_of(p);
    if (!is_hopper()) return options & (kScores | kBias | kOtherBiasOrOrigin) ? 128 : 64;
    if (options & kDropout) return 64;
    return has_gradient_of_keys(p) ? 128 : columns > 32 ? 64 : 96;
  }
  // A thread block of the backward walks over all queries of a KV head: 64x256:64 8x64 60.0, 92.9 and 41.8; 64x512:64
  // 8x64 109, 169 and 69; 4x4096:77 8x64 364, 306 and 119.
  bool queries_suit_whole_heads(const AttnGradParams& p, Options kernel, int columns) const {
    const int64_t queries = p.seqlen_q * p.group_size();
    if (kernel == kAnyBias || (kernel == kPlain && !is_hopper())) return queries <= 512;
    return queries <= 256 && (columns <= 32 || p.seqlen_q <= 128);
  }

  // Whether the GPU has the shared memory and the grid for a plan.
  bool has_room(int64_t shared_bytes, int64_t blocks) const {
    return shared_bytes <= gpu_.block_shared && blocks <= std::numeric_limits<int32_t>::max();
  }
  TableRow short_forward_row(const AttnParams& p, const KernelCall& call) const {
    const TableRow row = hoppers<Stage::kSm90ShortForward>(call);
    if (!row || call.is_invariant || p.is_varlen() || !may_run_short_kernels(p) || !prefers_short_forward(p)) return {};
    if (const TableRow tiled = tiled_forward_row(p, call); fills_brief_tiles(p, tiled)) return {};
    const auto& kernel = table_row<Stage::kSm90ShortForward>(row);
    const int columns = kernel.head_dims.qk;
    const auto plan = sm90::ShortForwardPlan::of(p, compiled_tile(kernel.tiles), columns, gpu_.multiprocessors);
    return has_room(plan.shared_bytes(columns), plan.blocks(p)) ? row : TableRow{};
  }
  // The row of a forward in tiles. A plain one on Hopper may have other tiles:
  // - kBrief, if fewer of their products are empty. At D = 64, 256 queries in place of 192: 32x512 32x64 causal 126 and
  //   145, 64x512 16x64 178 and 184, 16x1024 32x64 321 and 323, but 16x768 32x64 185 and 176. At D = 128, 128 queries
  //   and keys in place of 192 and 80: 32x256 16x128 43.6 and 57.2, 32x512 145 and 153, 16x1024 causal 157 and 166, but
  //   16x768 149 and 145, 8x2048 457 and 442, 64x80 12x128 26.7 and 23.1, 8x128:4096 73.5 and 73.0.
  // - kFewTiles and kBriefFewTiles, which have the bits of the others, so that the batch size may decide, if they leave
  //   less of the GPU idle. A query row takes 1.25 times as long in them: 1x1500 20x64 37.2 and 43.2, 20x128 45.1 and
  //   57.6, 4x1024 8x64 causal 19.1 and 21.4; but 16x512 12x64 42.9 and 41.1.
  TableRow tiled_forward_row(const AttnParams& p, const KernelCall& call) const {
    const TableRow plain = forward_row(call);
    if (call.options != kPlain || call.is_invariant || p.is_varlen()) return plain;
    const TableRow brief = may_run_short_kernels(p) ? of_same_class(plain, call, kBrief) : TableRow{};
    const bool is_brief = brief && prefers_brief(p, forward_tile(brief), forward_tile(plain));
    const TableRow row = is_brief ? brief : plain;
    const TableRow few = of_same_class(plain, call, is_brief ? kBriefFewTiles : kFewTiles);
    const auto rows = [&](const auto& tile) { return sm90::busiest_rows(p, tile, gpu_.multiprocessors); };
    return few && 5 * rows(forward_tile(few)) < 4 * rows(forward_tile(row)) ? few : row;
  }
  static bool prefers_brief(const AttnParams& p, const sm90::ForwardTile& brief, const sm90::ForwardTile& plain) {
    const int64_t products = sm90::padded_products(p, brief), others = sm90::padded_products(p, plain);
    if (brief.queries() > plain.queries()) return 20 * products <= 19 * others;
    constexpr int64_t kMostKeys = 256, kLeastQueries = 129;  // a call needs to meet one of the two
    const auto keys = [&p](const auto& tile) { return tile_count(p.seqlen_k, tile.keys) * tile.keys; };
    const bool fits = 4 * products <= 3 * others || (9 * products <= 8 * others && keys(brief) <= keys(plain));
    return fits && (p.seqlen_k <= kMostKeys || p.seqlen_q >= kLeastQueries);
  }
  // Whether kBrief beats the forward of short sequences, whose bits it has: 64x197 12x64 43.4 and 48.7; but 64x160 33.8
  // and 30.1, 64x128:256 34.3 and 31.3. It needs enough tiles: 12x256 64x64 41.9 and 51.6, but 16x256 12x64 15.9 and
  // 13.7.
  bool fills_brief_tiles(const AttnParams& p, const TableRow& row) const {
    constexpr int64_t kLeastKeys = 161, kLeastQueries = 129;
    if (row.stage != Stage::kSm90Forward || p.seqlen_k < kLeastKeys || p.seqlen_q < kLeastQueries) return false;
    const auto& kernel = table_row<Stage::kSm90Forward>(row);
    const int64_t tiles = tile_count(p.seqlen_q, forward_tile(row).queries()) * p.batch * p.heads_q;
    const int64_t rounds = tile_count(tiles, gpu_.multiprocessors);
    return kernel.options == kBrief && rounds > 1 && 4 * tiles >= 3 * rounds * gpu_.multiprocessors;
  }
  // The row for the same head dims as `plain`, if it is one of Hopper's forwards.
  TableRow of_same_class(const TableRow& plain, KernelCall call, Options options) const {
    if (plain.stage != Stage::kSm90Forward) return {};
    call.options = options;
    const auto& dims = table_row<Stage::kSm90Forward>(plain).head_dims;
    const TableRow row = first<Stage::kSm90Forward>(call);
    return row && table_row<Stage::kSm90Forward>(row).head_dims == dims ? row : TableRow{};
  }
  static sm90::ForwardTile forward_tile(const TableRow& row) {
    return compiled_tile(table_row<Stage::kSm90Forward>(row).tiles);
  }
  TableRow heads_forward_row(const AttnParams& p, const KernelCall& call) const {
    const TableRow row = first<Stage::kSm80HeadsForward>(sm80::heads_call(p, call, 128));
    if (!row || call.is_invariant || !may_run_short_kernels(p)) return {};
    const auto& kernel = table_row<Stage::kSm80HeadsForward>(row);
    const int columns = kernel.head_dims.qk;
    if (p.seqlen_k > most_keys_of_whole_heads(p, kernel.options, columns)) return {};
    const auto tile = compiled_tile(kernel.tiles);
    const auto plan = sm80::HeadsForwardPlan::of(p, tile, gpu_.multiprocessors, kernel.options);
    return has_room(plan.shared_bytes(columns), plan.blocks(p)) ? row : TableRow{};
  }
  TableRow heads_backward_row(const AttnGradParams& p, const KernelCall& call) const {
    const TableRow row = first<Stage::kSm80HeadsBackward>(sm80::heads_call(p, call, sm80::kMostHeadKeys));
    if (!row || !sm80::runs_in_whole_heads(p)) return {};
    const auto& kernel = table_row<Stage::kSm80HeadsBackward>(row);
    const int columns = kernel.head_dims.qk;
    const auto plan = sm80::HeadsBackwardPlan::of(p, compiled_tile(kernel.tiles), kernel.options);
    const bool fits = p.seqlen_k <= most_keys_of_whole_heads(p, kernel.options, columns) &&
                      plan.warps() <= compiled_tile(kernel.tiles).warps &&
                      has_room(plan.shared_bytes(columns), p.batch * p.heads_k);
    if (!fits && kernel.options == kAnyBias) return heads_backward_row(p, sm80::with_every_option(call));
    return fits && queries_suit_whole_heads(p, kernel.options, columns) ? row : TableRow{};
  }

  // --- values in e4m3 ------------------------------------------------------------------------------------------------

  // With few keys a kernel that transposes values itself is faster than one before it.
  static bool transposes_itself(const AttnParams& p, const TableRow& row) {
    constexpr int64_t kMostTransposedKeys = 2048;
    if (row.stage != Stage::kSm90Forward || row.type != kE4m3) return false;
    const auto& kernel = table_row<Stage::kSm90Forward>(row);
    return sm90::can_transpose(includes(kernel.options, kIntervals), kernel.head_dims.v) &&
           p.seqlen_k <= kMostTransposedKeys;
  }

  // --- backwards -----------------------------------------------------------------------------------------------------

  // The kernel of a backward with few queries: dense float16 and bfloat16 calls with head dims up to 128, without
  // options of a score and biases, whose rows of one KV head fit in a tile. With more rows the kernels of sm80/ and
  // sm90/ keep the tensor cores busy.
  TableRow few_queries_backward_row(const AttnGradParams& p, const KernelCall& call) const {
    if (p.has_score_option() || p.has_bias() || p.has_mask() || p.has_dropout()) return {};
    // The rows of a KV head must fit in a tile, but a varlen sequence may have more queries than max_seqlen_q.
    if (p.is_varlen() || p.seqlen_q == 0 || p.heads_q == 0 || p.seqlen_k < kLeastSplitKeys) return {};
    // The tile of 16 rows of the kernels for every GPU is as fast: on an H200 1 x 1 x 65536 keys of 32:8 heads of 128
    // are read and written at 0.84 of the bandwidth of a copy, with Hopper's own kernel at 0.83; 8 x 4 x 16384 at 0.85
    // and 0.83.
    constexpr int64_t kNarrowRows = 16;
    const int64_t rows = p.seqlen_q * p.group_size();
    const bool aligned = rows_are_aligned(p.dk, p.head_dim, 2) && rows_are_aligned(p.dv, p.head_dim_v, 2);
    if (const TableRow own = hoppers<Stage::kSm90FewQueriesBackward>(call); own && rows > kNarrowRows && aligned) {
      if (rows <= compiled_tile(table_row<Stage::kSm90FewQueriesBackward>(own).tiles).rows) return own;
    }
    int i = -1;
    for (const FewQueriesRow& row : kernel_table::kFewQueriesBackward) {
      ++i;
      if (!(row.types & call.type) || std::max(p.head_dim, p.head_dim_v) > row.head_dim) continue;
      if (rows > 16 * row.row_tiles) continue;
      if (decode::shared_bytes_of(row) > gpu_.block_shared) return {};
      return {Stage::kFewQueriesBackward, i, call.type};
    }
    return {};
  }

  // Whether a thread block computes whole heads of many short sequences (docs/sm90_heads.md). Its sums have to stay in
  // the L2 cache beside the rows of the heads, of which a walk with a right bound reads half as many. Each thread block
  // has to take about the same number of heads. A deterministic call does not run so, because how many heads it has
  // must not change the bits of one.
  bool runs_by_heads(const AttnGradParams& p, const TableRow& row) const {
    constexpr int64_t kMostKeys = 1024, kMostSums = 20 << 20, kMostBoundedSums = 40 << 20;
    if (p.is_varlen() || p.deterministic || p.heads_q == 0 || p.seqlen_q == 0) return false;
    if (p.seqlen_k == 0 || p.seqlen_k > kMostKeys) return false;
    // The first key tile, which comes last, has to meet every query.
    const BasicMask<int64_t> mask(p, p.seqlen_q, p.seqlen_k);
    if (mask.window_left != mask.kUnbounded || mask.keys_of(0, 1).end == 0) return false;
    if (!rows_are_aligned(p.out, p.head_dim_v, element_bytes(p))) return false;
    const int64_t heads = p.batch * p.heads_k, at_once = gpu_.multiprocessors;
    const int64_t rounds = (heads + at_once - 1) / at_once;
    const int64_t most = mask.window_right == mask.kUnbounded ? kMostSums : kMostBoundedSums;
    const sm90::BackwardTile tile = compiled_tile(table_row<Stage::kSm90Heads>(row).tiles);
    return heads > 0 && 4 * heads >= 3 * rounds * at_once &&
           sm90::head_sum_vectors(p, tile, sm90::head_blocks(p, at_once)) * 16 <= most;
  }

  // Whether the query heads of a group add up their dk and dv (QueryHeads in sm90/shared/backward_policies.cuh), in any
  // order, instead of sharing a walk. It costs the additions, and pays in two cases. Walks over whole groups leave
  // multiprocessors idle: few of them are in one round, or there is one round only, in which causal walks differ in
  // length. Or, with a right bound, thread blocks soon read different query heads, since their walks differ in length,
  // and the group is larger than the L2 cache holds for all that run together.
  bool adds_over_groups(const AttnGradParams& p) const {
    constexpr int64_t kKeys = 128, kLargeGroup = 24 << 20;  // bytes
    if (p.deterministic || p.heads_q <= p.heads_k) return false;
    const int64_t tiles = tile_count(p.seqlen_k, kKeys) * p.batch * p.heads_k, at_once = gpu_.multiprocessors;
    const bool bounded = p.window_right != kUnbounded;
    if (4 * tiles < 3 * at_once || (bounded && tiles <= at_once)) return true;
    return bounded && p.window_left == kUnbounded && group_bytes(p, 2) >= kLargeGroup;
  }

  const Family family_;
  const Gpu gpu_;
};

}  // namespace flashattn_ext
