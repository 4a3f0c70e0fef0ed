// What the launches of all optimizer steps share.
#pragma once

#include <optional>

#include "../../ops/optimizers/optimizer_arg_checks.h"
#include "../common/dispatch.h"
#include "../common/launch.cuh"
#include "optimizer_kernel.h"

namespace zero_ext::cuda {

// Segments prepared in memory of the device.
template <class Rule>
struct DeviceSegments {
  ops::Tensor memory;
  std::int64_t count;

  const core::OptimizerSegment<Rule>* data() const {
    return static_cast<const core::OptimizerSegment<Rule>*>(memory.const_data_ptr());
  }
};

// Without waiting for the values; `master` says the device and the number of elements.
template <class Rule>
DeviceSegments<Rule> prepare_segments(const char* op, const ops::Tensor& master,
                                      const ops::Tensor& segments, const ops::Tensor& hyper,
                                      const ops::Tensor& grad_scale) {
  using Segment = core::OptimizerSegment<Rule>;
  const std::int64_t count = ops::check_segments<Rule>(op, segments, hyper);
  ops::check_scale(op, grad_scale);
  const ops::Tensor memory =
      torch::stable::empty({count * static_cast<std::int64_t>(sizeof(Segment))},
                           ops::ScalarType::Byte, std::nullopt, master.device());
  // One block, whose threads agree on whether the step is made.
  launch(op,
         PrepareSegments<Rule>{
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

// Calls visit(std::type_identity<Moment>).
template <class Visit>
void with_moment_type(core::NumericType type, const Visit& visit) {
  if (type == core::NumericType::float32) return visit(std::type_identity<float>{});
  visit(std::type_identity<core::BFloat16>{});
}

}  // namespace zero_ext::cuda
