// One handle for a transfer that is spread over several devices.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "../aio/transfer_handle.h"

namespace zero_ext::core {

// Complete when all transfers are. Failed if any is, with the first transfer's reason.
class StripedTransferHandle final : public TransferHandle {
 public:
  // `check` runs once, on the first thread that waits, after all transfers have succeeded; what it
  // throws is the outcome. `owner` keeps the memory that it looks at.
  StripedTransferHandle(std::function<void()> check, std::shared_ptr<void> owner);

  // Before the handle is handed out.
  void add(std::shared_ptr<TransferHandle> transfer) { transfers_.push_back(std::move(transfer)); }

  // Waits for all transfers, failed or not; the first failure.
  std::exception_ptr wait_for_all() const;

  bool done() const override;
  void wait() override;

 private:
  std::exception_ptr check_outcome() const;

  std::vector<std::shared_ptr<TransferHandle>> transfers_;
  std::function<void()> check_;
  std::shared_ptr<void> owner_;
  std::mutex mutex_;
  bool waited_ = false;
  std::exception_ptr outcome_;
};

}  // namespace zero_ext::core
