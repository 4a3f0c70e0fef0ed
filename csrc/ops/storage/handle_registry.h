// The objects behind the int64 handles of ops, and the transfers that they have started.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "../../core/aio/transfer_handle.h"
#include "../checks.h"

namespace zero_ext::ops {

// All open objects of one kind. An op holds a reference while it runs, so closing is safe.
template <class Object>
class HandleRegistry {
 public:
  // The registry of this process; `kind` names it in messages. It is never destroyed, because
  // threads of objects that nobody closed may outlive static destruction. A forked child starts
  // with an empty one: the threads behind its parent's objects are not there.
  static HandleRegistry& of_process(const char* kind) {
    static std::atomic<HandleRegistry*> current = nullptr;
    HandleRegistry* found = current.load(std::memory_order_acquire);
    while (found == nullptr || found->process_ != ::getpid()) {
      auto fresh = std::make_unique<HandleRegistry>(kind);
      if (current.compare_exchange_strong(found, fresh.get(), std::memory_order_acq_rel)) {
        return *fresh.release();
      }
    }
    return *found;
  }

  explicit HandleRegistry(const char* kind) : kind_(kind), process_(::getpid()) {}

  void put(std::int64_t handle, std::shared_ptr<Object> object) {
    const std::lock_guard lock(mutex_);
    std::swap(objects_[handle], object);
  }

  std::shared_ptr<Object> get(std::int64_t handle) {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(handle);
    STD_TORCH_CHECK(
        found != objects_.end(), kind_, ": handle ", handle,
        " is not open in this process, and a forked child cannot use its parent's. Open it here.");
    return found->second;
  }

  void remove(std::int64_t handle) {
    std::unique_lock lock(mutex_);
    const auto node = objects_.extract(handle);
    lock.unlock();
  }

  void clear() {
    std::map<std::int64_t, std::shared_ptr<Object>> removed;
    const std::lock_guard lock(mutex_);
    removed.swap(objects_);
  }

 private:
  const char* const kind_;
  const pid_t process_;
  std::mutex mutex_;
  std::map<std::int64_t, std::shared_ptr<Object>> objects_;
};

// Transfers that nobody has waited for, by the caller's number of each, or of several.
class NumberedTransfers {
 public:
  void add(std::int64_t number, std::shared_ptr<core::TransferHandle> transfer) {
    const std::lock_guard lock(mutex_);
    transfers_[number].push_back(std::move(transfer));
  }

  // All of them have ended when the first error is thrown.
  void wait(std::int64_t number) {
    std::unique_lock lock(mutex_);
    const auto node = transfers_.extract(number);
    lock.unlock();
    if (node.empty()) return;
    if (const auto error = core::wait_for_all(node.mapped())) std::rethrow_exception(error);
  }

 private:
  std::mutex mutex_;
  std::map<std::int64_t, std::vector<std::shared_ptr<core::TransferHandle>>> transfers_;
};

inline std::size_t byte_count(const Tensor& tensor) {
  return static_cast<std::size_t>(tensor.numel()) * tensor.element_size();
}

// The memory of a tensor that a transfer fills, or reads; the transfer holds owner_of(tensor).
inline std::span<std::byte> bytes_into(const Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), byte_count(tensor)};
}
inline std::span<const std::byte> bytes_of(const Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), byte_count(tensor)};
}
inline std::shared_ptr<void> owner_of(const Tensor& tensor) {
  return std::make_shared<Tensor>(tensor);
}

}  // namespace zero_ext::ops
