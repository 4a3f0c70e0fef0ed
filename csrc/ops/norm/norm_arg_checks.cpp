#include "norm_arg_checks.h"

#include "../optimizers/optimizer_arg_checks.h"

namespace zero_ext::ops {
namespace {

template <class Target>
NormArguments<Target> read_arguments(const Tensor& values, const Argument& argument,
                                     const Tensor& changed, const char* changed_name,
                                     Target* target) {
  const core::NumericType type = check_numeric(values, argument);
  check_flat(values, argument, values.numel());
  check_disjoint(
      {memory_range(values, argument), memory_range(changed, {argument.op, changed_name})});
  return {values.const_data_ptr(), type, values.numel(), target};
}

}  // namespace

NormArguments<std::int64_t> read_norm_arguments(const Tensor& grad, const Tensor& accumulator) {
  constexpr const char* op = "squared_norm_";
  return read_arguments(grad, {op, "grad"}, accumulator, "accumulator",
                        check_accumulator(op, accumulator));
}

NormArguments<std::int32_t> read_non_finite_arguments(const Tensor& values,
                                                      const Tensor& non_finite) {
  constexpr const char* op = "flag_non_finite_";
  return read_arguments(values, {op, "values"}, non_finite, "non_finite",
                        read_flag(op, non_finite));
}

std::int64_t* check_accumulator(const char* op, const Tensor& accumulator) {
  const Argument argument{op, "accumulator"};
  check_dtype(accumulator, argument, ScalarType::Long);
  check_flat(accumulator, argument, core::Superaccumulator::kEntries);
  return accumulator.mutable_data_ptr<std::int64_t>();
}

}  // namespace zero_ext::ops
