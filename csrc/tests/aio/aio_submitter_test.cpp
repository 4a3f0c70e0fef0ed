// The submitter over a queue whose answers the test chooses, and probing where calls are forbidden.
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <thread>
#include <tuple>

#include "../../core/aio/submitter.h"
#include "../../core/base/unique_fd.h"
#include "../test_support.h"
#include "aio_support.h"

namespace zero_ext::core {
namespace {

using testing::error_of;
using testing::expect_in;
using testing::fresh_generator;
using testing::Memory;
using testing::ScratchFolder;

// What a queue saw; outlives it.
struct Observed {
  bool drained = false;
  std::size_t most_in_flight = 0;
  std::size_t largest_batch = 0;
  std::vector<std::int64_t> offsets;
};

// Ends its blocks in random order, or breaks after some.
class FakeQueue final : public IoQueue {
 public:
  FakeQueue(std::size_t capacity, std::uint64_t seed, Observed& observed,
            int breaks_after = 1 << 30)
      : IoQueue(capacity), generator_(seed), observed_(observed), left_(breaks_after) {}

  void submit(std::span<const BlockRequest> requests) override {
    in_flight_.insert(in_flight_.end(), requests.begin(), requests.end());
    observed_.most_in_flight = std::max(observed_.most_in_flight, in_flight_.size());
    observed_.largest_batch = std::max(observed_.largest_batch, requests.size());
    for (const auto& request : requests) observed_.offsets.push_back(request.offset);
  }

  void reap(std::vector<BlockCompletion>& into) override {
    if (in_flight_.empty()) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return woken_; });
      woken_ = false;
      return;
    }
    if (left_-- == 0) throw std::runtime_error("the ring is gone");
    std::ranges::shuffle(in_flight_, generator_);
    for (std::size_t count = 1 + generator_() % in_flight_.size(); count > 0; --count) {
      const BlockRequest& request = in_flight_.back();
      into.push_back({request.slot, static_cast<std::int64_t>(request.memory.size())});
      in_flight_.pop_back();
    }
  }

  void wake() override {
    const std::lock_guard lock(mutex_);
    woken_ = true;
    changed_.notify_one();
  }

  bool drain(std::chrono::milliseconds limit) override {
    observed_.drained = true;
    return limit > std::chrono::milliseconds(0);
  }

 private:
  std::mt19937_64 generator_;
  Observed& observed_;
  int left_;
  std::vector<BlockRequest> in_flight_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool woken_ = false;
};

class AioSubmitter : public ::testing::Test {
 protected:
  std::shared_ptr<Transfer> transfer(std::int64_t blocks, std::shared_ptr<void> owner = nullptr) {
    const auto bytes = static_cast<std::size_t>(blocks * 4096);
    return std::make_shared<Transfer>(
        TransferRequest{file_, IoDirection::kWrite, 0, memory_.span().first(bytes),
                        std::move(owner)},
        4096);
  }

  const ScratchFolder folder_;
  const std::shared_ptr<IoFile> file_ =
      IoFile::open(folder_.file("a"), IoFile::Mode::kCreate, true);
  const std::shared_ptr<FaultPlan> faults_ = std::make_shared<FaultPlan>();
  Memory memory_{400 * 4096};
};

TEST_F(AioSubmitter, FillsTheQueueAndNeverOverfillsIt) {
  auto generator = fresh_generator();
  for (const std::size_t capacity : {1, 7, 32}) {
    Observed observed;
    {
      Submitter submitter(std::make_unique<FakeQueue>(capacity, generator(), observed), faults_);
      std::vector<std::shared_ptr<Transfer>> transfers;
      for (const std::int64_t blocks : {400, 1, 33}) {
        transfers.push_back(transfer(blocks));
        submitter.enqueue({transfers.back(), 0, 1});
      }
      for (const auto& handle : transfers) handle->wait();
    }
    EXPECT_EQ(observed.most_in_flight, capacity);
    EXPECT_EQ(observed.largest_batch, capacity);
    EXPECT_EQ(observed.offsets.size(), 434U);
  }
}

TEST_F(AioSubmitter, UsesEveryBlockOfItsShare) {
  Observed observed;
  const auto full = transfer(100);
  {
    Submitter submitter(std::make_unique<FakeQueue>(4, 1, observed), faults_);
    submitter.enqueue({full, 2, 3});
  }
  EXPECT_FALSE(full->done());
  std::vector<std::int64_t> expected;
  for (std::int64_t block = 2; block < 100; block += 3) expected.push_back(block * 4096);
  EXPECT_EQ(observed.offsets, expected);
}

TEST_F(AioSubmitter, BlocksEndAtMultiplesOfTheirSizeInTheFile) {
  auto generator = fresh_generator();
  constexpr std::int64_t kBlock = 3 * 4096;
  for (int trial = 0; trial < 50; ++trial) {
    const auto offset = static_cast<std::int64_t>(generator() % 40 * 4096);
    const auto bytes = static_cast<std::size_t>((1 + generator() % 40) * 4096);
    const Transfer transfer(
        {file_, IoDirection::kWrite, offset, memory_.span().first(bytes), nullptr}, kBlock);
    std::int64_t expected = offset;
    for (std::int64_t index = 0; index < transfer.blocks(); ++index) {
      const Block block = transfer.block(index);
      const auto length = static_cast<std::int64_t>(block.memory.size());
      EXPECT_EQ(block.offset, expected);
      EXPECT_EQ(block.memory.data(), memory_.span().data() + (expected - offset));
      expected += length;
      const bool last = index + 1 == transfer.blocks();
      EXPECT_TRUE(last || expected % kBlock == 0) << expected;
      EXPECT_TRUE(length > 0 && length <= kBlock);
    }
    EXPECT_EQ(expected, offset + static_cast<std::int64_t>(bytes));
  }
}

TEST_F(AioSubmitter, WhatHasFailedIsNotSubmittedAnyFurther) {
  Observed observed;
  {
    Submitter submitter(std::make_unique<FakeQueue>(4, 1, observed), faults_);
    faults_->add({IoDirection::kWrite, 0, -EIO, 1});
    const auto failing = transfer(400);
    submitter.enqueue({failing, 0, 1});
    expect_in("(errno 5)", error_of([&] { failing->wait(); }));
  }
  EXPECT_LT(observed.offsets.size(), 10U);
}

TEST_F(AioSubmitter, ABrokenQueueFailsAllThatWasAndWillBeAsked) {
  Observed observed;
  Submitter submitter(std::make_unique<FakeQueue>(4, 1, observed, 3), faults_);
  const auto long_one = transfer(400);
  submitter.enqueue({long_one, 0, 1});
  const auto behind = transfer(10);
  submitter.enqueue({behind, 0, 1});
  for (const auto& handle : {long_one, behind}) {
    const std::string text = error_of([&] { handle->wait(); });
    expect_in("writing 4096 bytes at offset ", text);
    expect_in("the queue of the I/O engine broke: the ring is gone", text);
  }
  const auto late = transfer(10);
  submitter.enqueue({late, 0, 1});
  expect_in("broke: the ring is gone", error_of([&] { late->wait(); }));
}

TEST_F(AioSubmitter, ABrokenQueueIsDrainedBeforeItsTransfersEnd) {
  for (const bool drains : {true, false}) {
    Observed observed;
    Submitter submitter(std::make_unique<FakeQueue>(4, 1, observed, 0), faults_,
                        std::chrono::milliseconds(drains ? 1 : 0));
    auto owner = std::make_shared<int>(0);
    const std::weak_ptr<int> memory = owner;
    auto handle = transfer(2, std::move(owner));
    submitter.enqueue({handle, 0, 1});
    expect_in("the ring is gone", error_of([&] { handle->wait(); }));
    EXPECT_TRUE(observed.drained);
    handle.reset();
    EXPECT_EQ(memory.expired(), drains);  // memory that the kernel may still write to stays
  }
}

// Forbids one system call to this process for good.
void forbid(std::uint32_t call) {
  std::array<sock_filter, 4> filter = {{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  const sock_fprog program{filter.size(), filter.data()};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
    throw std::runtime_error("no seccomp filter");
  }
}

// A read of an empty pipe is with the kernel when io_uring_enter() stops working.
int drained_after(std::chrono::milliseconds written_after, std::chrono::milliseconds limit) {
  constexpr std::uint32_t kIoUringEnter = 426;
  std::array<int, 2> pipe{};
  if (::pipe(pipe.data()) != 0) return -1;
  const UniqueFd zeros(::open("/dev/zero", O_RDONLY | O_CLOEXEC));
  std::array<std::byte, 8> read{};
  std::array<std::byte, 8> other{};
  const auto queue = make_io_uring_queue(4);
  queue->submit(std::array{BlockRequest{0, pipe[0], IoDirection::kRead, -1, read},
                           BlockRequest{1, zeros.get(), IoDirection::kRead, 0, other}});
  std::vector<BlockCompletion> ended;
  while (ended.empty()) queue->reap(ended);
  forbid(kIoUringEnter);
  expect_in("io_uring_enter", error_of([&] { queue->reap(ended); }));
  std::jthread writer([&] {
    std::this_thread::sleep_for(written_after);
    static_cast<void>(::write(pipe[1], "12345678", 8));
  });
  const bool drained = queue->drain(limit);
  return drained ? 1 + (read[7] == std::byte{'8'}) : 0;
}

TEST(AioBackends, ABrokenRingIsDrained) {
  using std::chrono::milliseconds;
  for (const auto& [after, limit, expected] :
       {std::tuple{milliseconds(50), milliseconds(20000), 2},
        std::tuple{milliseconds(500), milliseconds(10), 0}}) {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(drained_after(after, limit));
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(WEXITSTATUS(status), expected);
  }
}

struct Forbidden {
  std::uint32_t call;
  Backend backend;
};

TEST(AioBackends, SayWhyTheyAreForbidden) {
  constexpr std::uint32_t kIoUringSetup = 425;
  for (const Forbidden test :
       {Forbidden{kIoUringSetup, Backend::kIoUring}, Forbidden{SYS_io_setup, Backend::kLibaio}}) {
    const pid_t child = ::fork();
    if (child == 0) {
      forbid(test.call);
      int wrong = 0;
      for (const BackendReport& report : probe_backends()) {
        const bool hit = report.backend == test.backend;
        wrong += hit == report.available || hit != report.reason.starts_with("forbidden");
      }
      const std::string refusal = error_of([&] { IoEngine::make({.backend = test.backend}); });
      wrong += refusal.find("forbidden") == std::string::npos;
      ::_exit(wrong);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0) << backend_name(test.backend);
  }
}

}  // namespace
}  // namespace zero_ext::core
