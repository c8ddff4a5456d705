// What surrounds the work of a kernel on its core. Kernels address local memory themselves ("static tensors" in the
// vendor's documents) and have no TPipe, so event ids are theirs to choose: 0 to 5.
#pragma once

#include <kernel_operator.h>

namespace flashattn_ext {
namespace ascend {

// Event ids within a core. 6 is reserved, and 7 belongs to the vendor's automatic synchronisation.
constexpr int32_t kLastEvent = 5;

// Bit of CTRL: set, infinities and NaN pass through arithmetic in half and bfloat16 and through products; clear, they
// become finite. SetSaturationFlag<SaturationMode::FLOAT> sets it too, but only headers of mid-2026 and later have it.
constexpr int64_t kCtrlNotFinite = 48;

// Runs a kernel's part for this core. Without TPipe nothing else sets the mask and atomic registers, which the kernel
// before may have left in any state, and nothing waits for the pipes at the end.
template <class Part, class A>
__aicore__ inline void RunPart(const A& arguments) {
  AscendC::InitSocState();
  const uint64_t ctrl = get_ctrl();
  set_ctrl(sbitset1(ctrl, kCtrlNotFinite));
  Part part(arguments);
  part.Run();
  AscendC::PipeBarrier<PIPE_ALL>();
  set_ctrl(ctrl);  // for kernels of others
}

}  // namespace ascend
}  // namespace flashattn_ext
