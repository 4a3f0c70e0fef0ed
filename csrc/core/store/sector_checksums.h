// What every sector of a storage must hold, as CRC32C values in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <shared_mutex>
#include <span>
#include <vector>

namespace zero_ext::core {

struct ChecksumMismatch {
  std::int64_t offset;  // of the sector
  std::uint32_t expected;
  std::uint32_t found;
};

// One value for every 4096 bytes, so that any part of what was written can be verified when it is
// read, at 1/1024 of the storage in host memory. A storage starts as zeros, which gives every
// sector a value from the beginning. May be used from any thread for ranges that do not overlap.
class SectorChecksums {
 public:
  static constexpr std::int64_t kSectorBytes = 4096;

  // Sectors up to `bytes`; new ones are expected to hold zeros.
  void grow(std::int64_t bytes);

  // Remembers what whole sectors from `offset` on will hold.
  void record(std::int64_t offset, std::span<const std::byte> bytes);

  // The first sector that does not hold what was recorded.
  std::optional<ChecksumMismatch> verify(std::int64_t offset,
                                         std::span<const std::byte> bytes) const;

 private:
  mutable std::shared_mutex growing_;
  std::vector<std::uint32_t> expected_;
};

}  // namespace zero_ext::core
