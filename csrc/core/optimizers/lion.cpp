#include "lion.h"

#include "../simd/kernels.h"
#include "coefficients/lion_coefficients_math.h"

namespace zero_ext::core {

LionFactors lion_factors(const LionHyperParameters& hyper, float gradient_scale) {
  return lion_factors_formula(hyper, gradient_scale);
}

void lion_step(const LionBuffers& buffers, std::span<const LionSegment> segments,
               std::int64_t begin, std::int64_t end) {
  const auto moments = static_cast<int>(buffers.moments);
  const auto grad = static_cast<int>(buffers.grad_type);
  const auto param = buffers.param_type ? static_cast<int>(*buffers.param_type) : kNumericTypes;
  const LionKernel kernel = active_kernels().lion[moments][grad][param];
  over_segments(segments, begin, end,
                [&](const LionFactors& factors, std::int64_t first, std::int64_t last) {
                  kernel(buffers, factors, first, last);
                });
}

}  // namespace zero_ext::core
