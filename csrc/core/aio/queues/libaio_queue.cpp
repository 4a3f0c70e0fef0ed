// The kernel's older asynchronous I/O, which libaio wraps, by raw system calls. Described in
// io_setup(2), io_submit(2), io_getevents(2). It is asynchronous for direct transfers only: others
// are done while they are submitted.
#include <stdexcept>

#include "../../base/error_text.h"
#include "io_queue.h"

#if __has_include(<linux/aio_abi.h>)

#include <linux/aio_abi.h>
#include <sys/syscall.h>

#include <cerrno>
#include <fstream>
#include <string>
#include <system_error>
#include <utility>

#include "eventfd.h"

namespace zero_ext::core {
namespace {

std::string setup_refusal(int reason) {
  const std::string text = std::generic_category().message(reason);
  if (reason == ENOSYS) return "this kernel has no asynchronous I/O: " + text;
  if (reason == EPERM) return "forbidden, probably by a seccomp filter: " + text;
  if (reason != EAGAIN) return "io_setup: " + text;
  std::string most, used;
  std::ifstream("/proc/sys/fs/aio-max-nr") >> most;
  std::ifstream("/proc/sys/fs/aio-nr") >> used;
  return "too many requests for sysctl fs.aio-max-nr = " + most + ", of which " + used +
         " are taken: " + text;
}

class LibaioQueue final : public IoQueue {
 public:
  explicit LibaioQueue(int depth)
      : IoQueue(static_cast<std::size_t>(depth)),
        blocks_(static_cast<std::size_t>(depth)),
        events_(static_cast<std::size_t>(depth)) {
    if (::syscall(SYS_io_setup, depth, &context_) != 0) {
      throw std::runtime_error(setup_refusal(errno));
    }
    unsent_.reserve(blocks_.size());
    refused_.reserve(blocks_.size());
  }

  ~LibaioQueue() override {
    if (context_ != 0) ::syscall(SYS_io_destroy, context_);
  }

  void submit(std::span<const BlockRequest> requests) override {
    for (const BlockRequest& request : requests) {
      iocb& block = blocks_[request.slot];
      block = {};
      block.aio_data = request.slot;
      block.aio_lio_opcode =
          request.direction == IoDirection::kRead ? IOCB_CMD_PREAD : IOCB_CMD_PWRITE;
      block.aio_fildes = static_cast<std::uint32_t>(request.descriptor);
      block.aio_buf = reinterpret_cast<std::uint64_t>(request.memory.data());
      block.aio_nbytes = request.memory.size();
      block.aio_offset = request.offset;
      block.aio_flags = IOCB_FLAG_RESFD;
      block.aio_resfd = static_cast<std::uint32_t>(event_.descriptor());
      unsent_.push_back(&block);
    }
  }

  // Completions and wake() ring the same bell.
  void reap(std::vector<BlockCompletion>& into) override {
    send();
    if (refused_.empty()) {
      event_.wait();
    } else {
      into.insert(into.end(), refused_.begin(), refused_.end());
      refused_.clear();
    }
    collect(into);
  }

  void wake() override { event_.signal(); }

  // io_destroy() waits for what is in flight, without a limit.
  bool drain(std::chrono::milliseconds /*limit*/) override {
    ::syscall(SYS_io_destroy, std::exchange(context_, 0));
    return true;
  }

 private:
  // Gives the kernel what it takes; a block it refuses ends with the reason.
  void send() {
    std::size_t sent = 0;
    while (sent < unsent_.size()) {
      const auto accepted =
          ::syscall(SYS_io_submit, context_, unsent_.size() - sent, unsent_.data() + sent);
      if (accepted > 0) {
        sent += static_cast<std::size_t>(accepted);
        in_flight_ += static_cast<std::size_t>(accepted);
      } else if (errno == EAGAIN && in_flight_ > 0) {
        break;
      } else if (errno != EINTR) {
        refused_.push_back({static_cast<std::uint32_t>(unsent_[sent]->aio_data), -errno});
        ++sent;
      }
    }
    unsent_.erase(unsent_.begin(), unsent_.begin() + static_cast<std::ptrdiff_t>(sent));
  }

  void collect(std::vector<BlockCompletion>& into) {
    const auto ended =
        ::syscall(SYS_io_getevents, context_, 0, events_.size(), events_.data(), nullptr);
    if (ended < 0 && errno == EINTR) {
      event_.signal();
      return;
    }
    if (ended < 0) {
      throw make_error("io_getevents: ", std::generic_category().message(errno));
    }
    in_flight_ -= static_cast<std::size_t>(ended);
    for (const io_event& event : std::span(events_).first(static_cast<std::size_t>(ended))) {
      into.push_back({static_cast<std::uint32_t>(event.data), event.res});
    }
  }

  const EventFd event_;
  aio_context_t context_ = 0;
  std::vector<iocb> blocks_;  // by slot
  std::vector<iocb*> unsent_;
  std::vector<BlockCompletion> refused_;
  std::vector<io_event> events_;
  std::size_t in_flight_ = 0;
};

}  // namespace

std::unique_ptr<IoQueue> make_libaio_queue(int depth) {
  return std::make_unique<LibaioQueue>(depth);
}

}  // namespace zero_ext::core

#else

namespace zero_ext::core {

std::unique_ptr<IoQueue> make_libaio_queue(int /*depth*/) {
  throw std::runtime_error("this build was made without the kernel header linux/aio_abi.h");
}

}  // namespace zero_ext::core

#endif
