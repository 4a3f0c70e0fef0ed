// zero_ext::lamb_norms_ and lamb_step_ on CUDA devices.
#include <optional>

#include "../../ops/optimizers/lamb_buffers.h"
#include "lamb_kernel.h"
#include "optimizer_launch.cuh"

namespace zero_ext::cuda {
namespace {

using ops::Tensor;

template <class Add>
__global__ void __launch_bounds__(kThreads, kMinBlocksOfProcessor)
    run_lamb_norms(const __grid_constant__ Add add) {
  __shared__ typename Add::Memory own[kWarpsOfBlock];
  static_assert(sizeof(own) <= kSharedBytes);
  const auto warp = threadIdx.x / kWarpLanes;
  add(std::int64_t{blockIdx.x} * kWarpsOfBlock + warp, std::int64_t{gridDim.x} * kWarpsOfBlock,
      own[warp]);
}

void lamb_norms(const Tensor& master, const Tensor& exp_avg, const Tensor& exp_avg_sq,
                const Tensor& grad, const Tensor& segments, const Tensor& hyper,
                const Tensor& grad_scale, const Tensor& norms) {
  constexpr const char* op = "lamb_norms_";
  const torch::stable::accelerator::DeviceGuard guard(master.get_device_index());
  const core::LambBuffers buffers =
      ops::read_lamb_buffers(op, master, exp_avg, exp_avg_sq, grad, std::nullopt, std::nullopt);
  const auto prepared = prepare_segments<core::LambHyper>(op, master, segments, hyper, grad_scale);
  std::int64_t* const sums = ops::read_lamb_norms(op, norms, segments);
  if (prepared.count == 0 || master.numel() == 0) return;
  const Launcher launcher(op);
  const auto run = [&]<class Moment, class Grad>(std::type_identity<Moment>,
                                                 std::type_identity<Grad>) {
    const auto add = AddLambSquares<Moment, Grad>::of(buffers, master.numel(), prepared.data(),
                                                      prepared.count, sums);
    const std::int64_t blocks = (add.chunks() + kWarpsOfBlock - 1) / kWarpsOfBlock;
    run_lamb_norms<<<launcher.blocks<run_lamb_norms<std::remove_const_t<decltype(add)>>>(blocks),
                     kThreads, 0, launcher.stream>>>(add);
    check(op, cudaGetLastError());
  };
  with_type(buffers.grad_type, [&](auto type) {
    if (buffers.moments == core::NumericType::float32)
      return run(std::type_identity<float>{}, type);
    run(std::type_identity<core::BFloat16>{}, type);
  });
  launch(op, CarryLambNorms{sums, 2 * prepared.count}, 2 * prepared.count);
}

void lamb_step(const Tensor& master, const Tensor& exp_avg, const Tensor& exp_avg_sq,
               const Tensor& grad, const std::optional<Tensor>& param, const Tensor& segments,
               const Tensor& hyper, const Tensor& grad_scale,
               const std::optional<Tensor>& non_finite) {
  constexpr const char* op = "lamb_step_";
  const torch::stable::accelerator::DeviceGuard guard(master.get_device_index());
  const core::LambBuffers buffers =
      ops::read_lamb_buffers(op, master, exp_avg, exp_avg_sq, grad, param, non_finite);
  launch_step<core::LambRule, core::LambHyper>(op, master, buffers, segments, hyper, grad_scale);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CUDA, library) {
  library.impl("lamb_norms_", TORCH_BOX(&lamb_norms));
  library.impl("lamb_step_", TORCH_BOX(&lamb_step));
}

}  // namespace zero_ext::cuda
