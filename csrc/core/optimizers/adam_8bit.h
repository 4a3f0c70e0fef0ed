// One-pass Adam / AdamW on flat shards whose moments are quantized block-wise.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "../base/numeric_types.h"
#include "../compression/blockwise.h"
#include "optimizer_buffers.h"

namespace zero_ext::core {

using AdamSegment = OptimizerSegment<AdamRule>;

// Flat buffers of `count` elements, the scales one a block; param may be absent.
struct Adam8BitBuffers {
  std::int64_t count;
  float* master;
  std::uint8_t* exp_avg_codes;     // signed dynamic code
  std::uint8_t* exp_avg_sq_codes;  // unsigned dynamic code
  float* exp_avg_scales;
  float* exp_avg_sq_scales;
  const void* grad;
  NumericType grad_type;
  void* param;
  std::optional<NumericType> param_type;
  // Raised if a new master weight or moment is not finite; null to not look.
  std::int32_t* non_finite = nullptr;
};

// Updates the elements of the segments that lie in the blocks [first_block, last_block): callers
// may split [0, block_count(count)) among threads in any way.
//
// The update reads the moments' dequantized values and itself uses the new ones before they are
// quantized. A block that no segment touches stays as it is, bit for bit. In one that a segment
// touches, elements outside every segment keep master and param; their moments keep their
// dequantized values, which are quantized again under the block's new scale: unchanged, bit for
// bit, when the scale is.
void adam_step_8bit(const Adam8BitBuffers& buffers, std::span<const AdamSegment> segments,
                    std::int64_t first_block, std::int64_t last_block);

}  // namespace zero_ext::core
