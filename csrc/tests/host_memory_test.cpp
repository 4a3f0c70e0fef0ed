#include "../core/host_memory.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <span>

#include "test_support.h"

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

TEST(HostMemory, RefusalChangesNothing) {
  errno = 0;
  EXPECT_EQ(allocate_host(std::int64_t{1} << 60), nullptr);
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
