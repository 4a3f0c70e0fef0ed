// The first of LAMB's two passes over flat shards: norms of the weights and of their update. They
// give the trust ratios that scale the update, which is a step as of optimizer_step.h.
#pragma once

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

}  // namespace zero_ext::core
