#include "block_device_signatures.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <span>
#include <string_view>
#include <system_error>
#include <vector>

#include "../base/error_text.h"

namespace zero_ext::core {
namespace {

constexpr std::size_t kSignatureSectorBytes = 4096;
constexpr std::string_view kSignature =
    "zero_ext store: scratch bytes of a running or crashed training job; nothing here is kept\n";

std::array<std::byte, kSignatureSectorBytes> signature_sector() {
  std::array<std::byte, kSignatureSectorBytes> sector{};
  std::memcpy(sector.data(), kSignature.data(), kSignature.size());
  return sector;
}

bool write_first_sector(int descriptor,
                        const std::array<std::byte, kSignatureSectorBytes>& sector) {
  return ::pwrite(descriptor, sector.data(), sector.size(), 0) ==
             static_cast<ssize_t>(sector.size()) &&
         ::fdatasync(descriptor) == 0;
}

void read_fully(const std::string& path, int descriptor, std::int64_t offset,
                std::span<std::byte> into) {
  while (!into.empty()) {
    const ssize_t got = ::pread(descriptor, into.data(), into.size(), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      throw make_error("store: block device '", path, "': reading it at offset ", offset,
                       " failed, ", std::generic_category().message(errno), ". Check the device.");
    }
    require(got != 0, "store: block device '", path, "': it ends at offset ", offset,
            ". Check the device.");
    offset += got;
    into = into.subspan(static_cast<std::size_t>(got));
  }
}

void check_zeros(const std::string& path, std::int64_t offset, std::span<const std::byte> bytes) {
  const auto other = std::find_if(bytes.begin(), bytes.end(),
                                  [](const std::byte value) { return value != std::byte{0}; });
  if (other == bytes.end()) return;
  throw make_error(
      "store: block device '", path, "': it holds data at offset ",
      offset + (other - bytes.begin()),
      ", perhaps a file system or a partition table. If that may be lost, write zeros over the "
      "first and the last MiB (wipefs, blkdiscard --zeroout).");
}

}  // namespace

void check_signatures(const std::string& path, int descriptor, std::int64_t device_bytes) {
  require(device_bytes >= 3 * kSignatureBytes, "store: block device '", path,
          "': expected at least ", 3 * kSignatureBytes, " bytes, got ", device_bytes,
          ". Use a larger one.");
  std::vector<std::byte> region(static_cast<std::size_t>(kSignatureBytes));
  read_fully(path, descriptor, device_bytes - kSignatureBytes, region);
  check_zeros(path, device_bytes - kSignatureBytes, region);
  read_fully(path, descriptor, 0, region);
  const auto signature = signature_sector();
  const bool has_signature = std::equal(signature.begin(), signature.end(), region.begin());
  check_zeros(path, has_signature ? kSignatureSectorBytes : 0,
              std::span(region).subspan(has_signature ? kSignatureSectorBytes : 0));
}

bool write_signature(int descriptor) { return write_first_sector(descriptor, signature_sector()); }

bool erase_signature(int descriptor) { return write_first_sector(descriptor, {}); }

}  // namespace zero_ext::core
