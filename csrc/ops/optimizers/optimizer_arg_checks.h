// The arguments of optimizer steps, checked before anything changes.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <vector>

#include "../../core/optimizers/adam_8bit.h"
#include "../../core/optimizers/hyperparameters.h"
#include "../../core/optimizers/lamb_norms.h"
#include "../../core/optimizers/optimizer_buffers.h"
#include "../checks.h"
#include "../compression/blockwise_arg_checks.h"

namespace zero_ext::ops {

struct MomentTensor {
  const char* name;
  const Tensor& tensor;
};

// Master weights float32 [n]; moments all float32 or all bfloat16 [n]; gradients and parameters
// [n]; the flag as of read_flag. None shares memory with another.
core::StepBuffers read_step_buffers(const char* op, const Tensor& master,
                                    std::span<const MomentTensor> moments, const Tensor& grad,
                                    const OptionalTensor& param, const OptionalTensor& non_finite);

// The same with the moments of Adam in blocks of 8-bit codes.
core::Adam8BitBuffers read_adam_8bit_buffers(const char* op, const Tensor& master,
                                             const QuantizedTensors& exp_avg,
                                             const QuantizedTensors& exp_avg_sq, const Tensor& grad,
                                             const OptionalTensor& param,
                                             const OptionalTensor& non_finite);

// int64 [S, 2, Superaccumulator::kEntries] for `segments` [S, 2], whose shape was checked.
std::int64_t* read_lamb_norms(const char* op, const Tensor& norms, const Tensor& segments);

// The int32 [1] in a tensor, null without one.
std::int32_t* read_flag(const char* op, const OptionalTensor& non_finite);

// int64 [S, 2] with float64 [S, fields.size()]; returns S.
std::int64_t check_segments(const char* op, const Tensor& segments, const Tensor& hyper,
                            std::span<const core::HyperField> fields);

template <class Rule>
std::int64_t check_segments(const char* op, const Tensor& segments, const Tensor& hyper) {
  std::array<core::HyperField, Rule::kHyper> fields;
  for (int i = 0; i < Rule::kHyper; ++i) fields[i] = Rule::hyper_field(i);
  return check_segments(op, segments, hyper, fields);
}

// float32, 0-d.
void check_scale(const char* op, const Tensor& grad_scale);

// What follows reads values, which must be the host's.

float read_scale(const char* op, const Tensor& grad_scale);

// Row i of segments: sorted, disjoint and inside [0, numel), where `previous` is the end of row
// i - 1. `error` is of row i of hyper-parameters.
void check_row(const char* op, std::int64_t i, std::span<const std::int64_t, 2> bounds,
               std::int64_t previous, std::int64_t numel, const core::HyperparameterError& error);

// int64 [S, 2] of (begin, end) with float64 [S, Rule::kHyper].
template <class Rule>
std::vector<core::OptimizerSegment<Rule>> read_segments(const char* op, const Tensor& segments,
                                                        const Tensor& hyper, float gradient_scale,
                                                        std::int64_t numel) {
  const std::int64_t count = check_segments<Rule>(op, segments, hyper);
  const auto* bounds = segments.const_data_ptr<std::int64_t>();
  const auto* row = hyper.const_data_ptr<double>();
  std::vector<core::OptimizerSegment<Rule>> result;
  result.reserve(static_cast<std::size_t>(count));
  std::int64_t previous = 0;
  for (std::int64_t i = 0; i < count; ++i, bounds += 2, row += Rule::kHyper) {
    check_row(op, i, std::span<const std::int64_t, 2>(bounds, 2), previous, numel,
              core::hyperparameter_error<Rule>(row));
    previous = bounds[1];
    result.push_back(core::prepare_segment<Rule>(bounds[0], bounds[1], row, gradient_scale));
  }
  return result;
}

}  // namespace zero_ext::ops
