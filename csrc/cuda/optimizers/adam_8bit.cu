// zero_ext::adam_step_8bit_ on CUDA devices.
#include "adam_8bit_kernel.h"
#include "optimizer_launch.cuh"

namespace zero_ext::cuda {
namespace {

using ops::OptionalTensor;
using ops::Tensor;

constexpr const char* kOp = "adam_step_8bit_";

void adam_step_8bit(const Tensor& master, const Tensor& exp_avg_codes,
                    const Tensor& exp_avg_sq_codes, const Tensor& exp_avg_scales,
                    const Tensor& exp_avg_sq_scales, const Tensor& grad,
                    const OptionalTensor& param, const Tensor& segments, const Tensor& hyper,
                    const Tensor& grad_scale, const OptionalTensor& non_finite) {
  const torch::stable::accelerator::DeviceGuard guard(master.get_device_index());
  const core::Adam8BitBuffers buffers =
      ops::read_adam_8bit_buffers(kOp, master, {exp_avg_codes, exp_avg_scales},
                                  {exp_avg_sq_codes, exp_avg_sq_scales}, grad, param, non_finite);
  const auto prepared = prepare_segments<core::AdamRule>(kOp, master, segments, hyper, grad_scale);
  with_grad_and_param(
      buffers.grad_type, buffers.param_type,
      [&]<class Grad, class Param>(std::type_identity<Grad>, std::type_identity<Param>) {
        launch_warps(kOp, AdamBlocks<Grad, Param>::of(buffers, prepared.data(), prepared.count),
                     run_count(buffers.count));
      });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CUDA, library) {
  library.impl("adam_step_8bit_", TORCH_BOX(&adam_step_8bit));
}

}  // namespace zero_ext::cuda
