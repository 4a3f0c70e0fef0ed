// zero_ext::flag_non_finite_: whether a flat tensor holds a number that is not finite.
#include "../../core/norm/non_finite.h"

#include "../op_registration.h"
#include "norm_arg_checks.h"

namespace zero_ext::ops {
namespace {

constexpr std::int64_t kGrain = 131072;

void flag_non_finite(const Tensor& values, const Tensor& non_finite) {
  const auto arguments = read_non_finite_arguments(values, non_finite);
  torch::stable::parallel_for(
      0, arguments.count, kGrain, [&](std::int64_t begin, std::int64_t end) {
        core::flag_non_finite(arguments.values, arguments.type, begin, end, arguments.target);
      });
}

}  // namespace

ZERO_EXT_OPS(CPU) {
  ops("flag_non_finite_(Tensor values, Tensor(a!) non_finite) -> ()", TORCH_BOX(&flag_non_finite));
}

}  // namespace zero_ext::ops
