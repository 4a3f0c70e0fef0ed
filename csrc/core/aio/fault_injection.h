// Faults that tests inject instead of the kernel's results.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "transfer_handle.h"

namespace zero_ext::core {

// Lets `after` completions of its direction pass, then changes the next `times`.
struct FaultRule {
  IoDirection direction = IoDirection::kRead;
  std::int64_t after = 0;
  std::int64_t result = 0;  // -errno, or the bytes of a short transfer (0: the file has ended)
  std::int64_t times = 1;
};

// The rules of one engine. May be used from any thread.
class FaultPlan {
 public:
  // Throws std::runtime_error on a rule that could never strike.
  void add(const FaultRule& rule);

  // What the completion with this result is to be taken for.
  std::int64_t apply(IoDirection direction, std::int64_t result);

 private:
  std::atomic<bool> armed_ = false;
  std::mutex mutex_;
  std::vector<FaultRule> rules_;
};

}  // namespace zero_ext::core
