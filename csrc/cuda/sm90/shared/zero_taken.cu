// Zeroes the counter of tiles of a forward. A memset would end the chain of early launches: the forward could not
// become resident while the kernel before it ends.
#include "cuda/host/launch.cuh"
#include "cuda/ptx/async.cuh"
#include "cuda/sm90/shared/forward_work.cuh"

namespace flashattn_ext::sm90 {
namespace {

__global__ void zero_taken_kernel(int* taken) {
  ptx::let_next_kernel_start();
  ptx::wait_for_previous_kernel();
  *taken = 0;
}

}  // namespace

void zero_taken(const AttnParams& p, int* taken) {
  launch_early(zero_taken_kernel, "counter of tiles", p, dim3(1), 1, 0, taken);
}

}  // namespace flashattn_ext::sm90
