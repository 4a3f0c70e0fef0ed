// The tensors of the ops of the exact norm and of flags, checked before anything changes.
#pragma once

#include "../../core/norm/superaccumulator.h"
#include "../checks.h"

namespace zero_ext::ops {

// Flat values, and the accumulator [core::Superaccumulator::kEntries] or flag that they change.
template <class Target>
struct NormArguments {
  const void* values;
  core::NumericType type;
  std::int64_t count;
  Target* target;
};

NormArguments<std::int64_t> read_norm_arguments(const Tensor& grad, const Tensor& accumulator);
NormArguments<std::int32_t> read_non_finite_arguments(const Tensor& values,
                                                      const Tensor& non_finite);

std::int64_t* check_accumulator(const char* op, const Tensor& accumulator);

}  // namespace zero_ext::ops
