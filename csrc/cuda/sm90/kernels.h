// The entry points of the sm_90 kernels. Each source that is compiled instantiates one of them for one element type,
// class of head dims and some options: the rows of cuda/table/kernel_table.h.
#pragma once

#include "cuda/decode/few_rows/few_rows.h"
#include "cuda/decode/few_rows/packed.h"
#include "cuda/sm90/fp8/transposed_values.h"
#include "cuda/sm90/shared/tiles.h"
#include "cuda/table/kernels.h"

namespace flashattn_ext::sm90 {

constexpr size_t kForwardBytes = 64;  // workspace of the forward and of forward mode: TileGrid::taken

// T: __half, __nv_bfloat16 or Float8; kHeadDim as in sm80/kernels.h; kHeadDimV: at least head_dim_v. Every row of q, k
// and v is 16-byte aligned and a multiple of 16 bytes long; rows of `out` may have any alignment.
template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
void forward(const AttnParams& p);

// The same for invariant calls without options or with a Mask (invariant.cuh); and what decoding needs of the kernel.
template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
void invariant(const AttnParams& p);
template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
size_t invariant_bytes(const AttnParams& p);
template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
ChunkKernel invariant_chunks();

// Calls with some dozens of rows of a KV head (packed.cuh).
template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
void packed(const DecodeParams& p, const decode::Plan& plan);

// Rows of dout are aligned as well; rows of out, dq, dk and dv may have any alignment.
template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
size_t backward_bytes(const AttnGradParams& p);
template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
void backward(const AttnGradParams& p);

// The same for many short sequences (heads.cuh), and whether a call is one of those.
template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
bool serves_heads(const AttnGradParams& p);
template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
size_t heads_bytes(const AttnGradParams& p);
template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
void heads(const AttnGradParams& p);

// The main stage of such a call with few queries for many keys (resident.cuh).
template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
void resident(const AttnGradParams& p, const BackwardWorkspace& workspace, const decode::BackwardPlan& plan);

// Rows of the tangents of q, k and v are aligned as those of q, k and v are; rows of out and of its tangent may have
// any alignment.
template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
void jvp(const JvpParams& p);

template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
size_t second_bytes(const SecondParams& p);
template <class T, int kHeadDim, Options kOptions, int kHeadDimV>
void second(const SecondParams& p);

// Rows for RowKernels (cuda/dispatch.cuh).
struct ForwardRows {
  using Kernel = ForwardKernel;
  static constexpr const auto& kTable = kernel_table::kSm90Forward;
  static constexpr const KernelCall& needed(const KernelCall& call) { return call; }
  // Workspace for values in e4m3 that a kernel before the forward transposes.
  template <bool kHasIntervals, int kHeadDimV>
  static size_t values_bytes(const AttnParams& p) {
    return transposes_itself<kHasIntervals, kHeadDimV>(p) ? 0 : transposed_bytes(p);
  }
  template <class T, int kHeadDim, int kHeadDimV, Options kOptions>
  static constexpr Kernel kernel() {
    return {forward<T, kHeadDim, kOptions, kHeadDimV>, kForwardBytes, 0,
            kTypeOf<T> == kE4m3 ? values_bytes<includes(kOptions, kIntervals), kHeadDimV> : nullptr,
            kTypeOf<T> == kE4m3};
  }
};
// Other invariant calls run rows of kSm90Forward.
struct InvariantRows {
  using Kernel = ForwardKernel;
  static constexpr const auto& kTable = kernel_table::kSm90Invariant;
  static constexpr const KernelCall& needed(const KernelCall& call) { return call; }
  template <class T, int kHeadDim, int kHeadDimV, Options kOptions>
  static constexpr Kernel kernel() {
    return {invariant<T, kHeadDim, kOptions, kHeadDimV>,
            kForwardBytes,
            0,
            invariant_bytes<T, kHeadDim, kOptions, kHeadDimV>,
            false,
            invariant_chunks<T, kHeadDim, kOptions, kHeadDimV>};
  }
};
struct PackedRows {
  using Kernel = decode::PackedKernel;
  static constexpr const auto& kTable = kernel_table::kSm90Packed;
  static constexpr const KernelCall& needed(const KernelCall& call) { return call; }
  template <class T, int kHeadDim, int kHeadDimV, Options kOptions>
  static constexpr Kernel kernel() {
    constexpr ForwardTile tile = tile_of<kernel_table::kSm90Packed, T, kHeadDim, kOptions, kHeadDimV>();
    return {packed<T, kHeadDim, kOptions, kHeadDimV>, tile.queries(), tile.keys, kHeadDim};
  }
};
struct BackwardRows {
  using Kernel = BackwardKernel;
  static constexpr const auto& kTable = kernel_table::kSm90Backward;
  static constexpr const KernelCall& needed(const KernelCall& call) { return call; }
  template <class T, int kHeadDim, int kHeadDimV, Options kOptions>
  static constexpr Kernel kernel() {
    return {backward<T, kHeadDim, kOptions, kHeadDimV>, backward_bytes<T, kHeadDim, kOptions, kHeadDimV>};
  }
};
struct HeadRows {
  using Kernel = BackwardKernel;
  static constexpr const auto& kTable = kernel_table::kSm90Heads;
  static constexpr const KernelCall& needed(const KernelCall& call) { return call; }
  template <class T, int kHeadDim, int kHeadDimV, Options kOptions>
  static constexpr Kernel kernel() {
    return {heads<T, kHeadDim, kOptions, kHeadDimV>, heads_bytes<T, kHeadDim, kOptions, kHeadDimV>,
            serves_heads<T, kHeadDim, kOptions, kHeadDimV>};
  }
};
struct ResidentRows {
  using Kernel = decode::FewRowsKernel;
  static constexpr const auto& kTable = kernel_table::kSm90Resident;
  static constexpr const KernelCall& needed(const KernelCall& call) { return call; }
  template <class T, int kHeadDim, int kHeadDimV, Options kOptions>
  static constexpr Kernel kernel() {
    return {tile_of<kernel_table::kSm90Resident, T, kHeadDim, kOptions, kHeadDimV>().rows, kHeadDim, nullptr,
            resident<T, kHeadDim, kOptions, kHeadDimV>};
  }
};

struct JvpRows {
  using Kernel = JvpKernel;
  static constexpr const auto& kTable = kernel_table::kSm90Jvp;
  static constexpr const KernelCall& needed(const KernelCall& call) { return call; }
  template <class T, int kHeadDim, int kHeadDimV, Options kOptions>
  static constexpr Kernel kernel() {
    return {jvp<T, kHeadDim, kOptions, kHeadDimV>, kForwardBytes};
  }
};

struct SecondRows {
  using Kernel = SecondKernel;
  static constexpr const auto& kTable = kernel_table::kSm90Second;
  static constexpr const KernelCall& needed(const KernelCall& call) { return call; }
  template <class T, int kHeadDim, int kHeadDimV, Options kOptions>
  static constexpr Kernel kernel() {
    return {second<T, kHeadDim, kOptions, kHeadDimV>, second_bytes<T, kHeadDim, kOptions, kHeadDimV>};
  }
};

}  // namespace flashattn_ext::sm90
