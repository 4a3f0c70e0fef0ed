// Whether all numbers of a range are finite. See optimizer_kernel.h on inclusion.
#pragma once

#include <bit>
#include <cstdint>

#include "../base/host_device.h"
#include "../base/numeric_types.h"

namespace zero_ext::core {
namespace {

// The bits of a magnitude grow with it, and infinity and NaN have the largest of all: the maximum
// of integers, which needs no conversion, decides.
template <class V, class T>
bool all_finite(const void* source, std::int64_t count) {
  const auto* values = static_cast<const T*>(source);
  constexpr std::int64_t lanes = V::template lanes<T>;
  auto highest = V::template set_bits<T>(0);
  std::int64_t i = 0;
  ZERO_EXT_UNROLL_BY(4)
  for (; i + lanes <= count; i += lanes) {
    highest = V::template max<T>(highest, V::template magnitudes<T>(values + i));
  }
  std::uint32_t top = V::template highest<T>(highest);
  for (; i < count; ++i) {
    const std::uint32_t bits = std::bit_cast<UnsignedOf<T>>(values[i]);
    const std::uint32_t magnitude = bits & (0x7FFFFFFFU >> (32 - 8 * sizeof(T)));
    if (magnitude > top) top = magnitude;
  }
  return top < kInfinityBits<T>;
}

}  // namespace
}  // namespace zero_ext::core
