// The rounding mode that exact sums need.
#pragma once

#include <cstdint>

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
#elif defined(__aarch64__)
  FpModeGuard() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(kDefault) : "memory");
  }
  ~FpModeGuard() { asm volatile("msr fpcr, %0" : : "r"(saved_) : "memory"); }
  FpModeGuard(const FpModeGuard&) = delete;
  FpModeGuard& operator=(const FpModeGuard&) = delete;

 private:
  static constexpr std::uint64_t kDefault = 0;
  std::uint64_t saved_;
#endif
};

}  // namespace zero_ext::core
