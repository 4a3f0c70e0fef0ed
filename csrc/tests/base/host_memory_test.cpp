#include "../../core/base/host_memory.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <span>

#include "../test_support.h"

namespace zero_ext::core {
namespace {

TEST(HostMemory, IsAlignedZeroAndCounted) {
  for (const std::int64_t bytes : {1L, 4096L, 3'000'001L}) {
    void* const address = allocate_host(bytes);
    ASSERT_NE(address, nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(address) % (2U << 20), 0U);
    const std::span memory(static_cast<std::byte*>(address), static_cast<std::size_t>(bytes));
    EXPECT_TRUE(std::ranges::all_of(memory, [](std::byte each) { return each == std::byte{0}; }));
    std::ranges::fill(memory, std::byte{0xA5});
    EXPECT_EQ(live_host_bytes(), bytes);
    free_host(address);
    EXPECT_EQ(live_host_bytes(), 0);
  }
}

TEST(HostMemory, BlankMemoryIsOnesAndCostsNextToNothing) {
  constexpr std::int64_t kLarge = std::int64_t{1} << 36;
  for (const std::int64_t bytes : {std::int64_t{1}, std::int64_t{5'000'001}, kLarge}) {
    void* const address = map_nan_filled_host(bytes);
    ASSERT_NE(address, nullptr);
    auto* const memory = static_cast<std::byte*>(address);
    for (std::int64_t at = 0; at < bytes; at += bytes / 1000 + 1) {
      ASSERT_EQ(memory[at], std::byte{0xFF});
    }
    ASSERT_EQ(memory[bytes - 1], std::byte{0xFF});
    EXPECT_EQ(live_host_bytes(), 0);
    memory[0] = std::byte{1};  // reaches no other chunk
    for (std::int64_t at = 1 << 21; at < bytes; at += bytes / 100 + (1 << 21)) {
      ASSERT_EQ(memory[at / (1 << 21) * (1 << 21)], std::byte{0xFF});
    }
    free_host(address);
  }
}

TEST(HostMemory, RefusalChangesNothing) {
  errno = 0;
  EXPECT_EQ(allocate_host(std::int64_t{1} << 60), nullptr);
  EXPECT_EQ(errno, ENOMEM);
  errno = 0;
  EXPECT_EQ(map_nan_filled_host(std::int64_t{1} << 62), nullptr);
  EXPECT_EQ(errno, ENOMEM);
  EXPECT_EQ(live_host_bytes(), 0);
  int other = 0;
  free_host(&other);
  EXPECT_EQ(live_host_bytes(), 0);
}

TEST(HostMemory, ManyThreadsMayAllocateAndFree) {
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([] {
        for (std::int64_t round = 1; round <= 50; ++round) {
          void* const address = allocate_host(round * 1000);
          ASSERT_NE(address, nullptr);
          static_cast<char*>(address)[round * 1000 - 1] = 1;
          EXPECT_GE(live_host_bytes(), round * 1000);
          free_host(address);
        }
      });
    }
  }
  EXPECT_EQ(live_host_bytes(), 0);
}

}  // namespace
}  // namespace zero_ext::core
