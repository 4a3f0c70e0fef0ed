// Philox4x32-10, the counter-based generator of attention's dropout.
//
// Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
#pragma once

#include <cstdint>

#include "../base/host_device.h"

namespace zero_ext::core {

struct Philox4 {
  std::uint32_t words[4];
};

// The four words that ten rounds make of a counter and a 64-bit key.
ZERO_EXT_HOST_DEVICE Philox4 philox4x32(Philox4 counter, std::uint64_t key) {
  auto key0 = static_cast<std::uint32_t>(key);
  auto key1 = static_cast<std::uint32_t>(key >> 32);
  auto [c0, c1, c2, c3] = counter.words;
  ZERO_EXT_UNROLL_BY(10)
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xD2511F53U} * c0;
    const std::uint64_t product1 = std::uint64_t{0xCD9E8D57U} * c2;
    c0 = static_cast<std::uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c2 = static_cast<std::uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c1 = static_cast<std::uint32_t>(product1);
    c3 = static_cast<std::uint32_t>(product0);
    key0 += 0x9E3779B9U;
    key1 += 0xBB67AE85U;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace zero_ext::core
