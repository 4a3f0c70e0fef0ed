// The tensors of ops on flat buffers, checked before anything changes.
#pragma once

#include <vector>

#include "../../core/flat/flat_segments.h"
#include "../checks.h"

namespace zero_ext::ops {

// Tensor i lies in `flat` from offsets[i] on.
core::FlatSegments read_flat_segments(const char* op, const Tensor& flat,
                                      const std::vector<Tensor>& tensors,
                                      const std::vector<std::int64_t>& offsets);

// Shards that are added up in list order.
struct ShardSum {
  void* target;
  core::NumericType target_type;
  std::vector<const void*> sources;
  core::NumericType source_type;
  std::int64_t numel;
  float scale;
};

ShardSum read_shard_sum(const char* op, const Tensor& out, const std::vector<Tensor>& shards,
                        double scale);

}  // namespace zero_ext::ops
