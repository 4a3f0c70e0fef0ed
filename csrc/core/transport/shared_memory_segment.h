// The shared memory in which the processes of one host publish the addresses of their messages.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

namespace zero_ext::core {

inline constexpr std::size_t kDescriptorsInFlight = 64;
inline constexpr std::size_t kCacheLine = 64;
inline constexpr std::size_t kReasonBytes = 1024;

// A message in its sender's memory. `tag` says what it is.
struct MessageDescriptor {
  std::uint64_t address = 0;
  std::uint64_t nbytes = 0;
  std::int64_t tag = 0;
};

// One direction between two ranks: a ring that its sender fills and its receiver empties. Once it
// is `withdrawn` the memory of messages that were not read may hold anything.
struct Channel {
  alignas(kCacheLine) std::atomic<std::uint64_t> posted;
  std::atomic<std::uint32_t> withdrawn;
  alignas(kCacheLine) std::atomic<std::uint64_t> read;
  std::array<MessageDescriptor, kDescriptorsInFlight> ring;
};

// The state that a rank publishes. `token` is in its own memory, for others to try to read.
// `reason`, a zero-terminated text, is valid once the rank has aborted.
struct Member {
  alignas(kCacheLine) std::atomic<std::uint32_t> doorbell;
  std::uint32_t process;
  std::uint64_t token_address;
  std::uint64_t token;
  std::atomic<std::uint32_t> aborted;
  std::array<char, kReasonBytes> reason;
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free &&
              std::atomic<std::uint32_t>::is_always_lock_free);

// A mapping of the segment; unmapped with the object. The name is removed by `unlink`, once all
// have joined.
class SharedMemorySegment {
 public:
  // Throws std::runtime_error naming the segment and the reason.
  SharedMemorySegment(const std::string& name, int world_size, bool create);
  ~SharedMemorySegment();
  SharedMemorySegment(const SharedMemorySegment&) = delete;
  SharedMemorySegment& operator=(const SharedMemorySegment&) = delete;

  Member& member(int rank) const;
  Channel& channel(int source, int destination) const;
  int world_size() const { return world_size_; }

  // Wakes the process of `rank`; sleeps until this rank's doorbell has left `seen`, at most
  // `longest`.
  void ring(int rank) const;
  void sleep(int rank, std::uint32_t seen, std::chrono::milliseconds longest) const;

  static void unlink(const std::string& name);

 private:
  int world_size_;
  std::size_t nbytes_;
  void* base_;
};

}  // namespace zero_ext::core
