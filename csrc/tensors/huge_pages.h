// Memory of large tensors on the CPU.
//
// The gradient of a bias takes a 4 KB page for every 1024 or 2048 scores. The page fault of the first write to each
// page takes longer than computing the scores: 10 ms for 32 MB on an EPYC, 2 ms with 2 MB pages.
#pragma once

#include <ATen/core/Tensor.h>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#endif

namespace flashattn_ext {

// Advises the operating system to back a large, still unwritten CPU tensor with huge pages. It may decline. Kernels of
// Arm servers may have base pages of 64 KB: madvise refuses an address inside of one.
inline void ask_for_huge_pages(const at::Tensor& t) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHugePage = uintptr_t{1} << 21;
  if (!t.is_cpu() || t.nbytes() < 2 * kHugePage) return;
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uintptr_t>(t.data_ptr());
  const uintptr_t begin = (address + page - 1) / page * page, end = (address + t.nbytes()) / page * page;
  (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)t;
#endif
}

}  // namespace flashattn_ext
