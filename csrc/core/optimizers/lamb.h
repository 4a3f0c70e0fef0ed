// LAMB on flat shards in two passes, with hyper-parameters per segment: norms of the weights and of
// their update, then the update, scaled by a trust ratio that those norms give.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <span>

#include "../base/numeric_types.h"
#include "../norm/superaccumulator.h"
#include "coefficients/lamb_coefficients.h"
#include "optimizer_segment.h"

namespace zero_ext::core {

using LambSegment = OptimizerSegment<LambCoefficients>;

// Flat buffers of equal element count; param may be absent.
struct LambBuffers {
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

// Exact sums of squares of one segment: of its master weights, and of what LambRule::direction says
// of it.
struct LambNorms {
  Superaccumulator weights;
  Superaccumulator updates;
};

// Adds to norms[i] the squares of what lies in segments[i] of the elements [begin, end) of all
// segments laid end to end, and changes nothing else. Threads that share `norms` share `mutex`.
void lamb_norms(const LambBuffers& buffers, std::span<const LambSegment> segments,
                std::int64_t begin, std::int64_t end, std::span<LambNorms> norms,
                std::mutex& mutex);

// Updates the elements [begin, end) of all segments laid end to end: callers may split
// [0, total length of the segments) among threads in any way.
void lamb_step(const LambBuffers& buffers, std::span<const LambSegment> segments,
               std::int64_t begin, std::int64_t end);

}  // namespace zero_ext::core
