#include "adam_stream.h"

#include <algorithm>
#include <cstring>

#include "../flat.h"
#include "extents.h"
#include "round_up.h"

namespace zero_ext::core {
namespace {

constexpr std::int64_t kGrain = 16384;

bool in_store(const ElementSource& gradient) { return gradient.data == nullptr; }
bool in_store(const std::optional<ElementTarget>& param) { return param && param->data == nullptr; }

void add_extent(std::vector<StoreExtent>& extents, const ChunkLayout& layout, NumericType type,
                std::int64_t offset) {
  const std::int64_t bytes = layout.elements() * element_size(type);
  extents.push_back({offset, round_up(bytes, layout.alignment())});
}

void check_ranges(const ByteStore& store, std::span<const AdamRange> ranges) {
  std::vector<StoreExtent> extents;
  extents.reserve(ranges.size());
  for (const AdamRange& range : ranges) {
    extents.push_back({range.offset, range.layout.extent_bytes()});
    if (in_store(range.gradient)) {
      add_extent(extents, range.layout, range.gradient.type, range.gradient.offset);
    }
    if (in_store(range.param)) {
      add_extent(extents, range.layout, range.param->type, range.param->offset);
    }
  }
  check_extents(std::move(extents), store.alignment());
}

// Part of a gradient or parameter extent that belongs to a chunk.
Transfer chunk_of(const ChunkLayout& layout, std::int64_t chunk, NumericType type,
                  std::int64_t extent_offset, std::int64_t place) {
  const std::int64_t bytes = layout.count(chunk) * element_size(type);
  const std::int64_t padded = round_up(bytes, layout.alignment());
  return {extent_offset + layout.begin(chunk) * element_size(type), place, padded, padded - bytes};
}

// Memory of a chunk: its state, then what its gradient and parameters take that lie in the store.
Job make_job(const AdamRange& range, std::size_t index, std::int64_t chunk) {
  const ChunkLayout& layout = range.layout;
  const std::int64_t padded = layout.padded_bytes(chunk);
  Job job{index, chunk, padded, {}, {}};
  job.reads[0] = {range.offset + layout.offset(chunk), 0, padded,
                  padded - layout.state_bytes(chunk)};
  job.writes[0] = job.reads[0];
  if (in_store(range.gradient)) {
    const std::int64_t place = round_up(job.bytes, Ring::kAlignment);
    job.reads[1] = chunk_of(layout, chunk, range.gradient.type, range.gradient.offset, place);
    job.bytes = place + job.reads[1].bytes;
  }
  if (in_store(range.param)) {
    const std::int64_t place = round_up(job.bytes, Ring::kAlignment);
    job.writes[1] = chunk_of(layout, chunk, range.param->type, range.param->offset, place);
    job.bytes = place + job.writes[1].bytes;
  }
  return job;
}

// The chunks of all ranges that a segment touches, in order.
class TouchedChunks {
 public:
  explicit TouchedChunks(std::span<const AdamRange> ranges) : ranges_(ranges) {}

  std::optional<Job> operator()() {
    for (; range_ < ranges_.size(); ++range_, chunk_ = 0, segment_ = 0) {
      const AdamRange& range = ranges_[range_];
      if (const std::optional<std::int64_t> element = next_touched(range)) {
        const std::int64_t chunk = *element / range.layout.chunk_elements();
        chunk_ = chunk + 1;
        return make_job(range, range_, chunk);
      }
    }
    return std::nullopt;
  }

 private:
  // First element at or after the next chunk that is inside a segment.
  std::optional<std::int64_t> next_touched(const AdamRange& range) {
    const std::int64_t first = range.layout.begin(chunk_);
    for (; segment_ < range.segments.size(); ++segment_) {
      const AdamSegment& segment = range.segments[segment_];
      const std::int64_t element = std::max(first, segment.begin);
      if (element < segment.end) return element;
    }
    return std::nullopt;
  }

  std::span<const AdamRange> ranges_;
  std::size_t range_ = 0;
  std::int64_t chunk_ = 0;
  std::size_t segment_ = 0;
};

// The step on one chunk in memory.
class ChunkStep {
 public:
  ChunkStep(NumericType moments, const ParallelFor& parallel)
      : moments_(moments), parallel_(parallel) {}

  void operator()(const AdamRange& range, const ChunkPipeline::Slot& slot) {
    select(range, slot.job.chunk);
    const AdamBuffers buffers = buffers_of(range, slot);
    std::int64_t total = 0;
    for (const AdamSegment& segment : segments_) total += segment.end - segment.begin;
    parallel_(0, total, kGrain, [&](std::int64_t begin, std::int64_t end) {
      adam_step(buffers, segments_, begin, end);
    });
    if (in_store(range.param)) complete(buffers, range.layout.count(slot.job.chunk), slot);
  }

 private:
  // segments_ = the range's segments cut to the chunk, relative to it.
  void select(const AdamRange& range, std::int64_t chunk) {
    const std::int64_t begin = range.layout.begin(chunk);
    const std::int64_t count = range.layout.count(chunk);
    segments_.clear();
    const auto ends_before = [begin](const AdamSegment& each) { return each.end <= begin; };
    auto each = std::partition_point(range.segments.begin(), range.segments.end(), ends_before);
    for (; each != range.segments.end() && each->begin < begin + count; ++each) {
      segments_.push_back({std::max(each->begin - begin, std::int64_t{0}),
                           std::min(each->end - begin, count), each->factors});
    }
  }

  AdamBuffers buffers_of(const AdamRange& range, const ChunkPipeline::Slot& slot) const {
    const Job& job = slot.job;
    const ChunkLayout& layout = range.layout;
    std::byte* const memory = slot.memory.data();
    const std::int64_t begin = layout.begin(job.chunk);
    AdamBuffers buffers{reinterpret_cast<float*>(memory),
                        memory + layout.field_offset(job.chunk, 1),
                        memory + layout.field_offset(job.chunk, 2),
                        moments_,
                        in_store(range.gradient)
                            ? memory + job.reads[1].place
                            : range.gradient.data + begin * element_size(range.gradient.type),
                        range.gradient.type,
                        nullptr,
                        std::nullopt};
    if (range.param) {
      buffers.param_type = range.param->type;
      buffers.param = in_store(range.param)
                          ? memory + job.writes[1].place
                          : range.param->data + begin * element_size(range.param->type);
    }
    return buffers;
  }

  // Parameters of elements outside every segment, and the padding behind the last.
  void complete(const AdamBuffers& buffers, std::int64_t count, const ChunkPipeline::Slot& slot) {
    const std::int64_t size = element_size(*buffers.param_type);
    auto* const param = static_cast<std::byte*>(buffers.param);
    std::int64_t done = 0;
    const auto round_until = [&](std::int64_t end) {
      copy_cast(param + done * size, *buffers.param_type, buffers.master + done,
                NumericType::float32, end - done);
    };
    for (const AdamSegment& segment : segments_) {
      round_until(segment.begin);
      done = segment.end;
    }
    round_until(count);
    std::memset(param + count * size, 0, static_cast<std::size_t>(slot.job.writes[1].padding));
  }

  NumericType moments_;
  const ParallelFor& parallel_;
  std::vector<AdamSegment> segments_;
};

}  // namespace

PipelineCounters adam_stream(ByteStore& store, Ring& ring, std::span<const AdamRange> ranges,
                             NumericType moments, const ParallelFor& parallel) {
  check_ranges(store, ranges);
  ChunkPipeline pipeline(store, ring, TouchedChunks(ranges));
  ChunkStep step(moments, parallel);
  while (const ChunkPipeline::Slot* const slot = pipeline.next()) {
    step(ranges[slot->job.range], *slot);
  }
  return pipeline.counters();
}

}  // namespace zero_ext::core
