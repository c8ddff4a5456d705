// Invariant decoding on Hopper: the kernel of forward.cuh for tasks, each one chunk of keys (cuda/host/chunks.h) of a
// sequence and KV head, whose result goes to ChunkPartials.
#pragma once

#include "cuda/score/chunks.cuh"
#include "cuda/sm90/forward/forward.cuh"

namespace flashattn_ext::sm90 {

// The part of a tile of queries that is within a chunk.
struct ChunkWork : ForwardWork {
  template <int kKeys>
  __device__ __forceinline__ Limits tiles_of(const AttnParams& p, int row) const {
    return within_chunk(ForwardWork::tiles_of<kKeys>(p, row));
  }
  __device__ __forceinline__ Limits within_chunk(const Limits& all) const {
    const int begin = max(all.begin, first), end = min(all.end, last + 1);
    return begin < end ? Limits{begin, end} : Limits{first, first};
  }
};

// The mask of rows of which `group` are heads of one query.
struct GroupedMask {
  Mask32 mask;
  int group;
  __device__ __forceinline__ Limits keys_of(int begin, int end) const {
    return mask.keys_of(begin / group, (end - 1) / group + 1);
  }
};
struct GroupedWork : ChunkWork {
  int group;
  __device__ GroupedMask mask(const AttnParams& p) const { return {Mask32(p, p.seqlen_q, length_k), group}; }
  template <int kKeys>
  __device__ __forceinline__ Limits tiles_of(const AttnParams& p, int row) const {
    const Limits none{first, first};
    if (row >= length_q) return none;
    const Limits keys = mask(p).keys_of(row, min(row + 64, length_q));
    return keys.begin < keys.end ? within_chunk({keys.begin / kKeys, (keys.end - 1) / kKeys + 1}) : none;
  }
};

// What invariant forwards and decoding share.
template <class T, int kHeadDim, class TileOfRow, class Policies, class Chunking>
struct ChunkedForward : Forward<T, kHeadDim, kHeadDim, TileOfRow, Policies, Chunking> {
  using Base = Forward<T, kHeadDim, kHeadDim, TileOfRow, Policies, Chunking>;
  using Base::Base;
  using typename Base::SeenWork;
  static constexpr int kChunkTiles = kTilesOfChunk<Base::kKeys>;

  // seen(work): the SeenWork of a Work; end(work, sums): takes the sums of a chunk, and `out`.
  template <class Seen, class End>
  __device__ __forceinline__ void compute_chunks(const Seen& seen, const End& end) {
    const typename Base::Generator generator(this->p);
    if (this->group == 0) this->pass_phase(Base::kGroups - 1);
    const auto receive = [&] { return seen(receive_work(this->shared, &this->work_parity)); };
    // The loop ends by its condition: with a return inside, ptxas does not keep the places in the rings in uniform
    // registers, and a step takes 1.25 times as long.
    for (SeenWork work = receive(); work.exists(); work = receive()) {
      ChunkSum sums[2];
      compute_chunk(work, generator, sums);
      end(work, sums);
    }
  }

 private:
  __device__ __forceinline__ void compute_chunk(const SeenWork& work, const typename Base::Generator& generator,
                                                ChunkSum (&sums)[2]) {
    set_zero(this->out);
    this->softmax.start(-infinity());
    if (work.sees_keys()) this->compute_tile(work, generator);
    bool poisoned[2] = {false, false};
    Base::Visibility::take_poisoned(this->shared, this->work_parity ^ 1, this->warp_row, poisoned);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sums[r] = {this->softmax.max[r], this->softmax.total(r)};
      if (!poisoned[r]) continue;
#pragma unroll
      for (int n = 0; n < Base::kOutTiles; ++n) this->out[n][2 * r] = this->out[n][2 * r + 1] = not_a_number();
    }
  }
};

struct TaskGrid : TileGrid {
  ChunkPartials partials;
};

template <class T, int kHeadDim, class TileOfRow, class Policies>
struct InvariantDecode : ChunkedForward<T, kHeadDim, TileOfRow, Policies, ChunksApart<GroupedWork>> {
  using Base = ChunkedForward<T, kHeadDim, TileOfRow, Policies, ChunksApart<GroupedWork>>;
  using Base::kChunkTiles, Base::kGroups, Base::kKeys, Base::kOutTiles, Base::kPanels;
  using Base::out, Base::p, Base::shared, Base::softmax;
  using typename Base::Element, typename Base::Score, typename Base::Shared, typename Base::Visibility,
      typename Base::Work;

  struct Loader : Base::Loader {
    __device__ void load_tiles(const TileGrid& grid) {
      each_work(
          this->p, grid, [&](int tile) { return grid.next(tile); },
          [&](const Work& work, int key_start) {
            publish_work(this->shared, work, &this->work_parity);
            load_task(work, key_start, static_cast<const TaskGrid&>(grid).partials);
          });
      publish_work(this->shared, Work{}, &this->work_parity);
    }
    __device__ void load_task(const Work& work, int key_start, const ChunkPartials& partials) {
      const int hk = work.h / (static_cast<int>(this->p.group_size()) / partials.group);
      // The rows behind the queries keep what was there; nothing reads their results.
      const auto load_q = [&](auto& to, ptx::Barrier& full) {
        ptx::barrier_arrive_expect(&full, kPanels * partials.rows * static_cast<int>(sizeof(to[0][0])));
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
          ptx::tma_load(to[panel], &this->maps.q, &full, panel * kPanelColumns, 0, work.query_start, work.h);
        }
      };
      const auto load_rows = [&](auto& to, ptx::Barrier& full, const CUtensorMap& map, int n) {
        load_panels(to, full, map, key_start + n * kKeys, hk, 0);
      };
      const auto load_pages = [&](auto& to, ptx::Barrier& full, const CUtensorMap& map, int n) {
        load_from_pages(to, full, map, n, work, hk, partials.pages);
      };
      partials.pages.table ? this->load_steps(work, load_q, load_pages, load_pages)
                           : this->load_steps(work, load_q, load_rows, load_rows);
    }
    // The rows behind the last box of the sequence keep what was there; their scores are masked, and the consumers zero
    // their values.
    template <int kTilePanels>
    __device__ __forceinline__ void load_from_pages(Element (&to)[kTilePanels][kKeys][kPanelColumns],
                                                    ptx::Barrier& full, const CUtensorMap& map, int n, const Work& work,
                                                    int hk, const KeyPages& pages) {
      const int key = n * kKeys, left = work.length_k - key;
      const int rows = (min(left, kKeys) + pages.box_rows - 1) / pages.box_rows * pages.box_rows;
      ptx::barrier_arrive_expect(&full, rows * kTilePanels * static_cast<int>(sizeof(to[0][0])));
      const int* page = pages.table + work.b / 2 * pages.table_stride + key / pages.page_size;
      int place = key % pages.page_size, next = *page;
#pragma unroll 1
      for (int row = 0; row < rows; row += pages.box_rows) {
        // The next entry of the table arrives while this box is copied.
        const int entry = min(max(next, 0), pages.entries - 1), of_page = place;
        place += pages.box_rows;
        const bool ends = place == pages.page_size;
        page += ends && row + pages.box_rows < rows;
        next = *page;
        place = ends ? 0 : place;
#pragma unroll
        for (int panel = 0; panel < kTilePanels; ++panel) {
          ptx::tma_load(to[panel][row], &map, &full, panel * kPanelColumns, of_page, hk, entry);
        }
      }
    }
  };

  const ChunkPartials& partials;

  __device__ InvariantDecode(Shared& shared, const AttnParams& params, const Score& score, int group,
                             const TaskGrid& grid)
      : Base(shared, params, score, group, grid), partials(grid.partials) {}

  // Calls body(work, first row of the keys) for every task of this thread block; as each_forward_work. Chunks behind
  // the last key of a sequence are left out.
  template <class Take, class Body>
  static __device__ __forceinline__ void each_work(const AttnParams& p, const TileGrid& tasks, const Take& take,
                                                   const Body& body) {
    const ChunkPartials& partials = static_cast<const TaskGrid&>(tasks).partials;
    for (int task = static_cast<int>(blockIdx.x); task < tasks.tiles;) {
      const int following = Visibility::kTakesLate ? 0 : take(task);
      const int chunk = task % partials.chunks, head = task / partials.chunks, b = head / partials.heads;
      Work work{2 * b, head % partials.heads};
      const Sequence keys = key_sequence(p, work.b);
      const int queries = static_cast<int>(p.seqlen_q);
      work.query_start = b * queries;
      work.length_q = partials.rows;
      work.length_k = static_cast<int>(keys.length);
      const Limits visible = Mask32(p, queries, work.length_k).keys_of(0, queries);
      const Limits chunks = chunks_of<kKeys>(visible);
      if (chunk >= chunks.begin && chunk < chunks.end) {
        work.first = max(visible.begin / kKeys, chunk * kChunkTiles);
        work.last = min((visible.end - 1) / kKeys, (chunk + 1) * kChunkTiles - 1);
        body(work, static_cast<int>(keys.start));
      }
      task = Visibility::kTakesLate ? take(task) : following;
    }
  }

  __device__ __forceinline__ void compute_tiles() {
    this->compute_chunks([&](const Work& work) { return GroupedWork{{work}, partials.group}; },
                         [&](const GroupedWork& work, const ChunkSum(&sums)[2]) { store_partial(work, sums); });
  }

  // Writes what cuda/decode/prefill/chunks.cu adds up. The rows of a sequence are one tile.
  __device__ __forceinline__ void store_partial(const ChunkWork& work, const ChunkSum (&sums)[2]) const {
    const int64_t head = int64_t{work.b / 2} * partials.heads + work.h;
    const int64_t slot = head * partials.chunks + work.first / kChunkTiles;
    const int row = this->warp_row + quad();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row + 8 * r >= partials.rows) continue;
      const int64_t at = slot * partials.rows + row + 8 * r;
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) {
        const int column = n * 8 + 2 * lane_in_quad();
        if (column >= partials.columns) continue;
        *reinterpret_cast<float2*>(partials.out + at * partials.columns + column) =
            make_float2(out[n][2 * r], out[n][2 * r + 1]);
      }
      if (lane_in_quad() == 0) partials.sums[at] = sums[r];
      if (lane_in_quad() == r && partials.largest) partials.largest[at] = softmax.largest_logit;
    }
  }
};

// A box is the rows of a task: `group` heads of all queries of a sequence.
inline CUtensorMap grouped_query_map(const AttnParams& p, const ChunkPartials& partials) {
  const TensorView rows{p.q.data, partials.group * p.q.head_stride, p.q.head_stride, p.q.row_stride};
  return tensor_map(p, rows, p.head_dim, partials.group, p.total_q, partials.heads, partials.group, p.dtype,
                    static_cast<int>(p.seqlen_q));
}

template <class Kernel>
void run_chunk_tasks(const AttnParams& p, const ChunkPartials& partials) {
  ForwardMaps maps{Kernel::kMasks ? query_map(p, p.q, p.head_dim, Kernel::kQueries) : grouped_query_map(p, partials),
                   key_map(p, p.k, p.head_dim, Kernel::kKeys), key_map(p, p.v, p.head_dim_v, Kernel::kKeys)};
  if (const KeyPages& pages = partials.pages; pages.table) {
    AttnParams entries = p;  // entries of the cache, as a dense batch
    entries.cu_seqlens_q = nullptr;
    entries.batch = pages.entries;
    entries.seqlen_k = pages.page_size;
    maps.k = key_map(entries, pages.k, p.head_dim, pages.box_rows);
    maps.v = key_map(entries, pages.v, p.head_dim_v, pages.box_rows);
  }
  const int64_t tasks = p.batch / 2 * partials.heads * partials.chunks;
  TaskGrid grid{};
  static_cast<TileGrid&>(grid) = {{1, 1}, static_cast<int>(tasks), partials.taken};
  grid.partials = partials;
  launch_forward_kernel<Kernel>("sm90 invariant decode", p, tasks, maps, grid);
}

}  // namespace flashattn_ext::sm90
