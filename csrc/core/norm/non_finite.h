// Flags that say that a number is NaN or infinite, raised by any number of kernels and threads.
#pragma once

#include <cstdint>

#include "../base/numeric_types.h"

namespace zero_ext::core {

// Sets `flag` to 1. Any number of threads may raise one flag at the same time.
void raise_flag(std::int32_t* flag);

// Raises `flag` if an element of values[begin, end) is not finite, and leaves it alone otherwise.
void flag_non_finite(const void* values, NumericType type, std::int64_t begin, std::int64_t end,
                     std::int32_t* flag);

}  // namespace zero_ext::core
