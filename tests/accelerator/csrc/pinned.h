// Host memory that copies reach asynchronously.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>

namespace stand_in {

bool is_pinned(const void* address);
// Remembers existing memory as pinned; refused as `refuse_pinned` says.
void pin(const void* address, std::size_t bytes);
// Waits for what copies still do with it.
void unpin(const void* address);
// Pinning, by allocation or of existing memory, succeeds `after` more times and is then refused; a
// negative number ends that.
void refuse_pinned(std::int64_t after);
std::size_t pinned_bytes();
c10::Allocator* pinned_allocator();
void register_pinned_memory();

}  // namespace stand_in
