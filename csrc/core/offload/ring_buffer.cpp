#include "ring_buffer.h"

#include <cerrno>
#include <system_error>

#include "../base/error_text.h"
#include "../base/rounding.h"

namespace zero_ext::core {

RingBuffer::RingBuffer(std::int64_t bytes) : bytes_(bytes / kAlignment * kAlignment) {
  require(bytes >= kAlignment, "staging_buffer_bytes: expected at least ", kAlignment, ", got ",
          bytes, ". Raise it.");
  memory_.reset(static_cast<std::byte*>(allocate_host(bytes_)));
  if (memory_ == nullptr) {
    throw make_error("staging_buffer_bytes: the kernel refused ", bytes, " bytes (",
                     std::generic_category().message(errno), "). Free memory or lower it.");
  }
}

std::optional<std::int64_t> RingBuffer::find_space(std::int64_t bytes) const {
  if (acquired_.empty()) return bytes <= bytes_ ? std::optional<std::int64_t>(0) : std::nullopt;
  const std::int64_t front = acquired_.front().begin;
  const std::int64_t back = acquired_.back().end;
  const bool wrapped = back <= front;
  const std::int64_t limit = wrapped ? front : bytes_;
  if (bytes <= limit - back) return back;
  if (!wrapped && bytes <= front) return 0;
  return std::nullopt;
}

std::optional<std::span<std::byte>> RingBuffer::acquire(std::int64_t bytes) {
  const std::int64_t length = round_up(bytes, kAlignment);
  const std::optional<std::int64_t> begin = find_space(length);
  if (!begin) return std::nullopt;
  acquired_.push_back({*begin, *begin + length});
  return std::span(memory_.get() + *begin, static_cast<std::size_t>(bytes));
}

void RingBuffer::release() { acquired_.pop_front(); }

}  // namespace zero_ext::core
