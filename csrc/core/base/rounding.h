// Rounding of sizes to whole multiples.
#pragma once

#include <cstdint>

namespace zero_ext::core {

// How many pieces of `unit` > 0 cover `value` >= 0.
constexpr std::int64_t ceil_div(std::int64_t value, std::int64_t unit) {
  return (value + unit - 1) / unit;
}

// The least multiple of `unit` > 0 that is not below `value` >= 0.
constexpr std::int64_t round_up(std::int64_t value, std::int64_t unit) {
  return ceil_div(value, unit) * unit;
}

}  // namespace zero_ext::core
