#include "cross_process_transport.h"

#include <poll.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <random>
#include <system_error>
#include <utility>

#include "../base/error_text.h"

namespace zero_ext::core {
namespace {

using namespace std::chrono_literals;

constexpr auto kWatchPeriod = 200ms;
constexpr auto kLingerLimit = 5s;
constexpr std::size_t kLargestRead = std::size_t{1} << 30;

// What `connect` lets the others read.
std::uint64_t own_token = 0;

// Reads another process's memory; returns 0 or an errno. Short reads go on where they ended.
int read_process(pid_t process, std::uint64_t address, std::span<std::byte> into) {
  while (!into.empty()) {
    const iovec local{into.data(), std::min(into.size(), kLargestRead)};
    const iovec remote{reinterpret_cast<void*>(address), local.iov_len};
    const ssize_t got = ::process_vm_readv(process, &local, 1, &remote, 1, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return got < 0 ? errno : EFAULT;
    into = into.subspan(static_cast<std::size_t>(got));
    address += static_cast<std::uint64_t>(got);
  }
  return 0;
}

}  // namespace

CrossProcessTransport::CrossProcessTransport(const std::string& name, int rank, int world_size,
                                             bool create)
    : rank_(rank),
      segment_(name, world_size, create),
      peers_(static_cast<std::size_t>(world_size)) {
  if (own_token == 0) own_token = (std::uint64_t{std::random_device{}()} << 32) | 1;
  Member& self = segment_.member(rank);
  self.process = static_cast<std::uint32_t>(::getpid());
  self.token_address = reinterpret_cast<std::uint64_t>(&own_token);
  self.token = own_token;
}

CrossProcessTransport::~CrossProcessTransport() {
  if (thread_.joinable()) {
    // A peer may still be reading what was sent: its memory goes away with this object's owners.
    // What it reads later it rejects.
    const auto limit = std::chrono::steady_clock::now() + kLingerLimit;
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, limit, [this] {
      return std::ranges::all_of(peers_, [](const Peer& peer) {
        return !peer.failure.empty() || (peer.unread.empty() && peer.unposted.empty());
      });
    });
    for (int rank = 0; rank < segment_.world_size(); ++rank) withdraw(rank);
    lock.unlock();
    stopping_ = true;
    segment_.ring(rank_);
    thread_.join();
  }
  for (const Peer& peer : peers_) {
    if (peer.process_watch >= 0) ::close(peer.process_watch);
  }
}

bool CrossProcessTransport::connect() {
  if (thread_.joinable()) return true;
  for (int rank = 0; rank < segment_.world_size(); ++rank) {
    const Member& member = segment_.member(rank);
    if (rank == rank_) continue;
    std::uint64_t seen = 0;
    const auto process = static_cast<pid_t>(member.process);
    if (read_process(process, member.token_address, std::as_writable_bytes(std::span(&seen, 1))) !=
            0 ||
        seen != member.token) {
      return false;
    }
    const auto watch = static_cast<int>(::syscall(SYS_pidfd_open, process, 0));
    if (watch < 0) return false;
    peers_[static_cast<std::size_t>(rank)].process_watch = watch;
  }
  thread_ = std::thread([this] { run(); });
  return true;
}

void CrossProcessTransport::send(int peer, std::span<const std::byte> bytes, std::int64_t tag,
                                 std::shared_ptr<void> owner) {
  check_peer(peer);
  Owners released;  // until the lock is
  const std::lock_guard lock(mutex_);
  released.swap(released_);
  check_not_aborted();
  const MessageDescriptor descriptor{reinterpret_cast<std::uint64_t>(bytes.data()), bytes.size(),
                                     tag};
  peers_[static_cast<std::size_t>(peer)].unposted.push_back({descriptor, std::move(owner)});
  post(peer);
}

void CrossProcessTransport::receive(int peer, std::span<std::byte> bytes, std::int64_t tag,
                                    std::shared_ptr<void> owner) {
  check_peer(peer);
  Owners released;
  const std::lock_guard lock(mutex_);
  released.swap(released_);
  check_not_aborted();
  peers_[static_cast<std::size_t>(peer)].expected.push_back({bytes, tag, std::move(owner)});
  const Channel& channel = segment_.channel(peer, rank_);
  if (channel.posted.load(std::memory_order_acquire) !=
      channel.read.load(std::memory_order_relaxed)) {
    segment_.ring(rank_);
  }
}

void CrossProcessTransport::wait(int rank, MessageDirection direction, std::uint64_t count,
                                 std::chrono::duration<double> timeout) {
  check_peer(rank);
  Owners released;
  std::unique_lock lock(mutex_);
  const std::string failure = await(rank, direction, count, timeout, lock);
  released.swap(released_);
  lock.unlock();
  require(failure.empty(), failure);
}

// Why it was in vain, or nothing.
std::string CrossProcessTransport::await(int rank, MessageDirection direction, std::uint64_t count,
                                         std::chrono::duration<double> timeout,
                                         std::unique_lock<std::mutex>& lock) {
  const auto limit = std::chrono::steady_clock::now() +
                     std::chrono::duration_cast<std::chrono::steady_clock::duration>(timeout);
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  const auto complete = [&] {
    return (direction == MessageDirection::kSend ? peer.sent : peer.received) >= count;
  };
  // What has arrived already is copied here rather than by a thread that first has to wake up.
  while (!complete() && peer.failure.empty() && progress(lock)) {
  }
  if (!changed_.wait_until(lock, limit, [&] { return complete() || !peer.failure.empty(); })) {
    fail(rank, "no answer from rank " + std::to_string(rank) + " within " +
                   std::to_string(timeout.count()) + " seconds");
    withdraw(rank);
  }
  // Once this throws the caller may use the memory for something else.
  if (!complete()) changed_.wait(lock, [&] { return !peer.copying; });
  if (complete()) return {};
  if (direction == MessageDirection::kSend) withdraw(rank);
  return peer.failure;
}

void CrossProcessTransport::abort(const std::string& reason) {
  Member& self = segment_.member(rank_);
  const std::lock_guard lock(mutex_);
  if (self.aborted.load(std::memory_order_relaxed) != 0) return;
  std::size_t length = std::min(reason.size(), kReasonBytes - 1);
  // Not within a character of UTF-8: what is cut there cannot be shown.
  while (length < reason.size() && length > 0 && (reason[length] & 0xC0) == 0x80) --length;
  std::copy_n(reason.begin(), length, self.reason.begin());
  self.aborted.store(1, std::memory_order_release);
  for (int rank = 0; rank < segment_.world_size(); ++rank) {
    segment_.ring(rank);
    fail(rank, reason);
  }
}

void CrossProcessTransport::run() {
  auto watched = std::chrono::steady_clock::now();
  while (!stopping_) {
    const std::uint32_t seen = segment_.member(rank_).doorbell.load(std::memory_order_acquire);
    bool moved = false;
    {
      std::unique_lock lock(mutex_);
      moved = progress(lock);
      if (std::chrono::steady_clock::now() - watched > kWatchPeriod) {
        watch_processes();
        watched = std::chrono::steady_clock::now();
      }
    }
    if (!moved) segment_.sleep(rank_, seen, kWatchPeriod);
  }
}

// Does everything that can be done now; whether there was anything.
bool CrossProcessTransport::progress(std::unique_lock<std::mutex>& lock) {
  bool moved = false;
  for (int rank = 0; rank < segment_.world_size(); ++rank) {
    if (rank == rank_) continue;
    moved |= reap_sent(rank);
    moved |= post(rank);
    moved |= copy_next(rank, lock);
    moved |= detect_peer_exit(rank);
  }
  if (moved) changed_.notify_all();
  return moved;
}

bool CrossProcessTransport::post(int rank) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  Channel& channel = segment_.channel(rank_, rank);
  bool moved = false;
  std::uint64_t posted = channel.posted.load(std::memory_order_relaxed);
  while (!peer.unposted.empty() &&
         posted - channel.read.load(std::memory_order_acquire) < kDescriptorsInFlight) {
    channel.ring[posted % kDescriptorsInFlight] = peer.unposted.front().descriptor;
    peer.unread.push_back(std::move(peer.unposted.front().owner));
    peer.unposted.pop_front();
    channel.posted.store(++posted, std::memory_order_release);
    moved = true;
  }
  if (moved) segment_.ring(rank);
  return moved;
}

bool CrossProcessTransport::reap_sent(int rank) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  const std::uint64_t read = segment_.channel(rank_, rank).read.load(std::memory_order_acquire);
  const bool moved = peer.sent < read;
  for (; peer.sent < read; ++peer.sent) {
    released_.push_back(std::move(peer.unread.front()));
    peer.unread.pop_front();
  }
  return moved;
}

// Whether this rank waits for one that has aborted, or closed its transport.
bool CrossProcessTransport::detect_peer_exit(int rank) {
  const Peer& peer = peers_[static_cast<std::size_t>(rank)];
  const bool withdrawn = withdrew(rank);
  const bool aborted = segment_.member(rank).aborted.load(std::memory_order_acquire) != 0;
  if (!peer.failure.empty() || peer.copying || !(withdrawn || aborted)) return false;
  // Looked at only now: what was read or posted before that is seen.
  const bool moved = reap_sent(rank);
  const Channel& channel = segment_.channel(rank, rank_);
  const bool more = channel.posted.load(std::memory_order_acquire) !=
                    channel.read.load(std::memory_order_relaxed);
  const bool waiting = !peer.expected.empty() || !peer.unread.empty() || !peer.unposted.empty();
  if (!waiting || (more && !withdrawn && !peer.expected.empty())) return moved;
  fail(rank, failure_reason(rank));
  return true;
}

bool CrossProcessTransport::copy_next(int rank, std::unique_lock<std::mutex>& lock) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  Channel& channel = segment_.channel(rank, rank_);
  const std::uint64_t read = channel.read.load(std::memory_order_relaxed);
  if (peer.copying || peer.expected.empty() || !peer.failure.empty() ||
      channel.posted.load(std::memory_order_acquire) == read || withdrew(rank)) {
    return false;
  }
  const MessageDescriptor message = channel.ring[read % kDescriptorsInFlight];
  Incoming target = std::move(peer.expected.front());
  peer.expected.pop_front();
  const bool other_size = message.nbytes != target.bytes.size();
  if (other_size || message.tag != target.tag) {
    // Refused, but read: the sender need not wait for what will never be taken.
    released_.push_back(std::move(target.owner));
    channel.read.store(read + 1, std::memory_order_release);
    segment_.ring(rank);
    const std::string sender = "rank " + std::to_string(rank) + " sent ";
    fail(rank, other_size ? sender + std::to_string(message.nbytes) + " bytes where " +
                                std::to_string(target.bytes.size()) + " were expected"
                          : sender + "something else in its place");
    return true;
  }
  peer.copying = true;
  lock.unlock();
  const int error = read_process(static_cast<pid_t>(segment_.member(rank).process), message.address,
                                 target.bytes);
  // Asked after the message was read, which no read of it moves down behind.
  const bool withdrawn = channel.withdrawn.fetch_or(0, std::memory_order_acq_rel) != 0;
  lock.lock();
  peer.copying = false;
  released_.push_back(std::move(target.owner));
  changed_.notify_all();
  if (withdrawn) {
    fail(rank, failure_reason(rank));
  } else if (error != 0) {
    fail(rank, "reading a message of rank " + std::to_string(rank) +
                   " failed: " + std::generic_category().message(error));
  } else {
    ++peer.received;
    channel.read.store(read + 1, std::memory_order_release);
    segment_.ring(rank);
  }
  return true;
}

void CrossProcessTransport::watch_processes() {
  for (int rank = 0; rank < segment_.world_size(); ++rank) {
    Peer& peer = peers_[static_cast<std::size_t>(rank)];
    pollfd watch{peer.process_watch, POLLIN, 0};
    if (peer.process_watch >= 0 && peer.failure.empty() && ::poll(&watch, 1, 0) > 0) {
      fail(rank, "the process of rank " + std::to_string(rank) + " has ended");
    }
  }
}

void CrossProcessTransport::check_peer(int rank) const {
  require(rank >= 0 && rank < segment_.world_size() && rank != rank_,
          "peer: expected another rank than ", rank_, " of ", segment_.world_size(), ", got ", rank,
          ". Pass such a rank.");
}

void CrossProcessTransport::check_not_aborted() const {
  const Member& self = segment_.member(rank_);
  require(self.aborted.load(std::memory_order_relaxed) == 0, self.reason.data());
}

// The first failure of a peer is the last: what was expected of it is not written to any more.
void CrossProcessTransport::fail(int rank, const std::string& reason) {
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  if (!peer.failure.empty()) return;
  peer.failure = reason;
  for (Incoming& incoming : peer.expected) released_.push_back(std::move(incoming.owner));
  peer.expected.clear();
  changed_.notify_all();
}

// Before memory changes that `rank` may still read: no write to it moves up before this.
void CrossProcessTransport::withdraw(int rank) {
  segment_.channel(rank_, rank).withdrawn.exchange(1, std::memory_order_acq_rel);
  segment_.ring(rank);
}

bool CrossProcessTransport::withdrew(int rank) const {
  return segment_.channel(rank, rank_).withdrawn.load(std::memory_order_acquire) != 0;
}

std::string CrossProcessTransport::failure_reason(int rank) const {
  const Member& member = segment_.member(rank);
  if (member.aborted.load(std::memory_order_acquire) != 0) return member.reason.data();
  return "rank " + std::to_string(rank) +
         " has closed its connections, or waited longer than its time limit";
}

}  // namespace zero_ext::core
