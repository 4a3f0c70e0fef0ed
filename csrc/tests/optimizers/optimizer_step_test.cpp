#include "../../core/optimizers/optimizer_step.h"

#include <limits>

#include "step_samples.h"

namespace zero_ext::core {
namespace {

using testing::available_isas;
using testing::fresh_generator;
using testing::Sample;
using testing::SelectedIsa;
using testing::split_over_threads;
using testing::StepProblem;
using testing::StepTypes;

constexpr std::int64_t kCount = 1021;
constexpr float kScale = 0.5F;

template <class Rule>
class OptimizerStep : public ::testing::Test {
 protected:
  using Problem = StepProblem<Rule>;

  static const double* row(std::int64_t i) {
    return i < 200 ? Sample<Rule>::kRow.data() : Sample<Rule>::kOther.data();
  }
  static bool stepped(std::int64_t i) { return i >= 3 && i != 200; }

  // All elements but the first three and number 200; an empty one too.
  static std::vector<OptimizerSegment<Rule>> segments() {
    std::vector<OptimizerSegment<Rule>> result;
    for (const auto& [begin, end] :
         {std::pair{3, 200}, std::pair{200, 200}, std::pair{201, 1021}}) {
      result.push_back({begin, end, Rule::coefficients(row(begin), kScale)});
    }
    return result;
  }
  static void step(Problem& problem) {
    optimizer_step<Rule>(problem.buffers(), segments(), 0, total_of(segments()));
  }
};
TYPED_TEST_SUITE(OptimizerStep, testing::TypesOf<OptimizerRules>::All);

TYPED_TEST(OptimizerStep, MatchesDoubleReferenceAndLeavesTheRest) {
  auto generator = fresh_generator();
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    for (const StepTypes& types : testing::all_step_types()) {
      StepProblem<TypeParam> problem(kCount, types, 0, generator);
      const StepProblem<TypeParam> before = problem;
      this->step(problem);
      EXPECT_EQ(problem.flag, 0);
      const double moment_error = types.moments == NumericType::float32 ? 1e-6 : 0x1p-8;
      for (std::int64_t i = 0; i < kCount; ++i) {
        double values[1 + TypeParam::kMoments] = {before.master.at(i)};
        for (int m = 0; m < TypeParam::kMoments; ++m) values[1 + m] = before.moments[m].at(i);
        bool stable = true;
        if (this->stepped(i)) {
          stable =
              Sample<TypeParam>::update(values, double{kScale} * before.grad.at(i), this->row(i));
        } else {
          EXPECT_EQ(problem.master.at(i), before.master.at(i));
          EXPECT_EQ(problem.param.at(i), before.param.at(i));
        }
        if (!stable) continue;
        EXPECT_NEAR(problem.master.at(i), values[0], 4e-6 * (1 + std::abs(values[0]))) << types;
        for (int m = 0; m < TypeParam::kMoments; ++m) {
          EXPECT_NEAR(problem.moments[m].at(i), values[1 + m],
                      1e-6 + moment_error * std::abs(values[1 + m]))
              << types;
        }
        if (!types.param || !this->stepped(i)) continue;
        testing::Buffer rounded(1, *types.param, 0, generator);
        rounded.set(0, problem.master.at(i));
        EXPECT_EQ(problem.param.at(i), rounded.at(0)) << types;
      }
    }
  }
}

TYPED_TEST(OptimizerStep, InstructionSetsAndThreadSplitsAgreeBitForBit) {
  auto generator = fresh_generator();
  for (const StepTypes& types : testing::all_step_types()) {
    StepProblem<TypeParam> start(kCount, types, 3, generator);
    start.moments[0].set(7, 0);  // an update of zero, whose sign counts
    start.grad.set(7, -0.0F);
    StepProblem<TypeParam> full = start;
    {
      const SelectedIsa selected(Isa::scalar);
      this->step(full);
    }
    const auto segments = this->segments();
    for (const Isa isa : available_isas()) {
      const SelectedIsa selected(isa);
      StepProblem<TypeParam> split = start;
      const StepBuffers buffers = split.buffers();
      split_over_threads(total_of(segments), 4, [&](std::int64_t begin, std::int64_t end) {
        optimizer_step<TypeParam>(buffers, segments, begin, end);
      });
      EXPECT_TRUE(split == full) << types << " isa " << static_cast<int>(isa);
    }
  }
}

TYPED_TEST(OptimizerStep, NanInAGradientReachesTheWeight) {
  auto generator = fresh_generator();
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    StepProblem<TypeParam> problem(kCount, {}, 0, generator);
    for (const std::int64_t i : {8, 901}) {
      problem.grad.set(i, std::numeric_limits<float>::quiet_NaN());
    }
    this->step(problem);
    for (std::int64_t i = 0; i < kCount; ++i) {
      EXPECT_EQ(std::isnan(problem.master.at(i)), i == 8 || i == 901) << i;
    }
  }
}

TYPED_TEST(OptimizerStep, AScaleThatIsNotFiniteEmptiesASegment) {
  for (const float scale :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    const auto segment = prepare_segment<TypeParam>(3, 9, this->row(0), scale);
    EXPECT_EQ(segment.begin, segment.end);
  }
  EXPECT_EQ(prepare_segment<TypeParam>(3, 9, this->row(0), 0.0F).begin, 3);
}

TEST(Lion, AnUpdateOfZeroMovesNothing) {
  auto generator = fresh_generator();
  StepProblem<LionRule> problem(3, {}, 0, generator);
  problem.moments[0].set(1, 0);
  problem.grad.set(1, -0.0F);
  const float before = problem.master.at(1);
  const std::vector<OptimizerSegment<LionRule>> segments{
      {0, 3, LionRule::coefficients(Sample<LionRule>::kOther.data(), 1.0F)}};
  optimizer_step<LionRule>(problem.buffers(), segments, 0, 3);
  EXPECT_EQ(problem.master.at(1), before);
}

}  // namespace
}  // namespace zero_ext::core
