// The arguments of optimizer steps whose values the host reads, checked before anything changes.
#pragma once

#include <vector>

#include "../../core/optimizers/coefficients/hyperparameter_error.h"
#include "../../core/optimizers/optimizer_segment.h"
#include "optimizer_tensor_checks.h"

namespace zero_ext::ops {

// Row i of segments: sorted, disjoint and inside [0, numel), where `previous` is the end of row
// i - 1.
void check_bounds(const char* op, std::int64_t i, std::int64_t begin, std::int64_t end,
                  std::int64_t previous, std::int64_t numel);

// Of row i of hyper.
void check_hyperparameters(const char* op, std::int64_t i, const core::HyperparameterError& error);

// int64 [S, 2] of (begin, end) with float64 [S, Hyper::kCount]; see core::AdamHyper.
template <class Hyper>
std::vector<core::OptimizerSegment<typename Hyper::Coefficients>> read_segments(
    const char* op, const Tensor& segments, const Tensor& hyper, float gradient_scale,
    std::int64_t numel) {
  const std::int64_t count = check_segments<Hyper>(op, segments, hyper);
  const auto* bounds = segments.const_data_ptr<std::int64_t>();
  const auto* rows = hyper.const_data_ptr<double>();
  std::vector<core::OptimizerSegment<typename Hyper::Coefficients>> result;
  result.reserve(static_cast<std::size_t>(count));
  std::int64_t previous = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t begin = bounds[2 * i];
    const std::int64_t end = bounds[2 * i + 1];
    check_bounds(op, i, begin, end, previous, numel);
    previous = end;
    const double* row = rows + Hyper::kCount * i;
    check_hyperparameters(op, i, Hyper::error(row));
    result.push_back(core::prepare_segment<Hyper>(begin, end, row, gradient_scale));
  }
  return result;
}

// Elements that lie in the segments.
template <class Coefficients>
std::int64_t total_of(const std::vector<core::OptimizerSegment<Coefficients>>& segments) {
  std::int64_t total = 0;
  for (const auto& each : segments) total += each.end - each.begin;
  return total;
}

// The float32 in a 0-d tensor.
float read_scale(const char* op, const Tensor& grad_scale);

}  // namespace zero_ext::ops
