// The blocks of payloads, spread over threads.
#pragma once

#include <algorithm>

#include "../../core/compression/payload_layout.h"
#include "../torch_stable.h"

namespace zero_ext::ops {

// Calls work(payload, block, begin, count) for runs of whole blocks of `block` elements, of `numel`
// in each of `chunks`, the last block of which may be shorter. `grain` blocks are worth a thread.
template <class Work>
void for_each_block_range(std::int64_t chunks, std::int64_t numel, std::int64_t block,
                          std::int64_t grain, const Work& work) {
  const std::int64_t blocks = core::ceil_div(numel, block);
  torch::stable::parallel_for(0, chunks * blocks, grain, [&](std::int64_t begin, std::int64_t end) {
    while (begin < end) {
      const std::int64_t chunk = begin / blocks;
      const std::int64_t stop = std::min(end, (chunk + 1) * blocks);
      const std::int64_t first = begin - chunk * blocks;
      const std::int64_t from = first * block;
      work(chunk, first, from, std::min((stop - chunk * blocks) * block, numel) - from);
      begin = stop;
    }
  });
}

}  // namespace zero_ext::ops
