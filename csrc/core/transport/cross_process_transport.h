// Point-to-point messages between processes of one host, one copy each: the receiver reads the
// sender's memory (process_vm_readv). A shared segment carries the descriptors, a thread a process
// does the copies.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "shared_memory_segment.h"

namespace zero_ext::core {

// The direction of a message, seen from this rank.
enum class MessageDirection { kSend, kReceive };

// The transport of one rank with all others of its group. Messages between two ranks arrive in the
// order they were sent. All methods may be called from any thread; failures throw
// std::runtime_error.
//
// A process writes to no memory but its own. It writes to that of a message that it receives until
// the message is complete or its `wait` has thrown, never later. It reads that of a peer, and
// rejects what it has read if the peer withdrew it meanwhile. A peer does that before it releases
// the memory.
class CrossProcessTransport {
 public:
  // Joins the segment `name`; the rank with `create` makes it, before the others join.
  CrossProcessTransport(const std::string& name, int rank, int world_size, bool create);
  ~CrossProcessTransport();
  CrossProcessTransport(const CrossProcessTransport&) = delete;
  CrossProcessTransport& operator=(const CrossProcessTransport&) = delete;

  // Whether this process may read every other's memory. Call once all have joined. Starts the
  // thread.
  bool connect();

  // Offers `bytes` to `peer`, and keeps `owner` alive until they were read.
  void send(int peer, std::span<const std::byte> bytes, std::int64_t tag,
            std::shared_ptr<void> owner);

  // Fills `bytes` with the next message from `peer`, which must be as long and have the same tag;
  // keeps `owner` until then.
  void receive(int peer, std::span<std::byte> bytes, std::int64_t tag, std::shared_ptr<void> owner);

  // Returns when `count` messages in this direction are complete; throws after `timeout`, when a
  // message of another size or tag arrived, when the peer closed its exchange, or when its process
  // ended. Then nothing is exchanged with the peer any more.
  void wait(int peer, MessageDirection direction, std::uint64_t count,
            std::chrono::duration<double> timeout);

  // Publishes that this rank no longer takes part. Ranks that wait for it then throw `reason`, of
  // which 1023 bytes are stored, and so do all methods of this object. Messages sent before still
  // arrive while this object lives.
  void abort(const std::string& reason);

 private:
  struct Outgoing {
    MessageDescriptor descriptor;
    std::shared_ptr<void> owner;
  };
  struct Incoming {
    std::span<std::byte> bytes;
    std::int64_t tag;
    std::shared_ptr<void> owner;
  };
  using Owners = std::vector<std::shared_ptr<void>>;
  struct Peer {
    std::deque<Outgoing> unposted;
    std::deque<std::shared_ptr<void>>
        unread;  // owners of posted messages that the peer has not read
    std::deque<Incoming> expected;
    std::uint64_t sent = 0;      // complete messages to the peer
    std::uint64_t received = 0;  // complete messages from the peer
    bool copying = false;
    int process_watch = -1;  // pidfd, readable once the process ended
    std::string failure;
  };

  void run();
  bool progress(std::unique_lock<std::mutex>& lock);
  std::string await(int rank, MessageDirection direction, std::uint64_t count,
                    std::chrono::duration<double> timeout, std::unique_lock<std::mutex>& lock);
  bool post(int rank);
  bool reap_sent(int rank);
  bool detect_peer_exit(int rank);
  bool copy_next(int rank, std::unique_lock<std::mutex>& lock);
  void watch_processes();
  void check_peer(int rank) const;
  void check_not_aborted() const;
  void fail(int rank, const std::string& reason);
  void withdraw(int rank);
  bool withdrew(int rank) const;
  std::string failure_reason(int rank) const;

  const int rank_;
  SharedMemorySegment segment_;
  std::vector<Peer> peers_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // Of complete messages. What goes with an owner may be any code, a finalizer that closes this
  // exchange included. So the thread never releases one, and nobody does under the lock.
  Owners released_;
  std::atomic<bool> stopping_ = false;
  std::thread thread_;
};

}  // namespace zero_ext::core
