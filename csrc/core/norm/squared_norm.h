// Exact sum of squares and count of non-finite elements of a flat buffer, in one pass.
#pragma once

#include <cstdint>

#include "../base/numeric_types.h"
#include "superaccumulator.h"

namespace zero_ext::core {

// Adds the squares of values[begin, end) to `total`.
void add_squares(const void* values, NumericType type, std::int64_t begin, std::int64_t end,
                 Superaccumulator& total);

}  // namespace zero_ext::core
