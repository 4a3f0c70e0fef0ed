// The two ends of a block device, where everything that uses a device leaves its signature.
#pragma once

#include <cstdint>
#include <string>

namespace zero_ext::core {

// Every signature that blkid knows lies within this many bytes of one end of a device; a store
// leaves them alone, but for its own signature in the first 4096 bytes.
inline constexpr std::int64_t kSignatureBytes = 1 << 20;

// Throws std::runtime_error naming the path and the first offending offset unless both regions hold
// zeros, or the signature and zeros; or if the device is too small to have anything between them.
void check_signatures(const std::string& path, int descriptor, std::int64_t device_bytes);

// Writes or erases the signature by which a later store recognises a device that holds nothing but
// scratch bytes. Returns whether that succeeded; errno has the reason if not.
bool write_signature(int descriptor);
bool erase_signature(int descriptor);

}  // namespace zero_ext::core
