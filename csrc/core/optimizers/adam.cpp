#include "adam.h"

#include "../simd/kernels.h"
#include "coefficients/adam_coefficients_math.h"

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
  over_segments(segments, begin, end,
                [&](const AdamFactors& factors, std::int64_t first, std::int64_t last) {
                  kernel(buffers, factors, first, last);
                });
}

}  // namespace zero_ext::core
