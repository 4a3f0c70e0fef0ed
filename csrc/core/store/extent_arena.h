// Allocation of the bytes of a storage: exact extents, best fit, neighbors joined when they are
// free.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>

namespace zero_ext::core {

// Hands out extents of [0, capacity) and does no I/O. An extent's size is the size asked for,
// rounded up to `alignment`, nothing more. Not thread-safe: its owner holds a lock.
class ExtentArena {
 public:
  // `capacity` and `alignment` in bytes; the part of the capacity beyond a multiple of the
  // alignment is never handed out. Throws std::runtime_error for a negative capacity or an
  // alignment below 1.
  ExtentArena(std::int64_t capacity, std::int64_t alignment);

  // The offset of a new extent: in the smallest free range that holds it, the lowest of equal ones.
  // Throws std::runtime_error saying what was wanted and what is free; nothing changes then.
  std::int64_t allocate(std::int64_t bytes);

  // Frees the extent that starts at `offset`. Throws std::runtime_error if none does.
  void release(std::int64_t offset);

  // More space at the end. Throws std::runtime_error if `capacity` is below the present one.
  void grow(std::int64_t capacity);

  // Whether one live extent holds all of [offset, offset + bytes).
  bool contains(std::int64_t offset, std::int64_t bytes) const;

  std::int64_t live_bytes() const { return live_bytes_; }
  std::int64_t largest_free() const;
  std::int64_t capacity() const { return capacity_; }
  std::int64_t alignment() const { return alignment_; }

 private:
  void add_free(std::int64_t offset, std::int64_t bytes);
  void remove_free(std::int64_t offset, std::int64_t bytes);

  std::int64_t alignment_;
  std::int64_t capacity_ = 0;
  std::int64_t live_bytes_ = 0;
  std::map<std::int64_t, std::int64_t> live_;                // offset to bytes
  std::map<std::int64_t, std::int64_t> free_;                // offset to bytes; no two touch
  std::set<std::pair<std::int64_t, std::int64_t>> by_size_;  // bytes and offset of each in free_
};

}  // namespace zero_ext::core
