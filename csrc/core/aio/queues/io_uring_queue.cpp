// io_uring by raw system calls: one build serves every kernel, and needs no library of the
// system's. Described in io_uring_setup(2), io_uring_enter(2), io_uring_register(2).
#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

#include "../../base/error_text.h"
#include "io_queue.h"

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif

// Defined by the headers of Linux 5.6, whose io_uring is the oldest with plain reads and writes.
#ifdef IORING_FEAT_RW_CUR_POS

#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <fstream>
#include <thread>

#include "../../base/unique_fd.h"
#include "eventfd.h"

namespace zero_ext::core {
namespace {

// The same on every architecture; headers of an old C library may lack the names.
constexpr long kSetupCall = 425;
constexpr long kEnterCall = 426;
constexpr long kRegisterCall = 427;

constexpr std::uint64_t kWakeMark = ~std::uint64_t{0};

// The kernel is short of memory for requests: what takes longer than this is no passing state.
constexpr int kMaxRefusals = 1000;

std::string setup_refusal(int reason) {
  const std::string text = std::generic_category().message(reason);
  if (reason == ENOSYS) return "this kernel has no io_uring: " + text;
  if (reason == ENOMEM) {
    return "no memory for its rings, which older kernels charge to RLIMIT_MEMLOCK (ulimit -l): " +
           text;
  }
  if (reason != EPERM && reason != EACCES) return "io_uring_setup: " + text;
  std::string setting;
  std::ifstream("/proc/sys/kernel/io_uring_disabled") >> setting;
  if (setting.empty() || setting == "0") return "forbidden, probably by a seccomp filter: " + text;
  return "forbidden by sysctl kernel.io_uring_disabled = " + setting + ": " + text;
}

// Shared memory of a ring.
class RingMapping {
 public:
  RingMapping(int descriptor, std::size_t bytes, std::int64_t what)
      : bytes_(bytes),
        base_(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor,
                     what)) {
    if (base_ == MAP_FAILED) {
      throw make_error("mapping a ring: ", std::generic_category().message(errno));
    }
  }
  ~RingMapping() { ::munmap(base_, bytes_); }
  RingMapping(const RingMapping&) = delete;
  RingMapping& operator=(const RingMapping&) = delete;

  template <class T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(base_) + offset);
  }

 private:
  std::size_t bytes_;
  void* base_;
};

// A counter that the kernel reads or writes too.
std::atomic_ref<std::uint32_t> counter(std::uint32_t* address) {
  return std::atomic_ref<std::uint32_t>(*address);
}

class IoUring {
 public:
  explicit IoUring(int depth) {
    const auto made = static_cast<int>(::syscall(kSetupCall, depth, &parameters_));
    if (made < 0) throw std::runtime_error(setup_refusal(errno));
    descriptor_ = UniqueFd(made);
  }
  int descriptor() const { return descriptor_.get(); }
  const io_uring_params& parameters() const { return parameters_; }

  // Both rings lie in one mapping, and reads and writes are among the operations.
  void check_age() const {
    constexpr std::uint32_t kOperations = IORING_OP_WRITE + 1;
    alignas(io_uring_probe)
        std::array<std::byte, sizeof(io_uring_probe) + kOperations * sizeof(io_uring_probe_op)>
            space{};
    const auto& probe = *reinterpret_cast<const io_uring_probe*>(space.data());
    const bool probed = ::syscall(kRegisterCall, descriptor_.get(), IORING_REGISTER_PROBE,
                                  space.data(), kOperations) == 0;
    if (!probed || (parameters_.features & IORING_FEAT_SINGLE_MMAP) == 0 ||
        (probe.ops[IORING_OP_READ].flags & IO_URING_OP_SUPPORTED) == 0 ||
        (probe.ops[IORING_OP_WRITE].flags & IO_URING_OP_SUPPORTED) == 0) {
      throw std::runtime_error("its io_uring is older than that of Linux 5.6");
    }
  }

 private:
  io_uring_params parameters_{};
  UniqueFd descriptor_;
};

class IoUringQueue final : public IoQueue {
 public:
  // One entry more than blocks: the wait for wake().
  explicit IoUringQueue(int depth)
      : IoQueue(static_cast<std::size_t>(depth)),
        ring_(depth + 1),
        rings_(ring_.descriptor(), rings_bytes(ring_.parameters()), IORING_OFF_SQ_RING),
        entries_(ring_.descriptor(), ring_.parameters().sq_entries * sizeof(io_uring_sqe),
                 IORING_OFF_SQES) {
    ring_.check_age();
    const auto& offsets = ring_.parameters();
    submission_tail_ = rings_.at<std::uint32_t>(offsets.sq_off.tail);
    submission_mask_ = *rings_.at<std::uint32_t>(offsets.sq_off.ring_mask);
    completion_head_ = rings_.at<std::uint32_t>(offsets.cq_off.head);
    completion_tail_ = rings_.at<std::uint32_t>(offsets.cq_off.tail);
    completion_mask_ = *rings_.at<std::uint32_t>(offsets.cq_off.ring_mask);
    completions_ = rings_.at<io_uring_cqe>(offsets.cq_off.cqes);
    auto* const order = rings_.at<std::uint32_t>(offsets.sq_off.array);
    for (std::uint32_t i = 0; i < offsets.sq_entries; ++i) order[i] = i;
  }

  void submit(std::span<const BlockRequest> requests) override {
    for (const BlockRequest& request : requests) {
      io_uring_sqe entry{};
      entry.opcode = request.direction == IoDirection::kRead ? IORING_OP_READ : IORING_OP_WRITE;
      entry.fd = request.descriptor;
      entry.off = static_cast<std::uint64_t>(request.offset);
      entry.addr = reinterpret_cast<std::uint64_t>(request.memory.data());
      entry.len = static_cast<std::uint32_t>(request.memory.size());
      entry.user_data = request.slot;
      add(entry);
    }
  }

  void reap(std::vector<BlockCompletion>& into) override {
    if (!watching_) watch();
    bool ended = collect(into);
    while (unsent_ > 0 || !ended) {
      enter(!ended);
      ended |= collect(into);
    }
  }

  void wake() override { event_.signal(); }

  // Closing a ring does not wait for its requests. They end in the shared memory of the ring, which
  // needs no further io_uring_enter(): the kernel writes there while this thread sleeps.
  bool drain(std::chrono::milliseconds limit) override {
    const auto end = std::chrono::steady_clock::now() + limit;
    std::vector<BlockCompletion> ended;
    event_.signal();  // ends the poll of wake(), which counts too
    collect(ended);
    while (in_flight_ > 0 && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      collect(ended);
    }
    return in_flight_ == 0;
  }

 private:
  static std::size_t rings_bytes(const io_uring_params& offsets) {
    return std::max(offsets.sq_off.array + offsets.sq_entries * sizeof(std::uint32_t),
                    offsets.cq_off.cqes + offsets.cq_entries * sizeof(io_uring_cqe));
  }

  void add(const io_uring_sqe& entry) {
    const std::uint32_t tail = *submission_tail_;
    entries_.at<io_uring_sqe>(0)[tail & submission_mask_] = entry;
    counter(submission_tail_).store(tail + 1, std::memory_order_release);
    ++unsent_;
  }

  // One poll of the bell in the ring: a wait for completions then ends with wake() too.
  void watch() {
    io_uring_sqe entry{};
    entry.opcode = IORING_OP_POLL_ADD;
    entry.fd = event_.descriptor();
    entry.poll_events = POLLIN;
    entry.user_data = kWakeMark;
    add(entry);
    watching_ = true;
  }

  // Gives the kernel what was added, and waits for a completion if asked to.
  void enter(bool wait) {
    const auto sent = ::syscall(kEnterCall, ring_.descriptor(), unsent_, wait ? 1 : 0,
                                IORING_ENTER_GETEVENTS, nullptr, 0);
    if (sent >= 0) {
      unsent_ -= static_cast<std::uint32_t>(sent);
      in_flight_ += static_cast<std::uint32_t>(sent);
      refusals_ = 0;
      return;
    }
    if (errno == EINTR) return;
    if ((errno != EAGAIN && errno != EBUSY) || ++refusals_ > kMaxRefusals) {
      throw make_error("io_uring_enter: ", std::generic_category().message(errno));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  // Whether anything had ended.
  bool collect(std::vector<BlockCompletion>& into) {
    const std::uint32_t tail = counter(completion_tail_).load(std::memory_order_acquire);
    std::uint32_t head = *completion_head_;
    const bool any = head != tail;
    in_flight_ -= tail - head;
    for (; head != tail; ++head) {
      const io_uring_cqe& entry = completions_[head & completion_mask_];
      if (entry.user_data == kWakeMark) {
        event_.wait();
        watching_ = false;
      } else {
        into.push_back({static_cast<std::uint32_t>(entry.user_data), entry.res});
      }
    }
    counter(completion_head_).store(head, std::memory_order_release);
    return any;
  }

  const EventFd event_;
  const IoUring ring_;
  const RingMapping rings_;
  const RingMapping entries_;
  std::uint32_t* submission_tail_;
  std::uint32_t submission_mask_;
  std::uint32_t* completion_head_;
  std::uint32_t* completion_tail_;
  std::uint32_t completion_mask_;
  io_uring_cqe* completions_;
  std::uint32_t unsent_ = 0;
  std::uint32_t in_flight_ = 0;  // requests that the kernel has
  int refusals_ = 0;
  bool watching_ = false;
};

}  // namespace

std::unique_ptr<IoQueue> make_io_uring_queue(int depth) {
  return std::make_unique<IoUringQueue>(depth);
}

}  // namespace zero_ext::core

#else

namespace zero_ext::core {

std::unique_ptr<IoQueue> make_io_uring_queue(int /*depth*/) {
  throw std::runtime_error("this build was made without the kernel headers of Linux 5.6 or later");
}

}  // namespace zero_ext::core

#endif
