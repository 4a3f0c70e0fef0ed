// zero_ext::lamb_norms_: the norms that LAMB needs before its step.
#include <array>
#include <mutex>
#include <span>

#include "../../core/optimizers/optimizer_step.h"
#include "../op_registration.h"
#include "optimizer_arg_checks.h"

namespace zero_ext::ops {
namespace {

using core::Superaccumulator;

constexpr const char* kOp = "lamb_norms_";
constexpr std::int64_t kGrain = 16384;

void lamb_norms(const Tensor& master, const Tensor& exp_avg, const Tensor& exp_avg_sq,
                const Tensor& grad, const Tensor& segments, const Tensor& hyper,
                const Tensor& grad_scale, const Tensor& norms) {
  const std::array moments{MomentTensor{"exp_avg", exp_avg},
                           MomentTensor{"exp_avg_sq", exp_avg_sq}};
  const core::StepBuffers buffers =
      read_step_buffers(kOp, master, moments, grad, std::nullopt, std::nullopt);
  const auto prepared = read_segments<core::LambRule>(kOp, segments, hyper,
                                                      read_scale(kOp, grad_scale), master.numel());
  std::int64_t* entries = read_lamb_norms(kOp, norms, segments);
  std::vector<core::LambNorms> totals(prepared.size());
  std::mutex mutex;
  torch::stable::parallel_for(0, core::total_of(prepared), kGrain,
                              [&](std::int64_t begin, std::int64_t end) {
                                core::lamb_norms(buffers, prepared, begin, end, totals, mutex);
                              });
  using Entries = std::span<std::int64_t, Superaccumulator::kEntries>;
  for (core::LambNorms& total : totals) {
    for (Superaccumulator* each : {&total.weights, &total.updates}) {
      each->add_to(Entries(entries, Superaccumulator::kEntries));
      entries += Superaccumulator::kEntries;
    }
  }
}

}  // namespace

ZERO_EXT_OPS(CPU) {
  ops("lamb_norms_(Tensor master, Tensor exp_avg, Tensor exp_avg_sq, Tensor grad, Tensor segments, "
      "Tensor hyper, Tensor grad_scale, Tensor(a!) norms) -> ()",
      TORCH_BOX(&lamb_norms));
}

}  // namespace zero_ext::ops
