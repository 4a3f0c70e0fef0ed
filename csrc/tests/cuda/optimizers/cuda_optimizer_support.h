// Inputs shared by the tests that run optimizer steps of csrc/cuda on the host.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "../../../cuda/optimizers/segment_search.h"
#include "../../optimizers/step_samples.h"
#include "../emulated_launch.h"

namespace zero_ext::cuda::testing {

using core::NumericType;

using core::testing::all_step_types;
using core::testing::Buffer;
using core::testing::kTypes;
using core::testing::Sample;
using core::testing::StepProblem;
using core::testing::StepTypes;

// Segments as the op gets them, in tensors.
template <class Rule>
struct Plan {
  using Segment = core::OptimizerSegment<Rule>;

  std::vector<std::int64_t> bounds;
  std::vector<double> hyper;
  float scale = 0.37F;

  void add(std::int64_t begin, std::int64_t end, std::span<const double> row) {
    bounds.insert(bounds.end(), {begin, end});
    hyper.insert(hyper.end(), row.begin(), row.end());
  }
  std::int64_t count() const { return static_cast<std::int64_t>(bounds.size() / 2); }

  std::vector<Segment> prepared(std::int64_t numel) const {
    const auto [segments, error] = attempted(numel);
    EXPECT_EQ(error, "");
    return segments;
  }
  // With what the kernel records, whose result begins as nonsense.
  std::pair<std::vector<Segment>, std::string> attempted(std::int64_t numel) const {
    std::vector<Segment> result(bounds.size() / 2, {-5, 1 << 30, {}});
    DeviceErrorRecord record{};
    PrepareSegments<Rule>{
        DeviceOp::adam_step, &record, bounds.data(), hyper.data(), &scale, count(), numel,
        result.data()}(0, 1);
    return {result, core::device_error_text(record)};
  }
};

// Sorted, disjoint segments with gaps, empty ones, and bounds inside of packs; some `longest`
// elements long. Each has one of the sample's rows of hyper-parameters.
template <class Rule>
Plan<Rule> random_plan(std::int64_t numel, std::mt19937_64& generator, std::uint64_t longest = 90) {
  Plan<Rule> plan;
  std::int64_t at = 0;
  while (at < numel) {
    const auto gap = static_cast<std::int64_t>(generator() % 4 == 0 ? generator() % 13 : 0);
    const auto length =
        static_cast<std::int64_t>(generator() % (generator() % 2 == 0 ? 9 : longest));
    const std::int64_t begin = std::min(numel, at + gap);
    at = std::min(numel, begin + length);
    plan.add(begin, at, generator() % 2 == 0 ? Sample<Rule>::kRow : Sample<Rule>::kOther);
  }
  return plan;
}

}  // namespace zero_ext::cuda::testing
