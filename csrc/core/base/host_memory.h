// Page-aligned host memory from the kernel, with a registry of what is live.
#pragma once

#include <cstdint>

namespace zero_ext::core {

// Maps `bytes` > 0 of zero pages at a 2 MiB boundary and asks for huge pages. Returns null when
// the kernel refuses; errno says why.
void* allocate_host(std::int64_t bytes);

// Maps `bytes` > 0 of memory whose bytes are all 0xFF, NaN in every floating-point type. It takes
// at most 2 MiB, or a five-hundredth of `bytes`, of physical memory, until it is written to.
// Returns null when the kernel refuses; errno says why.
void* map_nan_filled_host(std::int64_t bytes);

// Unmaps what these two returned; any other address is ignored.
void free_host(void* address);

// Bytes asked for by all live allocations; blank memory does not count.
std::int64_t live_host_bytes();

}  // namespace zero_ext::core
