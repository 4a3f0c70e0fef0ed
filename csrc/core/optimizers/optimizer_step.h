// The fused step of any rule on flat shards, with hyper-parameters per segment.
#pragma once

#include <cstdint>
#include <span>

#include "../dispatch/kernels.h"
#include "optimizer_buffers.h"

namespace zero_ext::core {

// Updates the elements [begin, end) of all segments laid end to end: callers may split
// [0, total_of(segments)) among threads in any way.
template <class Rule>
void optimizer_step(const StepBuffers& buffers, std::span<const OptimizerSegment<Rule>> segments,
                    std::int64_t begin, std::int64_t end) {
  const auto moments = static_cast<int>(buffers.moment_type);
  const auto grad = static_cast<int>(buffers.grad_type);
  const auto param = buffers.param_type ? static_cast<int>(*buffers.param_type) : kNumericTypes;
  const StepKernels<Rule>& kernels = active_kernels().steps;
  const StepKernel<Rule> kernel = kernels.at[moments][grad][param];
  for_each_segment(segments, begin, end, [&](std::size_t i, std::int64_t first, std::int64_t last) {
    kernel(buffers, segments[i].coefficients, first, last);
  });
}

}  // namespace zero_ext::core
