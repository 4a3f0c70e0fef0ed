// The tensors of the ops of the exact norm, checked before anything changes.
#pragma once

#include "../../core/norm/superaccumulator.h"
#include "../checks.h"

namespace zero_ext::ops {

struct NormArguments {
  const void* values;
  core::NumericType type;
  std::int64_t count;
  std::int64_t* accumulator;  // [core::Superaccumulator::kEntries]
};

NormArguments read_norm_arguments(const Tensor& grad, const Tensor& accumulator);

void check_accumulator(const char* op, const Tensor& accumulator);

}  // namespace zero_ext::ops
