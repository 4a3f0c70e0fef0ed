#include "lion.h"

#include "../dispatch/kernels.h"
#include "coefficients/lion_coefficients_math.h"

namespace zero_ext::core {

LionCoefficients lion_coefficients(const LionHyperparameters& hyper, float gradient_scale) {
  return lion_coefficients_math(hyper, gradient_scale);
}

void lion_step(const LionBuffers& buffers, std::span<const LionSegment> segments,
               std::int64_t begin, std::int64_t end) {
  const auto moments = static_cast<int>(buffers.moments);
  const auto grad = static_cast<int>(buffers.grad_type);
  const auto param = buffers.param_type ? static_cast<int>(*buffers.param_type) : kNumericTypes;
  const LionKernel kernel = active_kernels().lion[moments][grad][param];
  for_each_segment(segments, begin, end,
                   [&](const LionCoefficients& coefficients, std::int64_t first,
                       std::int64_t last) { kernel(buffers, coefficients, first, last); });
}

}  // namespace zero_ext::core
