// zero_ext::flag_non_finite_ on CUDA devices, without waiting for them.
#include <algorithm>

#include "../../ops/norm/norm_arg_checks.h"
#include "../common/dispatch.h"
#include "../common/launch.cuh"
#include "non_finite_kernel.h"

namespace zero_ext::cuda {
namespace {

using ops::Tensor;

void flag_non_finite(const Tensor& values, const Tensor& non_finite) {
  const torch::stable::accelerator::DeviceGuard guard(values.get_device_index());
  const auto arguments = ops::read_non_finite_arguments(values, non_finite);
  if (arguments.count == 0) return;
  with_type(arguments.type, [&]<class T>(std::type_identity<T>) {
    const auto kernel = FlagNonFinite<T>::of(arguments.values, arguments.count, arguments.target);
    launch_warps("flag_non_finite_", kernel, std::max(kernel.tiles(), std::int64_t{1}));
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CUDA, library) {
  library.impl("flag_non_finite_", TORCH_BOX(&flag_non_finite));
}

}  // namespace zero_ext::cuda
