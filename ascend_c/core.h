// What surrounds the work of a kernel on its core. Kernels address local memory themselves ("static tensors" in the
// vendor's documents) and have no TPipe, so event ids are theirs to choose: 0 to 5.
#pragma once

#include <kernel_operator.h>

namespace flashattn_ext {
namespace ascend {

// Event ids within a core. 6 is reserved, and 7 belongs to the vendor's automatic synchronisation.
constexpr int32_t kLastEvent = 5;

// Runs a kernel's part for this core. Without TPipe nothing else sets the mask and atomic registers, which the kernel
// before may have left in any state, and nothing waits for the pipes at the end.
template <class Part, class A>
__aicore__ inline void RunPart(const A& arguments) {
  AscendC::InitSocState();
  Part part(arguments);
  part.Run();
  AscendC::PipeBarrier<PIPE_ALL>();
}

}  // namespace ascend
}  // namespace flashattn_ext
