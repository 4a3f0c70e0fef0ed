// A byte FIFO of fixed size that chunks pass through on their way between storage and processor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>

#include "../base/host_memory.h"

namespace zero_ext::core {

// One allocation on huge pages. Spans are taken at the back and released at the front.
class RingBuffer {
 public:
  // Spans begin at multiples of this: enough for direct transfers to any device.
  static constexpr std::int64_t kAlignment = 4096;

  // Takes whole aligned blocks of `bytes`. Throws std::runtime_error when that is not even one, or
  // the kernel refuses.
  explicit RingBuffer(std::int64_t bytes);

  std::int64_t bytes() const { return bytes_; }

  // `bytes` > 0 of contiguous memory; nothing while too little of it is free.
  std::optional<std::span<std::byte>> acquire(std::int64_t bytes);

  // Gives back the span that was taken first.
  void release();

  // Held by whoever takes spans at the moment.
  std::unique_lock<std::mutex> exclusive() { return std::unique_lock(mutex_); }

 private:
  struct Free {
    void operator()(std::byte* memory) const { free_host(memory); }
  };
  struct AcquiredSpan {
    std::int64_t begin;
    std::int64_t end;
  };

  // Where `bytes` fit behind what is taken.
  std::optional<std::int64_t> find_space(std::int64_t bytes) const;

  std::int64_t bytes_;
  std::unique_ptr<std::byte, Free> memory_;
  std::deque<AcquiredSpan> acquired_;
  std::mutex mutex_;
};

}  // namespace zero_ext::core
