#include "striped_transfer_handle.h"

#include <algorithm>

namespace zero_ext::core {

StripedTicket::StripedTicket(std::function<void()> check, std::shared_ptr<void> owner)
    : check_(std::move(check)), owner_(std::move(owner)) {}

bool StripedTicket::done() const {
  return std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->done(); });
}

void StripedTicket::wait() {
  const std::lock_guard lock(mutex_);
  if (!waited_) {
    outcome_ = wait_for_parts();
    if (outcome_ == nullptr) outcome_ = check_outcome();
    waited_ = true;
    check_ = nullptr;
    owner_.reset();
  }
  if (outcome_ != nullptr) std::rethrow_exception(outcome_);
}

std::exception_ptr StripedTicket::wait_for_parts() const {
  std::exception_ptr first;
  for (const auto& part : parts_) {
    try {
      part->wait();
    } catch (...) {
      if (first == nullptr) first = std::current_exception();
    }
  }
  return first;
}

std::exception_ptr StripedTicket::check_outcome() const {
  try {
    if (check_ != nullptr) check_();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

}  // namespace zero_ext::core
