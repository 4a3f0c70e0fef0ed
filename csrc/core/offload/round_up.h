// Rounding of sizes to whole multiples.
#pragma once

#include <cstdint>

namespace zero_ext::core {

// The least multiple of `unit` > 0 that is not below `value` >= 0.
constexpr std::int64_t round_up(std::int64_t value, std::int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

}  // namespace zero_ext::core
