#include "adam.h"

#include <algorithm>

#include "adam_factors_formula.h"
#include "kernels.h"

namespace zero_ext::core {

AdamFactors adam_factors(const AdamHyperParameters& hyper, float gradient_scale) {
  return adam_factors_formula(hyper, gradient_scale);
}

void adam_step(const AdamBuffers& buffers, std::span<const AdamSegment> segments,
               std::int64_t begin, std::int64_t end) {
  const auto moments = static_cast<int>(buffers.moments);
  const auto grad = static_cast<int>(buffers.grad_type);
  const auto param = buffers.param_type ? static_cast<int>(*buffers.param_type) : kNumericTypes;
  const AdamKernel kernel = active_kernels().adam[moments][grad][param];
  std::int64_t passed = 0;  // elements of earlier segments
  for (const AdamSegment& segment : segments) {
    const std::int64_t length = segment.end - segment.begin;
    const std::int64_t first = std::max(begin - passed, std::int64_t{0});
    const std::int64_t last = std::min(end - passed, length);
    if (first < last) {
      kernel(buffers, segment.factors, segment.begin + first, segment.begin + last);
    }
    passed += length;
    if (passed >= end) break;
  }
}

}  // namespace zero_ext::core
