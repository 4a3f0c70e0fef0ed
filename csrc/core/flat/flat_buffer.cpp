#include "flat_buffer.h"

#include "../dispatch/kernels.h"

namespace zero_ext::core {

void copy_cast(void* target, NumericType target_type, const void* source, NumericType source_type,
               std::int64_t count) {
  const auto row = static_cast<int>(target_type);
  active_kernels().copy[row][static_cast<int>(source_type)](target, source, count);
}

void accumulate_cast(void* target, NumericType target_type, const void* source,
                     NumericType source_type, std::int64_t count) {
  const auto row = static_cast<int>(target_type);
  active_kernels().accumulate[row][static_cast<int>(source_type)](target, source, count);
}

void sum_shards(void* target, NumericType target_type, std::span<const void* const> shards,
                NumericType shard_type, std::int64_t begin, std::int64_t end, float scale,
                bool accumulate) {
  const auto row = static_cast<int>(target_type);
  active_kernels().sum_shards[row][static_cast<int>(shard_type)](target, shards, begin, end, scale,
                                                                 accumulate);
}

}  // namespace zero_ext::core
