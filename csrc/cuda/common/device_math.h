// Arithmetic that is one instruction on a device, and what the host has in its place.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "../../core/base/host_device.h"
#include "../../core/base/numeric_types.h"

namespace zero_ext::cuda {

// One of two words, as one instruction: the compiler would else choose between what it loads them
// from, and load them one by one.
ZERO_EXT_HOST_DEVICE std::uint32_t select(bool first, std::uint32_t one, std::uint32_t two) {
#if defined(__CUDA_ARCH__)
  std::uint32_t chosen;
  asm("{ .reg .pred p; setp.ne.u32 p, %3, 0; selp.b32 %0, %1, %2, p; }"
      : "=r"(chosen)
      : "r"(one), "r"(two), "r"(static_cast<std::uint32_t>(first)));
  return chosen;
#else
  return first ? one : two;
#endif
}

ZERO_EXT_HOST_DEVICE int count_bits(std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __popc(bits);
#else
  return std::popcount(bits);
#endif
}

// To 2 units in the last place on a device (CUDA C++ Programming Guide, intrinsic functions).
ZERO_EXT_HOST_DEVICE float fast_exp2(float value) {
#if defined(__CUDA_ARCH__)
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(power) : "f"(value));
  return power;
#else
  return ::exp2f(value);
#endif
}

// Two 16-bit elements in a word, the first in its low half.
template <class T>
ZERO_EXT_HOST_DEVICE std::uint32_t pack_pair(float first, float second) {
#if defined(__CUDA_ARCH__)
  std::uint32_t packed;
  if constexpr (std::is_same_v<T, core::BFloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(second), "f"(first));
  }
  return packed;
#else
  return core::from_float<T>(first).bits |
         static_cast<std::uint32_t>(core::from_float<T>(second).bits) << 16;
#endif
}

}  // namespace zero_ext::cuda
