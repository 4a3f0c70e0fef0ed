#include "extent_arena.h"

#include <iterator>

#include "../base/error_text.h"

namespace zero_ext::core {
ExtentArena::ExtentArena(std::int64_t capacity, std::int64_t alignment) : alignment_(alignment) {
  require(alignment >= 1, "extent arena: expected an alignment of at least 1, got ", alignment,
          ". Pass a multiple of the sector.");
  grow(capacity);
}

std::int64_t ExtentArena::allocate(std::int64_t bytes) {
  require(bytes >= 1, "extent arena: expected at least 1 byte to allocate, got ", bytes,
          ". Leave empty ranges out.");
  // What cannot fit anyway is not rounded up: that could overflow.
  const std::int64_t rounded = bytes > capacity_ / alignment_ * alignment_
                                   ? bytes
                                   : ((bytes - 1) / alignment_ + 1) * alignment_;
  const auto best = by_size_.lower_bound({rounded, 0});
  require(best != by_size_.end(), "extent arena: expected a free range of ", bytes, " bytes, got ",
          largest_free(), " as the largest, with ", live_bytes_, " of ", capacity_,
          " bytes taken. Reserve more, or release extents.");
  const auto [found, offset] = *best;
  remove_free(offset, found);
  if (found > rounded) add_free(offset + rounded, found - rounded);
  live_.emplace(offset, rounded);
  live_bytes_ += rounded;
  return offset;
}

void ExtentArena::release(std::int64_t offset) {
  const auto extent = live_.find(offset);
  require(extent != live_.end(), "extent arena: no extent starts at offset ", offset,
          ". Release an offset that allocate returned, once.");
  std::int64_t begin = offset;
  std::int64_t bytes = extent->second;
  live_bytes_ -= bytes;
  live_.erase(extent);
  const auto next = free_.find(begin + bytes);
  if (next != free_.end()) {
    const std::int64_t length = next->second;
    remove_free(begin + bytes, length);
    bytes += length;
  }
  const auto after = free_.lower_bound(begin);
  if (after != free_.begin()) {
    const auto [before, length] = *std::prev(after);
    if (before + length == begin) {
      remove_free(before, length);
      begin = before;
      bytes += length;
    }
  }
  add_free(begin, bytes);
}

void ExtentArena::grow(std::int64_t capacity) {
  require(capacity >= capacity_, "extent arena: expected a capacity of at least the present ",
          capacity_, " bytes, got ", capacity, ". Pass a larger one.");
  const std::int64_t old_end = capacity_ / alignment_ * alignment_;
  const std::int64_t new_end = capacity / alignment_ * alignment_;
  capacity_ = capacity;
  if (new_end == old_end) return;
  std::int64_t begin = old_end;
  if (!free_.empty()) {
    const auto [last, length] = *std::prev(free_.end());
    if (last + length == old_end) {
      remove_free(last, length);
      begin = last;
    }
  }
  add_free(begin, new_end - begin);
}

bool ExtentArena::contains(std::int64_t offset, std::int64_t bytes) const {
  const auto after = live_.upper_bound(offset);
  if (bytes < 0 || after == live_.begin()) return false;
  const auto& [begin, length] = *std::prev(after);
  // Compared by what is left, so that no sum can overflow.
  return offset - begin <= length && bytes <= length - (offset - begin);
}

std::int64_t ExtentArena::largest_free() const {
  return by_size_.empty() ? 0 : std::prev(by_size_.end())->first;
}

void ExtentArena::add_free(std::int64_t offset, std::int64_t bytes) {
  free_.emplace(offset, bytes);
  by_size_.emplace(bytes, offset);
}

void ExtentArena::remove_free(std::int64_t offset, std::int64_t bytes) {
  free_.erase(offset);
  by_size_.erase({bytes, offset});
}

}  // namespace zero_ext::core
