#include "../../core/offload/ring_buffer.h"

#include <cstring>
#include <stdexcept>

#include "../test_support.h"

namespace zero_ext::core {
namespace {

TEST(RingBuffer, SpansAreAlignedDisjointAndInsideOneAllocation) {
  auto generator = testing::fresh_generator();
  constexpr std::int64_t kBytes = 40 * RingBuffer::kAlignment;
  RingBuffer ring(kBytes + 123);
  EXPECT_EQ(ring.bytes(), kBytes);
  EXPECT_EQ(live_host_bytes(), kBytes);
  std::deque<std::span<std::byte>> held;
  std::byte* lowest = nullptr;
  std::byte mark{1};
  std::deque<std::byte> marks;
  for (int round = 0; round < 3000; ++round) {
    const auto bytes = std::uniform_int_distribution<std::int64_t>(1, kBytes / 3)(generator);
    if (const auto span = ring.acquire(bytes)) {
      ASSERT_EQ(span->size(), static_cast<std::size_t>(bytes));
      ASSERT_EQ(reinterpret_cast<std::uintptr_t>(span->data()) % RingBuffer::kAlignment, 0U);
      if (lowest == nullptr) lowest = span->data();
      ASSERT_GE(span->data(), lowest);
      ASSERT_LE(span->data() + span->size(), lowest + kBytes);
      std::ranges::fill(*span, mark);
      held.push_back(*span);
      marks.push_back(mark);
      mark = static_cast<std::byte>(static_cast<int>(mark) % 250 + 1);
    } else {
      ASSERT_FALSE(held.empty()) << "a ring that is free refuses " << bytes;
      const auto same = [&](std::byte each) { return each == marks.front(); };
      ASSERT_TRUE(std::ranges::all_of(held.front(), same)) << "spans overlap";
      held.pop_front();
      marks.pop_front();
      ring.release();
    }
  }
}

TEST(RingBuffer, YieldsAllOfItselfAgainAndAgain) {
  RingBuffer ring(4 * RingBuffer::kAlignment);
  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE(ring.acquire(4 * RingBuffer::kAlignment));
    EXPECT_FALSE(ring.acquire(1));
    ring.release();
  }
  EXPECT_FALSE(ring.acquire(4 * RingBuffer::kAlignment + 1));
  // Nothing of a full ring that has wrapped is given twice.
  ASSERT_TRUE(ring.acquire(2 * RingBuffer::kAlignment));
  ASSERT_TRUE(ring.acquire(2 * RingBuffer::kAlignment));
  ring.release();
  ASSERT_TRUE(ring.acquire(2 * RingBuffer::kAlignment));
  EXPECT_FALSE(ring.acquire(1));
}

TEST(RingBuffer, TooSmallOrTooLargeIsRefused) {
  EXPECT_THROW(RingBuffer(RingBuffer::kAlignment - 1), std::runtime_error);
  EXPECT_THROW(RingBuffer(std::int64_t{1} << 60), std::runtime_error);
  EXPECT_EQ(live_host_bytes(), 0);
}

}  // namespace
}  // namespace zero_ext::core
