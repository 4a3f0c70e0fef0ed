// What the launches of all optimizer steps share.
#pragma once

#include <optional>

#include "../../ops/optimizers/optimizer_tensor_checks.h"
#include "../common/device_errors.cuh"
#include "../common/dispatch.h"
#include "../common/launch.cuh"
#include "optimizer_kernel.h"

namespace zero_ext::cuda {

// Segments prepared in memory of the device.
template <class Coefficients>
struct DeviceSegments {
  ops::Tensor memory;
  std::int64_t count;

  const core::OptimizerSegment<Coefficients>* data() const {
    return static_cast<const core::OptimizerSegment<Coefficients>*>(memory.const_data_ptr());
  }
};

// Without waiting for the values; `master` says the device and the number of elements.
template <class Hyper>
DeviceSegments<typename Hyper::Coefficients> prepare_segments(const char* op,
                                                              const ops::Tensor& master,
                                                              const ops::Tensor& segments,
                                                              const ops::Tensor& hyper,
                                                              const ops::Tensor& grad_scale) {
  using Segment = typename PrepareSegments<Hyper>::Segment;
  const std::int64_t count = ops::check_segments<Hyper>(op, segments, hyper);
  ops::check_scale(op, grad_scale);
  const ops::Tensor memory =
      torch::stable::empty({count * static_cast<std::int64_t>(sizeof(Segment))},
                           ops::ScalarType::Byte, std::nullopt, master.device());
  // One block, whose threads agree on whether the step is made.
  launch(op,
         PrepareSegments<Hyper>{
             core::device_op(op), device_errors(op), segments.const_data_ptr<std::int64_t>(),
             hyper.const_data_ptr<double>(), grad_scale.const_data_ptr<float>(), count,
             master.numel(), static_cast<Segment*>(memory.mutable_data_ptr())},
         std::min(count, std::int64_t{1}));
  return {memory, count};
}

// Calls visit(std::type_identity<Grad>, std::type_identity<Param>) for the types of gradients and
// parameters.
template <class Visit>
void with_grad_and_param(core::NumericType grad, const std::optional<core::NumericType>& param,
                         const Visit& visit) {
  with_type(grad, [&](auto grad_type) {
    if (!param) return visit(grad_type, std::type_identity<NoParam>{});
    with_type(*param, [&](auto param_type) { visit(grad_type, param_type); });
  });
}

// The step of a rule over flat `buffers`.
template <class Rule, class Hyper, class Buffers>
void launch_step(const char* op, const ops::Tensor& master, const Buffers& buffers,
                 const ops::Tensor& segments, const ops::Tensor& hyper,
                 const ops::Tensor& grad_scale) {
  const auto prepared = prepare_segments<Hyper>(op, master, segments, hyper, grad_scale);
  const auto with_moments = [&]<class Moment>(std::type_identity<Moment>) {
    with_grad_and_param(
        buffers.grad_type, buffers.param_type,
        [&]<class Grad, class Param>(std::type_identity<Grad>, std::type_identity<Param>) {
          const auto step = OptimizerStep<Rule, Moment, Grad, Param>::of(
              buffers, master.numel(), prepared.data(), prepared.count);
          launch_warps(op, step, step.tiles());
        });
  };
  if (buffers.moments == core::NumericType::float32) {
    with_moments(std::type_identity<float>{});
  } else {
    with_moments(std::type_identity<core::BFloat16>{});
  }
}

}  // namespace zero_ext::cuda
