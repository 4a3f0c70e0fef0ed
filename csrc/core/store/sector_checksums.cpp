#include "sector_checksums.h"

#include <array>
#include <mutex>

#include "../base/crc32c.h"

namespace zero_ext::core {
namespace {

constexpr auto kSector = static_cast<std::size_t>(SectorChecksums::kSectorBytes);

std::size_t sector_of(std::int64_t offset) { return static_cast<std::size_t>(offset) / kSector; }

}  // namespace

void SectorChecksums::grow(std::int64_t bytes) {
  static constexpr std::array<std::byte, kSector> kZeros{};
  const std::unique_lock lock(growing_);
  expected_.resize(sector_of(bytes), crc32c(kZeros, 0));
}

void SectorChecksums::record(std::int64_t offset, std::span<const std::byte> bytes) {
  const std::shared_lock lock(growing_);
  std::size_t sector = sector_of(offset);
  for (std::size_t at = 0; at < bytes.size(); at += kSector) {
    expected_[sector++] = crc32c(bytes.subspan(at, kSector), 0);
  }
}

std::optional<ChecksumMismatch> SectorChecksums::verify(std::int64_t offset,
                                                        std::span<const std::byte> bytes) const {
  const std::shared_lock lock(growing_);
  std::size_t sector = sector_of(offset);
  for (std::size_t at = 0; at < bytes.size(); at += kSector, ++sector) {
    const std::uint32_t found = crc32c(bytes.subspan(at, kSector), 0);
    if (found != expected_[sector]) {
      return ChecksumMismatch{offset + static_cast<std::int64_t>(at), expected_[sector], found};
    }
  }
  return std::nullopt;
}

}  // namespace zero_ext::core
