// Memory of large tensors on the CPU.
//
// The gradient of a bias has a page of 4 KB for every 1024 scores or 2048, and the first write to each of them is a
// trap into the system that takes longer than the scores: 10 ms for 32 MB on an EPYC, 2 ms in pages of 2 MB.
#pragma once

#include <ATen/core/Tensor.h>

#if defined(__linux__)
#include <sys/mman.h>

#include <cstdint>
#endif

namespace flashattn_ext {

// Asks the system to back a tensor that nobody has written yet with huge pages, if it is on the CPU and large. It may
// decline, which costs nothing but time.
inline void ask_for_huge_pages(const at::Tensor& t) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 4096, kHugePage = uintptr_t{1} << 21;
  if (!t.is_cpu() || t.nbytes() < 2 * kHugePage) return;
  const auto address = reinterpret_cast<uintptr_t>(t.data_ptr());
  const uintptr_t begin = (address + kPage - 1) / kPage * kPage, end = (address + t.nbytes()) / kPage * kPage;
  (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)t;
#endif
}

}  // namespace flashattn_ext
