#include "adam_stream.h"

#include <algorithm>
#include <cstring>

#include "../base/rounding.h"
#include "../compression/blockwise.h"
#include "../flat/flat_buffer.h"
#include "../optimizers/optimizer_step.h"

namespace zero_ext::core {
namespace {

constexpr std::int64_t kGrain = 16384;  // elements worth a thread
constexpr std::int64_t kGrainBlocks = 64;

bool in_store(const RangeElements<const std::byte>& gradient) { return gradient.offset >= 0; }
bool in_store(const std::optional<RangeElements<std::byte>>& param) {
  return param && param->offset >= 0;
}

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
    if (range.target >= 0) extents.push_back({range.target, range.layout.extent_bytes()});
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
ChunkTransfer chunk_of(const ChunkLayout& layout, std::int64_t chunk, NumericType type,
                       std::int64_t extent_offset, std::int64_t memory_offset) {
  const std::int64_t bytes = layout.count(chunk) * element_size(type);
  const std::int64_t padded = round_up(bytes, layout.alignment());
  return {extent_offset + layout.begin(chunk) * element_size(type), memory_offset, padded,
          padded - bytes};
}

// Memory of a chunk: its state, then what its gradient and parameters take that lie in the store.
ChunkJob make_chunk_job(const AdamRange& range, std::size_t index, std::int64_t chunk) {
  const ChunkLayout& layout = range.layout;
  const std::int64_t padded = layout.padded_bytes(chunk);
  ChunkJob job{index, chunk, padded, {}, {}};
  job.reads[0] = {range.offset + layout.offset(chunk), 0, padded,
                  padded - layout.state_bytes(chunk)};
  job.writes[0] = job.reads[0];
  if (range.target >= 0) job.writes[0].offset = range.target + layout.offset(chunk);
  if (in_store(range.gradient)) {
    const std::int64_t memory_offset = round_up(job.bytes, RingBuffer::kAlignment);
    job.reads[1] =
        chunk_of(layout, chunk, range.gradient.type, range.gradient.offset, memory_offset);
    job.bytes = memory_offset + job.reads[1].bytes;
  }
  if (in_store(range.param)) {
    const std::int64_t memory_offset = round_up(job.bytes, RingBuffer::kAlignment);
    job.writes[1] = chunk_of(layout, chunk, range.param->type, range.param->offset, memory_offset);
    job.bytes = memory_offset + job.writes[1].bytes;
  }
  return job;
}

// The chunks of all ranges that a segment touches or that move to another extent, in order.
class MovedChunks {
 public:
  explicit MovedChunks(std::span<const AdamRange> ranges) : ranges_(ranges) {}

  std::optional<ChunkJob> operator()() {
    for (; range_ < ranges_.size(); ++range_, chunk_ = 0, segment_ = 0) {
      const AdamRange& range = ranges_[range_];
      if (const std::optional<std::int64_t> element = next_element(range)) {
        const std::int64_t chunk = *element / range.layout.chunk_elements();
        chunk_ = chunk + 1;
        return make_chunk_job(range, range_, chunk);
      }
    }
    return std::nullopt;
  }

 private:
  // First element at or after the next chunk whose chunk is to move.
  std::optional<std::int64_t> next_element(const AdamRange& range) {
    const std::int64_t first = range.layout.begin(chunk_);
    if (range.target >= 0) {
      return first < range.layout.elements() ? std::optional(first) : std::nullopt;
    }
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
  ChunkStep(AdamMoments moments, const ChunkRunner& runner, std::int32_t* non_finite)
      : moments_(moments), runner_(runner), non_finite_(non_finite) {}

  void operator()(const AdamRange& range, const ChunkPipeline::Slot& slot,
                  const PipelineCounters& so_far) {
    select(range, slot.job.chunk);
    if (moments_ == AdamMoments::blockwise8) {
      step_8bit(range, slot, so_far);
    } else {
      step(range, slot, so_far);
    }
    if (in_store(range.param)) complete(range, slot);
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
                           std::min(each->end - begin, count), each->coefficients});
    }
  }

  void step(const AdamRange& range, const ChunkPipeline::Slot& slot,
            const PipelineCounters& so_far) const {
    const bool wide = moments_ == AdamMoments::float32;
    const StepBuffers buffers{master(slot),
                              {field<void>(range, slot, 1), field<void>(range, slot, 2)},
                              wide ? NumericType::float32 : NumericType::bfloat16,
                              gradient(range, slot),
                              range.gradient.type,
                              param(range, slot),
                              param_type(range),
                              non_finite_};
    runner_(total_of(segments_), kGrain, so_far, [&](std::int64_t begin, std::int64_t end) {
      optimizer_step<AdamRule>(buffers, segments_, begin, end);
    });
  }

  void step_8bit(const AdamRange& range, const ChunkPipeline::Slot& slot,
                 const PipelineCounters& so_far) const {
    const std::int64_t count = range.layout.count(slot.job.chunk);
    const Adam8BitBuffers buffers{count,
                                  master(slot),
                                  field<std::uint8_t>(range, slot, 3),
                                  field<std::uint8_t>(range, slot, 4),
                                  field<float>(range, slot, 1),
                                  field<float>(range, slot, 2),
                                  gradient(range, slot),
                                  range.gradient.type,
                                  param(range, slot),
                                  param_type(range),
                                  non_finite_};
    runner_(block_count(count), kGrainBlocks, so_far, [&](std::int64_t begin, std::int64_t end) {
      adam_step_8bit(buffers, segments_, begin, end);
    });
  }

  template <class T>
  static T* field(const AdamRange& range, const ChunkPipeline::Slot& slot, std::size_t index) {
    void* const at = slot.memory.data() + range.layout.field_offset(slot.job.chunk, index);
    return static_cast<T*>(at);
  }

  static float* master(const ChunkPipeline::Slot& slot) {
    return reinterpret_cast<float*>(slot.memory.data());
  }

  static const void* gradient(const AdamRange& range, const ChunkPipeline::Slot& slot) {
    const ChunkJob& job = slot.job;
    if (in_store(range.gradient)) return slot.memory.data() + job.reads[1].memory_offset;
    return range.gradient.data + range.layout.begin(job.chunk) * element_size(range.gradient.type);
  }

  static void* param(const AdamRange& range, const ChunkPipeline::Slot& slot) {
    const ChunkJob& job = slot.job;
    if (!range.param) return nullptr;
    if (in_store(range.param)) return slot.memory.data() + job.writes[1].memory_offset;
    return range.param->data + range.layout.begin(job.chunk) * element_size(range.param->type);
  }

  static std::optional<NumericType> param_type(const AdamRange& range) {
    return range.param ? std::optional(range.param->type) : std::nullopt;
  }

  // Parameters of elements outside every segment, and the padding behind the last.
  void complete(const AdamRange& range, const ChunkPipeline::Slot& slot) const {
    const NumericType type = range.param->type;
    const std::int64_t size = element_size(type);
    auto* const to = static_cast<std::byte*>(param(range, slot));
    std::int64_t done = 0;
    const auto round_until = [&](std::int64_t end) {
      copy_cast(to + done * size, type, master(slot) + done, NumericType::float32, end - done);
    };
    for (const AdamSegment& segment : segments_) {
      round_until(segment.begin);
      done = segment.end;
    }
    const std::int64_t count = range.layout.count(slot.job.chunk);
    round_until(count);
    std::memset(to + count * size, 0, static_cast<std::size_t>(slot.job.writes[1].padding));
  }

  AdamMoments moments_;
  const ChunkRunner& runner_;
  std::int32_t* non_finite_;
  std::vector<AdamSegment> segments_;
};

}  // namespace

std::vector<StateField> adam_fields(AdamMoments moments) {
  switch (moments) {
    case AdamMoments::float32:
      return {{4, 1}, {4, 1}, {4, 1}};
    case AdamMoments::bfloat16:
      return {{4, 1}, {2, 1}, {2, 1}};
    case AdamMoments::blockwise8:
      break;
  }
  return {{4, 1}, {4, kQuantizationBlock}, {4, kQuantizationBlock}, {1, 1}, {1, 1}};
}

PipelineCounters adam_stream(ByteStore& store, RingBuffer& ring, std::span<const AdamRange> ranges,
                             AdamMoments moments, const ChunkRunner& runner,
                             std::int32_t* non_finite) {
  check_ranges(store, ranges);
  ChunkPipeline pipeline(store, ring, MovedChunks(ranges));
  ChunkStep step(moments, runner, non_finite);
  while (const ChunkPipeline::Slot* const slot = pipeline.next()) {
    step(ranges[slot->job.range], *slot, pipeline.counters());
  }
  return pipeline.counters();
}

}  // namespace zero_ext::core
