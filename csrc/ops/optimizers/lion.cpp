// zero_ext::lion_step_: one-pass Lion.
#include <optional>

#include "../../core/optimizers/coefficients/lion_coefficients_math.h"
#include "lion_buffers.h"
#include "optimizer_arg_checks.h"

namespace zero_ext::ops {
namespace {

constexpr const char* kOp = "lion_step_";
constexpr std::int64_t kGrain = 16384;

void lion_step(const Tensor& master, const Tensor& exp_avg, const Tensor& grad,
               const std::optional<Tensor>& param, const Tensor& segments, const Tensor& hyper,
               const Tensor& grad_scale, const std::optional<Tensor>& non_finite) {
  const core::LionBuffers buffers =
      read_lion_buffers(kOp, master, exp_avg, grad, param, non_finite);
  const std::vector<core::LionSegment> prepared = read_segments<core::LionHyper>(
      kOp, segments, hyper, read_scale(kOp, grad_scale), master.numel());
  torch::stable::parallel_for(0, total_of(prepared), kGrain,
                              [&](std::int64_t begin, std::int64_t end) {
                                core::lion_step(buffers, prepared, begin, end);
                              });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(zero_ext, library) {
  library.def(
      "lion_step_(Tensor(a!) master, Tensor(b!) exp_avg, Tensor grad, Tensor(c!)? param, "
      "Tensor segments, Tensor hyper, Tensor grad_scale, "
      "Tensor(d!)? non_finite=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CPU, library) {
  library.impl("lion_step_", TORCH_BOX(&lion_step));
}

}  // namespace zero_ext::ops
