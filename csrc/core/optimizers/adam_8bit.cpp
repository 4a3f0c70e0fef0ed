#include "adam_8bit.h"

#include <algorithm>

#include "../dispatch/kernels.h"
#include "adam_rule.h"

namespace zero_ext::core {

void adam_step_8bit(const Adam8BitBuffers& buffers, std::span<const AdamSegment> segments,
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

}  // namespace zero_ext::core
