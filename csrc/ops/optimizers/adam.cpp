// zero_ext::adam_step_: one-pass Adam / AdamW.
#include <optional>

#include "../../core/optimizers/coefficients/adam_coefficients_math.h"
#include "adam_buffers.h"
#include "optimizer_arg_checks.h"

namespace zero_ext::ops {
namespace {

constexpr const char* kOp = "adam_step_";
constexpr std::int64_t kGrain = 16384;

void adam_step(const Tensor& master, const Tensor& exp_avg, const Tensor& exp_avg_sq,
               const Tensor& grad, const std::optional<Tensor>& param, const Tensor& segments,
               const Tensor& hyper, const Tensor& grad_scale,
               const std::optional<Tensor>& non_finite) {
  const core::AdamBuffers buffers =
      read_adam_buffers(kOp, master, exp_avg, exp_avg_sq, grad, param, non_finite);
  const std::vector<core::AdamSegment> prepared = read_segments<core::AdamHyper>(
      kOp, segments, hyper, read_scale(kOp, grad_scale), master.numel());
  torch::stable::parallel_for(0, total_of(prepared), kGrain,
                              [&](std::int64_t begin, std::int64_t end) {
                                core::adam_step(buffers, prepared, begin, end);
                              });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(zero_ext, library) {
  library.def(
      "adam_step_(Tensor(a!) master, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor grad, "
      "Tensor(d!)? param, Tensor segments, Tensor hyper, Tensor grad_scale, "
      "Tensor(e!)? non_finite=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CPU, library) {
  library.impl("adam_step_", TORCH_BOX(&adam_step));
}

}  // namespace zero_ext::ops
