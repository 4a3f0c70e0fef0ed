// Payloads of compressed elements: 32-bit words of codes, and behind them float32 scales.
#pragma once

#include <cstdint>

#include "../base/rounding.h"

namespace zero_ext::core {

// Where a payload, or its blocks from one of them on, is read and where it is written.
struct PayloadSource {
  const std::uint32_t* words;
  const float* scales;
};

struct PayloadTarget {
  std::uint32_t* words;
  float* scales;
};

// --- To signs; see sign_formula.h ---

inline constexpr std::int64_t kSignBlock = 8192;
inline constexpr std::int64_t kSignLanes = 256;

constexpr std::int64_t sign_words(std::int64_t count) { return ceil_div(count, 32); }
constexpr std::int64_t sign_blocks(std::int64_t count) { return ceil_div(count, kSignBlock); }
constexpr std::int64_t sign_payload_bytes(std::int64_t count) {
  return 4 * (sign_words(count) + sign_blocks(count));
}

// --- To integers; see integer_block_formula.h ---

// Blocks are padded to a multiple of this many elements: so payloads of the same elements have the
// same padding in every format, and need no count beside them to be turned from one to another.
inline constexpr std::int64_t kIntegerPadding = 8;

// Elements of a block: a multiple of this, up to the highest.
inline constexpr std::int64_t kIntegerBlockUnit = 128;
inline constexpr std::int64_t kMaxIntegerBlock = 4096;

struct BlockFormat {
  int bits;  // 4 or 8
  bool is_symmetric;
  std::int64_t block;

  constexpr bool operator==(const BlockFormat&) const = default;
  constexpr int fields() const { return 32 / bits; }
  // Floats a block.
  constexpr int scales() const { return is_symmetric ? 1 : 2; }
  // Without a division by what only runs tell: it takes a GPU long.
  constexpr std::int64_t words(std::int64_t count) const {
    return ceil_div(count, kIntegerPadding) * (kIntegerPadding * bits / 32);
  }
  constexpr std::int64_t blocks(std::int64_t count) const { return ceil_div(count, block); }
  constexpr std::int64_t payload_bytes(std::int64_t count) const {
    return 4 * (words(count) + scales() * blocks(count));
  }
  // The most elements, padding included, whose payload has this size; -1 if none has it.
  constexpr std::int64_t max_elements(std::int64_t bytes) const {
    const std::int64_t full_block_bytes = payload_bytes(block);
    const std::int64_t rest = bytes % full_block_bytes;
    const std::int64_t count = bytes / full_block_bytes * block;
    if (rest == 0) return count;
    const std::int64_t padded = (rest / 4 - scales()) * fields();
    return padded > 0 && payload_bytes(count + padded) == bytes ? count + padded : -1;
  }
};

}  // namespace zero_ext::core
