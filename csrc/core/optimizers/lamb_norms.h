// The first of LAMB's two passes over flat shards: norms of the weights and of their update. They
// give the trust ratios that scale the update, which is a step as of optimizer_step.h.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>

#include "../norm/superaccumulator.h"
#include "optimizer_buffers.h"

namespace zero_ext::core {

using LambSegment = OptimizerSegment<LambRule>;

// Exact sums of squares of one segment: of its master weights, and of what LambRule::direction says
// of it.
struct LambNorms {
  Superaccumulator weights;
  Superaccumulator updates;
};

// Adds to norms[i] the squares of what lies in segments[i] of the elements [begin, end) of all
// segments laid end to end, and changes nothing else. Threads that share `norms` share `mutex`.
void lamb_norms(const StepBuffers& buffers, std::span<const LambSegment> segments,
                std::int64_t begin, std::int64_t end, std::span<LambNorms> norms,
                std::mutex& mutex);

}  // namespace zero_ext::core
