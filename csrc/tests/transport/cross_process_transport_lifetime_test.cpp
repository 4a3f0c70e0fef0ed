// Memory of messages that fail: what an exchange may still read and write once a wait has thrown or
// a rank has closed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>

#include "cross_process_transport_support.h"

namespace zero_ext::core {
namespace {

using namespace std::chrono_literals;

constexpr std::byte kSent{0x11};
constexpr std::byte kReused{0x5A};  // what the memory holds once it serves something else
constexpr std::byte kPoison{0xEE};
constexpr std::size_t kLarge = std::size_t{64} << 20;

std::string failure_of(CrossProcessTransport& exchange, int peer, MessageDirection direction,
                       std::chrono::duration<double> timeout) {
  try {
    exchange.wait(peer, direction, 1, timeout);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

// An owner that reuses the memory of `bytes` as soon as nobody needs them.
std::shared_ptr<void> reusing(Bytes& bytes) {
  return {&bytes, [](Bytes* freed) { std::fill(freed->begin(), freed->end(), kReused); }};
}

TEST(HostExchangeLifetime, WritesNothingAfterAReceiveTimedOut) {
  Pair pair;
  const Bytes sent(8, kSent);
  Bytes got(8, kPoison);
  pair[1].receive(0, got, kTag, nullptr);
  EXPECT_NE(failure_of(pair[1], 0, MessageDirection::kReceive, 50ms).find("no answer"),
            std::string::npos);
  pair[0].send(1, sent, kTag, nullptr);
  // The sender learns that nobody takes it.
  EXPECT_NE(failure_of(pair[0], 1, MessageDirection::kSend, 30s).find("rank 1 has closed"),
            std::string::npos);
  std::this_thread::sleep_for(300ms);
  EXPECT_EQ(got, Bytes(8, kPoison));
  EXPECT_NE(failure_of(pair[1], 0, MessageDirection::kReceive, 1s).find("no answer"),
            std::string::npos);
}

TEST(HostExchangeLifetime, RejectsWhatItsSenderNoLongerWaitsFor) {
  Pair pair;
  Bytes sent(8, kSent), got(8, kPoison);
  pair[0].send(1, sent, kTag, nullptr);
  EXPECT_NE(failure_of(pair[0], 1, MessageDirection::kSend, 50ms).find("no answer"),
            std::string::npos);
  std::fill(sent.begin(), sent.end(), kReused);
  pair[1].receive(0, got, kTag, nullptr);
  EXPECT_NE(failure_of(pair[1], 0, MessageDirection::kReceive, 30s).find("rank 0 has closed"),
            std::string::npos);
  EXPECT_EQ(got, Bytes(8, kPoison));
}

TEST(HostExchangeLifetime, RejectsWhatItsSenderHasFreed) {
  Pair pair;
  Bytes sent(8, kSent), got(8, kPoison);
  pair[0].send(1, sent, kTag, reusing(sent));
  pair[0].abort("rank 0: the disk is gone");
  pair.close(0);
  ASSERT_EQ(sent, Bytes(8, kReused));
  pair[1].receive(0, got, kTag, nullptr);
  EXPECT_EQ(failure_of(pair[1], 0, MessageDirection::kReceive, 30s), "rank 0: the disk is gone");
  EXPECT_EQ(got, Bytes(8, kPoison));
}

TEST(HostExchangeLifetime, ReportsThatAPeerHasClosed) {
  Pair pair;
  const Bytes sent(8, kSent);
  Bytes got(8, kPoison);
  pair[1].send(0, sent, kTag, nullptr);
  pair[1].receive(0, got, kTag, nullptr);
  pair.close(0);
  for (const MessageDirection direction : {MessageDirection::kSend, MessageDirection::kReceive}) {
    EXPECT_NE(failure_of(pair[1], 0, direction, 30s).find("rank 0 has closed"), std::string::npos);
  }
}

TEST(HostExchangeLifetime, DeliversBeforeItCloses) {
  for (int round = 0; round < 50; ++round) {
    Pair pair;
    const Bytes sent(8, kSent);
    Bytes got(8, kPoison);
    pair[0].send(1, sent, kTag, nullptr);
    pair[1].receive(0, got, kTag, nullptr);
    pair.close(0);
    EXPECT_EQ(failure_of(pair[1], 0, MessageDirection::kReceive, 10s), "");
    EXPECT_EQ(got, sent);
  }
}

// A sender that gives up and frees a message while it is read: what was received is what was sent,
// or an error.
TEST(HostExchangeLifetime, RejectsWhatIsFreedWhileItIsRead) {
  std::mt19937 random(std::random_device{}());
  Bytes sent(kLarge), got(kLarge);
  for (int round = 0; round < 10; ++round) {
    Pair pair;
    ASSERT_TRUE(pair.connected());
    std::fill(sent.begin(), sent.end(), kSent);
    std::fill(got.begin(), got.end(), kPoison);
    pair[0].send(1, sent, kTag, reusing(sent));
    pair[1].receive(0, got, kTag, nullptr);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 20'000));
    pair[0].abort("rank 0: no more");
    pair.close(0);
    const std::string failure = failure_of(pair[1], 0, MessageDirection::kReceive, 30s);
    if (failure.empty()) {
      EXPECT_EQ(std::count(got.begin(), got.end(), kSent), kLarge);
    } else {
      EXPECT_EQ(failure, "rank 0: no more");
    }
  }
}

// A rank that gives up while its own thread still reads a message: once the wait has thrown nothing
// writes to the memory.
TEST(HostExchangeLifetime, WritesNothingAfterAWaitHasThrown) {
  std::mt19937 random(std::random_device{}());
  const Bytes sent(kLarge, kSent);
  Bytes got(kLarge);
  for (int round = 0; round < 10; ++round) {
    Pair pair;
    ASSERT_TRUE(pair.connected());
    std::fill(got.begin(), got.end(), kPoison);
    pair[1].receive(0, got, kTag, nullptr);
    pair[0].send(1, sent, kTag, nullptr);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 10'000));
    pair[1].abort("rank 1: no more");
    failure_of(pair[1], 0, MessageDirection::kReceive, 30s);
    std::fill(got.begin(), got.end(), kReused);
    std::this_thread::sleep_for(30ms);
    EXPECT_EQ(std::count(got.begin(), got.end(), kReused), kLarge);
  }
}

// What is released with a tensor may be any code, even code that closes the exchange.
TEST(HostExchangeLifetime, ReleasesOwnersInTheThreadsThatCallIt) {
  Pair pair;
  const Bytes sent(8, kSent);
  Bytes got(8, kPoison);
  std::thread::id released[2];
  const auto owner = [&released](int rank) {
    return std::shared_ptr<void>(
        &released[rank], [](std::thread::id* where) { *where = std::this_thread::get_id(); });
  };
  pair[0].send(1, sent, kTag, owner(0));
  pair[1].receive(0, got, kTag, owner(1));
  std::this_thread::sleep_for(300ms);  // the threads move the message meanwhile
  pair[1].wait(0, MessageDirection::kReceive, 1, 10s);
  pair[0].wait(1, MessageDirection::kSend, 1, 10s);
  EXPECT_EQ(got, sent);
  EXPECT_EQ(released[0], std::this_thread::get_id());
  EXPECT_EQ(released[1], std::this_thread::get_id());
}

}  // namespace
}  // namespace zero_ext::core
