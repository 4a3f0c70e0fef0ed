// zero_ext::adam_step_, lamb_step_, lion_step_ ... on CUDA devices.
#include "../../core/optimizers/optimizer_rules.h"
#include "../../ops/optimizers/step_op.h"
#include "optimizer_launch.cuh"

namespace zero_ext::cuda {
namespace {

struct DeviceStep {
  template <class Rule>
  static void run(const ops::Tensor& master, const core::StepBuffers& buffers,
                  const ops::StepSettings& settings) {
    const torch::stable::accelerator::DeviceGuard guard(master.get_device_index());
    const auto prepared = prepare_segments<Rule>(Rule::kOp, master, settings.segments,
                                                 settings.hyper, settings.grad_scale);
    with_moment_type(buffers.moment_type, [&]<class Moment>(std::type_identity<Moment>) {
      with_grad_and_param(
          buffers.grad_type, buffers.param_type,
          [&]<class Grad, class Param>(std::type_identity<Grad>, std::type_identity<Param>) {
            const auto step = OptimizerStep<Rule, Moment, Grad, Param>::of(
                buffers, master.numel(), prepared.data(), prepared.count);
            launch_warps(Rule::kOp, step, step.tiles());
          });
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CUDA, library) {
  core::OptimizerRules::visit([&]<class Rule>() {
    using Op = ops::StepOp<Rule, DeviceStep>;
    library.impl(Rule::kOp, TORCH_BOX(&Op::call));
  });
}

}  // namespace zero_ext::cuda
