// Arrays that follow one another in the workspace of a call.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashattn_ext {

// Gives away a workspace from its beginning. With a workspace of nullptr the pointers have no meaning, and bytes() is
// the size that the call needs.
class Carver {
 public:
  explicit Carver(void* workspace) : begin_(static_cast<char*>(workspace)), next_(begin_) {}

  // An array of `count` elements, aligned for every vector load.
  template <class T>
  T* take(int64_t count) {
    constexpr int64_t kAlignment = 64;
    char* const array = next_;
    next_ += (count * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(array);
  }
  // What is left of the workspace.
  char* rest() const { return next_; }
  size_t bytes() const { return static_cast<size_t>(next_ - begin_); }

 private:
  char *begin_, *next_;
};

}  // namespace flashattn_ext
