// Block-wise quantization to integers; see integer_block_formula.h for the payload and arithmetic.
#pragma once

#include <cstdint>
#include <span>

#include "../base/numeric_types.h"
#include "payload_layout.h"

namespace zero_ext::core {

// Every function takes `count` elements from the start of a block on: pointers to values, words
// and scales are those of the first of them, but for `payloads`, which are whole and of which the
// blocks from `first_block` on are read.

void quantize_blocks(const void* values, NumericType type, std::int64_t count,
                     const BlockFormat& format, PayloadTarget payload);

void dequantize_blocks(PayloadSource payload, std::int64_t count, const BlockFormat& format,
                       void* out, NumericType type);

// out = factor * sum of what the payloads stand for, in their order [+ out]; there is a payload.
void sum_quantized(std::span<const PayloadSource> payloads, std::int64_t first_block,
                   std::int64_t count, const BlockFormat& format, float factor, bool accumulate,
                   float* out);

// Quantizes factor * that sum; both formats have blocks of the same size.
void requantize_blocks(std::span<const PayloadSource> payloads, std::int64_t first_block,
                       std::int64_t count, const BlockFormat& from, const BlockFormat& to,
                       float factor, PayloadTarget payload);

}  // namespace zero_ext::core
