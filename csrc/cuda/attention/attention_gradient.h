// What the kernels of both gradients share: what they are given, and the gradients of scores.
//
// Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning"
// (2023), the backward pass.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "../machine/warp.h"
#include "attention_output.h"
#include "attention_scores.h"
#include "attention_shape.h"
#include "attention_stream.h"

namespace zero_ext::cuda {

template <class T>
struct GradientInputs {
  AttentionRules rules;
  Heads<const T> query;
  Heads<const T> key;
  Heads<const T> value;
  Heads<const T> grad_output;
  const float* reference;  // [batch, query heads, query length]: see PrepareGradients
  const float* delta;      // likewise

  ZERO_EXT_FUNCTION Matrix<const T> queries(const Heads<const T>& of, std::int32_t batch,
                                            std::int32_t head) const {
    return {of.of(batch, head), of.row_stride, rules.sizes.query_length, rules.sizes.dim};
  }
  // Of the key head that a query head shares.
  ZERO_EXT_FUNCTION Matrix<const T> keys(const Heads<const T>& of, std::int32_t batch,
                                         std::int32_t head) const {
    const std::int32_t own = head / (rules.sizes.query_heads / rules.sizes.key_heads);
    return {of.of(batch, own), of.row_stride, rules.sizes.key_length, rules.sizes.dim};
  }
  ZERO_EXT_FUNCTION std::int64_t first_row(std::int32_t batch, std::int32_t head) const {
    return (std::int64_t{batch} * rules.sizes.query_heads + head) * rules.sizes.query_length;
  }
};

// Gradient of one score, in natural units: of weight p, its value's product with the output's
// gradient, and delta, the sum of output times its gradient over the row. `kept` is
// 1 / (1 - probability) for a weight that was kept, 0 for a dropped one, 1 without dropout.
ZERO_EXT_HOST_DEVICE float score_gradient(float weight, float value_product, float kept,
                                          float delta) {
  return weight * std::fmaf(value_product, kept, -delta);
}

// For every row of queries: what its scores are compared with (the logarithm of the sum of
// exponentials; infinite where nothing was attended, so that every weight is 0), and
// the sum of its outputs times their gradients. One warp a row.
template <class T>
struct PrepareGradients {
  AttentionSizes sizes;
  Heads<const T> grad_output;
  Heads<const T> output;
  const float* logsumexp;  // [batch, query heads, query length], in base 2
  float* reference;
  float* delta;

  ZERO_EXT_FUNCTION void operator()(std::int64_t warp, std::int64_t warps) const {
    for (std::int64_t row = warp; row < sizes.query_rows(); row += warps) {
      const std::int64_t index = row % sizes.query_length;
      const auto batch = static_cast<std::int32_t>(row / sizes.query_length / sizes.query_heads);
      const auto head = static_cast<std::int32_t>(row / sizes.query_length % sizes.query_heads);
      const T* grad = grad_output.of(batch, head) + index * grad_output.row_stride;
      const T* own = output.of(batch, head) + index * output.row_stride;
      double sum = 0.0;
      for (int here = 0; here < kLanesHere; ++here) {
        for (int i = lane_number(here); i < sizes.dim; i += kWarpLanes) {
          sum += static_cast<double>(core::to_float(grad[i])) *
                 static_cast<double>(core::to_float(own[i]));
        }
      }
      sum = sum_of_warp(sum);
      if (lane_number(0) != 0) continue;
      const float total = logsumexp[row];
      delta[row] = static_cast<float>(sum);
      reference[row] = total == kMasked ? std::numeric_limits<float>::infinity() : total;
    }
  }
};

}  // namespace zero_ext::cuda
