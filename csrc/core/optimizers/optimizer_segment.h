// Ranges of elements that an optimizer steps with hyper-parameters of their own.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "../base/host_device.h"
#include "coefficients/hyperparameter_error.h"

namespace zero_ext::core {

// Half-open element range that shares hyper-parameters, prepared as the rule's coefficients.
template <class CoefficientsOf>
struct OptimizerSegment {
  using Coefficients = CoefficientsOf;
  std::int64_t begin;
  std::int64_t end;
  Coefficients coefficients;
};

// The elements [begin, end), which `row` of hyper-parameters steps by gradients that are multiplied
// by `gradient_scale`; none of them if that is not finite: gradients overflowed, and a step changes
// nothing. `Hyper` is of the kind of AdamHyper.
template <class Hyper>
ZERO_EXT_HOST_DEVICE OptimizerSegment<typename Hyper::Coefficients> prepare_segment(
    std::int64_t begin, std::int64_t end, const double* row, float gradient_scale) {
  return {is_finite(gradient_scale) ? begin : end, end, Hyper::coefficients(row, gradient_scale)};
}

// Calls step(i, first, last) for what lies of segments[i] in the elements [begin, end) of all
// segments laid end to end.
template <class Coefficients, class Step>
void for_each_indexed_segment(std::span<const OptimizerSegment<Coefficients>> segments,
                              std::int64_t begin, std::int64_t end, const Step& step) {
  std::int64_t passed = 0;  // elements of earlier segments
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const OptimizerSegment<Coefficients>& segment = segments[i];
    const std::int64_t length = segment.end - segment.begin;
    const std::int64_t first = std::max(begin - passed, std::int64_t{0});
    const std::int64_t last = std::min(end - passed, length);
    if (first < last) step(i, segment.begin + first, segment.begin + last);
    passed += length;
    if (passed >= end) break;
  }
}

// The same with step(coefficients, first, last).
template <class Coefficients, class Step>
void for_each_segment(std::span<const OptimizerSegment<Coefficients>> segments, std::int64_t begin,
                      std::int64_t end, const Step& step) {
  for_each_indexed_segment(segments, begin, end,
                           [&](std::size_t i, std::int64_t first, std::int64_t last) {
                             step(segments[i].coefficients, first, last);
                           });
}

}  // namespace zero_ext::core
