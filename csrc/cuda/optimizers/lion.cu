// zero_ext::lion_step_ on CUDA devices.
#include <optional>

#include "../../core/optimizers/coefficients/lion_coefficients_math.h"
#include "../../core/optimizers/lion_formula.h"
#include "../../ops/optimizers/lion_buffers.h"
#include "optimizer_launch.cuh"

namespace zero_ext::cuda {
namespace {

using ops::Tensor;

constexpr const char* kOp = "lion_step_";

void lion_step(const Tensor& master, const Tensor& exp_avg, const Tensor& grad,
               const std::optional<Tensor>& param, const Tensor& segments, const Tensor& hyper,
               const Tensor& grad_scale, const std::optional<Tensor>& non_finite) {
  const torch::stable::accelerator::DeviceGuard guard(master.get_device_index());
  const core::LionBuffers buffers =
      ops::read_lion_buffers(kOp, master, exp_avg, grad, param, non_finite);
  launch_step<core::LionRule, core::LionHyper>(kOp, master, buffers, segments, hyper, grad_scale);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CUDA, library) {
  library.impl("lion_step_", TORCH_BOX(&lion_step));
}

}  // namespace zero_ext::cuda
