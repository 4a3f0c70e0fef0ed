#include "chunk_layout.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "../base/error_text.h"
#include "../base/rounding.h"
#include "ring_buffer.h"

namespace zero_ext::core {
namespace {

constexpr std::int64_t kChunksInRing = 8;
constexpr std::int64_t kSmallestElement = 2;   // bytes of a bfloat16 or float16 parameter
constexpr std::int64_t kGradientAndParam = 8;  // bytes an element, both in float32

std::int64_t field_bytes(const StateField& field, std::int64_t count) {
  return ceil_div(count, field.elements) * field.bytes;
}

std::int64_t bytes_of(std::span<const StateField> fields, std::int64_t count) {
  return std::accumulate(
      fields.begin(), fields.end(), std::int64_t{0},
      [count](std::int64_t sum, const StateField& each) { return sum + field_bytes(each, count); });
}

void check_fields(std::span<const StateField> fields, std::int64_t chunk_elements) {
  if (fields.empty())
    throw std::runtime_error(
        "chunk layout: expected at least one field, got none. Name the fields of the state.");
  for (const StateField& field : fields) {
    require(field.bytes >= 1 && field.elements >= 1 && chunk_elements % field.elements == 0,
            "chunk layout: expected fields of positive bytes for a number of elements that divides "
            "the chunk's ",
            chunk_elements, ", got ", field.bytes, " bytes for every ", field.elements,
            " elements. Correct the field.");
  }
}

}  // namespace

std::int64_t chunk_elements_for(std::int64_t staging_buffer_bytes,
                                std::span<const StateField> fields) {
  std::int64_t unit = RingBuffer::kAlignment / kSmallestElement;
  for (const StateField& field : fields) unit = std::lcm(unit, field.elements);
  check_fields(fields, unit);
  const std::int64_t unit_bytes = bytes_of(fields, unit) + kGradientAndParam * unit;
  const std::int64_t units = staging_buffer_bytes / kChunksInRing / unit_bytes;
  require(units >= 1, "staging_buffer_bytes: expected at least ", kChunksInRing * unit_bytes,
          ", so that a chunk of this state fills an aligned block, got ", staging_buffer_bytes,
          ". Raise it.");
  return units * unit;
}

ChunkLayout::ChunkLayout(std::int64_t elements, std::vector<StateField> fields,
                         std::int64_t chunk_elements, std::int64_t alignment)
    : elements_(elements),
      fields_(std::move(fields)),
      chunk_elements_(chunk_elements),
      alignment_(alignment) {
  require(elements >= 0, "chunk layout: expected a range of at least 0 elements, got ", elements,
          ". Pass another range.");
  if (alignment < 1 || chunk_elements < 1 || chunk_elements * kSmallestElement % alignment != 0) {
    throw make_error("chunk layout: expected chunks of a multiple of ",
                     std::max<std::int64_t>(alignment / kSmallestElement, 1),
                     " elements with an alignment of ", alignment, " bytes, got ", chunk_elements,
                     ". Round it up.");
  }
  check_fields(fields_, chunk_elements);
  full_chunk_bytes_ = round_up(bytes_of(fields_, chunk_elements), alignment);
}

std::int64_t ChunkLayout::count(std::int64_t chunk) const {
  return std::min(chunk_elements_, elements_ - begin(chunk));
}

std::int64_t ChunkLayout::padded_bytes(std::int64_t chunk) const {
  return round_up(state_bytes(chunk), alignment_);
}

std::int64_t ChunkLayout::field_offset(std::int64_t chunk, std::size_t field) const {
  return bytes_of(std::span(fields_).first(field), count(chunk));
}

std::int64_t ChunkLayout::extent_bytes() const {
  const std::int64_t last = chunks() - 1;
  return last < 0 ? 0 : offset(last) + padded_bytes(last);
}

}  // namespace zero_ext::core
