// The fused step of any rule on flat shards, with hyper-parameters per segment; that of Adam on
// 8-bit moments; and the norms that LAMB needs before its step.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <span>

#include "../dispatch/kernels.h"
#include "../simd/fp_mode_guard.h"
#include "adam_8bit.h"
#include "lamb_norms.h"
#include "optimizer_buffers.h"
#include "optimizer_rules.h"

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

// Updates the elements of the segments that lie in the blocks [first_block, last_block): callers
// may split [0, block_count(count)) among threads in any way.
//
// The update reads the moments' dequantized values and itself uses the new ones before they are
// quantized. A block that no segment touches stays as it is, bit for bit. In one that a segment
// touches, elements outside every segment keep master and param; their moments keep their
// dequantized values, which are quantized again under the block's new scale: unchanged, bit for
// bit, when the scale is.
inline void adam_step_8bit(const Adam8BitBuffers& buffers, std::span<const AdamSegment> segments,
                           std::int64_t first_block, std::int64_t last_block) {
  const auto grad = static_cast<int>(buffers.grad_type);
  const auto param = buffers.param_type ? static_cast<int>(*buffers.param_type) : kNumericTypes;
  const Adam8BitKernel kernel = active_kernels().adam_8bit[grad][param];
  auto first = segments.begin();
  for (std::int64_t block = first_block; block < last_block; ++block) {
    const std::int64_t begin = block * kQuantizationBlock;
    const std::int64_t end = std::min(begin + kQuantizationBlock, buffers.count);
    const auto ends_later = [](std::int64_t at, const AdamSegment& each) { return at < each.end; };
    const auto starts_earlier = [](const AdamSegment& each, std::int64_t at) {
      return each.begin < at;
    };
    first = std::upper_bound(first, segments.end(), begin, ends_later);
    const auto last = std::lower_bound(first, segments.end(), end, starts_earlier);
    const bool touched =
        std::any_of(first, last, [](const AdamSegment& each) { return each.begin < each.end; });
    if (touched) kernel(buffers, {first, last}, begin, end);
  }
}

// Adds to norms[i] the squares of what lies in segments[i] of the elements [begin, end) of all
// segments laid end to end, and changes nothing else. Threads that share `norms` share `mutex`.
inline void lamb_norms(const StepBuffers& buffers, std::span<const LambSegment> segments,
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
