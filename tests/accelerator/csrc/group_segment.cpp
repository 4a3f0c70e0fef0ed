#include "group_segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <system_error>
#include <thread>

namespace stand_in {

struct GroupSegment::Header {
  std::atomic<std::uint32_t> failure;  // 0 none, 1 being written, 2 there
  std::array<char, 2048> reason;
  std::array<std::atomic<std::uint32_t>, kMaxRanks> bells;
  std::array<std::atomic<bool>, kMaxRanks> left;
  std::array<std::array<std::atomic<bool>, kMaxRanks>, kMaxRanks> waits;  // of a rank for another
};

namespace {

constexpr std::chrono::milliseconds kNap{20};  // a bell that is missed costs at most this

std::system_error system_error(const char* what) { return {errno, std::generic_category(), what}; }

}  // namespace

GroupSegment::GroupSegment(int rank, int size, const std::string& name) : rank_(rank), size_(size) {
  const auto ranks = static_cast<std::size_t>(size);
  const std::size_t pipes = sizeof(Header);
  const std::size_t launches = pipes + ranks * ranks * sizeof(Pipe);
  bytes_ = launches + (1 + ranks * ranks) * ranks * kLaunchesKept * sizeof(Launch);
  file_ = rank == 0 ? memfd_create("stand_in_ccl", MFD_CLOEXEC)
                    : open(name.c_str(), O_RDWR | O_CLOEXEC);
  if (file_ < 0 || (rank == 0 && ftruncate(file_, static_cast<off_t>(bytes_)) != 0)) {
    throw system_error("stand_in_ccl: shared memory");
  }
  void* const address = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (address == MAP_FAILED) {
    throw system_error("stand_in_ccl: shared memory");
  }
  auto* const begin = static_cast<std::byte*>(address);
  // New pages are zero, which is the first value of everything here.
  header_ = reinterpret_cast<Header*>(begin);
  pipes_ = reinterpret_cast<Pipe*>(begin + pipes);
  launches_ = reinterpret_cast<Launch*>(begin + launches);
}

GroupSegment::~GroupSegment() {
  munmap(header_, bytes_);
  close(file_);
}

std::string GroupSegment::name() const {
  return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file_);
}

std::size_t GroupSegment::channel_of_pair(int sender, int receiver) const {
  return 1 + static_cast<std::size_t>(sender * size_ + receiver);
}

Launch& GroupSegment::launch(std::size_t channel, int rank, std::uint64_t number) {
  const std::size_t log =
      channel * static_cast<std::size_t>(size_) + static_cast<std::size_t>(rank);
  return launches_[log * kLaunchesKept + number % kLaunchesKept];
}

void GroupSegment::fail(const std::string& reason) {
  std::uint32_t none = 0;
  if (header_->failure.compare_exchange_strong(none, 1)) {
    const std::size_t length = std::min(reason.size(), header_->reason.size() - 1);
    std::memcpy(header_->reason.data(), reason.data(), length);
    header_->failure = 2;
  }
  for (int rank = 0; rank < size_; ++rank) {
    ring(rank);
  }
}

bool GroupSegment::failed() const { return header_->failure != 0; }

void GroupSegment::check() const {
  if (aborted_) {
    throw std::runtime_error("stand_in_ccl: the communicator was aborted");
  }
  if (!failed()) {
    return;
  }
  while (header_->failure != 2) {
    std::this_thread::yield();
  }
  throw std::runtime_error(header_->reason.data());
}

void GroupSegment::leave() { header_->left.at(static_cast<std::size_t>(rank_)) = true; }

bool GroupSegment::left(int rank) const { return header_->left.at(static_cast<std::size_t>(rank)); }

bool GroupSegment::wanted() const {
  return failed() || aborted_ ||
         std::any_of(header_->waits.begin(), header_->waits.end(), [this](auto& waits) {
           return waits.at(static_cast<std::size_t>(rank_)).load();
         });
}

Pipe& GroupSegment::pipe(int sender, int receiver) { return pipes_[sender * size_ + receiver]; }

void GroupSegment::ring(int rank) {
  std::atomic<std::uint32_t>& bell = header_->bells.at(static_cast<std::size_t>(rank));
  ++bell;
  syscall(SYS_futex, &bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Moves what can be moved now; whether that was anything.
bool GroupSegment::advance(Transfer& transfer) {
  Pipe& pipe = transfer.sends ? this->pipe(rank_, transfer.peer) : this->pipe(transfer.peer, rank_);
  const std::uint64_t held = pipe.written - pipe.read;
  const std::size_t left = transfer.bytes - transfer.done;
  const std::size_t ready = std::min<std::size_t>(transfer.sends ? kPipeBytes - held : held, left);
  if (ready == 0) {
    return false;
  }
  const std::uint64_t from = transfer.sends ? pipe.written : pipe.read;
  const std::size_t first = std::min<std::size_t>(ready, kPipeBytes - from % kPipeBytes);
  std::byte* const data = transfer.data + transfer.done;
  std::byte* const in_pipe = pipe.data.data() + from % kPipeBytes;
  if (transfer.sends) {
    std::memcpy(in_pipe, data, first);
    std::memcpy(pipe.data.data(), data + first, ready - first);
    pipe.written += ready;
  } else {
    std::memcpy(data, in_pipe, first);
    std::memcpy(data + first, pipe.data.data(), ready - first);
    pipe.read += ready;
  }
  transfer.done += ready;
  ring(transfer.peer);
  return true;
}

// As NCCL's, a send ends when it is received.
bool GroupSegment::is_open(const Transfer& transfer) {
  const Pipe& out = pipe(rank_, transfer.peer);
  return transfer.done < transfer.bytes || (transfer.sends && out.read < out.written);
}

void GroupSegment::move(std::vector<Transfer>& transfers, std::chrono::milliseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  std::atomic<std::uint32_t>& bell = header_->bells.at(static_cast<std::size_t>(rank_));
  auto& waits = header_->waits.at(static_cast<std::size_t>(rank_));
  while (true) {
    const std::uint32_t rung = bell;
    check();
    bool moved = false, open = false;
    std::array<std::array<bool, 2>, kMaxRanks> busy{};  // with an earlier transfer
    for (Transfer& transfer : transfers) {
      const auto peer = static_cast<std::size_t>(transfer.peer);
      bool& taken = busy.at(peer).at(transfer.sends ? 1 : 0);
      if (!taken && transfer.done < transfer.bytes) {
        moved |= advance(transfer);
        taken = transfer.done < transfer.bytes;
      }
      const bool waiting = is_open(transfer);
      if (waiting) {
        waits.at(peer) = true;
      }
      open |= waiting;
    }
    if (!open) {
      break;
    }
    if (!moved) {
      const timespec nap{0, std::chrono::nanoseconds(kNap).count()};
      syscall(SYS_futex, &bell, FUTEX_WAIT, rung, &nap, nullptr, 0);
      if (std::chrono::steady_clock::now() > deadline) {
        fail("stand_in_ccl: rank " + std::to_string(rank_) + " waited for its peers longer than " +
             std::to_string(limit.count()) + " ms");
      }
    }
  }
  std::fill(waits.begin(), waits.end(), false);
}

}  // namespace stand_in
