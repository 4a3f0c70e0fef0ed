#include "lamb_norms.h"

#include "../dispatch/kernels.h"
#include "../simd/fp_mode_guard.h"
#include "lamb_rule.h"

namespace zero_ext::core {

void lamb_norms(const StepBuffers& buffers, std::span<const LambSegment> segments,
                std::int64_t begin, std::int64_t end, std::span<LambNorms> norms,
                std::mutex& mutex) {
  [[maybe_unused]] const FpModeGuard fp_mode;
  const auto moments = static_cast<int>(buffers.moment_type);
  const auto grad = static_cast<int>(buffers.grad_type);
  const LambNormsKernel kernel = active_kernels().lamb_norms[moments][grad];
  for_each_segment(segments, begin, end, [&](std::size_t i, std::int64_t first, std::int64_t last) {
    LambNorms partial;
    kernel(buffers, segments[i].coefficients, first, last, partial);
    const std::lock_guard lock(mutex);
    norms[i].weights.merge(partial.weights);
    norms[i].updates.merge(partial.updates);
  });
}

}  // namespace zero_ext::core
