// Block-wise quantization to integers; see integer_block_formula.h for the payload and arithmetic.
#pragma once

#include <cstdint>
#include <span>

#include "../base/numeric_types.h"
#include "../dispatch/kernels.h"
#include "payload_layout.h"

namespace zero_ext::core {

// Of the format in the tables of kernels.
inline int index_of(const BlockFormat& format) {
  return 2 * (format.bits == 8 ? 1 : 0) + (format.is_symmetric ? 1 : 0);
}

// Every function takes `count` elements from the start of a block on: pointers to values, words
// and scales are those of the first of them, but for `payloads`, which are whole and of which the
// blocks from `first_block` on are read.

inline void quantize_blocks(const void* values, NumericType type, std::int64_t count,
                            const BlockFormat& format, PayloadTarget payload) {
  active_kernels().quantize_blocks[index_of(format)][static_cast<int>(type)](values, count,
                                                                             format.block, payload);
}

inline void dequantize_blocks(PayloadSource payload, std::int64_t count, const BlockFormat& format,
                              void* out, NumericType type) {
  active_kernels().dequantize_blocks[index_of(format)][static_cast<int>(type)](payload, count,
                                                                               format.block, out);
}

// out = factor * sum of what the payloads stand for, in their order [+ out]; there is a payload.
inline void sum_quantized(std::span<const PayloadSource> payloads, std::int64_t first_block,
                          std::int64_t count, const BlockFormat& format, float factor,
                          bool accumulate, float* out) {
  active_kernels().sum_quantized[index_of(format)](payloads, first_block, count, format.block,
                                                   factor, accumulate, out);
}

// Quantizes factor * that sum; both formats have blocks of the same size.
inline void requantize_blocks(std::span<const PayloadSource> payloads, std::int64_t first_block,
                              std::int64_t count, const BlockFormat& from, const BlockFormat& to,
                              float factor, PayloadTarget payload) {
  active_kernels().requantize_blocks[index_of(from)][index_of(to)](payloads, first_block, count,
                                                                   to.block, factor, payload);
}

}  // namespace zero_ext::core
