// Reading and writing slices of the optimizer state in a store: first fill, checkpoints, and
// optimizers that run elsewhere. Memory in use is the ring's, whatever the slice's length.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../base/numeric_types.h"
#include "chunk_layout.h"
#include "chunk_pipeline.h"

namespace zero_ext::core {

// Elements [begin, end) of a range, and the caller's memory for each field of its layout; null for
// fields that are not asked for. Where a field has more than one element per entry, begin and end
// are multiples of that, or the range's end.
struct StateSlice {
  const ChunkLayout& layout;
  std::int64_t offset;  // of the state's extent
  std::int64_t begin;
  std::int64_t end;
  std::vector<std::byte*> fields;
};

// Copies the slice out of the store. Both throw std::runtime_error when the slice lies outside the
// range; when a transfer fails its error is thrown, with none left in flight.
PipelineCounters read_state(ByteStore& store, RingBuffer& ring, const StateSlice& slice);

// Copies the slice into the store; elements and fields around it keep their values.
PipelineCounters write_state(ByteStore& store, RingBuffer& ring, const StateSlice& slice);

// Writes a whole range: the first field from `master`, converted to float32, the others zero.
PipelineCounters fill_state(ByteStore& store, RingBuffer& ring, const ChunkLayout& layout,
                            std::int64_t offset, const std::byte* master, NumericType type);

}  // namespace zero_ext::core
