#include "block_device_signatures.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <vector>

namespace zero_ext::core {
namespace {

constexpr std::size_t kMarkBytes = 4096;
constexpr std::string_view kMark =
    "zero_ext store: scratch bytes of a running or crashed training job; nothing here is kept\n";

std::runtime_error failure(const std::string& path, const std::string& reason) {
  return std::runtime_error("store: block device '" + path + "': " + reason);
}

std::array<std::byte, kMarkBytes> mark_sector() {
  std::array<std::byte, kMarkBytes> sector{};
  std::memcpy(sector.data(), kMark.data(), kMark.size());
  return sector;
}

bool write_first_sector(int descriptor, const std::array<std::byte, kMarkBytes>& sector) {
  return ::pwrite(descriptor, sector.data(), sector.size(), 0) ==
             static_cast<ssize_t>(sector.size()) &&
         ::fdatasync(descriptor) == 0;
}

void read_whole(const std::string& path, int descriptor, std::int64_t offset,
                std::span<std::byte> into) {
  while (!into.empty()) {
    const ssize_t got = ::pread(descriptor, into.data(), into.size(), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      throw failure(path, "reading it at offset " + std::to_string(offset) + ": " +
                              std::generic_category().message(errno));
    }
    if (got == 0) throw failure(path, "ends at offset " + std::to_string(offset));
    offset += got;
    into = into.subspan(static_cast<std::size_t>(got));
  }
}

void check_zeros(const std::string& path, std::int64_t offset, std::span<const std::byte> bytes) {
  const auto other = std::find_if(bytes.begin(), bytes.end(),
                                  [](const std::byte value) { return value != std::byte{0}; });
  if (other == bytes.end()) return;
  throw failure(path, "holds data at offset " + std::to_string(offset + (other - bytes.begin())) +
                          ", perhaps a file system or a partition table; if it may be lost, write "
                          "zeros over the first and the last MiB (wipefs, blkdiscard --zeroout)");
}

}  // namespace

void check_margins(const std::string& path, int descriptor, std::int64_t device_bytes) {
  if (device_bytes < 3 * kDeviceMarginBytes) {
    throw failure(path, "has " + std::to_string(device_bytes) + " bytes; " +
                            std::to_string(3 * kDeviceMarginBytes) + " or more wanted");
  }
  std::vector<std::byte> margin(static_cast<std::size_t>(kDeviceMarginBytes));
  read_whole(path, descriptor, device_bytes - kDeviceMarginBytes, margin);
  check_zeros(path, device_bytes - kDeviceMarginBytes, margin);
  read_whole(path, descriptor, 0, margin);
  const auto mark = mark_sector();
  const bool marked = std::equal(mark.begin(), mark.end(), margin.begin());
  check_zeros(path, marked ? kMarkBytes : 0, std::span(margin).subspan(marked ? kMarkBytes : 0));
}

bool write_mark(int descriptor) { return write_first_sector(descriptor, mark_sector()); }

bool erase_mark(int descriptor) { return write_first_sector(descriptor, {}); }

}  // namespace zero_ext::core
