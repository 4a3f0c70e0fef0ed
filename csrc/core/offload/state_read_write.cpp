#include "state_read_write.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "../flat/flat_buffer.h"
#include "extent_checks.h"
#include "round_up.h"

namespace zero_ext::core {
namespace {

// Bytes of one field that a part has in one chunk: where in the chunk, where in caller's memory.
struct FieldBytes {
  std::int64_t in_chunk;
  std::int64_t in_part;
  std::int64_t bytes;
};

std::int64_t entries(const StateField& field, std::int64_t elements) {
  return (elements + field.elements - 1) / field.elements;
}

FieldBytes field_bytes(const StatePart& part, std::int64_t chunk, std::size_t index) {
  const StateField& field = part.layout.fields()[index];
  const std::int64_t start = part.layout.begin(chunk);
  const std::int64_t stop = start + part.layout.count(chunk);
  const std::int64_t first = entries(field, std::max(part.begin, start) - start);
  const std::int64_t last = entries(field, std::min(part.end, stop) - start);
  const std::int64_t passed = (start - part.begin) / field.elements;
  return {part.layout.field_offset(chunk, index) + first * field.bytes,
          std::max(passed, std::int64_t{0}) * field.bytes, (last - first) * field.bytes};
}

// The aligned bytes of a chunk that hold all that is asked for.
struct Window {
  std::int64_t begin = 0;  // from the start of the chunk
  std::int64_t end = 0;
  std::int64_t asked = 0;  // bytes
  bool whole = false;      // the part covers every byte that is not padding
};

Window window_of(const StatePart& part, std::int64_t chunk) {
  Window window;
  std::int64_t begin = part.layout.padded_bytes(chunk);
  std::int64_t end = 0;
  for (std::size_t i = 0; i < part.fields.size(); ++i) {
    if (part.fields[i] == nullptr) continue;
    const FieldBytes field = field_bytes(part, chunk, i);
    begin = std::min(begin, field.in_chunk);
    end = std::max(end, field.in_chunk + field.bytes);
    window.asked += field.bytes;
  }
  const std::int64_t alignment = part.layout.alignment();
  window.begin = begin / alignment * alignment;
  window.end = round_up(end, alignment);
  const std::int64_t last = std::min(window.end, part.layout.state_bytes(chunk));
  window.whole = window.asked == last - window.begin;
  return window;
}

void check_part(const ByteStore& store, const StatePart& part) {
  const ChunkLayout& layout = part.layout;
  check_extents({{part.offset, layout.extent_bytes()}}, store.alignment());
  if (part.begin < 0 || part.begin > part.end || part.end > layout.elements()) {
    throw std::runtime_error("state: elements [" + std::to_string(part.begin) + ", " +
                             std::to_string(part.end) + ") of a range of " +
                             std::to_string(layout.elements()));
  }
  if (part.fields.size() != layout.fields().size()) {
    throw std::runtime_error("state: " + std::to_string(part.fields.size()) + " fields of " +
                             std::to_string(layout.fields().size()));
  }
  for (std::size_t i = 0; i < part.fields.size(); ++i) {
    const std::int64_t unit = layout.fields()[i].elements;
    const bool ends_well = part.end % unit == 0 || part.end == layout.elements();
    if (part.fields[i] != nullptr && (part.begin % unit != 0 || !ends_well)) {
      throw std::runtime_error("state: elements [" + std::to_string(part.begin) + ", " +
                               std::to_string(part.end) + ") cut the entries of field " +
                               std::to_string(i) + ", one for every " + std::to_string(unit) +
                               " elements");
    }
  }
}

enum class Direction { kRead, kWrite };

// The chunks that a part touches. What a write does not cover is read first.
class PartChunks {
 public:
  PartChunks(const StatePart& part, Direction direction)
      : part_(part), direction_(direction), chunk_(part.begin / part.layout.chunk_elements()) {
    const bool nothing =
        std::ranges::all_of(part.fields, [](const std::byte* each) { return each == nullptr; });
    if (nothing || part.begin == part.end) chunk_ = part.layout.chunks();
  }

  std::optional<Job> operator()() {
    if (chunk_ >= part_.layout.chunks() || part_.layout.begin(chunk_) >= part_.end) {
      return std::nullopt;
    }
    const Window window = window_of(part_, chunk_);
    const std::int64_t bytes = window.end - window.begin;
    const Transfer transfer{part_.offset + part_.layout.offset(chunk_) + window.begin, 0, bytes,
                            bytes - window.asked};
    Job job{0, chunk_++, bytes, {}, {}};
    if (direction_ == Direction::kRead || !window.whole) job.reads[0] = transfer;
    if (direction_ == Direction::kWrite) job.writes[0] = transfer;
    return job;
  }

 private:
  const StatePart& part_;
  Direction direction_;
  std::int64_t chunk_;
};

PipelineCounters access(ByteStore& store, Ring& ring, const StatePart& part, Direction direction) {
  check_part(store, part);
  ChunkPipeline pipeline(store, ring, PartChunks(part, direction));
  while (const ChunkPipeline::Slot* const slot = pipeline.next()) {
    const std::int64_t chunk = slot->job.chunk;
    const Window window = window_of(part, chunk);
    // Padding is written as zeros, not as whatever the ring held before.
    if (direction == Direction::kWrite && window.whole) {
      std::memset(slot->memory.data() + window.asked, 0,
                  static_cast<std::size_t>(window.end - window.begin - window.asked));
    }
    for (std::size_t i = 0; i < part.fields.size(); ++i) {
      if (part.fields[i] == nullptr) continue;
      const FieldBytes field = field_bytes(part, chunk, i);
      std::byte* const stored = slot->memory.data() + field.in_chunk - window.begin;
      std::byte* const given = part.fields[i] + field.in_part;
      const auto bytes = static_cast<std::size_t>(field.bytes);
      if (direction == Direction::kRead) {
        std::memcpy(given, stored, bytes);
      } else {
        std::memcpy(stored, given, bytes);
      }
    }
  }
  return pipeline.counters();
}

}  // namespace

PipelineCounters read_state(ByteStore& store, Ring& ring, const StatePart& part) {
  return access(store, ring, part, Direction::kRead);
}

PipelineCounters write_state(ByteStore& store, Ring& ring, const StatePart& part) {
  return access(store, ring, part, Direction::kWrite);
}

PipelineCounters fill_state(ByteStore& store, Ring& ring, const ChunkLayout& layout,
                            std::int64_t offset, const std::byte* master, NumericType type) {
  check_extents({{offset, layout.extent_bytes()}}, store.alignment());
  const StateField& first = layout.fields()[0];
  if (first.bytes != 4 || first.elements != 1) {
    throw std::runtime_error("state: the first field has " + std::to_string(first.bytes) +
                             " bytes for every " + std::to_string(first.elements) +
                             " elements; master weights are float32");
  }
  std::int64_t chunk = 0;
  ChunkPipeline pipeline(store, ring, [&]() -> std::optional<Job> {
    if (chunk >= layout.chunks()) return std::nullopt;
    const std::int64_t bytes = layout.padded_bytes(chunk);
    Job job{0, chunk, bytes, {}, {}};
    job.writes[0] = {offset + layout.offset(chunk), 0, bytes, bytes - layout.state_bytes(chunk)};
    ++chunk;
    return job;
  });
  while (const ChunkPipeline::Slot* const slot = pipeline.next()) {
    const std::int64_t count = layout.count(slot->job.chunk);
    std::byte* const memory = slot->memory.data();
    copy_cast(memory, NumericType::float32,
              master + layout.begin(slot->job.chunk) * element_size(type), type, count);
    std::memset(memory + 4 * count, 0, slot->memory.size() - static_cast<std::size_t>(4 * count));
  }
  return pipeline.counters();
}

}  // namespace zero_ext::core
