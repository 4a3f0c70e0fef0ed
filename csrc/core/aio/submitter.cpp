#include "submitter.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>

namespace zero_ext::core {
namespace {

using namespace std::chrono_literals;

// Waits of 0, 1, 2, 4 ... 64 ms: a condition that outlasts them, a third of a second, is an error.
constexpr int kMaxAttempts = 10;
constexpr auto kLongestPause = 64ms;

bool is_transient(std::int64_t error) { return error == EINTR || error == EAGAIN; }

std::string errno_text(std::int64_t error) {
  return std::generic_category().message(static_cast<int>(error)) + " (errno " +
         std::to_string(error) + ")";
}

void fail(const TransferShare& share, const std::string& reason) {
  Transfer& transfer = *share.transfer;
  transfer.end_blocks(share.blocks_left(),
                      transfer.failure_text(transfer.block(share.next), reason));
}

}  // namespace

Submitter::Submitter(std::unique_ptr<IoQueue> queue, std::shared_ptr<FaultPlan> faults,
                     std::chrono::milliseconds drain_limit)
    : faults_(std::move(faults)),
      drain_limit_(drain_limit),
      queue_(std::move(queue)),
      slots_(queue_->capacity()),
      thread_([this] { run(); }) {}

Submitter::~Submitter() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    if (broken_.empty()) queue_->wake();
  }
  thread_.join();
}

void Submitter::enqueue(TransferShare share) {
  const std::lock_guard lock(mutex_);
  if (!broken_.empty()) {
    fail(share, broken_);
    return;
  }
  shares_.push_back(std::move(share));
  if (std::exchange(starved_, false)) queue_->wake();
}

void Submitter::run() {
  try {
    process_shares();
  } catch (const std::exception& error) {
    fail_all(error.what());
  }
}

void Submitter::process_shares() {
  for (auto index = static_cast<std::uint32_t>(slots_.size()); index-- > 0;) {
    free_.push_back(index);
  }
  while (fill()) {
    completions_.clear();
    queue_->reap(completions_);
    for (const BlockCompletion& completion : completions_) handle_completion(completion);
    back_off();
  }
}

// Hands the queue all it may hold; false when nothing is left and nothing will come.
bool Submitter::fill() {
  requests_.clear();
  for (const std::uint32_t index : retries_) start(index);
  retries_.clear();
  bool finished = false;
  while (!free_.empty()) {
    if (!current_ && !acquire_share()) {
      const std::lock_guard lock(mutex_);
      finished = stopping_ && shares_.empty();
      break;
    }
    Transfer& transfer = *current_->transfer;
    if (transfer.failed()) {
      transfer.end_blocks(current_->blocks_left(), "");
      current_.reset();
      continue;
    }
    const std::uint32_t index = free_.back();
    free_.pop_back();
    slots_[index] = {current_->transfer, transfer.block(current_->next), 0};
    start(index);
    current_->next += current_->step;
    if (current_->next >= transfer.blocks()) current_.reset();
  }
  if (!requests_.empty()) queue_->submit(requests_);
  return !finished || free_.size() < slots_.size();
}

bool Submitter::acquire_share() {
  const std::lock_guard lock(mutex_);
  starved_ = shares_.empty();
  if (starved_) return false;
  current_ = std::move(shares_.front());
  shares_.pop_front();
  return true;
}

void Submitter::start(std::uint32_t index) {
  const Slot& slot = slots_[index];
  requests_.push_back({index, slot.transfer->file().descriptor(slot.block.direct),
                       slot.transfer->direction(), slot.block.offset, slot.block.memory});
}

void Submitter::handle_completion(const BlockCompletion& completion) {
  if (!completion.reason.empty()) {
    end(completion.slot, completion.reason);
    return;
  }
  Slot& slot = slots_[completion.slot];
  const IoDirection direction = slot.transfer->direction();
  const std::int64_t result = faults_->apply(direction, completion.result);
  if (result >= static_cast<std::int64_t>(slot.block.memory.size())) {
    end(completion.slot, "");
  } else if (result > 0) {
    advance(slot, static_cast<std::size_t>(result));
    retries_.push_back(completion.slot);
  } else if (result == 0) {
    end(completion.slot,
        direction == IoDirection::kRead
            ? "the file ends (it has " + std::to_string(slot.transfer->file().size()) + " bytes)"
            : "the kernel takes no more bytes there");
  } else if (!is_transient(-result)) {
    end(completion.slot, errno_text(-result));
  } else if (++slot.attempts == kMaxAttempts) {
    end(completion.slot,
        errno_text(-result) + ", " + std::to_string(kMaxAttempts) + " times in succession");
  } else {
    max_attempts_ = std::max(max_attempts_, slot.attempts);
    retries_.push_back(completion.slot);
  }
}

// Past a short transfer. A rest that is no longer aligned goes through the page cache.
void Submitter::advance(Slot& slot, std::size_t moved) {
  slot.block.offset += static_cast<std::int64_t>(moved);
  slot.block.memory = slot.block.memory.subspan(moved);
  slot.block.direct =
      slot.block.direct && slot.block.offset % slot.transfer->file().alignment() == 0;
  slot.attempts = 0;
}

void Submitter::end(std::uint32_t index, const std::string& reason) {
  Slot& slot = slots_[index];
  slot.transfer->end_blocks(
      1, reason.empty() ? reason : slot.transfer->failure_text(slot.block, reason));
  slot = {};
  free_.push_back(index);
}

void Submitter::back_off() {
  if (max_attempts_ > 1) {
    std::this_thread::sleep_for(std::min<std::chrono::milliseconds>(
        std::chrono::milliseconds(1 << (max_attempts_ - 2)), kLongestPause));
  }
  max_attempts_ = 0;
}

// The queue is of no use any more: all that was asked of it, and all that will be, has failed. The
// kernel may go on with what it has, so transfers end when it is done, or their memory stays.
void Submitter::fail_all(const std::string& reason) {
  const bool drained = queue_->drain(drain_limit_);
  const std::lock_guard lock(mutex_);
  broken_ = "the queue of the I/O engine broke: " + reason;
  queue_.reset();
  for (std::uint32_t index = 0; index < slots_.size(); ++index) {
    if (!slots_[index].transfer) continue;
    if (!drained) slots_[index].transfer->keep_owner();
    end(index, broken_);
  }
  if (current_) shares_.push_front(*std::exchange(current_, std::nullopt));
  for (const TransferShare& share : shares_) fail(share, broken_);
  shares_.clear();
}

}  // namespace zero_ext::core
