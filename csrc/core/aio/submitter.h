// The thread that feeds one queue of a backend and judges what comes back.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "fault_injection.h"
#include "io_thread.h"
#include "queues/io_queue.h"
#include "transfer.h"

namespace zero_ext::core {

// Every `step`-th block of a transfer, from block `next` on.
struct TransferShare {
  std::shared_ptr<Transfer> transfer;
  std::int64_t next = 0;
  std::int64_t step = 1;

  std::int64_t blocks_left() const { return (transfer->blocks() - next - 1) / step + 1; }
};

class Submitter {
 public:
  // Keeps the queue full. Where it breaks, waits for `drain_limit` until the kernel is done with
  // the memory of its blocks.
  Submitter(std::unique_ptr<IoQueue> queue, std::shared_ptr<FaultPlan> faults,
            std::chrono::milliseconds drain_limit = std::chrono::seconds(30));

  // Ends when all that was enqueued has.
  ~Submitter();

  void enqueue(TransferShare share);

 private:
  struct Slot {
    std::shared_ptr<Transfer> transfer;
    Block block;
    int attempts = 0;
  };

  void run();
  void process_shares();
  bool fill();
  bool acquire_share();
  void start(std::uint32_t index);
  void handle_completion(const BlockCompletion& completion);
  void advance(Slot& slot, std::size_t moved);
  void end(std::uint32_t index, const std::string& reason);
  void back_off();
  void fail_all(const std::string& reason);

  const std::shared_ptr<FaultPlan> faults_;
  const std::chrono::milliseconds drain_limit_;
  std::unique_ptr<IoQueue> queue_;

  // Of the thread alone.
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_;
  std::vector<std::uint32_t>
      retries_;  // slots whose block, or the rest of it, goes to the queue anew
  std::vector<BlockRequest> requests_;
  std::vector<BlockCompletion> completions_;
  std::optional<TransferShare> current_;
  int max_attempts_ = 0;  // of the blocks to retry

  std::mutex mutex_;
  std::deque<TransferShare> shares_;
  bool starved_ = false;  // the thread has room for blocks and waits for shares
  bool stopping_ = false;
  std::string broken_;

  IoThread thread_;
};

}  // namespace zero_ext::core
