#include "adam.h"

#include <algorithm>
#include <cmath>

#include "kernels.h"

namespace zero_ext::core {

AdamFactors adam_factors(const AdamHyperParameters& hyper, float gradient_scale) {
  const double correction1 = 1.0 - std::pow(hyper.beta1, hyper.step);
  const double correction2 = 1.0 - std::pow(hyper.beta2, hyper.step);
  AdamFactors factors{};
  factors.gradient_scale = hyper.maximize ? -gradient_scale : gradient_scale;
  factors.coupled_decay = hyper.decoupled ? 0.0F : static_cast<float>(hyper.weight_decay);
  factors.decoupled_decay =
      hyper.decoupled ? static_cast<float>(hyper.lr * hyper.weight_decay) : 0.0F;
  factors.average_weight = static_cast<float>(1.0 - hyper.beta1);
  factors.beta1 = static_cast<float>(hyper.beta1);
  factors.average_from_gradient = hyper.beta1 <= 0.5;
  factors.beta2 = static_cast<float>(hyper.beta2);
  factors.square_weight = static_cast<float>(1.0 - hyper.beta2);
  factors.inverse_root_correction = static_cast<float>(1.0 / std::sqrt(correction2));
  factors.eps = static_cast<float>(hyper.eps);
  factors.step_size = static_cast<float>(hyper.lr / correction1);
  return factors;
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
