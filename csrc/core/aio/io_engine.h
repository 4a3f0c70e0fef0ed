// Asynchronous reads and writes of files, through whichever interface the kernel offers.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fault_injection.h"
#include "io_file.h"
#include "queues/io_queue.h"
#include "transfer_handle.h"

namespace zero_ext::core {

class Submitter;
struct TransferRequest;

enum class Backend { kIoUring, kLibaio, kThreads };

// "io_uring", "libaio", "threads".
std::string_view backend_name(Backend backend);

struct BackendReport {
  Backend backend = Backend::kThreads;
  bool available = false;
  std::string reason;  // why not; empty if available
};

// What this process may use on this kernel, the preferred one first.
std::vector<BackendReport> probe_backends();

struct IoEngineOptions {
  Backend backend = Backend::kThreads;
  std::int64_t queue_depth = 32;       // blocks in flight a submitter, 1 to 1024
  std::int64_t block_bytes = 1 << 20;  // a multiple of 4096, at most 1 GiB
  std::int64_t io_threads = 1;         // queues, each with a thread, 1 to 16
};

// Transfers are cut into blocks, which are spread over the submitters and end in any order:
// transfers that overlap must be waited for in between. All methods may be called from any thread;
// failures throw std::runtime_error. A forked child must make an engine of its own: there these
// methods throw.
class IoEngine {
  struct Components;
  using QueueMaker = std::function<std::unique_ptr<IoQueue>(int depth)>;

 public:
  // Throws if an option is out of range, or with the kernel's reason if it refuses the backend.
  static std::shared_ptr<IoEngine> make(const IoEngineOptions& options);

  // With the backend of that name instead of the options', or for "auto" with the first that works.
  static std::shared_ptr<IoEngine> make(std::string_view backend, IoEngineOptions options);

  // Instead of the backend, threads move the blocks by `mover`.
  static std::shared_ptr<IoEngine> make(const IoEngineOptions& options, const BlockMover& mover);

  explicit IoEngine(Components&& components);

  // Waits until all transfers have ended. Must not run on a thread of the engine: no owner of a
  // transfer may hold its engine.
  ~IoEngine();
  IoEngine(const IoEngine&) = delete;
  IoEngine& operator=(const IoEngine&) = delete;

  // Fills `into` with the bytes from `offset`; the handle fails if the file ends before. Memory and
  // `owner` belong to the transfer until its handle was waited for, or until it ended if nobody
  // keeps the handle.
  std::shared_ptr<TransferHandle> read(std::shared_ptr<IoFile> file, std::int64_t offset,
                                       std::span<std::byte> into,
                                       std::shared_ptr<void> owner = nullptr);
  std::shared_ptr<TransferHandle> write(std::shared_ptr<IoFile> file, std::int64_t offset,
                                        std::span<const std::byte> from,
                                        std::shared_ptr<void> owner = nullptr);

  const IoEngineOptions& options() const { return options_; }

  // For tests of what lies above: counts the completions from now on.
  void inject_fault(FaultRule rule);

 private:
  static std::shared_ptr<IoEngine> make_of(const IoEngineOptions& options,
                                           const QueueMaker& make_queue);
  std::shared_ptr<TransferHandle> start(TransferRequest&& request);
  void check_process() const;

  const IoEngineOptions options_;
  const std::int64_t process_;
  const std::shared_ptr<FaultPlan> faults_;
  std::vector<std::unique_ptr<Submitter>> submitters_;
  std::atomic<std::uint32_t> next_submitter_ = 0;
};

}  // namespace zero_ext::core
