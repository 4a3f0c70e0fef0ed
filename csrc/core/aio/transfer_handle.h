// Transfers under way between memory and storage.
#pragma once

#include <exception>

namespace zero_ext::core {

// The direction of a transfer, seen from memory.
enum class IoDirection { kRead, kWrite };

// The memory of a transfer belongs to it until wait() has returned or thrown.
class TransferHandle {
 public:
  virtual ~TransferHandle() = default;

  // Whether wait() would not block.
  virtual bool done() const = 0;

  // Returns once every byte has been transferred; throws std::runtime_error naming path, offset,
  // length and the kernel's reason. May be called again, with the same outcome.
  virtual void wait() = 0;
};

// Waits for all of some handles, of which any may be null; the first failure.
template <class Handles>
std::exception_ptr wait_for_all(const Handles& handles) {
  std::exception_ptr first;
  for (const auto& handle : handles) {
    try {
      if (handle != nullptr) handle->wait();
    } catch (...) {
      if (first == nullptr) first = std::current_exception();
    }
  }
  return first;
}

// Whether that would not block.
template <class Handles>
bool all_done(const Handles& handles) {
  for (const auto& handle : handles) {
    if (handle != nullptr && !handle->done()) return false;
  }
  return true;
}

}  // namespace zero_ext::core
