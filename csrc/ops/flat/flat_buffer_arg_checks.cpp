#include "flat_buffer_arg_checks.h"

#include <cmath>

namespace zero_ext::ops {

core::FlatSegments read_flat_segments(const char* op, const Tensor& flat,
                                      const std::vector<Tensor>& tensors,
                                      const std::vector<std::int64_t>& offsets) {
  core::FlatSegments segments;
  segments.flat_type = check_numeric(flat, {op, "flat"});
  check_flat(flat, {op, "flat"}, flat.numel());
  STD_TORCH_CHECK(tensors.size() == offsets.size(), op, ": offsets: expected one for each of ",
                  tensors.size(), " tensors, got ", offsets.size(), ". Pass that many.");
  segments.flat = static_cast<std::byte*>(flat.mutable_data_ptr());
  const auto base = reinterpret_cast<std::uintptr_t>(segments.flat);
  const auto size = static_cast<std::uintptr_t>(core::element_size(segments.flat_type));
  std::vector<MemoryRange> memory{memory_range(flat, {op, "flat"})};
  std::vector<MemoryRange> ranges;
  segments.list.reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::string index = "[" + std::to_string(i) + "]";
    const core::NumericType type = check_numeric(tensors[i], {op, "tensors" + index});
    const std::int64_t numel = tensors[i].numel();
    const std::int64_t offset = offsets[i];
    STD_TORCH_CHECK(offset >= 0 && offset <= flat.numel() && numel <= flat.numel() - offset, op,
                    ": tensors", index, ": expected a range inside the ", flat.numel(),
                    " elements of argument 'flat', got ", numel, " elements at offset ", offset,
                    ". Pass another offset or a larger buffer.");
    segments.list.push_back({tensors[i].mutable_data_ptr(), type, offset, segments.total, numel});
    segments.total += numel;
    memory.push_back(memory_range(tensors[i], {op, "tensors" + index}));
    const auto range_begin = base + static_cast<std::uintptr_t>(offset) * size;
    ranges.push_back({range_begin,
                      range_begin + static_cast<std::uintptr_t>(numel) * size,
                      {op, "offsets" + index}});
  }
  check_disjoint(std::move(memory));
  check_disjoint(std::move(ranges));
  return segments;
}

ShardSum read_shard_sum(const char* op, const Tensor& out, const std::vector<Tensor>& shards,
                        double scale) {
  const core::NumericType out_type = check_numeric(out, {op, "out"});
  const std::int64_t numel = out.numel();
  check_flat(out, {op, "out"}, numel);
  STD_TORCH_CHECK(
      !shards.empty(), op,
      ": argument 'shards': expected at least one tensor, got none. Pass one of each rank.");
  STD_TORCH_CHECK(std::isfinite(scale), op, ": scale: expected a finite number, got ", scale,
                  ". Check what it is computed from.");
  const core::NumericType shard_type = check_numeric(shards[0], {op, "shards[0]"});
  std::vector<const void*> sources;
  sources.reserve(shards.size());
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const Argument argument{op, "shards[" + std::to_string(i) + "]"};
    check_dtype(shards[i], argument, shards[0].scalar_type());
    check_flat(shards[i], argument, numel);
    sources.push_back(shards[i].const_data_ptr());
    const bool in_place = sources.back() == out.const_data_ptr() && shard_type == out_type;
    if (!in_place)
      check_disjoint({memory_range(out, {op, "out"}), memory_range(shards[i], argument)});
  }
  return {out.mutable_data_ptr(),   out_type, std::move(sources), shard_type, numel,
          static_cast<float>(scale)};
}

}  // namespace zero_ext::ops
