// Checks of extents before any byte of them moves.
#pragma once

#include <cstdint>
#include <vector>

namespace zero_ext::core {

struct StoreExtent {
  std::int64_t offset;
  std::int64_t bytes;
};

// Throws std::runtime_error unless all begin at multiples of `alignment` and no two overlap.
void check_extents(std::vector<StoreExtent> extents, std::int64_t alignment);

}  // namespace zero_ext::core
