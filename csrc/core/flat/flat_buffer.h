// Copies, additions and sums of flat buffers with a cast between element types.
#pragma once

#include <cstdint>
#include <span>

#include "../base/numeric_types.h"
#include "../dispatch/kernels.h"

namespace zero_ext::core {

// target[0..count) = cast(source[0..count)); the ranges must not overlap.
inline void copy_cast(void* target, NumericType target_type, const void* source,
                      NumericType source_type, std::int64_t count) {
  const auto row = static_cast<int>(target_type);
  active_kernels().copy[row][static_cast<int>(source_type)](target, source, count);
}

// target[0..count) = cast(float(target) + float(source)); the ranges must not overlap.
inline void accumulate_cast(void* target, NumericType target_type, const void* source,
                            NumericType source_type, std::int64_t count) {
  const auto row = static_cast<int>(target_type);
  active_kernels().accumulate[row][static_cast<int>(source_type)](target, source, count);
}

// target[i] = cast(scale * (shards[0][i] + shards[1][i] + ...) [+ target[i]]) for i in
// [begin, end), in float32 and in list order. `target` may be one of the shards.
inline void sum_shards(void* target, NumericType target_type, std::span<const void* const> shards,
                       NumericType shard_type, std::int64_t begin, std::int64_t end, float scale,
                       bool accumulate) {
  const auto row = static_cast<int>(target_type);
  active_kernels().sum_shards[row][static_cast<int>(shard_type)](target, shards, begin, end, scale,
                                                                 accumulate);
}

}  // namespace zero_ext::core
