// zero_ext::lamb_norms_ on CUDA devices.
#include "lamb_norms_kernel.h"
#include "optimizer_launch.cuh"

namespace zero_ext::cuda {
namespace {

using ops::Tensor;

constexpr const char* kOp = "lamb_norms_";

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
  const torch::stable::accelerator::DeviceGuard guard(master.get_device_index());
  const std::array moments{ops::MomentTensor{"exp_avg", exp_avg},
                           ops::MomentTensor{"exp_avg_sq", exp_avg_sq}};
  const core::StepBuffers buffers =
      ops::read_step_buffers(kOp, master, moments, grad, std::nullopt, std::nullopt);
  const auto prepared = prepare_segments<core::LambRule>(kOp, master, segments, hyper, grad_scale);
  std::int64_t* const sums = ops::read_lamb_norms(kOp, norms, segments);
  if (prepared.count == 0 || master.numel() == 0) return;
  const auto run = [&]<class Moment, class Grad>(std::type_identity<Moment>,
                                                 std::type_identity<Grad>) {
    const auto add = AddLambSquares<Moment, Grad>::of(buffers, master.numel(), prepared.data(),
                                                      prepared.count, sums);
    launch_grid<run_lamb_norms<AddLambSquares<Moment, Grad>>>(kOp, add, add.chunks(),
                                                              kWarpsOfBlock);
  };
  with_type(buffers.grad_type, [&](auto type) {
    with_moment_type(buffers.moment_type, [&](auto moment) { run(moment, type); });
  });
  launch(kOp, CarryLambNorms{sums, 2 * prepared.count}, 2 * prepared.count);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CUDA, library) {
  library.impl("lamb_norms_", TORCH_BOX(&lamb_norms));
}

}  // namespace zero_ext::cuda
