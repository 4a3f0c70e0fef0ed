#include "adam.h"

#include "../dispatch/kernels.h"
#include "coefficients/adam_coefficients_math.h"

namespace zero_ext::core {

AdamCoefficients adam_coefficients(const AdamHyperparameters& hyper, float gradient_scale) {
  return adam_coefficients_math(hyper, gradient_scale);
}

void adam_step(const AdamBuffers& buffers, std::span<const AdamSegment> segments,
               std::int64_t begin, std::int64_t end) {
  const auto moments = static_cast<int>(buffers.moments);
  const auto grad = static_cast<int>(buffers.grad_type);
  const auto param = buffers.param_type ? static_cast<int>(*buffers.param_type) : kNumericTypes;
  const AdamKernel kernel = active_kernels().adam[moments][grad][param];
  for_each_segment(segments, begin, end,
                   [&](const AdamCoefficients& coefficients, std::int64_t first,
                       std::int64_t last) { kernel(buffers, coefficients, first, last); });
}

}  // namespace zero_ext::core
