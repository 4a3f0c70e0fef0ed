// The extent arena against a model that keeps one flag for every granule.
#include "../../core/store/extent_arena.h"

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../test_support.h"

namespace zero_ext::core {
namespace {

using testing::fresh_generator;

// Finds the free ranges anew each time by looking at every granule.
class NaiveArena {
 public:
  NaiveArena(std::int64_t capacity, std::int64_t alignment) : alignment_(alignment) {
    grow(capacity);
  }

  std::optional<std::int64_t> allocate(std::int64_t bytes) {
    const std::int64_t expected = granules(bytes);
    std::optional<std::pair<std::int64_t, std::int64_t>> best;  // length, begin
    for (const auto& [begin, length] : free_ranges()) {
      if (length >= expected && (!best || length < best->first)) best = {length, begin};
    }
    if (!best) return std::nullopt;
    mark(best->second, expected, true);
    sizes_[best->second] = expected;
    return best->second * alignment_;
  }

  void release(std::int64_t offset) {
    const auto extent = sizes_.extract(offset / alignment_);
    mark(extent.key(), extent.mapped(), false);
  }

  void grow(std::int64_t capacity) {
    allocated_.resize(static_cast<std::size_t>(capacity / alignment_));
  }

  std::int64_t live_bytes() const {
    std::int64_t bytes = 0;
    for (const auto& [begin, length] : sizes_) bytes += length * alignment_;
    return bytes;
  }

  std::int64_t largest_free() const {
    std::int64_t largest = 0;
    for (const auto& [begin, length] : free_ranges()) largest = std::max(largest, length);
    return largest * alignment_;
  }

  bool contains(std::int64_t offset, std::int64_t bytes) const {
    for (const auto& [begin, length] : sizes_) {
      const std::int64_t end = (begin + length) * alignment_;
      if (offset >= begin * alignment_ && offset <= end && offset + bytes <= end) return true;
    }
    return false;
  }

 private:
  std::int64_t granules(std::int64_t bytes) const { return (bytes + alignment_ - 1) / alignment_; }

  std::map<std::int64_t, std::int64_t> free_ranges() const {
    std::map<std::int64_t, std::int64_t> ranges;
    std::int64_t begin = -1;
    for (std::int64_t at = 0; at <= static_cast<std::int64_t>(allocated_.size()); ++at) {
      const bool free = at < static_cast<std::int64_t>(allocated_.size()) && !allocated_[at];
      if (free && begin < 0) begin = at;
      if (!free && begin >= 0) ranges[std::exchange(begin, -1)] = at - begin;
    }
    return ranges;
  }

  void mark(std::int64_t begin, std::int64_t length, bool allocated) {
    for (std::int64_t at = begin; at < begin + length; ++at) allocated_[at] = allocated;
  }

  std::int64_t alignment_;
  std::vector<bool> allocated_;
  std::map<std::int64_t, std::int64_t> sizes_;  // in granules
};

std::string reason(const auto& call) {
  try {
    call();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(ExtentArena, AgreesWithTheModelOnRandomSequences) {
  std::mt19937_64 random = fresh_generator();
  for (int sequence = 0; sequence < 40; ++sequence) {
    const auto alignment = static_cast<std::int64_t>(1 + random() % 9);
    auto capacity = static_cast<std::int64_t>(random() % 800);
    ExtentArena arena(capacity, alignment);
    NaiveArena model(capacity, alignment);
    std::vector<std::int64_t> live;
    for (int step = 0; step < 300; ++step) {
      const std::uint64_t kind = random() % 16;
      if (kind < 8) {
        const auto bytes = static_cast<std::int64_t>(1 + random() % 60);
        const auto expected = model.allocate(bytes);
        if (expected) {
          ASSERT_EQ(arena.allocate(bytes), *expected);
          live.push_back(*expected);
        } else {
          ASSERT_THROW(arena.allocate(bytes), std::runtime_error);
        }
      } else if (kind < 15 && !live.empty()) {
        std::swap(live[random() % live.size()], live.back());
        arena.release(live.back());
        model.release(live.back());
        live.pop_back();
      } else if (kind == 15 && step % 4 == 0) {
        capacity += static_cast<std::int64_t>(random() % 30);
        arena.grow(capacity);
        model.grow(capacity);
      }
      ASSERT_EQ(arena.live_bytes(), model.live_bytes());
      ASSERT_EQ(arena.largest_free(), model.largest_free());
      const auto offset = static_cast<std::int64_t>(random() % 850);
      const auto bytes = static_cast<std::int64_t>(random() % 40);
      ASSERT_EQ(arena.contains(offset, bytes), model.contains(offset, bytes))
          << offset << " " << bytes;
    }
    for (const std::int64_t offset : live) arena.release(offset);
    EXPECT_EQ(arena.live_bytes(), 0);
    EXPECT_EQ(arena.largest_free(), capacity / alignment * alignment);
  }
}

TEST(ExtentArena, RoundsUpToTheAlignmentAndNothingMore) {
  ExtentArena arena(100 * 4096 + 4095, 4096);
  EXPECT_EQ(arena.allocate(1), 0);
  EXPECT_EQ(arena.allocate(4097), 4096);
  EXPECT_EQ(arena.allocate(97 * 4096), 3 * 4096);
  EXPECT_EQ(arena.live_bytes(), 100 * 4096);
  EXPECT_EQ(arena.largest_free(), 0);
}

TEST(ExtentArena, UsesTheTightestRange) {
  ExtentArena arena(100, 1);
  const std::int64_t wide = arena.allocate(30);
  arena.allocate(1);
  const std::int64_t tight = arena.allocate(10);
  arena.allocate(1);
  arena.release(wide);
  arena.release(tight);
  EXPECT_EQ(arena.allocate(10), tight);
}

TEST(ExtentArena, SaysWhatWasWantedAndWhatIsFree) {
  ExtentArena arena(1000, 10);
  const std::int64_t first = arena.allocate(400);
  arena.allocate(300);
  arena.release(first);
  const std::string text = reason([&] { arena.allocate(401); });
  for (const char* chunk : {"free range of 401 bytes", "got 400 as the largest", "300 of 1000"}) {
    EXPECT_NE(text.find(chunk), std::string::npos) << text;
  }
  EXPECT_EQ(arena.live_bytes(), 300);
  EXPECT_EQ(arena.allocate(400), first);
}

TEST(ExtentArena, RefusesWhatMakesNoSense) {
  ExtentArena arena(100, 10);
  const std::int64_t offset = arena.allocate(20);
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t bytes : {std::int64_t{0}, std::int64_t{-1}, kMax}) {
    EXPECT_THROW(arena.allocate(bytes), std::runtime_error) << bytes;
  }
  EXPECT_THROW(arena.release(offset + 10), std::runtime_error);
  EXPECT_THROW(arena.release(-10), std::runtime_error);
  arena.release(offset);
  EXPECT_THROW(arena.release(offset), std::runtime_error);
  EXPECT_THROW(arena.grow(99), std::runtime_error);
  EXPECT_THROW(ExtentArena(-1, 10), std::runtime_error);
  EXPECT_THROW(ExtentArena(100, 0), std::runtime_error);
  arena.allocate(10);
  for (const std::int64_t at : {std::int64_t{-1}, std::int64_t{0}, std::int64_t{5}, kMax}) {
    EXPECT_FALSE(arena.contains(at, kMax)) << at;
  }
}

}  // namespace
}  // namespace zero_ext::core
