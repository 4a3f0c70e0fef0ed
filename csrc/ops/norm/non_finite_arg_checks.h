// The tensors of flag_non_finite_, checked before anything changes.
#pragma once

#include "../checks.h"

namespace zero_ext::ops {

struct NonFiniteArguments {
  const void* values;
  core::NumericType type;
  std::int64_t count;
  std::int32_t* flag;
};

NonFiniteArguments read_non_finite_arguments(const Tensor& values, const Tensor& non_finite);

}  // namespace zero_ext::ops
