#include "norm_arg_checks.h"

namespace zero_ext::ops {

NormArguments read_norm_arguments(const Tensor& grad, const Tensor& accumulator) {
  constexpr const char* op = "squared_norm_";
  const core::NumericType type = check_numeric(grad, {op, "grad"});
  check_flat(grad, {op, "grad"}, grad.numel());
  check_accumulator(op, accumulator);
  check_disjoint(
      {memory_range(grad, {op, "grad"}), memory_range(accumulator, {op, "accumulator"})});
  return {grad.const_data_ptr(), type, grad.numel(), accumulator.mutable_data_ptr<std::int64_t>()};
}

void check_accumulator(const char* op, const Tensor& accumulator) {
  const Argument argument{op, "accumulator"};
  check_dtype(accumulator, argument, ScalarType::Long);
  check_flat(accumulator, argument, core::Superaccumulator::kEntries);
}

}  // namespace zero_ext::ops
