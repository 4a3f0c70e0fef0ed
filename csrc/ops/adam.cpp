// zero_ext::adam_step_: one-pass Adam / AdamW.
#include "../core/adam.h"

#include <optional>

#include "adam_arguments.h"
#include "checks.h"

namespace zero_ext::ops {
namespace {

constexpr const char* kOp = "adam_step_";
constexpr std::int64_t kGrain = 16384;

core::AdamBuffers read_buffers(const Tensor& master, const Tensor& exp_avg,
                               const Tensor& exp_avg_sq, const Tensor& grad,
                               const std::optional<Tensor>& param) {
  check_dtype(master, {kOp, "master"}, ScalarType::Float);
  const std::int64_t numel = master.numel();
  check_flat(master, {kOp, "master"}, numel);
  const core::NumericType moments = check_numeric(exp_avg, {kOp, "exp_avg"});
  STD_TORCH_CHECK(moments != core::NumericType::float16, kOp,
                  ": argument 'exp_avg' has dtype Half; it must be Float or BFloat16");
  check_flat(exp_avg, {kOp, "exp_avg"}, numel);
  check_dtype(exp_avg_sq, {kOp, "exp_avg_sq"}, exp_avg.scalar_type());
  check_flat(exp_avg_sq, {kOp, "exp_avg_sq"}, numel);
  const core::NumericType grad_type = check_numeric(grad, {kOp, "grad"});
  check_flat(grad, {kOp, "grad"}, numel);
  core::AdamBuffers buffers{master.mutable_data_ptr<float>(),
                            exp_avg.mutable_data_ptr(),
                            exp_avg_sq.mutable_data_ptr(),
                            moments,
                            grad.const_data_ptr(),
                            grad_type,
                            nullptr,
                            std::nullopt};
  std::vector<Extent> extents{extent(master, {kOp, "master"}), extent(exp_avg, {kOp, "exp_avg"}),
                              extent(exp_avg_sq, {kOp, "exp_avg_sq"}), extent(grad, {kOp, "grad"})};
  if (param) {
    buffers.param_type = check_numeric(*param, {kOp, "param"});
    check_flat(*param, {kOp, "param"}, numel);
    buffers.param = param->mutable_data_ptr();
    extents.push_back(extent(*param, {kOp, "param"}));
  }
  check_disjoint(std::move(extents));
  return buffers;
}

void adam_step(const Tensor& master, const Tensor& exp_avg, const Tensor& exp_avg_sq,
               const Tensor& grad, const std::optional<Tensor>& param, const Tensor& segments,
               const Tensor& hyper, const Tensor& grad_scale) {
  const core::AdamBuffers buffers = read_buffers(master, exp_avg, exp_avg_sq, grad, param);
  const std::vector<core::AdamSegment> parts =
      read_segments(kOp, segments, hyper, read_scale(kOp, grad_scale), master.numel());
  std::int64_t total = 0;
  for (const core::AdamSegment& part : parts) total += part.end - part.begin;
  torch::stable::parallel_for(0, total, kGrain, [&](std::int64_t begin, std::int64_t end) {
    core::adam_step(buffers, parts, begin, end);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(zero_ext, library) {
  library.def(
      "adam_step_(Tensor(a!) master, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor grad, "
      "Tensor(d!)? param, Tensor segments, Tensor hyper, Tensor grad_scale) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zero_ext, CPU, library) {
  library.impl("adam_step_", TORCH_BOX(&adam_step));
}

}  // namespace zero_ext::ops
