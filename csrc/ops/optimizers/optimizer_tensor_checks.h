// The tensors that all optimizer steps share, checked before anything changes without looking at
// their values.
#pragma once

#include <optional>
#include <span>

#include "../checks.h"

namespace zero_ext::ops {

struct Moment {
  const char* name;
  const Tensor& tensor;
};

struct OptimizerTypes {
  core::NumericType moments;
  core::NumericType grad;
  std::optional<core::NumericType> param;
};

// Master weights float32 [n]; moments all float32 or all bfloat16 [n]; gradients and parameters
// [n]; the flag as of read_flag. None shares memory with another.
OptimizerTypes check_step(const char* op, const Tensor& master, std::span<const Moment> moments,
                          const Tensor& grad, const std::optional<Tensor>& param,
                          const std::optional<Tensor>& non_finite);

// The int32 [1] in a tensor, null without one.
std::int32_t* read_flag(const char* op, const std::optional<Tensor>& non_finite);

// int64 [S, 2] with float64 [S, columns], which `names` lists; returns S.
std::int64_t check_segments(const char* op, const Tensor& segments, const Tensor& hyper,
                            int columns, const char* names);

// For the hyper-parameters of a rule, see core::AdamHyper.
template <class Hyper>
std::int64_t check_segments(const char* op, const Tensor& segments, const Tensor& hyper) {
  return check_segments(op, segments, hyper, Hyper::kCount, Hyper::kNames);
}

// float32, 0-d.
void check_scale(const char* op, const Tensor& grad_scale);

}  // namespace zero_ext::ops
