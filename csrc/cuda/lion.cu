// zero_ext::lion_step_ on CUDA devices.
#include <optional>

#include "../ops/lion_buffers.h"
#include "lion_kernel.h"
#include "step.cuh"

namespace zero_ext::cuda {
namespace {

using ops::Tensor;

constexpr const char* kOp = "lion_step_";

template <class Moment>
void launch_step(const core::LionBuffers& buffers, std::int64_t numel,
                 const DeviceSegments<core::LionFactors>& segments) {
  with_grad_and_param(
      buffers.grad_type, buffers.param_type,
      [&]<class Grad, class Param>(std::type_identity<Grad>, std::type_identity<Param>) {
        const auto step =
            lion_step_of<Moment, Grad, Param>(buffers, numel, segments.data(), segments.count);
        launch(kOp, step, step.packs());
      });
}

void lion_step(const Tensor& master, const Tensor& exp_avg, const Tensor& grad,
               const std::optional<Tensor>& param, const Tensor& segments, const Tensor& hyper,
               const Tensor& grad_scale) {
  const torch::stable::accelerator::DeviceGuard guard(master.get_device_index());
  const core::LionBuffers buffers = ops::read_lion_buffers(kOp, master, exp_avg, grad, param);
  const auto prepared = prepare_segments<core::LionHyper>(kOp, master, segments, hyper, grad_scale);
  if (buffers.moments == core::NumericType::float32) {
    launch_step<float>(buffers, master.numel(), prepared);
  } else {
    launch_step<core::BFloat16>(buffers, master.numel(), prepared);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CUDA, library) {
  library.impl("lion_step_", TORCH_BOX(&lion_step));
}

}  // namespace zero_ext::cuda
