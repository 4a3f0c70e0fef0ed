// What a step over flat shards works on: its buffers, and ranges of elements with hyper-parameters
// of their own.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "../base/numeric_types.h"
#include "hyperparameters.h"
#include "optimizer_list.h"

namespace zero_ext::core {

inline constexpr int kMostMoments = 2;

// Flat buffers of equal element count; param may be absent.
struct StepBuffers {
  float* master;
  std::array<void*, kMostMoments> moments;  // null behind those of the rule
  NumericType moment_type;
  const void* grad;
  NumericType grad_type;
  void* param;
  std::optional<NumericType> param_type;
  // Raised if a new master weight or moment is not finite; null to not look.
  std::int32_t* non_finite = nullptr;
};

// Half-open element range that shares hyper-parameters, prepared as the rule's coefficients.
template <class Rule>
struct OptimizerSegment {
  std::int64_t begin;
  std::int64_t end;
  CoefficientsOf<Rule> coefficients;
};

// The elements [begin, end), which `row` of hyper-parameters steps by gradients that are multiplied
// by `gradient_scale`; none of them if that is not finite: gradients overflowed, and a step changes
// nothing.
template <class Rule>
ZERO_EXT_HOST_DEVICE OptimizerSegment<Rule> prepare_segment(std::int64_t begin, std::int64_t end,
                                                            const double* row,
                                                            float gradient_scale) {
  return {is_finite(gradient_scale) ? begin : end, end, Rule::coefficients(row, gradient_scale)};
}

// Elements that lie in the segments.
template <class Segments>
std::int64_t total_of(const Segments& segments) {
  std::int64_t total = 0;
  for (const auto& each : segments) total += each.end - each.begin;
  return total;
}

// Calls step(i, first, last) for what lies of segments[i] in the elements [begin, end) of all
// segments laid end to end.
template <class Rule, class Step>
void for_each_segment(std::span<const OptimizerSegment<Rule>> segments, std::int64_t begin,
                      std::int64_t end, const Step& step) {
  std::int64_t passed = 0;  // elements of earlier segments
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const OptimizerSegment<Rule>& segment = segments[i];
    const std::int64_t length = segment.end - segment.begin;
    const std::int64_t first = std::max(begin - passed, std::int64_t{0});
    const std::int64_t last = std::min(end - passed, length);
    if (first < last) step(i, segment.begin + first, segment.begin + last);
    passed += length;
    if (passed >= end) break;
  }
}

}  // namespace zero_ext::core
