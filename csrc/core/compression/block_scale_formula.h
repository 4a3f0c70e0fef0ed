// The scale of a block of values that are quantized.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "../base/host_device.h"
#include "../base/numeric_types.h"

namespace zero_ext::core {

// From the highest of its values' magnitude keys, see vector_scalar.h: the value of largest
// magnitude, the positive one of two; NaN when a value is not finite.
ZERO_EXT_HOST_DEVICE float scale_of_key(std::uint32_t key) {
  if (key >> 1 >= kInfinityBits<float>) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(std::rotr(key ^ 1U, 1));
}

// Whether values can be divided by it; without, all of the block's codes are zero's. Smaller scales
// have no finite reciprocal, and NaN compares false.
ZERO_EXT_HOST_DEVICE bool scale_divides(float scale) {
  return ::fabsf(scale) >= std::numeric_limits<float>::min();
}

// The scale that is kept of a block whose codes are all zero's.
ZERO_EXT_HOST_DEVICE float stored_scale(float scale) { return scale != scale ? scale : 0.0F; }

}  // namespace zero_ext::core
