// zero_ext::adam_step_, lamb_step_, lion_step_ ...: the one-pass step of each rule of the list.
#include "../../core/optimizers/optimizer_rules.h"
#include "../../core/optimizers/optimizer_step.h"
#include "../op_registration.h"
#include "step_op.h"

namespace zero_ext::ops {
namespace {

constexpr std::int64_t kGrain = 16384;

struct HostStep {
  template <class Rule>
  static void run(const Tensor& master, const core::StepBuffers& buffers,
                  const StepSettings& settings) {
    const auto segments =
        read_segments<Rule>(Rule::kOp, settings.segments, settings.hyper,
                            read_scale(Rule::kOp, settings.grad_scale), master.numel());
    torch::stable::parallel_for(0, core::total_of(segments), kGrain,
                                [&](std::int64_t begin, std::int64_t end) {
                                  core::optimizer_step<Rule>(buffers, segments, begin, end);
                                });
  }
};

}  // namespace

ZERO_EXT_OPS(CPU) {
  core::OptimizerRules::visit([&]<class Rule>() {
    using Op = StepOp<Rule, HostStep>;
    ops(Op::schema(), TORCH_BOX(&Op::call));
  });
}

}  // namespace zero_ext::ops
