#include "../../core/offload/adaptive_threading.h"

#include <chrono>
#include <thread>

#include "../test_support.h"

namespace zero_ext::core {
namespace {

using std::chrono::microseconds;

PipelineCounters counters(microseconds waiting, microseconds computing) {
  PipelineCounters result;
  result.waiting_for_reads = waiting;
  result.computing = computing;
  return result;
}

// Both ways take the time given; which one ran is counted.
struct Strategies {
  microseconds alone;
  microseconds threads;
  int ran_alone = 0;
  int ran_threads = 0;
  bool inside = false;

  AdaptiveThreading use() {
    return AdaptiveThreading([this](std::int64_t begin, std::int64_t end, std::int64_t grain,
                                    const RangeFunction& function) {
      EXPECT_EQ(grain, 10);
      inside = true;
      function(begin, end);
      inside = false;
    });
  }

  void run(AdaptiveThreading& use, const PipelineCounters& so_far, int times) {
    for (int i = 0; i < times; ++i) {
      use.run(100, 10, so_far, [this](std::int64_t begin, std::int64_t end) {
        EXPECT_EQ(begin, 0);
        EXPECT_EQ(end, 100);
        ++(inside ? ran_threads : ran_alone);
        std::this_thread::sleep_for(inside ? threads : alone);
      });
    }
  }
};

TEST(AdaptiveThreading, ThreadsRestWhileStorageIsWaitedFor) {
  Strategies strategies{microseconds(1), microseconds(1)};
  AdaptiveThreading use = strategies.use();
  strategies.run(use, counters(microseconds(100), microseconds(50)), 300);
  EXPECT_EQ(strategies.ran_threads, 0);
}

TEST(AdaptiveThreading, TheFasterStrategyComputes) {
  const PipelineCounters busy = counters(microseconds(100), microseconds(51));
  Strategies threads{microseconds(20000), microseconds(1)};
  AdaptiveThreading first = threads.use();
  threads.run(first, busy, 50);
  EXPECT_EQ(threads.ran_alone, 1);
  Strategies alone{microseconds(1), microseconds(20000)};
  AdaptiveThreading second = alone.use();
  alone.run(second, busy, 50);
  EXPECT_EQ(alone.ran_threads, 1);
  alone.run(second, busy, 50);
  EXPECT_EQ(alone.ran_threads, 2) << "the slower way is tried again once in a while";
}

TEST(AdaptiveThreading, NothingToDoIsNotMeasured) {
  Strategies strategies{microseconds(1), microseconds(1)};
  AdaptiveThreading use = strategies.use();
  use.run(0, 10, {}, [](std::int64_t, std::int64_t) { FAIL(); });
  EXPECT_EQ(strategies.ran_alone + strategies.ran_threads, 0);
}

}  // namespace
}  // namespace zero_ext::core
