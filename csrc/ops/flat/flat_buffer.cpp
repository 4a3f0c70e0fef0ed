// zero_ext::pack_, accumulate_ and unpack_: tensors into and out of one flat buffer. sum_shards_:
// the local half of a reduce-scatter by all-to-all.
#include "../../core/flat/flat_buffer.h"

#include <algorithm>

#include "../op_registration.h"
#include "flat_buffer_arg_checks.h"

namespace zero_ext::ops {
namespace {

using core::FlatSegment;
using core::FlatSegments;

constexpr std::int64_t kGrain = 65536;
constexpr std::int64_t kShardGrain = 32768;

// Calls visit(segment, first element, count) in parallel, each element exactly once.
template <class Visit>
void for_each_range(const FlatSegments& segments, const Visit& visit) {
  torch::stable::parallel_for(0, segments.total, kGrain, [&](std::int64_t begin, std::int64_t end) {
    auto segment = std::upper_bound(
        segments.list.begin(), segments.list.end(), begin,
        [](std::int64_t value, const FlatSegment& each) { return value < each.start; });
    for (--segment; begin < end; ++segment) {
      const auto next = segment + 1;
      const std::int64_t stop = next == segments.list.end() ? end : std::min(end, next->start);
      if (begin < stop) visit(*segment, begin - segment->start, stop - begin);
      begin = std::max(begin, stop);
    }
  });
}

std::byte* at(void* base, core::NumericType type, std::int64_t index) {
  return static_cast<std::byte*>(base) + index * core::element_size(type);
}

void pack(const Tensor& flat, std::vector<Tensor> tensors, std::vector<std::int64_t> offsets) {
  const FlatSegments segments = read_flat_segments("pack_", flat, tensors, offsets);
  for_each_range(segments, [&](const FlatSegment& segment, std::int64_t first, std::int64_t count) {
    core::copy_cast(at(segments.flat, segments.flat_type, segment.offset + first),
                    segments.flat_type, at(segment.tensor, segment.type, first), segment.type,
                    count);
  });
}

void accumulate(const Tensor& flat, std::vector<Tensor> tensors,
                std::vector<std::int64_t> offsets) {
  const FlatSegments segments = read_flat_segments("accumulate_", flat, tensors, offsets);
  for_each_range(segments, [&](const FlatSegment& segment, std::int64_t first, std::int64_t count) {
    core::accumulate_cast(at(segments.flat, segments.flat_type, segment.offset + first),
                          segments.flat_type, at(segment.tensor, segment.type, first), segment.type,
                          count);
  });
}

void unpack(const Tensor& flat, std::vector<Tensor> tensors, std::vector<std::int64_t> offsets) {
  const FlatSegments segments = read_flat_segments("unpack_", flat, tensors, offsets);
  for_each_range(segments, [&](const FlatSegment& segment, std::int64_t first, std::int64_t count) {
    core::copy_cast(at(segment.tensor, segment.type, first), segment.type,
                    at(segments.flat, segments.flat_type, segment.offset + first),
                    segments.flat_type, count);
  });
}

void sum_shards(const Tensor& out, std::vector<Tensor> shards, double scale, bool accumulate) {
  const ShardSum sum = read_shard_sum("sum_shards_", out, shards, scale);
  torch::stable::parallel_for(0, sum.numel, kShardGrain, [&](std::int64_t begin, std::int64_t end) {
    core::sum_shards(sum.target, sum.target_type, sum.sources, sum.source_type, begin, end,
                     sum.scale, accumulate);
  });
}

}  // namespace

ZERO_EXT_OPS(CPU) {
  ops("pack_(Tensor(a!) flat, Tensor[] tensors, int[] offsets) -> ()", TORCH_BOX(&pack));
  ops("accumulate_(Tensor(a!) flat, Tensor[] tensors, int[] offsets) -> ()",
      TORCH_BOX(&accumulate));
  ops("unpack_(Tensor flat, Tensor(a!)[] tensors, int[] offsets) -> ()", TORCH_BOX(&unpack));
  ops("sum_shards_(Tensor(a!) out, Tensor[] shards, float scale, bool accumulate) -> ()",
      TORCH_BOX(&sum_shards));
}

}  // namespace zero_ext::ops
