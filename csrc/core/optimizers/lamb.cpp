#include "lamb.h"

#include "../simd/fp_mode_guard.h"
#include "../simd/kernels.h"
#include "coefficients/lamb_coefficients_math.h"

namespace zero_ext::core {

LambFactors lamb_factors(const LambHyperParameters& hyper, float gradient_scale) {
  return lamb_factors_formula(hyper, gradient_scale);
}

void lamb_norms(const LambBuffers& buffers, std::span<const LambSegment> segments,
                std::int64_t begin, std::int64_t end, std::span<LambNorms> norms,
                std::mutex& mutex) {
  [[maybe_unused]] const ExactArithmetic exact;
  const auto moments = static_cast<int>(buffers.moments);
  const auto grad = static_cast<int>(buffers.grad_type);
  const LambNormsKernel kernel = active_kernels().lamb_norms[moments][grad];
  over_numbered_segments(segments, begin, end,
                         [&](std::size_t i, std::int64_t first, std::int64_t last) {
                           LambNorms part;
                           kernel(buffers, segments[i].factors, first, last, part);
                           const std::lock_guard lock(mutex);
                           norms[i].weights.merge(part.weights);
                           norms[i].updates.merge(part.updates);
                         });
}

void lamb_step(const LambBuffers& buffers, std::span<const LambSegment> segments,
               std::int64_t begin, std::int64_t end) {
  const auto moments = static_cast<int>(buffers.moments);
  const auto grad = static_cast<int>(buffers.grad_type);
  const auto param = buffers.param_type ? static_cast<int>(*buffers.param_type) : kNumericTypes;
  const LambKernel kernel = active_kernels().lamb[moments][grad][param];
  over_segments(segments, begin, end,
                [&](const LambFactors& factors, std::int64_t first, std::int64_t last) {
                  kernel(buffers, factors, first, last);
                });
}

}  // namespace zero_ext::core
