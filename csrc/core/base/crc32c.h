// CRC32C (Castagnoli, RFC 3720 appendix B.4): the checksum of checkpoint files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace zero_ext::core {

// Checksum of the bytes that gave `seed` followed by `bytes`; a seed of 0 starts anew, so
// crc32c(b, crc32c(a, 0)) is the checksum of a and b joined. Picks the fastest form this machine
// runs.
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t seed);

// The forms crc32c() picks from, open to tests and to comparison.
std::uint32_t crc32c_portable(std::span<const std::byte> bytes, std::uint32_t seed);

// True when crc32c_hardware() may be called: the machine has the SSE4.2 crc32 instruction.
bool has_crc32c_hardware();
std::uint32_t crc32c_hardware(std::span<const std::byte> bytes, std::uint32_t seed);

}  // namespace zero_ext::core
