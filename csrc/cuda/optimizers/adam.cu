// zero_ext::adam_step_ on CUDA devices.
#include <optional>

#include "../../core/optimizers/adam_formula.h"
#include "../../core/optimizers/coefficients/adam_coefficients_math.h"
#include "../../ops/optimizers/adam_buffers.h"
#include "optimizer_launch.cuh"

namespace zero_ext::cuda {
namespace {

using ops::Tensor;

constexpr const char* kOp = "adam_step_";

void adam_step(const Tensor& master, const Tensor& exp_avg, const Tensor& exp_avg_sq,
               const Tensor& grad, const std::optional<Tensor>& param, const Tensor& segments,
               const Tensor& hyper, const Tensor& grad_scale,
               const std::optional<Tensor>& non_finite) {
  const torch::stable::accelerator::DeviceGuard guard(master.get_device_index());
  const core::AdamBuffers buffers =
      ops::read_adam_buffers(kOp, master, exp_avg, exp_avg_sq, grad, param, non_finite);
  launch_step<core::AdamRule, core::AdamHyper>(kOp, master, buffers, segments, hyper, grad_scale);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CUDA, library) {
  library.impl("adam_step_", TORCH_BOX(&adam_step));
}

}  // namespace zero_ext::cuda
