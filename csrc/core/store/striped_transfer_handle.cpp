#include "striped_transfer_handle.h"

#include <algorithm>

namespace zero_ext::core {

StripedTransferHandle::StripedTransferHandle(std::function<void()> check,
                                             std::shared_ptr<void> owner)
    : check_(std::move(check)), owner_(std::move(owner)) {}

bool StripedTransferHandle::done() const {
  return std::all_of(transfers_.begin(), transfers_.end(),
                     [](const auto& transfer) { return transfer->done(); });
}

void StripedTransferHandle::wait() {
  const std::lock_guard lock(mutex_);
  if (!waited_) {
    outcome_ = wait_for_all();
    if (outcome_ == nullptr) outcome_ = check_outcome();
    waited_ = true;
    check_ = nullptr;
    owner_.reset();
  }
  if (outcome_ != nullptr) std::rethrow_exception(outcome_);
}

std::exception_ptr StripedTransferHandle::wait_for_all() const {
  std::exception_ptr first;
  for (const auto& transfer : transfers_) {
    try {
      transfer->wait();
    } catch (...) {
      if (first == nullptr) first = std::current_exception();
    }
  }
  return first;
}

std::exception_ptr StripedTransferHandle::check_outcome() const {
  try {
    if (check_ != nullptr) check_();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

}  // namespace zero_ext::core
