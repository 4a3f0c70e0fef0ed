#include "state_read_write.h"

#include <algorithm>
#include <cstring>

#include "../base/error_text.h"
#include "../base/rounding.h"
#include "../flat/flat_buffer.h"

namespace zero_ext::core {
namespace {

// Bytes of one field that a slice has in one chunk: where in the chunk, where in caller's memory.
struct FieldBytes {
  std::int64_t in_chunk;
  std::int64_t in_slice;
  std::int64_t bytes;
};

FieldBytes field_bytes(const StateSlice& slice, std::int64_t chunk, std::size_t index) {
  const StateField& field = slice.layout.fields()[index];
  const std::int64_t start = slice.layout.begin(chunk);
  const std::int64_t stop = start + slice.layout.count(chunk);
  const std::int64_t first = ceil_div(std::max(slice.begin, start) - start, field.elements);
  const std::int64_t last = ceil_div(std::min(slice.end, stop) - start, field.elements);
  const std::int64_t passed = (start - slice.begin) / field.elements;
  return {slice.layout.field_offset(chunk, index) + first * field.bytes,
          std::max(passed, std::int64_t{0}) * field.bytes, (last - first) * field.bytes};
}

// The aligned bytes of a chunk that hold all that is asked for.
struct Window {
  std::int64_t begin = 0;  // from the start of the chunk
  std::int64_t end = 0;
  std::int64_t requested_bytes = 0;  // bytes
  bool covers_all = false;           // the slice covers every byte that is not padding
};

Window window_of(const StateSlice& slice, std::int64_t chunk) {
  Window window;
  std::int64_t begin = slice.layout.padded_bytes(chunk);
  std::int64_t end = 0;
  for (std::size_t i = 0; i < slice.fields.size(); ++i) {
    if (slice.fields[i] == nullptr) continue;
    const FieldBytes field = field_bytes(slice, chunk, i);
    begin = std::min(begin, field.in_chunk);
    end = std::max(end, field.in_chunk + field.bytes);
    window.requested_bytes += field.bytes;
  }
  const std::int64_t alignment = slice.layout.alignment();
  window.begin = begin / alignment * alignment;
  window.end = round_up(end, alignment);
  const std::int64_t last = std::min(window.end, slice.layout.state_bytes(chunk));
  window.covers_all = window.requested_bytes == last - window.begin;
  return window;
}

void check_slice(const ByteStore& store, const StateSlice& slice) {
  const ChunkLayout& layout = slice.layout;
  check_extents({{slice.offset, layout.extent_bytes()}}, store.alignment());
  require(slice.begin >= 0 && slice.begin <= slice.end && slice.end <= layout.elements(),
          "state: expected elements inside [0, ", layout.elements(), "), got [", slice.begin, ", ",
          slice.end, "). Pass other bounds.");
  if (slice.fields.size() != layout.fields().size()) {
    throw make_error("state: expected ", layout.fields().size(), " fields, got ",
                     slice.fields.size(), ". Pass memory or nothing for each.");
  }
  for (std::size_t i = 0; i < slice.fields.size(); ++i) {
    const std::int64_t unit = layout.fields()[i].elements;
    const bool ends_well = slice.end % unit == 0 || slice.end == layout.elements();
    if (slice.fields[i] != nullptr && (slice.begin % unit != 0 || !ends_well)) {
      throw make_error("state: expected bounds at multiples of ", unit,
                       " elements, which an entry of field ", i, " covers, got [", slice.begin,
                       ", ", slice.end, "). Round them.");
    }
  }
}

enum class StateAccess { kRead, kWrite };

// The chunks that a slice touches. What a write does not cover is read first.
class SliceChunks {
 public:
  SliceChunks(const StateSlice& slice, StateAccess direction)
      : slice_(slice), direction_(direction), chunk_(slice.begin / slice.layout.chunk_elements()) {
    const bool nothing =
        std::ranges::all_of(slice.fields, [](const std::byte* each) { return each == nullptr; });
    if (nothing || slice.begin == slice.end) chunk_ = slice.layout.chunks();
  }

  std::optional<ChunkJob> operator()() {
    if (chunk_ >= slice_.layout.chunks() || slice_.layout.begin(chunk_) >= slice_.end) {
      return std::nullopt;
    }
    const Window window = window_of(slice_, chunk_);
    const std::int64_t bytes = window.end - window.begin;
    const ChunkTransfer transfer{slice_.offset + slice_.layout.offset(chunk_) + window.begin, 0,
                                 bytes, bytes - window.requested_bytes};
    ChunkJob job{0, chunk_++, bytes, {}, {}};
    if (direction_ == StateAccess::kRead || !window.covers_all) job.reads[0] = transfer;
    if (direction_ == StateAccess::kWrite) job.writes[0] = transfer;
    return job;
  }

 private:
  const StateSlice& slice_;
  StateAccess direction_;
  std::int64_t chunk_;
};

PipelineCounters transfer_slice(ByteStore& store, RingBuffer& ring, const StateSlice& slice,
                                StateAccess direction) {
  check_slice(store, slice);
  ChunkPipeline pipeline(store, ring, SliceChunks(slice, direction));
  while (const ChunkPipeline::Slot* const slot = pipeline.next()) {
    const std::int64_t chunk = slot->job.chunk;
    const Window window = window_of(slice, chunk);
    // Padding is written as zeros, not as whatever the ring held before.
    if (direction == StateAccess::kWrite && window.covers_all) {
      std::memset(slot->memory.data() + window.requested_bytes, 0,
                  static_cast<std::size_t>(window.end - window.begin - window.requested_bytes));
    }
    for (std::size_t i = 0; i < slice.fields.size(); ++i) {
      if (slice.fields[i] == nullptr) continue;
      const FieldBytes field = field_bytes(slice, chunk, i);
      std::byte* const stored = slot->memory.data() + field.in_chunk - window.begin;
      std::byte* const caller = slice.fields[i] + field.in_slice;
      const auto bytes = static_cast<std::size_t>(field.bytes);
      if (direction == StateAccess::kRead) {
        std::memcpy(caller, stored, bytes);
      } else {
        std::memcpy(stored, caller, bytes);
      }
    }
  }
  return pipeline.counters();
}

}  // namespace

PipelineCounters read_state(ByteStore& store, RingBuffer& ring, const StateSlice& slice) {
  return transfer_slice(store, ring, slice, StateAccess::kRead);
}

PipelineCounters write_state(ByteStore& store, RingBuffer& ring, const StateSlice& slice) {
  return transfer_slice(store, ring, slice, StateAccess::kWrite);
}

PipelineCounters fill_state(ByteStore& store, RingBuffer& ring, const ChunkLayout& layout,
                            std::int64_t offset, const std::byte* master, NumericType type) {
  check_extents({{offset, layout.extent_bytes()}}, store.alignment());
  const StateField& first = layout.fields()[0];
  require(first.bytes == 4 && first.elements == 1,
          "state: expected float32 master weights as the first field, got ", first.bytes,
          " bytes for every ", first.elements,
          " elements. Open the stream with the fields of an optimizer.");
  std::int64_t chunk = 0;
  ChunkPipeline pipeline(store, ring, [&]() -> std::optional<ChunkJob> {
    if (chunk >= layout.chunks()) return std::nullopt;
    const std::int64_t bytes = layout.padded_bytes(chunk);
    ChunkJob job{0, chunk, bytes, {}, {}};
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
