// One-pass Adam / AdamW on flat shards, with hyper-parameters per segment.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "../base/numeric_types.h"
#include "coefficients/adam_coefficients.h"
#include "optimizer_segment.h"

namespace zero_ext::core {

using AdamSegment = OptimizerSegment<AdamCoefficients>;

// Flat buffers of equal element count; param may be absent.
struct AdamBuffers {
  float* master;
  void* exp_avg;
  void* exp_avg_sq;
  NumericType moments;
  const void* grad;
  NumericType grad_type;
  void* param;
  std::optional<NumericType> param_type;
  // Raised if a new master weight or moment is not finite; null to not look.
  std::int32_t* non_finite = nullptr;
};

// Updates the elements [begin, end) of all segments laid end to end: callers may split
// [0, total length of the segments) among threads in any way.
void adam_step(const AdamBuffers& buffers, std::span<const AdamSegment> segments,
               std::int64_t begin, std::int64_t end);

}  // namespace zero_ext::core
