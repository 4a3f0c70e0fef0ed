#include "transfer.h"

#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "../base/error_text.h"
#include "../base/rounding.h"

namespace zero_ext::core {

Transfer::Transfer(TransferRequest request, std::int64_t block_bytes)
    : request_(std::move(request)), process_(::getpid()) {
  const IoFile& file = *request_.file;
  const auto length = static_cast<std::int64_t>(request_.memory.size());
  block_bytes_ = round_up(block_bytes, file.alignment());
  body_ = length;
  if (file.direct()) {
    const std::int64_t head =
        std::min(length, round_up(request_.offset, file.alignment()) - request_.offset);
    const std::int64_t body = (length - head) / file.alignment() * file.alignment();
    if (body > 0 && file.is_dma_aligned(request_.memory.subspan(static_cast<std::size_t>(head)))) {
      head_ = head;
      body_ = body;
      body_direct_ = true;
    }
  }
  const std::int64_t tail = length - head_ - body_;
  // Blocks end at multiples of their size in the file. Cut from where a transfer begins, which is
  // any page of an arena, each would lie across two pieces of a device that works in larger ones.
  if (body_ > 0) phase_ = (request_.offset + head_) % block_bytes_;
  blocks_ = (head_ > 0) + ceil_div(phase_ + body_, block_bytes_) + (tail > 0);
  left_.store(blocks_, std::memory_order_relaxed);
  ended_.store(blocks_ == 0, std::memory_order_relaxed);
}

Block Transfer::block(std::int64_t index) const {
  const auto make_block = [this](std::int64_t begin, std::int64_t end, bool direct) {
    const auto memory = request_.memory.subspan(static_cast<std::size_t>(begin),
                                                static_cast<std::size_t>(end - begin));
    return Block{request_.offset + begin, memory, direct};
  };
  if (head_ > 0 && index-- == 0) return make_block(0, head_, false);
  const std::int64_t begin = head_ - phase_ + index * block_bytes_;
  const std::int64_t tail = head_ + body_;
  if (begin < tail) {
    return make_block(std::max(begin, head_), std::min(begin + block_bytes_, tail), body_direct_);
  }
  return make_block(tail, static_cast<std::int64_t>(request_.memory.size()), false);
}

void Transfer::end_blocks(std::int64_t count, const std::string& reason) {
  if (!reason.empty()) {
    const std::lock_guard lock(mutex_);
    if (reason_.empty()) reason_ = reason;
    failed_.store(true, std::memory_order_relaxed);
  }
  if (left_.fetch_sub(count, std::memory_order_acq_rel) != count) return;
  const std::lock_guard lock(mutex_);
  ended_.store(true, std::memory_order_release);
  changed_.notify_all();
}

void Transfer::keep_owner() {
  static std::mutex mutex;
  static auto& owners = *new std::vector<std::shared_ptr<void>>;
  const std::scoped_lock lock(mutex, mutex_);
  owners.push_back(request_.owner);
}

std::string Transfer::failure_text(const Block& block, const std::string& reason) const {
  return std::string(direction() == IoDirection::kRead ? "reading " : "writing ") +
         std::to_string(block.memory.size()) + " bytes at offset " + std::to_string(block.offset) +
         " of '" + file().path() + "' failed: " + reason;
}

void Transfer::wait() {
  if (::getpid() != process_) {
    throw make_error("transfer of '", file().path(), "': expected process ", process_,
                     ", which began it, got ", ::getpid(), ". Wait for it there.");
  }
  // The owner goes here, on the thread of the caller, rather than on one of the engine.
  std::shared_ptr<void> owner;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return done(); });
  owner = std::move(request_.owner);
  const std::string reason = reason_;
  lock.unlock();
  require(reason.empty(), reason);
}

}  // namespace zero_ext::core
