// One-pass Adam / AdamW on flat shards whose moments are quantized block-wise.
#pragma once

#include <cstdint>
#include <optional>

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

}  // namespace zero_ext::core
