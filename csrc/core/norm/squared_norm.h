// Exact sum of squares and count of non-finite elements of a flat buffer, in one pass.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../base/numeric_types.h"
#include "../dispatch/kernels.h"
#include "../simd/fp_mode_guard.h"
#include "superaccumulator.h"

namespace zero_ext::core {

// Adds the squares of values[begin, end) to `total`.
inline void add_squares(const void* values, NumericType type, std::int64_t begin, std::int64_t end,
                        Superaccumulator& total) {
  [[maybe_unused]] const FpModeGuard fp_mode;
  const auto* bytes = static_cast<const std::byte*>(values) + begin * element_size(type);
  active_kernels().squared_norm[static_cast<int>(type)](bytes, end - begin, total);
}

}  // namespace zero_ext::core
