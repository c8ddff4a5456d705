// The forward of invariant calls on Hopper: forward.cuh with the keys in chunks (../common/chunks.h). To the mainloop a
// chunk is a tile of queries of its own, which sees the keys of the chunk alone. In a forward the chunks of a tile of
// queries follow one another in a thread block, which keeps the sum of those before in global memory; a tile with one
// chunk does not use it. In decoding a chunk is a task, whose result goes to ChunkPartials.
#pragma once

#include "../common/chunks.cuh"
#include "forward.cuh"

namespace flashattn_ext::sm90 {

struct ChunkGrid : TileGrid {
  ChunkPartials partials;
  float4* sums;  // InvariantForward::kSumVectors for each consumer thread
};

// The part of a tile of queries that is within a chunk.
struct ChunkWork : ForwardWork {
  template <int kKeys>
  __device__ __forceinline__ Limits tiles_of(const AttnParams& p, int row) const {
    const Limits all = ForwardWork::tiles_of<kKeys>(p, row);
    const int begin = max(all.begin, first), end = min(all.end, last + 1);
    return begin < end ? Limits{begin, end} : Limits{first, first};
  }
};

template <class T, int kHeadDim, class TileOfRow, class Policies>
struct InvariantForward : Forward<T, kHeadDim, kHeadDim, TileOfRow, Policies> {
  using Base = Forward<T, kHeadDim, kHeadDim, TileOfRow, Policies>;
  using Kernel = InvariantForward;
  using Base::kGroups, Base::kKeys, Base::kOutTiles, Base::kQueries;
  using Base::out, Base::p, Base::shared, Base::softmax;
  using typename Base::Generator, typename Base::Maps, typename Base::Score, typename Base::Shared,
      typename Base::Visibility, typename Base::Work;
  static constexpr int kChunkTiles = kTilesOfChunk<kKeys>;
  static constexpr int kSumVectors = kOutTiles + 2;  // of a thread: accumulators, sums, largest logits

  struct Loader : Base::Loader {
    __device__ void load_tiles(const TileGrid& grid) {
      each_work(
          this->p, grid, [&](int tile) { return grid.next(tile); },
          [&](const Work& work, int key_start) {
            publish_work(this->shared, work, &this->work_parity);
            if (!work.sees_keys()) return;
            const KeyPages& pages = static_cast<const ChunkGrid&>(grid).partials.pages;
            pages.table ? load_from_pages(work, pages) : this->load_tile(work, key_start);
          });
      publish_work(this->shared, Work{}, &this->work_parity);
    }
    // The rows behind the last box of the sequence keep what was there; their scores are masked, and the consumers zero
    // their values.
    __device__ void load_from_pages(const Work& work, const KeyPages& pages) {
      const int* const table = pages.table + work.b / 2 * pages.table_stride;
      const int hk = work.h / static_cast<int>(this->p.group_size());
      const auto load = [&](auto& to, ptx::Barrier& full, const CUtensorMap& map, int n) {
        constexpr int kTilePanels = sizeof(to) / sizeof(to[0]), kRowBytes = sizeof(to[0][0]);
        const int key = n * kKeys, left = work.length_k - key;
        const int rows = (min(left, kKeys) + pages.box_rows - 1) / pages.box_rows * pages.box_rows;
        ptx::barrier_arrive_expect(&full, rows * kTilePanels * kRowBytes);
        const int* page = table + key / pages.page_size;
        int place = key % pages.page_size;
#pragma unroll 1
        for (int row = 0; row < rows; row += pages.box_rows) {
          const bool is_next = place == pages.page_size;
          page += is_next;
          place = is_next ? 0 : place;
          const int entry = min(max(*page, 0), pages.entries - 1);
#pragma unroll
          for (int panel = 0; panel < kTilePanels; ++panel) {
            ptx::tma_load(to[panel][row], &map, &full, panel * kPanelColumns, place, hk, entry);
          }
          place += pages.box_rows;
        }
      };
      this->load_steps(work, 0, load, load);
    }
  };

  const ChunkGrid& grid;

  __device__ InvariantForward(Shared& shared, const AttnParams& params, const Score& score, int group,
                              const ChunkGrid& grid)
      : Base(shared, params, score, group), grid(grid) {}

  // --- scheduling ---------------------------------------------------------------------------------------------------

  // Calls body(work, first row of the keys) for every chunk of every tile of this thread block; as each_forward_work.
  template <class Take, class Body>
  static __device__ __forceinline__ void each_work(const AttnParams& p, const TileGrid& tiles, const Take& take,
                                                   const Body& body) {
    const ChunkGrid& grid = static_cast<const ChunkGrid&>(tiles);
    if (grid.partials.out) return each_task(p, grid, take, body);
    each_forward_work<kQueries, kKeys, false, Visibility::kTakesLate>(
        p, grid, static_cast<int>(blockIdx.x), take, [&](const Work& work, int key_start) {
          int last = work.last;
          do {
            Work part = work;
            part.last = last;
            if (work.sees_keys()) part.first = max(work.first, last / kChunkTiles * kChunkTiles);
            last = part.first - 1;
            body(part, key_start);
          } while (last >= work.first);
        });
  }
  // The same in decoding. Chunks behind the last key of a sequence are left out.
  template <class Take, class Body>
  static __device__ __forceinline__ void each_task(const AttnParams& p, const ChunkGrid& grid, const Take& take,
                                                   const Body& body) {
    const ChunkPartials& partials = grid.partials;
    for (int tile = static_cast<int>(blockIdx.x); tile < grid.tiles;) {
      const int following = Visibility::kTakesLate ? 0 : take(tile);
      const int chunk = tile % partials.chunks, head = tile / partials.chunks, heads = static_cast<int>(p.heads_q);
      Work work{2 * (head / heads), head % heads};
      const Sequence keys = key_sequence(p, work.b);
      work.query_start = head / heads * partials.row_step;
      work.length_q = partials.rows;
      work.length_k = static_cast<int>(keys.length);
      const Limits visible = work.mask(p).keys_of(0, partials.rows), chunks = chunks_of<kKeys>(visible);
      if (chunk >= chunks.begin && chunk < chunks.end) {
        work.first = max(visible.begin / kKeys, chunk * kChunkTiles);
        work.last = min((visible.end - 1) / kKeys, (chunk + 1) * kChunkTiles - 1);
        body(work, static_cast<int>(keys.start));
      }
      tile = Visibility::kTakesLate ? take(tile) : following;
    }
  }

  // --- the consumer warpgroups --------------------------------------------------------------------------------------

  __device__ __forceinline__ void compute_tiles() {
    Generator generator(p);
    if (this->group == 0) this->pass_phase(kGroups - 1);
    const auto receive = [&] { return ChunkWork{receive_work(shared, &this->work_parity)}; };
    for (ChunkWork work = receive(); work.exists(); work = receive()) {
      set_zero(out);
      softmax.start(-infinity());
      if (work.sees_keys()) Visibility::compute_tile(*this, work, generator);
      end_chunk(work);
    }
  }

  __device__ __forceinline__ void end_chunk(const ChunkWork& work) {
    bool poisoned[2] = {false, false};
    Visibility::take_poisoned(*this, poisoned);
    ChunkSum sums[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sums[r] = {softmax.max[r], softmax.total(r)};
      if (!poisoned[r]) continue;
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) out[n][2 * r] = out[n][2 * r + 1] = not_a_number();
    }
    if (grid.partials.out) return store_partial(work, sums);
    const Limits visible = work.mask(p).keys_of(work.row0, min(work.row0 + kQueries, work.length_q));
    const Limits chunks = chunks_of<kKeys>(visible);
    const int chunk = work.first / kChunkTiles;
    if (chunk < chunks.end - 1) add_earlier(sums);
    if (chunk > chunks.begin && chunk < chunks.end) {
      keep(sums);
    } else {
      finish(work, sums);
    }
  }

  // Vector i of this thread's sums over earlier chunks; those of a warp are adjacent.
  __device__ __forceinline__ float4* kept(int i) const {
    const int warp = static_cast<int>(blockIdx.x) * kGroups * 4 + static_cast<int>(threadIdx.x) / 32 - 4;
    return grid.sums + (int64_t{warp} * kSumVectors + i) * 32 + threadIdx.x % 32;
  }
  __device__ __forceinline__ void keep(const ChunkSum (&sums)[2]) const {
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) *kept(n) = make_float4(out[n][0], out[n][1], out[n][2], out[n][3]);
    *kept(kOutTiles) = make_float4(sums[0].max, sums[0].sum, sums[1].max, sums[1].sum);
    *kept(kOutTiles + 1) = make_float4(softmax.largest_logit, 0, 0, 0);
  }
  __device__ __forceinline__ void add_earlier(ChunkSum (&sums)[2]) {
    const float4 before = *kept(kOutTiles);
    ChunkSum all[2] = {{before.x, before.y}, {before.z, before.w}};
    const ChunkFactors factors[2] = {add_chunk(&all[0], sums[0]), add_chunk(&all[1], sums[1])};
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
      const float4 x = *kept(n);
      out[n][0] = factors[0].add(x.x, out[n][0]), out[n][1] = factors[0].add(x.y, out[n][1]);
      out[n][2] = factors[1].add(x.z, out[n][2]), out[n][3] = factors[1].add(x.w, out[n][3]);
    }
    sums[0] = all[0], sums[1] = all[1];
    softmax.largest_logit = fmaxf(softmax.largest_logit, kept(kOutTiles + 1)->x);
  }

  __device__ __forceinline__ void finish(const ChunkWork& work, ChunkSum (&sums)[2]) {
    const float sink = head_sink(p, work.h);
    const int row = work.row0 + this->warp_row + g();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float factor = finish_chunks(&sums[r], sink);
      const bool exists = row + 8 * r < work.length_q;
      const int64_t at = int64_t{work.query_start} + row + 8 * r;
      if (exists && t() == 0) *row_statistic(p.lse, work.b, work.h, at) = lse_of(sums[r]);
      if (exists && t() == r && p.row_maxima.data) {
        *row_statistic(p.row_maxima, work.b, work.h, at) = softmax.largest_logit * kLn2<float>;
      }
      store_row(row_pointer<T>(p.out, work.b, work.h, at), out, r, factor, sums[r].sum == 0, exists,
                static_cast<int>(p.head_dim_v));
    }
  }

  // Writes what decode/chunks.cu adds up. The rows of a sequence are one tile.
  __device__ __forceinline__ void store_partial(const ChunkWork& work, const ChunkSum (&sums)[2]) const {
    const ChunkPartials& partials = grid.partials;
    const int64_t head = int64_t{work.b / 2} * p.heads_q + work.h;
    const int64_t slot = head * partials.chunks + work.first / kChunkTiles;
    const int row = this->warp_row + g();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row + 8 * r >= partials.rows) continue;
      const int64_t at = slot * partials.rows + row + 8 * r;
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) {
        const int column = n * 8 + 2 * t();
        if (column >= partials.columns) continue;
        *reinterpret_cast<float2*>(partials.out + at * partials.columns + column) =
            make_float2(out[n][2 * r], out[n][2 * r + 1]);
      }
      if (t() == 0) partials.sums[at] = sums[r];
      if (t() == r && partials.largest) partials.largest[at] = softmax.largest_logit;
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    invariant_forward_kernel(const __grid_constant__ AttnParams p, const __grid_constant__ typename Kernel::Maps maps,
                             const __grid_constant__ ChunkGrid grid,
                             const __grid_constant__ typename Kernel::Score score) {
  run_forward<Kernel>(p, maps, grid, score, grid);
}

template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
struct InvariantLaunch {
  static_assert(kHeadDim == kHeadDimV);
  using Kernel = InvariantForward<T, kHeadDim, TileOf<kernel_table::kSm90Invariant, T, kHeadDim, kOptions, kHeadDimV>,
                                  ForwardPolicies<kOptions>>;

  // tiles: of queries, or tasks of decoding.
  static void run(const AttnParams& p, const TileOrder& order, int64_t tiles, const ChunkPartials& partials) {
    typename Kernel::Maps maps{query_map(p, p.q, p.head_dim, Kernel::kQueries),
                               key_map(p, p.k, p.head_dim, Kernel::kKeys),
                               key_map(p, p.v, p.head_dim_v, Kernel::kKeys)};
    if (const KeyPages& pages = partials.pages; pages.table) {
      AttnParams entries = p;  // of the cache, as a dense batch
      entries.cu_seqlens_q = nullptr;
      entries.batch = pages.entries;
      entries.seqlen_k = pages.page_size;
      maps.k = key_map(entries, pages.k, p.head_dim, pages.box_rows);
      maps.v = key_map(entries, pages.v, p.head_dim_v, pages.box_rows);
    }
    int* taken = partials.taken;
    if (!partials.out && takes_tiles<Kernel>(p, tiles)) {
      taken = static_cast<int*>(p.workspace);
      zero_taken(p, taken);
    }
    ChunkGrid grid{};
    static_cast<TileGrid&>(grid) = {order, static_cast<int>(tiles), taken};
    grid.partials = partials;
    grid.sums = reinterpret_cast<float4*>(static_cast<char*>(p.workspace) + kForwardBytes);
    const char* const name = "sm90 invariant forward";
    launch_early(invariant_forward_kernel<Kernel>, name, p,
                 row_of_blocks(std::min<int64_t>(tiles, multiprocessors()), name, p), Kernel::kThreads,
                 static_cast<int>(sizeof(typename Kernel::Shared)), p, maps, grid, Kernel::Score::of(p));
  }
};

template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
void invariant(const AttnParams& p) {
  using Launch = InvariantLaunch<T, kHeadDim, kOptions, kHeadDimV>;
  if (p.batch * p.heads_q == 0) return;
  const int64_t blocks = tile_count(p.seqlen_q, Launch::Kernel::kQueries);
  Launch::run(p, forward_order(p, blocks, sizeof(T)), blocks * p.batch * p.heads_q, {});
}

template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
size_t invariant_bytes(const AttnParams& p) {
  using Kernel = typename InvariantLaunch<T, kHeadDim, kOptions, kHeadDimV>::Kernel;
  constexpr int kThreadBytes = Kernel::kSumVectors * static_cast<int>(sizeof(float4));
  const bool has_one_chunk = (p.is_varlen() ? p.total_k : p.seqlen_k) <= Kernel::kChunkTiles * Kernel::kKeys;
  return has_one_chunk ? 0 : static_cast<size_t>(multiprocessors()) * Kernel::kGroups * kGroupThreads * kThreadBytes;
}

template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
ChunkKernel invariant_chunks() {
  using Launch = InvariantLaunch<T, kHeadDim, kOptions, kHeadDimV>;
  const auto run = [](const AttnParams& p, const ChunkPartials& partials) {
    Launch::run(p, {1, 1}, p.batch / 2 * p.heads_q * partials.chunks, partials);
  };
  return {run, Launch::Kernel::kQueries, Launch::Kernel::kChunkTiles * Launch::Kernel::kKeys, Launch::Kernel::kKeys};
}

}  // namespace flashattn_ext::sm90
