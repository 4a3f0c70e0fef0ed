#include "non_finite_arg_checks.h"

#include "../optimizers/optimizer_arg_checks.h"

namespace zero_ext::ops {

NonFiniteArguments read_non_finite_arguments(const Tensor& values, const Tensor& non_finite) {
  constexpr const char* op = "flag_non_finite_";
  const core::NumericType type = check_numeric(values, {op, "values"});
  check_flat(values, {op, "values"}, values.numel());
  std::int32_t* const flag = read_flag(op, non_finite);
  check_disjoint(
      {memory_range(values, {op, "values"}), memory_range(non_finite, {op, "non_finite"})});
  return {values.const_data_ptr(), type, values.numel(), flag};
}

}  // namespace zero_ext::ops
