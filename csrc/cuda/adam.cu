// zero_ext::adam_step_ on CUDA devices.
#include <optional>

#include "../ops/adam_buffers.h"
#include "adam_kernel.h"
#include "dispatch.h"
#include "launch.cuh"

namespace zero_ext::cuda {
namespace {

using ops::Tensor;

constexpr const char* kOp = "adam_step_";

template <class Moment, class Grad, class Param>
void launch_step(const core::AdamBuffers& buffers, std::int64_t numel, const AdamSegment* segments,
                 std::int64_t segment_count) {
  const auto step = AdamStep<Moment, Grad, Param>::of(buffers, numel, segments, segment_count);
  launch(kOp, step, step.packs());
}

template <class Moment>
void launch_step(const core::AdamBuffers& buffers, std::int64_t numel, const AdamSegment* segments,
                 std::int64_t segment_count) {
  with_type(buffers.grad_type, [&]<class Grad>(std::type_identity<Grad>) {
    if (!buffers.param_type) {
      return launch_step<Moment, Grad, NoParam>(buffers, numel, segments, segment_count);
    }
    with_type(*buffers.param_type, [&]<class Param>(std::type_identity<Param>) {
      launch_step<Moment, Grad, Param>(buffers, numel, segments, segment_count);
    });
  });
}

void adam_step(const Tensor& master, const Tensor& exp_avg, const Tensor& exp_avg_sq,
               const Tensor& grad, const std::optional<Tensor>& param, const Tensor& segments,
               const Tensor& hyper, const Tensor& grad_scale) {
  const torch::stable::accelerator::DeviceGuard guard(master.get_device_index());
  const core::AdamBuffers buffers =
      ops::read_adam_buffers(kOp, master, exp_avg, exp_avg_sq, grad, param);
  const std::int64_t count = ops::check_segments(kOp, segments, hyper);
  ops::check_scale(kOp, grad_scale);
  const Tensor prepared =
      torch::stable::empty({count * static_cast<std::int64_t>(sizeof(AdamSegment))},
                           ops::ScalarType::Byte, std::nullopt, master.device());
  auto* parts = static_cast<AdamSegment*>(prepared.mutable_data_ptr());
  const std::int64_t numel = master.numel();
  launch(
      kOp,
      PrepareAdamSegments{segments.const_data_ptr<std::int64_t>(), hyper.const_data_ptr<double>(),
                          grad_scale.const_data_ptr<float>(), count, numel, parts},
      count);
  if (buffers.moments == core::NumericType::float32) {
    launch_step<float>(buffers, numel, parts, count);
  } else {
    launch_step<core::BFloat16>(buffers, numel, parts, count);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CUDA, library) {
  library.impl("adam_step_", TORCH_BOX(&adam_step));
}

}  // namespace zero_ext::cuda
