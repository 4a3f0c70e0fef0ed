// The two ends of a block device, where everything that uses a device leaves its signature.
#pragma once

#include <cstdint>
#include <string>

namespace zero_ext::core {

// Every signature that blkid knows lies within this many bytes of one end of a device; a store
// leaves them alone, but for its own mark in the first 4096 bytes.
inline constexpr std::int64_t kDeviceMarginBytes = 1 << 20;

// Throws std::runtime_error naming the path and the first offending offset unless both margins hold
// zeros, or the mark and zeros; or if the device is too small to have anything between them.
void check_margins(const std::string& path, int descriptor, std::int64_t device_bytes);

// Writes the mark that tells a later store that the device holds nothing but scratch bytes, or
// takes it away; whether that succeeded (else errno says why not).
bool write_mark(int descriptor);
bool erase_mark(int descriptor);

}  // namespace zero_ext::core
