#include "adam_arguments.h"

#include <cmath>

namespace zero_ext::ops {
namespace {

constexpr std::int64_t kHyperParameters = 8;

core::AdamHyperParameters read_hyper(const char* op, const double* row, std::int64_t index) {
  const auto check = [op, index](bool valid, const char* name, double value, const char* wanted) {
    STD_TORCH_CHECK(valid, op, ": ", name, " of hyper[", index, "] is ", value, "; it must be ",
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

}  // namespace

std::vector<core::AdamSegment> read_segments(const char* op, const Tensor& segments,
                                             const Tensor& hyper, float gradient_scale,
                                             std::int64_t numel) {
  check_dtype(segments, {op, "segments"}, ScalarType::Long);
  check_dtype(hyper, {op, "hyper"}, ScalarType::Double);
  STD_TORCH_CHECK(segments.dim() == 2 && segments.size(1) == 2, op,
                  ": argument 'segments' has shape ", shape_text(segments),
                  "; it must be [S, 2] (begin, end)");
  const std::int64_t count = segments.size(0);
  STD_TORCH_CHECK(hyper.dim() == 2 && hyper.size(0) == count && hyper.size(1) == kHyperParameters,
                  op, ": argument 'hyper' has shape ", shape_text(hyper), "; it must be [", count,
                  ", 8] (lr, beta1, beta2, eps, weight_decay, step, decoupled, maximize)");
  const auto* bounds = segments.const_data_ptr<std::int64_t>();
  const auto* rows = hyper.const_data_ptr<double>();
  std::vector<core::AdamSegment> result;
  result.reserve(static_cast<std::size_t>(count));
  std::int64_t previous = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t begin = bounds[2 * i];
    const std::int64_t end = bounds[2 * i + 1];
    STD_TORCH_CHECK(begin >= previous && begin <= end && end <= numel, op, ": segments[", i,
                    "] is [", begin, ", ", end, "); segments must be sorted, disjoint and inside [",
                    previous, ", ", numel, ")");
    previous = end;
    const auto values = read_hyper(op, rows + kHyperParameters * i, i);
    result.push_back({begin, end, core::adam_factors(values, gradient_scale)});
  }
  return result;
}

float read_scale(const char* op, const Tensor& grad_scale) {
  check_dtype(grad_scale, {op, "grad_scale"}, ScalarType::Float);
  STD_TORCH_CHECK(grad_scale.dim() == 0, op, ": argument 'grad_scale' has shape ",
                  shape_text(grad_scale), "; it must be a 0-d tensor");
  const float scale = *grad_scale.const_data_ptr<float>();
  STD_TORCH_CHECK(std::isfinite(scale), op, ": grad_scale is ", scale,
                  "; it must be finite: skip the step when gradients overflow");
  return scale;
}

}  // namespace zero_ext::ops
