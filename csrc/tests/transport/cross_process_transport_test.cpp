// Exchanges between two ranks, both in this process, or one in a child that dies.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cross_process_transport_support.h"

namespace zero_ext::core {
namespace {

using namespace std::chrono_literals;

TEST(CrossProcessTransport, DeliversInOrderInBothDirections) {
  Pair pair;
  ASSERT_TRUE(pair.connected());
  std::mt19937 random(std::random_device{}());
  std::vector<Bytes> sent, got;
  for (int message = 0; message < 40; ++message) {
    sent.push_back(random_bytes(1 + random() % 100'000, random));
    got.emplace_back(sent.back().size(), std::byte{0xEE});
  }
  for (std::size_t message = 0; message < sent.size(); ++message) {
    const int from = static_cast<int>(message % 2);
    pair[1 - from].receive(from, got[message], kTag, nullptr);
    pair[from].send(1 - from, sent[message], kTag, nullptr);
  }
  for (int rank = 0; rank < 2; ++rank) {
    pair[rank].wait(1 - rank, MessageDirection::kReceive, 20, 10s);
    pair[rank].wait(1 - rank, MessageDirection::kSend, 20, 10s);
  }
  EXPECT_EQ(sent, got);
}

TEST(CrossProcessTransport, HoldsMoreMessagesThanItsRing) {
  Pair pair;
  constexpr std::size_t kMessages = 5 * kDescriptorsInFlight + 3;
  std::vector<std::uint32_t> sent(kMessages), got(kMessages, 0);
  std::iota(sent.begin(), sent.end(), 1U);
  for (const auto& value : sent)
    pair[0].send(1, std::as_bytes(std::span(&value, 1)), kTag, nullptr);
  for (auto& value : got)
    pair[1].receive(0, std::as_writable_bytes(std::span(&value, 1)), kTag, nullptr);
  pair[1].wait(0, MessageDirection::kReceive, kMessages, 10s);
  pair[0].wait(1, MessageDirection::kSend, kMessages, 10s);
  EXPECT_EQ(sent, got);
}

TEST(CrossProcessTransport, HoldsOwnersUntilTheMessageIsThrough) {
  Pair pair;
  auto owner = std::make_shared<Bytes>(1000, std::byte{7});
  const std::weak_ptr<Bytes> alive = owner;
  pair[0].send(1, *owner, kTag, owner);
  owner.reset();
  EXPECT_FALSE(alive.expired());
  Bytes got(1000);
  pair[1].receive(0, got, kTag, nullptr);
  pair[1].wait(0, MessageDirection::kReceive, 1, 10s);
  pair[0].wait(1, MessageDirection::kSend, 1, 10s);
  EXPECT_TRUE(alive.expired());
  EXPECT_EQ(got, Bytes(1000, std::byte{7}));
}

TEST(CrossProcessTransport, RefusesAMessageOfAnotherSize) {
  Pair pair;
  const Bytes sent(8);
  Bytes got(9, std::byte{1});
  pair[0].send(1, sent, kTag, nullptr);
  pair[1].receive(0, got, kTag, nullptr);
  EXPECT_THROW(pair[1].wait(0, MessageDirection::kReceive, 1, 10s), std::runtime_error);
  EXPECT_EQ(got, Bytes(9, std::byte{1}));
}

TEST(CrossProcessTransport, RefusesAMessageOfAnotherTag) {
  Pair pair;
  const Bytes sent(8);
  Bytes got(8, std::byte{1});
  pair[0].send(1, sent, kTag + 1, nullptr);
  pair[1].receive(0, got, kTag, nullptr);
  EXPECT_THROW(pair[1].wait(0, MessageDirection::kReceive, 1, 10s), std::runtime_error);
  EXPECT_EQ(got, Bytes(8, std::byte{1}));
}

TEST(CrossProcessTransport, AbortsAfterTheTimeout) {
  Pair pair;
  Bytes got(8);
  pair[1].receive(0, got, kTag, nullptr);
  EXPECT_THROW(pair[1].wait(0, MessageDirection::kReceive, 1, 50ms), std::runtime_error);
}

TEST(CrossProcessTransport, ReportsWhyAPeerAborted) {
  Pair pair;
  ASSERT_TRUE(pair.connected());
  Bytes before(8, std::byte{3}), got(8), never(8);
  pair[0].send(1, before, kTag, nullptr);
  pair[0].abort("rank 0: no more" + std::string(5000, '.'));
  pair[0].abort("a second reason");
  pair[1].receive(0, got, kTag, nullptr);
  pair[1].wait(0, MessageDirection::kReceive, 1, 10s);
  EXPECT_EQ(got, before);
  pair[1].receive(0, never, kTag, nullptr);
  pair[1].send(0, before, kTag, nullptr);
  for (const MessageDirection direction : {MessageDirection::kReceive, MessageDirection::kSend}) {
    try {
      pair[1].wait(0, direction, 2, 30s);
      ADD_FAILURE() << "a rank that gave up went on";
    } catch (const std::runtime_error& error) {
      EXPECT_EQ(std::string(error.what()).substr(0, 16), "rank 0: no more.");
      EXPECT_EQ(std::string(error.what()).size(), kReasonBytes - 1);
    }
  }
}

TEST(CrossProcessTransport, CutsALongReasonBetweenCharacters) {
  for (const std::size_t shift : {0U, 1U, 2U}) {
    Pair pair;
    ASSERT_TRUE(pair.connected());
    std::string reason(shift, '.');
    while (reason.size() < 2 * kReasonBytes) reason += "\u2026";
    pair[0].abort(reason);
    Bytes never(8);
    pair[1].receive(0, never, kTag, nullptr);
    try {
      pair[1].wait(0, MessageDirection::kReceive, 1, 30s);
      ADD_FAILURE() << "a rank that gave up went on";
    } catch (const std::runtime_error& error) {
      const std::string text = error.what();
      EXPECT_EQ(text, reason.substr(0, text.size()));
      EXPECT_EQ((text.size() - shift) % 3, 0U);
      EXPECT_GT(text.size(), kReasonBytes - 4);
    }
  }
}

TEST(CrossProcessTransport, RefusesPeersThatDoNotExist) {
  Pair pair;
  Bytes bytes(1);
  for (const int peer : {-1, 0, 2}) {
    EXPECT_THROW(pair[0].send(peer, bytes, kTag, nullptr), std::runtime_error);
    EXPECT_THROW(pair[0].receive(peer, bytes, kTag, nullptr), std::runtime_error);
    EXPECT_THROW(pair[0].wait(peer, MessageDirection::kSend, 0, 1s), std::runtime_error);
  }
}

TEST(CrossProcessTransport, ReportsThatAPeersProcessEnded) {
  const std::string name = unique_name();
  CrossProcessTransport self(name, 0, 2, true);
  int joined[2];
  int leave[2];
  ASSERT_EQ(::pipe(joined) | ::pipe(leave), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto* const other = std::make_unique<CrossProcessTransport>(name, 1, 2, false).release();
    const char yes = other != nullptr ? 1 : 0;
    char go = 0;
    const bool signalled = ::write(joined[1], &yes, 1) == 1 && ::read(leave[0], &go, 1) == 1;
    ::_exit(signalled ? 0 : 1);
  }
  char answer = 0;
  ASSERT_EQ(::read(joined[0], &answer, 1), 1);
  SharedMemorySegment::unlink(name);
  ASSERT_TRUE(self.connect());
  Bytes got(8);
  self.receive(1, got, kTag, nullptr);
  ASSERT_EQ(::write(leave[1], &answer, 1), 1);
  try {
    self.wait(1, MessageDirection::kReceive, 1, 30s);
    ADD_FAILURE() << "a dead process sent a message";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("has ended"), std::string::npos) << error.what();
  }
  ::waitpid(child, nullptr, 0);
  for (const int end : {joined[0], joined[1], leave[0], leave[1]}) ::close(end);
}

TEST(CrossProcessTransport, NamesTheSegmentItCannotJoin) {
  EXPECT_THROW(CrossProcessTransport("/zero_ext-test-absent", 1, 2, false), std::runtime_error);
  const std::string name = unique_name();
  CrossProcessTransport first(name, 0, 2, true);
  EXPECT_THROW(CrossProcessTransport(name, 0, 2, true), std::runtime_error);
  EXPECT_THROW(CrossProcessTransport(name, 1, 3, false), std::runtime_error);
  SharedMemorySegment::unlink(name);
}

}  // namespace
}  // namespace zero_ext::core
