// Page-aligned host memory from the kernel, with a registry of what is live.
#pragma once

#include <cstdint>

namespace zero_ext::core {

// Maps `bytes` > 0 of zero pages at a 2 MiB boundary and asks for huge pages. Returns null when
// the kernel refuses; errno says why.
void* allocate_host(std::int64_t bytes);

// Unmaps what allocate_host returned; any other address is ignored.
void free_host(void* address);

// Bytes asked for by all live allocations.
std::int64_t live_host_bytes();

}  // namespace zero_ext::core
