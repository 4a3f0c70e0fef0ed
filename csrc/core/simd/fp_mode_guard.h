// The rounding mode that exact sums need.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace zero_ext::core {

// While it lives: round-to-nearest, and subnormals that are not flushed, whatever mode the calling
// thread is in.
class FpModeGuard {
 public:
#if defined(__x86_64__)
  FpModeGuard() : saved_(_mm_getcsr()) { _mm_setcsr(kDefault); }
  ~FpModeGuard() { _mm_setcsr(saved_); }
  FpModeGuard(const FpModeGuard&) = delete;
  FpModeGuard& operator=(const FpModeGuard&) = delete;

 private:
  static constexpr unsigned kDefault = 0x1F80;
  unsigned saved_;
#endif
};

}  // namespace zero_ext::core
