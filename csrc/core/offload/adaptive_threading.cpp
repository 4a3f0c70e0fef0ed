#include "adaptive_threading.h"

#include <chrono>

namespace zero_ext::core {
namespace {

// The slower way is tried again once in so many chunks.
constexpr std::int64_t kTryAgain = 64;
// Weight of the latest measurement in the average.
constexpr double kLatest = 0.25;

}  // namespace

ThreadUse::Way ThreadUse::choose(const PipelineCounters& so_far) const {
  const auto waiting = so_far.waiting_for_reads + so_far.waiting_for_writes;
  if (2 * so_far.computing <= waiting) return kAlone;
  if (nanoseconds_[kAlone] == 0) return kAlone;
  if (nanoseconds_[kThreads] == 0) return kThreads;
  const Way faster = nanoseconds_[kThreads] < nanoseconds_[kAlone] ? kThreads : kAlone;
  if (runs_ % kTryAgain == 0) return faster == kThreads ? kAlone : kThreads;
  return faster;
}

void ThreadUse::run(std::int64_t count, std::int64_t grain, const PipelineCounters& so_far,
                    const PartFunction& function) {
  if (count == 0) return;
  ++runs_;
  const Way way = choose(so_far);
  const auto start = std::chrono::steady_clock::now();
  if (way == kThreads) {
    threads_(0, count, grain, function);
  } else {
    function(0, count);
  }
  const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - start;
  const double latest = time.count() / static_cast<double>(count);
  double& average = nanoseconds_[way];
  average = average == 0 ? latest : (1 - kLatest) * average + kLatest * latest;
}

}  // namespace zero_ext::core
