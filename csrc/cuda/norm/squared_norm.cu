// zero_ext::squared_norm_ and squared_norm_value on CUDA devices, without waiting for them.
#include <algorithm>

#include "../../ops/norm/norm_arg_checks.h"
#include "../common/dispatch.h"
#include "../common/launch.cuh"
#include "squared_norm_kernel.h"

namespace zero_ext::cuda {
namespace {

using ops::Tensor;

template <class Add>
__global__ void __launch_bounds__(kThreads, kMinBlocksOfProcessor)
    run_squares(const __grid_constant__ Add add) {
  __shared__ std::int64_t own[kWarpsOfBlock][Add::kEntries];
  static_assert(sizeof(own) <= kSharedBytes);
  const auto warp = threadIdx.x / kWarpLanes;
  add(std::int64_t{blockIdx.x} * kWarpsOfBlock + warp, std::int64_t{gridDim.x} * kWarpsOfBlock,
      own[warp]);
}

void squared_norm(const Tensor& grad, const Tensor& accumulator) {
  constexpr const char* op = "squared_norm_";
  const torch::stable::accelerator::DeviceGuard guard(grad.get_device_index());
  const auto arguments = ops::read_norm_arguments(grad, accumulator);
  if (arguments.count == 0) return;
  with_type(arguments.type, [&]<class T>(std::type_identity<T>) {
    const auto add = AddSquares<T>::of(arguments.values, arguments.count, arguments.target);
    launch_grid<run_squares<AddSquares<T>>>(op, add, std::max(add.blocks(), std::int64_t{1}),
                                            kWarpsOfBlock);
  });
  launch(op, CarryAccumulator{arguments.target}, 1);
}

Tensor squared_norm_value(const Tensor& accumulator) {
  constexpr const char* op = "squared_norm_value";
  const torch::stable::accelerator::DeviceGuard guard(accumulator.get_device_index());
  ops::check_accumulator(op, accumulator);
  const Tensor result =
      torch::stable::empty({}, ops::ScalarType::Double, std::nullopt, accumulator.device());
  launch(op,
         ReadAccumulator{device_errors(op), accumulator.const_data_ptr<std::int64_t>(),
                         result.mutable_data_ptr<double>()},
         1);
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CUDA, library) {
  library.impl("squared_norm_", TORCH_BOX(&squared_norm));
  library.impl("squared_norm_value", TORCH_BOX(&squared_norm_value));
}

}  // namespace zero_ext::cuda
