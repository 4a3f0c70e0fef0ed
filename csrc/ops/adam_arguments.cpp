#include "adam_arguments.h"

#include <cmath>

#include "../core/adam_factors_formula.h"
#include "adam_buffers.h"

namespace zero_ext::ops {
namespace {

core::AdamHyperParameters read_hyper(const char* op, const double* row, std::int64_t index) {
  const core::AdamHyperFault fault = core::adam_hyper_fault(row);
  STD_TORCH_CHECK(fault.name == nullptr, op, ": ", fault.name, " of hyper[", index, "] is ",
                  fault.value, "; it must be ", fault.wanted);
  return core::adam_hyper_parameters(row);
}

}  // namespace

std::vector<core::AdamSegment> read_segments(const char* op, const Tensor& segments,
                                             const Tensor& hyper, float gradient_scale,
                                             std::int64_t numel) {
  const std::int64_t count = check_segments(op, segments, hyper);
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
    const auto values = read_hyper(op, rows + core::kAdamHyperParameters * i, i);
    result.push_back({begin, end, core::adam_factors(values, gradient_scale)});
  }
  return result;
}

float read_scale(const char* op, const Tensor& grad_scale) {
  check_scale(op, grad_scale);
  const float scale = *grad_scale.const_data_ptr<float>();
  STD_TORCH_CHECK(std::isfinite(scale), op, ": grad_scale is ", scale,
                  "; it must be finite: skip the step when gradients overflow");
  return scale;
}

}  // namespace zero_ext::ops
