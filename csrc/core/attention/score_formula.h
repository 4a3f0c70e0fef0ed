// What becomes of one score between the product of query and key and the weight of the value.
//
// Scores are kept in base 2: weights are exp2 of them, and exp2 is what processors have. A score is
//   product * scale * log2(e) + bias * log2(e),
// or minus infinity where the query may not see the key.
//
// Source: Dao, "FlashAttention-2" (arXiv 2307.08691), sections 2.2 and 3.1; dropout and bias as in
// torch.nn.functional.scaled_dot_product_attention.
#pragma once

#include <cstdint>

#include "../base/host_device.h"
#include "philox.h"

namespace zero_ext::core {

inline constexpr float kLog2E = 1.4426950408889634F;

// A weight is dropped when its random word is below this.
ZERO_EXT_HOST_DEVICE std::uint32_t drop_threshold(double probability) {
  const double scaled = probability * 4294967296.0;
  return scaled >= 4294967295.0 ? 0xFFFFFFFFU : static_cast<std::uint32_t>(scaled);
}

struct DropoutDraw {
  std::uint64_t seed;
  std::uint32_t offset;
  std::uint32_t head;  // batch index * query heads + query head
};

// The random words of four consecutive keys, of which the first is a multiple of four. They depend
// on nothing but their arguments, so every block size, thread count and device draws the same.
ZERO_EXT_HOST_DEVICE Philox4 dropout_words(const DropoutDraw& draw, std::uint32_t query,
                                           std::uint32_t first_key) {
  return philox4x32({{first_key / 4, query, draw.head, draw.offset}}, draw.seed);
}

}  // namespace zero_ext::core
