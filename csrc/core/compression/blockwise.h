// Block-wise quantization: bytes of a dynamic code, and one scale for each block of elements.
#pragma once

#include <cstdint>

#include "../base/rounding.h"

namespace zero_ext::core {

// Elements that share a scale. Blocks are counted from the first element; the last may be shorter.
// At 256 the scales add 1.6% to the bytes, and an outlier costs the precision of few neighbors.
inline constexpr std::int64_t kQuantizationBlock = 256;

constexpr std::int64_t block_count(std::int64_t elements) {
  return ceil_div(elements, kQuantizationBlock);
}

// The signed code, or the unsigned one for values that are never negative.
enum class DynamicCode : std::uint8_t { is_signed = 0, is_unsigned = 1 };
inline constexpr int kDynamicCodes = 2;

// Quantizes `count` values, counted from the start of a block: codes [count] and scales
// [block_count(count)].
//
// A block's scale is its element of largest magnitude, with its sign (the positive one of two
// equals); a code is that of the value nearest to element / scale. So that element is kept exactly
// though the signed code has no -1, and what has been quantized once is not changed by being
// quantized again. A block that holds a NaN or an infinity gets the scale NaN, so all its elements
// read back as NaN; one whose largest magnitude is below the smallest normal float32 becomes zeros.
void quantize_blockwise(const float* values, std::int64_t count, DynamicCode code,
                        std::uint8_t* codes, float* scales);

// The values that codes and scales stand for: code value * scale.
void dequantize_blockwise(const std::uint8_t* codes, const float* scales, std::int64_t count,
                          DynamicCode code, float* values);

}  // namespace zero_ext::core
