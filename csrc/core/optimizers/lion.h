// One-pass Lion on flat shards, with hyper-parameters per segment.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "../base/numeric_types.h"
#include "coefficients/lion_coefficients.h"
#include "optimizer_segment.h"

namespace zero_ext::core {

using LionSegment = OptimizerSegment<LionCoefficients>;

// Flat buffers of equal element count; param may be absent.
struct LionBuffers {
  float* master;
  void* exp_avg;
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
void lion_step(const LionBuffers& buffers, std::span<const LionSegment> segments,
               std::int64_t begin, std::int64_t end);

}  // namespace zero_ext::core
