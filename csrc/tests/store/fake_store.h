// A store in memory whose transfers complete late, out of order and on another thread.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../../core/store/byte_store.h"

namespace zero_ext::core::testing {

// What a read fills is poison until wait(); what a write was given must not change until then. Any
// breach of ByteStore's rules fails the test that runs.
class FakeStore final : public ByteStore {
 public:
  struct Settings {
    std::int64_t alignment = 1;
    std::chrono::microseconds delay{0};  // of each completion
    int fail_at = -1;                    // index of the transfer that fails
    bool refuse = false;                 // whether it fails when it is asked for, not later
  };

  FakeStore(std::int64_t bytes, std::uint64_t seed, Settings settings)
      : data(static_cast<std::size_t>(bytes), std::byte{0x5A}),
        reads_of(data.size()),
        writes_of(data.size()),
        settings_(settings),
        generator_(seed),
        worker_([this](const std::stop_token& stop) { run(stop); }) {}

  std::int64_t alignment() const override { return settings_.alignment; }

  std::shared_ptr<TransferHandle> read(std::int64_t offset, std::span<std::byte> into) override {
    return submit({offset, into.data(), into.size(), false});
  }
  std::shared_ptr<TransferHandle> write(std::int64_t offset,
                                        std::span<const std::byte> from) override {
    // Only read from; the structure is shared with reads.
    return submit({offset, const_cast<std::byte*>(from.data()), from.size(), true});
  }

  int outstanding() const {
    const std::lock_guard lock(mutex_);
    return static_cast<int>(waiting_.size());
  }

  std::vector<std::byte> data;
  std::vector<std::uint8_t> reads_of;  // times each byte has been read, written
  std::vector<std::uint8_t> writes_of;
  int transfers = 0;
  int unwaited = 0;  // transfers that nobody has waited for
  int most_outstanding = 0;
  bool read_beside_write = false;  // both kinds were outstanding at once

 private:
  struct PendingTransfer {
    std::int64_t offset;
    std::byte* memory;
    std::size_t bytes;
    bool is_write;
  };

  class LateHandle final : public TransferHandle {
   public:
    LateHandle(FakeStore& store, PendingTransfer transfer, bool fails, int index)
        : transfer_(transfer), store_(store), fails_(fails), index_(index) {}

    bool done() const override {
      const std::lock_guard lock(store_.mutex_);
      return done_;
    }

    void wait() override {
      std::unique_lock lock(store_.mutex_);
      store_.completed_.wait(lock, [this] { return done_; });
      if (!waited_) {
        waited_ = true;
        --store_.unwaited;
        std::byte* const stored = store_.data.data() + transfer_.offset;
        if (!transfer_.is_write && !fails_) {
          std::memcpy(transfer_.memory, stored, transfer_.bytes);
        } else if (transfer_.is_write && !fails_) {
          EXPECT_EQ(std::memcmp(transfer_.memory, stored, transfer_.bytes), 0)
              << "memory of a write has changed before it was waited for";
        }
      }
      if (fails_)
        throw std::runtime_error("injected failure of transfer " + std::to_string(index_));
    }

    const PendingTransfer transfer_;
    bool done_ = false;

   private:
    friend class FakeStore;
    FakeStore& store_;
    const bool fails_;
    const int index_;
    bool waited_ = false;
  };

  std::shared_ptr<TransferHandle> submit(PendingTransfer transfer) {
    const std::lock_guard lock(mutex_);
    const auto address = reinterpret_cast<std::uintptr_t>(transfer.memory);
    const auto alignment = static_cast<std::uintptr_t>(settings_.alignment);
    EXPECT_EQ(address % alignment, 0U);
    EXPECT_EQ(static_cast<std::uintptr_t>(transfer.offset) % alignment, 0U);
    EXPECT_EQ(transfer.bytes % alignment, 0U);
    EXPECT_LE(static_cast<std::size_t>(transfer.offset) + transfer.bytes, data.size());
    check_free(transfer);
    const bool fails = transfers == settings_.fail_at;
    const int index = transfers++;
    if (fails && settings_.refuse) {
      throw std::runtime_error("injected failure of transfer " + std::to_string(index));
    }
    auto& counts = transfer.is_write ? writes_of : reads_of;
    for (std::size_t i = 0; i < transfer.bytes; ++i) {
      ++counts[static_cast<std::size_t>(transfer.offset) + i];
    }
    auto handle = std::make_shared<LateHandle>(*this, transfer, fails, index);
    waiting_.push_back(handle);
    ++unwaited;
    most_outstanding = std::max(most_outstanding, static_cast<int>(waiting_.size()));
    const auto writes = [](const auto& each) { return each->transfer_.is_write; };
    read_beside_write = read_beside_write || (std::ranges::any_of(waiting_, writes) &&
                                              !std::ranges::all_of(waiting_, writes));
    asked_.notify_one();
    return handle;
  }

  // No transfer in flight shares a byte with this one, unless both read.
  void check_free(const PendingTransfer& transfer) const {
    for (const auto& each : waiting_) {
      const PendingTransfer& other = each->transfer_;
      const auto end = [](const PendingTransfer& of) {
        return of.offset + static_cast<std::int64_t>(of.bytes);
      };
      const bool apart = end(other) <= transfer.offset || end(transfer) <= other.offset;
      EXPECT_TRUE(apart || (!other.is_write && !transfer.is_write)) << "at " << transfer.offset;
      EXPECT_TRUE(other.memory + other.bytes <= transfer.memory ||
                  transfer.memory + transfer.bytes <= other.memory)
          << "memory is in use";
    }
  }

  void run(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (asked_.wait(lock, stop, [this] { return !waiting_.empty(); })) {
      lock.unlock();
      std::this_thread::sleep_for(settings_.delay);
      lock.lock();
      const auto chosen =
          waiting_.begin() + static_cast<std::ptrdiff_t>(std::uniform_int_distribution<std::size_t>(
                                 0, waiting_.size() - 1)(generator_));
      LateHandle& handle = **chosen;
      const PendingTransfer& transfer = handle.transfer_;
      if (!transfer.is_write) {
        std::memset(transfer.memory, 0xFF, transfer.bytes);
      } else if (!handle.fails_) {
        std::memcpy(data.data() + transfer.offset, transfer.memory, transfer.bytes);
      }
      handle.done_ = true;
      waiting_.erase(chosen);
      completed_.notify_all();
    }
  }

  const Settings settings_;
  mutable std::mutex mutex_;
  std::condition_variable_any asked_;
  std::condition_variable completed_;
  std::vector<std::shared_ptr<LateHandle>> waiting_;  // not completed
  std::mt19937_64 generator_;
  std::jthread worker_;
};

}  // namespace zero_ext::core::testing
