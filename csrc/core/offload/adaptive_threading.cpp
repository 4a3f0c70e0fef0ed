#include "adaptive_threading.h"

#include <chrono>

namespace zero_ext::core {
namespace {

// The slower strategy is tried again once in so many chunks.
constexpr std::int64_t kProbeInterval = 64;
// Weight of the latest measurement in the average.
constexpr double kLatest = 0.25;

}  // namespace

AdaptiveThreading::Strategy AdaptiveThreading::choose(const PipelineCounters& so_far) const {
  const auto waiting = so_far.waiting_for_reads + so_far.waiting_for_writes;
  if (2 * so_far.computing <= waiting) return kSingleThread;
  if (nanoseconds_[kSingleThread] == 0) return kSingleThread;
  if (nanoseconds_[kMultiThread] == 0) return kMultiThread;
  const Strategy faster =
      nanoseconds_[kMultiThread] < nanoseconds_[kSingleThread] ? kMultiThread : kSingleThread;
  if (runs_ % kProbeInterval == 0) return faster == kMultiThread ? kSingleThread : kMultiThread;
  return faster;
}

void AdaptiveThreading::run(std::int64_t count, std::int64_t grain, const PipelineCounters& so_far,
                            const RangeFunction& function) {
  if (count == 0) return;
  ++runs_;
  const Strategy strategy = choose(so_far);
  const auto start = std::chrono::steady_clock::now();
  if (strategy == kMultiThread) {
    threads_(0, count, grain, function);
  } else {
    function(0, count);
  }
  const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - start;
  const double latest = time.count() / static_cast<double>(count);
  double& average = nanoseconds_[strategy];
  average = average == 0 ? latest : (1 - kLatest) * average + kLatest * latest;
}

}  // namespace zero_ext::core
