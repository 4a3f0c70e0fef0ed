// zero_ext::adam_step_: one-pass Adam / AdamW.
#include "../core/adam.h"

#include <cmath>
#include <optional>

#include "checks.h"

namespace zero_ext::ops {
namespace {

constexpr const char* kOp = "adam_step_";
constexpr std::int64_t kHyperParameters = 8;
constexpr std::int64_t kGrain = 16384;

core::AdamHyperParameters read_hyper(const double* row, std::int64_t index) {
  const auto check = [index](bool valid, const char* name, double value, const char* wanted) {
    STD_TORCH_CHECK(valid, kOp, ": ", name, " of hyper[", index, "] is ", value, "; it must be ",
                    wanted);
  };
  check(std::isfinite(row[0]), "lr", row[0], "finite");
  check(row[1] >= 0 && row[1] < 1, "beta1", row[1], "in [0, 1)");
  check(row[2] >= 0 && row[2] < 1, "beta2", row[2], "in [0, 1)");
  check(std::isfinite(row[3]) && row[3] >= 0, "eps", row[3], "finite and not negative");
  check(std::isfinite(row[4]), "weight_decay", row[4], "finite");
  check(std::isfinite(row[5]) && row[5] >= 1, "step", row[5], "finite and at least 1");
  check(row[6] == 0 || row[6] == 1, "decoupled", row[6], "0 or 1");
  check(row[7] == 0 || row[7] == 1, "maximize", row[7], "0 or 1");
  return {row[0], row[1], row[2], row[3], row[4], row[5], row[6] == 1, row[7] == 1};
}

std::vector<core::AdamSegment> read_segments(const Tensor& segments, const Tensor& hyper,
                                             float gradient_scale, std::int64_t numel) {
  check_dtype(segments, {kOp, "segments"}, ScalarType::Long);
  check_dtype(hyper, {kOp, "hyper"}, ScalarType::Double);
  STD_TORCH_CHECK(segments.dim() == 2 && segments.size(1) == 2, kOp,
                  ": argument 'segments' has shape ", shape_text(segments),
                  "; it must be [S, 2] (begin, end)");
  const std::int64_t count = segments.size(0);
  STD_TORCH_CHECK(hyper.dim() == 2 && hyper.size(0) == count && hyper.size(1) == kHyperParameters,
                  kOp, ": argument 'hyper' has shape ", shape_text(hyper), "; it must be [", count,
                  ", 8] (lr, beta1, beta2, eps, weight_decay, step, decoupled, maximize)");
  const auto* bounds = segments.const_data_ptr<std::int64_t>();
  const auto* rows = hyper.const_data_ptr<double>();
  std::vector<core::AdamSegment> result;
  result.reserve(static_cast<std::size_t>(count));
  std::int64_t previous = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t begin = bounds[2 * i];
    const std::int64_t end = bounds[2 * i + 1];
    STD_TORCH_CHECK(begin >= previous && begin <= end && end <= numel, kOp, ": segments[", i,
                    "] is [", begin, ", ", end, "); segments must be sorted, disjoint and inside [",
                    previous, ", ", numel, ")");
    previous = end;
    const auto values = read_hyper(rows + kHyperParameters * i, i);
    result.push_back({begin, end, core::adam_factors(values, gradient_scale)});
  }
  return result;
}

float read_scale(const Tensor& grad_scale) {
  check_dtype(grad_scale, {kOp, "grad_scale"}, ScalarType::Float);
  STD_TORCH_CHECK(grad_scale.dim() == 0, kOp, ": argument 'grad_scale' has shape ",
                  shape_text(grad_scale), "; it must be a 0-d tensor");
  const float scale = *grad_scale.const_data_ptr<float>();
  STD_TORCH_CHECK(std::isfinite(scale), kOp, ": grad_scale is ", scale,
                  "; it must be finite: skip the step when gradients overflow");
  return scale;
}

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
      read_segments(segments, hyper, read_scale(grad_scale), master.numel());
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
