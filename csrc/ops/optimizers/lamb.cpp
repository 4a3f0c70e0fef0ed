// zero_ext::lamb_norms_ and lamb_step_: LAMB in two passes.
#include <mutex>
#include <optional>
#include <span>

#include "../../core/optimizers/coefficients/lamb_coefficients_math.h"
#include "lamb_buffers.h"
#include "optimizer_arg_checks.h"

namespace zero_ext::ops {
namespace {

using core::Superaccumulator;

constexpr std::int64_t kGrain = 16384;

void lamb_norms(const Tensor& master, const Tensor& exp_avg, const Tensor& exp_avg_sq,
                const Tensor& grad, const Tensor& segments, const Tensor& hyper,
                const Tensor& grad_scale, const Tensor& norms) {
  constexpr const char* op = "lamb_norms_";
  const core::LambBuffers buffers =
      read_lamb_buffers(op, master, exp_avg, exp_avg_sq, grad, std::nullopt, std::nullopt);
  const std::vector<core::LambSegment> prepared = read_segments<core::LambHyper>(
      op, segments, hyper, read_scale(op, grad_scale), master.numel());
  std::int64_t* entries = read_lamb_norms(op, norms, segments);
  std::vector<core::LambNorms> totals(prepared.size());
  std::mutex mutex;
  torch::stable::parallel_for(0, total_of(prepared), kGrain,
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

void lamb_step(const Tensor& master, const Tensor& exp_avg, const Tensor& exp_avg_sq,
               const Tensor& grad, const std::optional<Tensor>& param, const Tensor& segments,
               const Tensor& hyper, const Tensor& grad_scale,
               const std::optional<Tensor>& non_finite) {
  constexpr const char* op = "lamb_step_";
  const core::LambBuffers buffers =
      read_lamb_buffers(op, master, exp_avg, exp_avg_sq, grad, param, non_finite);
  const std::vector<core::LambSegment> prepared = read_segments<core::LambHyper>(
      op, segments, hyper, read_scale(op, grad_scale), master.numel());
  torch::stable::parallel_for(0, total_of(prepared), kGrain,
                              [&](std::int64_t begin, std::int64_t end) {
                                core::lamb_step(buffers, prepared, begin, end);
                              });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(zero_ext, library) {
  library.def(
      "lamb_norms_(Tensor master, Tensor exp_avg, Tensor exp_avg_sq, Tensor grad, "
      "Tensor segments, Tensor hyper, Tensor grad_scale, Tensor(a!) norms) -> ()");
  library.def(
      "lamb_step_(Tensor(a!) master, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor grad, "
      "Tensor(d!)? param, Tensor segments, Tensor hyper, Tensor grad_scale, "
      "Tensor(e!)? non_finite=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CPU, library) {
  library.impl("lamb_norms_", TORCH_BOX(&lamb_norms));
  library.impl("lamb_step_", TORCH_BOX(&lamb_step));
}

}  // namespace zero_ext::ops
