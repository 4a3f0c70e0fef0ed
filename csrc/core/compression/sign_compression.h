// Compression to signs and back; see sign_formula.h for the payload and the arithmetic.
#pragma once

#include <cstdint>
#include <span>

#include "../base/numeric_types.h"
#include "../dispatch/kernels.h"
#include "payload_layout.h"

namespace zero_ext::core {

// Every function takes `count` elements from the start of a block on: pointers to values, errors,
// words and scales are those of the first of them, but for `payloads`, which are whole and of which
// the blocks from `first_block` on are read.

// Compresses values * factor + error; the error becomes what that left behind.
inline void compress_1bit(const void* values, NumericType type, float factor, std::int64_t count,
                          float* error, PayloadTarget payload) {
  active_kernels().compress_1bit[static_cast<int>(type)](values, factor, count, error, payload);
}

// out = factor * what the payload stands for [+ out].
inline void decompress_1bit(PayloadSource payload, std::int64_t count, float factor,
                            bool accumulate, void* out, NumericType type) {
  active_kernels().decompress_1bit[static_cast<int>(type)](payload, count, factor, accumulate, out);
}

// out = factor * sum of what the payloads stand for, in their order [+ out].
inline void sum_1bit(std::span<const PayloadSource> payloads, std::int64_t first_block,
                     std::int64_t count, float factor, bool accumulate, float* out) {
  active_kernels().sum_1bit(payloads, first_block, count, factor, accumulate, out);
}

// Compresses factor * that sum + error; the error becomes what that left behind.
inline void reduce_1bit(std::span<const PayloadSource> payloads, std::int64_t first_block,
                        std::int64_t count, float factor, float* error, PayloadTarget payload) {
  active_kernels().reduce_1bit(payloads, first_block, factor, count, error, payload);
}

}  // namespace zero_ext::core
