// Whether a chunk is worth several threads.
#pragma once

#include <array>
#include <cstdint>
#include <functional>

#include "chunk_pipeline.h"

namespace zero_ext::core {

// Runs function(begin, end) over parts of [begin, end), in parallel where that pays: parts of
// `grain` elements are worth a thread.
using RangeFunction = std::function<void(std::int64_t begin, std::int64_t end)>;
using ParallelFor = std::function<void(std::int64_t begin, std::int64_t end, std::int64_t grain,
                                       const RangeFunction& function)>;

// A parallel loop ends when its slowest thread does, which on a busy machine the scheduler may keep
// from running for milliseconds: many times what one thread takes for a chunk (measured on two busy
// cores: 20 times). So threads are used only if computing, not storage, is what the step waits
// for, and they are the faster strategy as measured.
class AdaptiveThreading {
 public:
  explicit AdaptiveThreading(ParallelFor threads) : threads_(std::move(threads)) {}

  // Runs the function over [0, count), given the counters of the step so far.
  void run(std::int64_t count, std::int64_t grain, const PipelineCounters& so_far,
           const RangeFunction& function);

 private:
  enum Strategy { kSingleThread = 0, kMultiThread = 1 };

  Strategy choose(const PipelineCounters& so_far) const;

  ParallelFor threads_;
  std::array<double, 2> nanoseconds_{};  // an element, of each strategy; 0 before it was tried
  std::int64_t runs_ = 0;
};

}  // namespace zero_ext::core
