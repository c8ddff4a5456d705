// Split-KV with the mainloop of forward.cuh (cuda/decode/few_queries/pack_gqa.h). A tile has the rows of several query
// heads of one KV head, in blocks of 16 queries of one head: each consumer warp computes one block, as if its tile of
// queries began with that block. A work is one part of the keys of a tile; its result goes to the slot of the part, or
// to `out` where the sequence has one part.
#pragma once

#include "backend/key_locator.h"
#include "cuda/decode/few_queries/pack_gqa.h"
#include "cuda/sm90/forward/forward.cuh"

namespace flashattn_ext::sm90 {

struct PackGqaGrid : TileGrid {
  decode::Plan plan;
};

// The work of one warp. All warpgroups with rows compute the same key tiles.
struct PackGqaWork : ForwardWork {
  bool has_rows = false;  // whether the warpgroup has rows

  template <int kKeys>
  __device__ __forceinline__ Limits tiles_of(const AttnParams&, int) const {
    return has_rows && sees_keys() ? Limits{first, last + 1} : Limits{first, first};
  }
};

struct PackGqaPolicies : PlainPolicies {
  static constexpr bool kTailsOfCaches = true;
};

template <class T, int kHeadDim, class TileOfRow>
struct PackGqaForward : Forward<T, kHeadDim, kHeadDim, TileOfRow, PackGqaPolicies> {
  using Base = Forward<T, kHeadDim, kHeadDim, TileOfRow, PackGqaPolicies>;
  using Base::kGroups, Base::kKeys, Base::kOutTiles, Base::kQueries, Base::kPanels;
  using Base::out, Base::p, Base::shared, Base::softmax, Base::warp_row;
  using typename Base::Element, typename Base::Generator, typename Base::Score, typename Base::Shared,
      typename Base::Work;
  static constexpr int kBlockRows = decode::kBlockRows, kTileBlocks = kQueries / kBlockRows;
  static constexpr int kGroupBlocks = kTileBlocks / kGroups;

  // A published work has its place in `h`, the first query of its sequence in query_start, and in row0 the
  // complement of the slot of its part, which is negative, or 0 where the result goes to `out`.
  struct PublishedTile {
    int row_tile, hk;
    bool is_first;  // the first part of the sequence

    __device__ __forceinline__ int code(const AttnParams& p) const {
      return 2 * (row_tile * static_cast<int>(p.heads_k) + hk) + (is_first ? 1 : 0);
    }
    static __device__ __forceinline__ PublishedTile of(int code, const AttnParams& p) {
      const int heads = static_cast<int>(p.heads_k), tile = code / 2;
      return {tile / heads, tile % heads, code % 2 == 1};
    }
  };
  static __device__ __forceinline__ int blocks_of(int queries) { return (queries + kBlockRows - 1) / kBlockRows; }

  // The parts of the keys of a sequence for one KV head.
  struct Parts {
    int count, slot;           // parts, and the slot of the first one
    int first_key, part_keys;  // part_keys > 0: part n begins at key first_key + n * part_keys

    // key_start: the first row of the keys in their batch entry.
    static __device__ __forceinline__ Parts of(const AttnParams& p, const decode::Plan& plan, const Work& work,
                                               const Limits& visible, int64_t key_start, int hk) {
      const int per_head = plan.slots / static_cast<int>(p.heads_k);
      // The slots of a packed sequence of more than part_keys keys end before those of the next one begin, because it
      // moves both terms on: `before` by its whole parts, and their minimum by at least one.
      const int before = p.is_varlen() ? static_cast<int>(key_start) / plan.part_keys : 0;
      const int slot = p.is_varlen() ? before + min(work.b, before) : work.b * plan.splits;
      if (plan.part_keys == 0) return {plan.splits, hk * per_head + slot, 0, 0};
      const int first = visible.begin / plan.part_keys;
      const int count = max(1, (visible.end + plan.part_keys - 1) / plan.part_keys - first);
      // The workspace may lack slots for a sequence that exceeds max_seqlen_q or max_seqlen_k, and for cu_seqlens that
      // are invalid.
      const bool is_known = work.length_q <= p.seqlen_q && work.length_k <= p.seqlen_k && slot + count <= per_head;
      return {is_known ? count : 1, hk * per_head + slot, first * plan.part_keys, plan.part_keys};
    }
    // The keys of part n.
    __device__ __forceinline__ Limits keys(const Limits& visible, int n) const {
      if (count > 1 && part_keys > 0) {
        const int begin = first_key + n * part_keys;
        return {max(visible.begin, begin), min(visible.end, begin + part_keys)};
      }
      const IndexRange own = split_keys({visible.begin, visible.end}, kKeys, count, n);
      return {static_cast<int>(own.begin), static_cast<int>(own.end)};
    }
  };

  struct Loader : Base::Loader {
    __device__ void load_tiles(const TileGrid& grid) {
      const decode::Plan& plan = static_cast<const PackGqaGrid&>(grid).plan;
      each_work(
          this->p, grid, [&](int tile) { return grid.next(tile); },
          [&](const Work& work, const KeyRun& keys) {
            publish_work(this->shared, work, &this->work_parity);
            if (work.sees_keys()) load_tile(plan, work, keys);
          });
      publish_work(this->shared, Work{}, &this->work_parity);
    }
    __device__ void load_tile(const decode::Plan& plan, const Work& work, const KeyRun& keys) {
      const PublishedTile place = PublishedTile::of(work.h, this->p);
      const auto load = [&](auto& to, ptx::Barrier& full, const CUtensorMap& map, int n) {
        load_panels(to, full, map, static_cast<int>(keys.row) + n * kKeys, place.hk, static_cast<int>(keys.entry));
      };
      const auto load_q = [&](auto& to, ptx::Barrier& full) { load_queries(to, full, plan, work, place); };
      this->load_steps(work, load_q, load, load);
    }
    __device__ void load_queries(Element (&to)[kPanels][kQueries][kPanelColumns], ptx::Barrier& full,
                                 const decode::Plan& plan, const Work& work, const PublishedTile& place) {
      const int head_blocks = blocks_of(work.length_q), first = place.row_tile * kTileBlocks;
      const int blocks = min(kTileBlocks, plan.group * head_blocks - first), batch = this->p.is_varlen() ? 0 : work.b;
      ptx::barrier_arrive_expect(&full, blocks * kPanels * kBlockRows * kPanelColumns * sizeof(Element));
#pragma unroll 1
      for (int i = 0; i < blocks; ++i) {
        const int head = place.hk * plan.group + (first + i) / head_blocks;
        const int query = work.query_start + (first + i) % head_blocks * kBlockRows;
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
          ptx::tma_load(to[panel][i * kBlockRows], &this->maps.q, &full, panel * kPanelColumns, query, head, batch);
        }
      }
    }
  };

  const PackGqaGrid& grid;

  __device__ PackGqaForward(Shared& shared, const AttnParams& params, const Score& score, int group,
                            const PackGqaGrid& grid)
      : Base(shared, params, score, group, grid), grid(grid) {}

  // Calls body(work, keys) for every work of this thread block; keys: the run that begins with the first key of the
  // sequence. The row tiles of a part are adjacent works, which read the same keys at the same time.
  template <class Take, class Body>
  static __device__ __forceinline__ void each_work(const AttnParams& p, const TileGrid& tiles, const Take& take,
                                                   const Body& body) {
    const decode::Plan& plan = static_cast<const PackGqaGrid&>(tiles).plan;
    const DecodeParams& call = static_cast<const DecodeParams&>(p);
    const int heads = static_cast<int>(p.heads_k);
    for (int i = static_cast<int>(blockIdx.x); i < tiles.tiles; i = take(i)) {
      const int task = i / plan.row_tiles / plan.splits, b = task / heads, part = i / plan.row_tiles % plan.splits;
      PublishedTile place{i % plan.row_tiles, task % heads, part == 0};
      const Sequence queries = query_sequence(p, b);
      const KeyLocator keys(call, b);
      Work work{b};
      work.query_start = static_cast<int>(queries.start);
      work.length_q = static_cast<int>(queries.length);
      work.length_k = static_cast<int>(keys.length);
      const KeyRun run = keys.length > 0 ? keys.run(0, 1) : KeyRun{};
      const Limits visible = work.mask(p).keys_of(0, work.length_q);
      const Parts parts = Parts::of(p, plan, work, visible, run.row, place.hk);
      const bool is_split = parts.count > 1;
      if (plan.splits > 1 && part == 0 && place.row_tile == 0) {
        plan.split_tasks[task] = decode::SplitTask{b, place.hk, 0, is_split ? parts.count : 0, parts.slot, parts.slot};
      }
      if (part >= parts.count) continue;
      const Limits own = parts.keys(visible, part);
      work.first = own.begin / kKeys;
      work.last = own.begin < own.end ? (own.end - 1) / kKeys : work.first - 1;
      work.row0 = is_split ? ~(parts.slot + part) : 0;
      for (; place.row_tile * kTileBlocks < plan.group * blocks_of(work.length_q); place.row_tile += plan.row_tiles) {
        work.h = place.code(p);
        body(work, run);
      }
    }
  }

  __device__ __forceinline__ void compute_tiles() {
    Generator generator(p);
    const decode::Plan& plan = grid.plan;
    if (this->group == 0) this->pass_phase(kGroups - 1);
    for (;;) {
      PackGqaWork work{receive_work(shared, &this->work_parity)};
      if (!work.exists()) return;
      const PublishedTile place = PublishedTile::of(work.h, p);
      const int slot = ~work.row0;
      const int block = place.row_tile * kTileBlocks + warp_row / kBlockRows, head_blocks = blocks_of(work.length_q);
      const int member = block / head_blocks;  // member of the group
      work.has_rows = place.row_tile * kTileBlocks + this->group * kGroupBlocks < plan.group * head_blocks;
      work.h = place.hk * plan.group + min(member, plan.group - 1);
      work.row0 = (member < plan.group ? block % head_blocks * kBlockRows : work.length_q) - warp_row;
      set_zero(out);
      softmax.start(-infinity());
      if (work.sees_keys()) this->compute_tile(work, generator);
      if (slot >= 0) {
        float sink_shrink[2] = {1, 1};
        if (place.is_first && p.has_sink) softmax.end(head_sink(p, work.h), 1, sink_shrink);
        store_partial(work, slot, member, sink_shrink);
      } else {
        this->finish_tile(work);
      }
    }
  }

  __device__ __forceinline__ void store_partial(const Work& work, int64_t slot, int member,
                                                const float (&shrink)[2]) const {
    const decode::Plan& plan = grid.plan;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = softmax.total(r), factor = sum == 0 ? 0.f : shrink[r] / sum;
      const int query = work.row0 + warp_row + quad() + 8 * r;
      if (query >= work.length_q) continue;
      const int64_t at = slot * plan.slot_rows + query * plan.group + member;
      float* const to = plan.partial_out + at * kHeadDim + 2 * lane_in_quad();
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) {
        *reinterpret_cast<float2*>(to + n * 8) = make_float2(out[n][2 * r] * factor, out[n][2 * r + 1] * factor);
      }
      if (lane_in_quad() == 0) plan.partial_sums[at] = {softmax.max[r], sum};
      if (lane_in_quad() == r && p.row_maxima.data) plan.partial_largest[at] = softmax.largest_logit;
    }
  }
};

template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
void pack_gqa(const DecodeParams& p, const decode::Plan& plan) {
  static_assert(kHeadDim == kHeadDimV && kOptions == kPlain);
  using Kernel = PackGqaForward<T, kHeadDim, TileOf<kernel_table::kSm90PackGqa, T, kHeadDim, kOptions, kHeadDimV>>;
  AttnParams entries = p;  // entries of the cache, as a dense batch
  entries.cu_seqlens_q = nullptr;
  entries.batch = p.cache.entries;
  entries.seqlen_k = p.cache.page_size;
  const ForwardMaps maps{query_map(p, p.q, p.head_dim, Kernel::kBlockRows),
                         key_map(entries, p.k, p.head_dim, Kernel::kKeys),
                         key_map(entries, p.v, p.head_dim_v, Kernel::kKeys)};
  PackGqaGrid grid{};
  grid.tiles = plan.blocks;
  grid.plan = plan;
  launch_forward_kernel<Kernel>("sm90 pack_gqa", p, plan.blocks, maps, grid);
}

}  // namespace flashattn_ext::sm90
