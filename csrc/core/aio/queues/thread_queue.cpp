// The backend that works everywhere: threads that call pread and pwrite, or another mover of
// blocks that returns when it is done.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "../io_thread.h"
#include "io_queue.h"

namespace zero_ext::core {
namespace {

// Past this a device gains nothing, and the machine loses to switching.
constexpr std::size_t kMaxThreads = 64;

BlockCompletion move_through_host(const BlockRequest& request) {
  const auto& memory = request.memory;
  const ssize_t moved =
      request.direction == IoDirection::kRead
          ? ::pread(request.descriptor, memory.data(), memory.size(), request.offset)
          : ::pwrite(request.descriptor, memory.data(), memory.size(), request.offset);
  return {request.slot, moved < 0 ? -errno : moved, ""};
}

class ThreadQueue final : public IoQueue {
 public:
  // As many requests wait as are in flight: a thread that ended one finds its next here, where the
  // submitter would be two switches of threads away.
  ThreadQueue(std::size_t threads, BlockMover mover)
      : IoQueue(2 * threads), mover_(std::move(mover)), max_threads_(threads) {
    start_thread();
  }

  ~ThreadQueue() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    work_added_.notify_all();
    for (const auto& thread : threads_) thread->join();
  }

  void submit(std::span<const BlockRequest> requests) override {
    const std::lock_guard lock(mutex_);
    work_.insert(work_.end(), requests.begin(), requests.end());
    while (threads_.size() - busy_ < work_.size() && threads_.size() < max_threads_ &&
           try_start_thread()) {
    }
    for (std::size_t i = 0; i < requests.size(); ++i) work_added_.notify_one();
  }

  void reap(std::vector<BlockCompletion>& into) override {
    std::unique_lock lock(mutex_);
    ended_changed_.wait(lock, [this] { return woken_ || !ended_.empty(); });
    woken_ = false;
    into.insert(into.end(), ended_.begin(), ended_.end());
    ended_.clear();
  }

  void wake() override {
    const std::lock_guard lock(mutex_);
    woken_ = true;
    ended_changed_.notify_one();
  }

  bool drain(std::chrono::milliseconds limit) override {
    std::unique_lock lock(mutex_);
    return ended_changed_.wait_for(lock, limit, [this] { return work_.empty() && busy_ == 0; });
  }

 private:
  void start_thread() {
    threads_.push_back(std::make_unique<IoThread>([this] { run(); }));
  }

  // The threads there are do the work, if slower.
  bool try_start_thread() {
    try {
      start_thread();
      return true;
    } catch (const std::runtime_error&) {
      return false;
    }
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      work_added_.wait(lock, [this] { return stopping_ || !work_.empty(); });
      if (work_.empty()) return;
      const BlockRequest request = work_.front();
      work_.pop_front();
      ++busy_;
      lock.unlock();
      BlockCompletion completion = mover_(request);
      lock.lock();
      --busy_;
      ended_.push_back(std::move(completion));
      ended_changed_.notify_one();
    }
  }

  const BlockMover mover_;
  const std::size_t max_threads_;
  std::mutex mutex_;
  std::condition_variable work_added_;
  std::condition_variable ended_changed_;
  std::deque<BlockRequest> work_;
  std::vector<BlockCompletion> ended_;
  std::vector<std::unique_ptr<IoThread>> threads_;
  std::size_t busy_ = 0;
  bool woken_ = false;
  bool stopping_ = false;
};

}  // namespace

std::unique_ptr<IoQueue> make_thread_queue(int depth) {
  return make_thread_queue(depth, &move_through_host);
}

std::unique_ptr<IoQueue> make_thread_queue(int depth, BlockMover mover) {
  const auto threads = std::min(kMaxThreads, static_cast<std::size_t>(depth));
  return std::make_unique<ThreadQueue>(threads, std::move(mover));
}

}  // namespace zero_ext::core
