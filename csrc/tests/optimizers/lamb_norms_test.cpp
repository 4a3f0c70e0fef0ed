#include <array>
#include <mutex>

#include "../../core/norm/squared_norm.h"
#include "../../core/optimizers/optimizer_step.h"
#include "step_samples.h"

namespace zero_ext::core {
namespace {

using testing::available_isas;
using testing::fresh_generator;
using testing::SelectedIsa;
using testing::split_over_threads;
using testing::StepTypes;

constexpr std::int64_t kCount = 5021;  // more than two blocks of the exact norm

using Problem = testing::StepProblem<LambRule>;
using Sample = testing::Sample<LambRule>;

std::vector<LambSegment> segments() {
  return {{3, 200, LambRule::coefficients(Sample::kRow.data(), 0.5F)},
          {200, 200, LambRule::coefficients(Sample::kRow.data(), 0.5F)},
          {201, 5021, LambRule::coefficients(Sample::kOther.data(), 0.5F)}};
}

// Of each segment: the sums of squares of weights and of updates, over four threads.
std::vector<std::array<double, 2>> norms_of(Problem& problem) {
  std::vector<LambNorms> norms(segments().size());
  std::mutex mutex;
  const std::vector<LambSegment> chunks = segments();
  const StepBuffers buffers = problem.buffers();
  split_over_threads(total_of(chunks), 4, [&](std::int64_t begin, std::int64_t end) {
    lamb_norms(buffers, chunks, begin, end, norms, mutex);
  });
  std::vector<std::array<double, 2>> result;
  for (LambNorms& each : norms) {
    std::array<double, 2>& sums = result.emplace_back();
    for (int k = 0; k < 2; ++k) {
      std::array<std::int64_t, Superaccumulator::kEntries> entries{};
      (k == 0 ? each.weights : each.updates).add_to(entries);
      EXPECT_TRUE(Superaccumulator::value(entries, sums[k]));
    }
  }
  return result;
}

TEST(LambNorms, MatchDoubleReferenceOnEveryInstructionSet) {
  auto generator = fresh_generator();
  for (const StepTypes& types : testing::all_step_types()) {
    Problem problem(kCount, types, 3, generator);
    const Problem before = problem;
    std::array<std::array<double, 2>, 3> expected{};
    for (std::int64_t i = 3; i < kCount; ++i) {
      if (i == 200) continue;
      double values[] = {before.master.at(i), before.moments[0].at(i), before.moments[1].at(i)};
      auto& [weights, updates] = expected[i < 200 ? 0 : 2];
      weights += values[0] * values[0];
      const double update = Sample::direction(
          values, 0.5 * before.grad.at(i), i < 200 ? Sample::kRow.data() : Sample::kOther.data());
      updates += update * update;
    }
    std::vector<std::array<double, 2>> scalar;
    for (const Isa isa : available_isas()) {
      const SelectedIsa selected(isa);
      const auto found = norms_of(problem);
      if (isa == Isa::scalar) scalar = found;
      EXPECT_EQ(found, scalar);
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_NEAR(found[i][0], expected[i][0], 1e-12 * expected[i][0]);  // weights are exact
        EXPECT_NEAR(found[i][1], expected[i][1], 1e-5 * expected[i][1]) << types;
      }
      EXPECT_TRUE(problem == before);
    }
  }
}

}  // namespace
}  // namespace zero_ext::core
