// The interface of an I/O backend: a queue of blocks with the kernel.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "../transfer_handle.h"

namespace zero_ext::core {

struct BlockRequest {
  std::uint32_t slot = 0;  // comes back with the completion
  int descriptor = -1;
  IoDirection direction = IoDirection::kRead;
  std::int64_t offset = 0;
  std::span<std::byte> memory;
};

struct BlockCompletion {
  std::uint32_t slot = 0;
  std::int64_t result = 0;  // bytes, or -errno
  std::string reason = {};  // of a failure that has no errno
};

// Moves a block, or a part of it, before it returns; called by many threads at once.
using BlockMover = std::function<BlockCompletion(const BlockRequest&)>;

// Used by one thread, but for wake(). Throws std::runtime_error when the queue itself breaks.
class IoQueue {
 public:
  explicit IoQueue(std::size_t capacity) : capacity_(capacity) {}
  IoQueue(const IoQueue&) = delete;
  IoQueue& operator=(const IoQueue&) = delete;
  virtual ~IoQueue() = default;

  // Most requests it holds at once, those in flight among them.
  std::size_t capacity() const { return capacity_; }

  // Takes all of them; with those that have not been reaped they are no more than there is room
  // for.
  virtual void submit(std::span<const BlockRequest> requests) = 0;

  // Appends what has ended; waits until there is something, or wake() was called since the last
  // time.
  virtual void reap(std::vector<BlockCompletion>& into) = 0;

  virtual void wake() = 0;

  // After the queue broke: waits, for `limit` at most, until the kernel no longer reads or writes
  // the memory of its requests, and tells whether that is so.
  virtual bool drain(std::chrono::milliseconds limit) = 0;

 private:
  const std::size_t capacity_;
};

// Each throws with the reason where its kind is not to be had.
std::unique_ptr<IoQueue> make_io_uring_queue(int depth);
std::unique_ptr<IoQueue> make_libaio_queue(int depth);
std::unique_ptr<IoQueue> make_thread_queue(int depth);  // pread and pwrite
std::unique_ptr<IoQueue> make_thread_queue(int depth, BlockMover mover);

}  // namespace zero_ext::core
