// Adam over one quantized block, templated over vector and element types. See optimizer_kernel.h on
// inclusion.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "../compression/blockwise_kernel.h"
#include "adam_8bit.h"
#include "adam_rule.h"
#include "optimizer_kernel.h"

namespace zero_ext::core {
namespace {

template <class V, class Grad, class Param>
struct Adam8BitBlock {
  using Loop = OptimizerLoop<V, AdamRule, float, Grad, Param>;
  using ExpAvg = BlockCodec<V, SignedDynamicCode>;
  using ExpAvgSq = BlockCodec<V, UnsignedDynamicCode>;

  // The block [begin, end) and the segments that reach into it. Between reading and writing its
  // codes, the block's moments exist in float32 on the stack.
  static void run(const Adam8BitBuffers& buffers, std::span<const AdamSegment> segments,
                  std::int64_t begin, std::int64_t end) {
    const std::int64_t block = begin / kQuantizationBlock;
    const std::int64_t count = end - begin;
    BlockValues exp_avg;
    BlockValues exp_avg_sq;
    ExpAvg::load(buffers.exp_avg_codes + begin, buffers.exp_avg_scales[block], count, exp_avg);
    ExpAvgSq::load(buffers.exp_avg_sq_codes + begin, buffers.exp_avg_sq_scales[block], count,
                   exp_avg_sq);
    auto* param = static_cast<Param*>(buffers.param);
    const typename Loop::Pointers at{buffers.master + begin,
                                     {exp_avg.values, exp_avg_sq.values},
                                     static_cast<const Grad*>(buffers.grad) + begin,
                                     param == nullptr ? nullptr : param + begin,
                                     buffers.non_finite};
    for (const AdamSegment& segment : segments) {
      const std::int64_t first = std::max(segment.begin, begin) - begin;
      const std::int64_t last = std::min(segment.end, end) - begin;
      if (first < last) Loop::range(at, segment.coefficients, first, last);
    }
    buffers.exp_avg_scales[block] = ExpAvg::store(exp_avg, count, buffers.exp_avg_codes + begin);
    buffers.exp_avg_sq_scales[block] =
        ExpAvgSq::store(exp_avg_sq, count, buffers.exp_avg_sq_codes + begin);
  }
};

}  // namespace
}  // namespace zero_ext::core
