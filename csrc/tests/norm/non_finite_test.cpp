#include "../../core/norm/non_finite.h"

#include <cmath>
#include <limits>

#include "../../core/optimizers/adam_8bit.h"
#include "../../core/optimizers/optimizer_step.h"
#include "../optimizers/step_samples.h"

namespace zero_ext::core {
namespace {

using testing::available_isas;
using testing::fresh_generator;
using testing::kTypeOf;
using testing::normal_values;
using testing::SelectedIsa;
using testing::split_over_threads;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <class T>
class NonFinite : public ::testing::Test {};
using Types = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(NonFinite, Types);

TYPED_TEST(NonFinite, OneElementAnywhereRaisesTheFlagAndTheLargestNumberDoesNot) {
  auto generator = fresh_generator();
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    for (const std::size_t count : {1, 15, 33, 64, 1000, 4133}) {
      auto values = normal_values<TypeParam>(generator, count);
      const std::uint32_t largest = kInfinityBits<TypeParam> - 1;
      values[generator() % count] =
          std::bit_cast<TypeParam>(static_cast<UnsignedOf<TypeParam>>(largest));
      const auto begin = static_cast<std::int64_t>(generator() % count);
      const auto end = static_cast<std::int64_t>(count);
      std::int32_t flag = 0;
      flag_non_finite(values.data(), kTypeOf<TypeParam>, 0, end, &flag);
      EXPECT_EQ(flag, 0);
      for (const float bad : {kNan, -kNan, kInfinity, -kInfinity}) {
        auto poisoned = values;
        const auto index = static_cast<std::int64_t>(generator() % count);
        poisoned[static_cast<std::size_t>(index)] = from_float<TypeParam>(bad);
        flag = 0;
        flag_non_finite(poisoned.data(), kTypeOf<TypeParam>, begin, end, &flag);
        EXPECT_EQ(flag, index >= begin ? 1 : 0) << count << " values, " << index << " of " << begin;
        flag_non_finite(poisoned.data(), kTypeOf<TypeParam>, 0, end, &flag);
        EXPECT_EQ(flag, 1);
        flag_non_finite(values.data(), kTypeOf<TypeParam>, 0, end, &flag);
        EXPECT_EQ(flag, 1) << "finite values lowered the flag";
      }
    }
  }
}

TYPED_TEST(NonFinite, NoElementsAreFinite) {
  std::int32_t flag = 0;
  flag_non_finite(nullptr, kTypeOf<TypeParam>, 0, 0, &flag);
  EXPECT_EQ(flag, 0);
}

using testing::StepProblem;

// float32 moments, bfloat16 gradients and parameters.
constexpr testing::StepTypes kStepTypes{NumericType::float32, NumericType::bfloat16,
                                        NumericType::bfloat16};

// The rows of the samples; a segment of [begin, end).
template <class Rule>
std::vector<OptimizerSegment<Rule>> segment_of(std::int64_t begin, std::int64_t end) {
  return {{begin, end, Rule::coefficients(testing::Sample<Rule>::kRow.data(), 0.5F)}};
}

template <class Rule, class Step>
void expect_the_flag_of_what_is_stepped(const Step& step) {
  auto generator = fresh_generator();
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    // The last one is long enough to be stored past the caches, at any alignment.
    for (const std::int64_t count : {5, 17, 700, (1 << 18) + 77}) {
      const auto begin = static_cast<std::int64_t>(generator() % 4);
      const auto end = count - static_cast<std::int64_t>(generator() % 2);
      for (const float bad : {0.0F, kNan, kInfinity, -kInfinity}) {
        StepProblem<Rule> problem(count, kStepTypes, 0, generator);
        const auto at = static_cast<std::int64_t>(generator() % static_cast<std::uint64_t>(count));
        if (bad != 0.0F) problem.grad.set(at, bad);
        const int expected = bad != 0.0F && begin <= at && at < end ? 1 : 0;
        step(problem, begin, end);
        EXPECT_EQ(problem.flag, expected)
            << count << " elements, " << bad << " at " << at << " of " << begin << " to " << end;
      }
      StepProblem<Rule> problem(count, kStepTypes, 0, generator);
      problem.master.set(begin, kNan);
      step(problem, begin, end);
      EXPECT_EQ(problem.flag, 1) << "a weight that was not finite before";
    }
  }
}

template <class Rule>
class NonFiniteStep : public ::testing::Test {};
TYPED_TEST_SUITE(NonFiniteStep, testing::TypesOf<OptimizerRules>::All);

TYPED_TEST(NonFiniteStep, RaisesTheFlagOnOneThread) {
  expect_the_flag_of_what_is_stepped<TypeParam>([](StepProblem<TypeParam>& problem,
                                                   std::int64_t begin, std::int64_t end) {
    optimizer_step<TypeParam>(problem.buffers(), segment_of<TypeParam>(begin, end), 0, end - begin);
  });
}

TYPED_TEST(NonFiniteStep, RaisesTheFlagOnAnyThread) {
  expect_the_flag_of_what_is_stepped<TypeParam>(
      [](StepProblem<TypeParam>& problem, std::int64_t begin, std::int64_t end) {
        const StepBuffers buffers = problem.buffers();
        const auto segments = segment_of<TypeParam>(begin, end);
        split_over_threads(end - begin, 3, [&](std::int64_t first, std::int64_t last) {
          optimizer_step<TypeParam>(buffers, segments, first, last);
        });
      });
}

TYPED_TEST(NonFiniteStep, WithoutAFlagNothingIsWritten) {
  auto generator = fresh_generator();
  StepProblem<TypeParam> problem(50, kStepTypes, 0, generator);
  problem.grad.set(20, kNan);
  StepBuffers buffers = problem.buffers();
  buffers.non_finite = nullptr;
  optimizer_step<TypeParam>(buffers, segment_of<TypeParam>(0, 50), 0, 50);
  EXPECT_EQ(problem.flag, 0);
  EXPECT_TRUE(std::isnan(problem.master.at(20)));
}

using AdamProblem = StepProblem<AdamRule>;

TEST(NonFiniteAdam, WithEightBitsRaisesTheFlag) {
  expect_the_flag_of_what_is_stepped<AdamRule>(
      [](AdamProblem& problem, std::int64_t begin, std::int64_t end) {
        const auto blocks = static_cast<std::size_t>(block_count(problem.count));
        const auto elements = static_cast<std::size_t>(problem.count);
        std::vector<std::uint8_t> codes[] = {std::vector<std::uint8_t>(elements),
                                             std::vector<std::uint8_t>(elements)};
        std::vector<float> scales[] = {std::vector<float>(blocks), std::vector<float>(blocks)};
        const StepBuffers step = problem.buffers();
        const Adam8BitBuffers buffers{problem.count,   step.master,      codes[0].data(),
                                      codes[1].data(), scales[0].data(), scales[1].data(),
                                      step.grad,       step.grad_type,   step.param,
                                      step.param_type, step.non_finite};
        adam_step_8bit(buffers, segment_of<AdamRule>(begin, end), 0, block_count(problem.count));
      });
}

TEST(NonFiniteAdam, AMomentThatOverflowsRaisesTheFlagWhereTheWeightStaysFinite) {
  auto generator = fresh_generator();
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    for (const std::int64_t index : {3, 40}) {
      AdamProblem problem(41, kStepTypes, 0, generator);
      problem.grad.set(index, 1e38F);  // its square is infinite in float32
      optimizer_step<AdamRule>(problem.buffers(), segment_of<AdamRule>(0, 41), 0, 41);
      EXPECT_TRUE(std::isfinite(problem.master.at(index)));
      EXPECT_EQ(problem.flag, 1);
    }
  }
}

// Without eps, the step of an element whose moments are zero is NaN, and the lanes behind the last
// element divide zero by zero.
TEST(NonFiniteAdam, LanesBehindTheLastElementDoNotCount) {
  auto generator = fresh_generator();
  auto row = testing::Sample<AdamRule>::kRow;
  row[3] = 0;
  const std::vector<AdamSegment> segments{{0, 3, AdamRule::coefficients(row.data(), 0.5F)}};
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    AdamProblem problem(3, kStepTypes, 0, generator);
    optimizer_step<AdamRule>(problem.buffers(), segments, 0, 3);
    EXPECT_EQ(problem.flag, 0);
    problem.moments[0].set(1, 0);
    problem.moments[1].set(1, 0);
    problem.grad.set(1, 0);
    optimizer_step<AdamRule>(problem.buffers(), segments, 0, 3);
    EXPECT_EQ(problem.flag, 1);
  }
}

}  // namespace
}  // namespace zero_ext::core
