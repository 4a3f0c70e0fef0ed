#include "lamb.h"

#include "../dispatch/kernels.h"
#include "../simd/fp_mode_guard.h"
#include "coefficients/lamb_coefficients_math.h"

namespace zero_ext::core {

LambCoefficients lamb_coefficients(const LambHyperparameters& hyper, float gradient_scale) {
  return lamb_coefficients_math(hyper, gradient_scale);
}

void lamb_norms(const LambBuffers& buffers, std::span<const LambSegment> segments,
                std::int64_t begin, std::int64_t end, std::span<LambNorms> norms,
                std::mutex& mutex) {
  [[maybe_unused]] const FpModeGuard fp_mode;
  const auto moments = static_cast<int>(buffers.moments);
  const auto grad = static_cast<int>(buffers.grad_type);
  const LambNormsKernel kernel = active_kernels().lamb_norms[moments][grad];
  for_each_indexed_segment(segments, begin, end,
                           [&](std::size_t i, std::int64_t first, std::int64_t last) {
                             LambNorms partial;
                             kernel(buffers, segments[i].coefficients, first, last, partial);
                             const std::lock_guard lock(mutex);
                             norms[i].weights.merge(partial.weights);
                             norms[i].updates.merge(partial.updates);
                           });
}

void lamb_step(const LambBuffers& buffers, std::span<const LambSegment> segments,
               std::int64_t begin, std::int64_t end) {
  const auto moments = static_cast<int>(buffers.moments);
  const auto grad = static_cast<int>(buffers.grad_type);
  const auto param = buffers.param_type ? static_cast<int>(*buffers.param_type) : kNumericTypes;
  const LambKernel kernel = active_kernels().lamb[moments][grad][param];
  for_each_segment(segments, begin, end,
                   [&](const LambCoefficients& coefficients, std::int64_t first,
                       std::int64_t last) { kernel(buffers, coefficients, first, last); });
}

}  // namespace zero_ext::core
