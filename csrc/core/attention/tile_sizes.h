// Sizes of the pieces that work and scratch memory are cut into; the same ones guard both. See
// ../step_kernel.h on inclusion.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention_args.h"

namespace zero_ext::core {
namespace {

// Rows and lanes of a tile; every row of scratch memory is this long or the padded head dim.
inline constexpr std::int64_t kTile = 64;

constexpr std::int64_t round_to(std::int64_t value, std::int64_t step) {
  return (value + step - 1) / step * step;
}

// Head dim as rows of scratch memory have it, with zeros at the end.
constexpr std::int64_t padded_dim(std::int64_t head_dim) { return round_to(head_dim, 16); }

// Queries of a row tile; the last one may have fewer.
inline std::int64_t tile_length(const AttentionArgs& args) {
  return std::min(args.layout.block, kTile);
}

}  // namespace
}  // namespace zero_ext::core
