// Where the optimizer state of a range of elements lies in its extent of the store.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "../base/rounding.h"

namespace zero_ext::core {

// One kind of state: `bytes` for every `elements` elements, the last few of a chunk rounded up.
struct StateField {
  std::int64_t bytes;
  std::int64_t elements;

  bool operator==(const StateField&) const = default;
};

// Elements of a chunk for a ring of this size: eight chunks fit with every field, gradient and
// parameter in float32, so that several are read and several written while one is computed.
// Throws std::runtime_error, naming the smallest ring, when a chunk would be smaller than what one
// aligned transfer of any element type needs.
std::int64_t chunk_elements_for(std::int64_t staging_buffer_bytes,
                                std::span<const StateField> fields);

// A range of `elements` lies chunk by chunk, each chunk one contiguous transfer: its fields next to
// one another, padded to `alignment`.
class ChunkLayout {
 public:
  // Throws std::runtime_error when chunk_elements * 2 bytes is no multiple of `alignment`: buffers
  // of any element type could not be cut at the same elements.
  ChunkLayout(std::int64_t elements, std::vector<StateField> fields, std::int64_t chunk_elements,
              std::int64_t alignment);

  std::int64_t elements() const { return elements_; }
  std::int64_t alignment() const { return alignment_; }
  std::int64_t chunk_elements() const { return chunk_elements_; }
  std::span<const StateField> fields() const { return fields_; }

  std::int64_t chunks() const { return ceil_div(elements_, chunk_elements_); }
  // Of chunk i: first element, number of elements.
  std::int64_t begin(std::int64_t chunk) const { return chunk * chunk_elements_; }
  std::int64_t count(std::int64_t chunk) const;
  // Of chunk i: bytes from the start of the extent, bytes of its fields, the same with padding.
  std::int64_t offset(std::int64_t chunk) const { return chunk * full_chunk_bytes_; }
  std::int64_t state_bytes(std::int64_t chunk) const { return field_offset(chunk, fields_.size()); }
  std::int64_t padded_bytes(std::int64_t chunk) const;
  // Of field f in chunk i: bytes from the start of the chunk.
  std::int64_t field_offset(std::int64_t chunk, std::size_t field) const;

  std::int64_t extent_bytes() const;

 private:
  std::int64_t elements_;
  std::vector<StateField> fields_;
  std::int64_t chunk_elements_;
  std::int64_t alignment_;
  std::int64_t full_chunk_bytes_;
};

}  // namespace zero_ext::core
