#include <limits>

#include "../../../core/optimizers/optimizer_step.h"
#include "../../../cuda/optimizers/optimizer_kernel.h"
#include "cuda_optimizer_support.h"

namespace zero_ext::cuda {
namespace {

using core::NumericType;
using core::testing::fresh_generator;
using testing::Plan;
using testing::Sample;
using testing::StepProblem;
using testing::StepTypes;
using zero_ext::testing::emulate_launch;

template <class Rule>
class CudaOptimizerStep : public ::testing::Test {};
TYPED_TEST_SUITE(CudaOptimizerStep, core::testing::TypesOf<core::OptimizerRules>::All);

template <class Rule>
void emulate_step(StepProblem<Rule>& problem, std::int64_t numel,
                  const std::vector<core::OptimizerSegment<Rule>>& segments, std::int64_t threads,
                  std::mt19937_64& generator) {
  const core::StepBuffers buffers = problem.buffers();
  const auto run = [&]<class Moment, class Grad, class Param>(std::type_identity<Moment>,
                                                              std::type_identity<Grad>,
                                                              std::type_identity<Param>) {
    emulate_launch(OptimizerStep<Rule, Moment, Grad, Param>::of(
                       buffers, numel, segments.data(), static_cast<std::int64_t>(segments.size())),
                   threads, generator);
  };
  with_type(buffers.moment_type, [&]<class Moment>(std::type_identity<Moment> moment) {
    if constexpr (!std::is_same_v<Moment, core::Float16>) {
      with_type(buffers.grad_type, [&](auto grad) {
        if (!buffers.param_type) return run(moment, grad, std::type_identity<NoParam>{});
        with_type(*buffers.param_type, [&](auto param) { run(moment, grad, param); });
      });
    }
  });
}

TYPED_TEST(CudaOptimizerStep, EveryTypeGridAndAlignmentYieldsTheBitsOfTheCpu) {
  auto generator = fresh_generator();
  for (const StepTypes& types : testing::all_step_types()) {
    for (const std::int64_t shift : {0, 3}) {
      const auto numel = static_cast<std::int64_t>(1 + generator() % 3000);
      const auto plan = testing::random_plan<TypeParam>(numel, generator, 900);
      const auto segments = plan.prepared(numel);
      const StepProblem<TypeParam> start(numel, types, shift, generator);
      StepProblem<TypeParam> expected = start;
      const std::int64_t total = core::total_of(segments);
      core::optimizer_step<TypeParam>(expected.buffers(), segments, 0, total);
      EXPECT_FALSE(expected == start && total > 0);
      for (const std::int64_t threads : {1, 7, 1000}) {
        StepProblem<TypeParam> problem = start;
        emulate_step(problem, numel, segments, threads, generator);
        EXPECT_TRUE(problem == expected) << types << " shift " << shift << " threads " << threads;
      }
    }
  }
}

TYPED_TEST(CudaOptimizerStep, PreparesTheSegmentsThatTheCpuReads) {
  auto generator = fresh_generator();
  const auto plan = testing::random_plan<TypeParam>(500, generator, 900);
  const auto segments = plan.prepared(500);
  for (std::size_t i = 0; i < segments.size(); ++i) {
    EXPECT_EQ(segments[i].begin, plan.bounds[2 * i]);
    EXPECT_EQ(segments[i].end, plan.bounds[2 * i + 1]);
    const auto expected = TypeParam::coefficients(plan.hyper.data() + TypeParam::kHyper * i, 0.37F);
    EXPECT_EQ(segments[i].coefficients.gradient_scale, expected.gradient_scale);
    EXPECT_EQ(segments[i].coefficients.beta2, expected.beta2);
  }
}

TYPED_TEST(CudaOptimizerStep, AScaleThatIsNotFiniteChangesNothing) {
  auto generator = fresh_generator();
  for (const float scale :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    auto plan = testing::random_plan<TypeParam>(300, generator, 900);
    plan.scale = scale;
    const StepProblem<TypeParam> start(300, {}, 0, generator);
    StepProblem<TypeParam> problem = start;
    emulate_step(problem, 300, plan.prepared(300), 40, generator);
    EXPECT_TRUE(problem == start);
  }
}

// The first of two segments is good: nothing of it is stepped either.
template <class Rule>
void expect_error(std::int64_t begin, std::int64_t end, std::span<const double> row,
                  const std::string& expected) {
  auto generator = fresh_generator();
  Plan<Rule> plan;
  plan.add(0, 10, Sample<Rule>::kRow);
  plan.add(begin, end, row);
  const auto [segments, error] = plan.attempted(100);
  EXPECT_EQ(error, expected);
  const StepProblem<Rule> start(100, {}, 0, generator);
  StepProblem<Rule> problem = start;
  emulate_step(problem, 100, segments, 40, generator);
  EXPECT_EQ(problem == start, expected != "");
}

TYPED_TEST(CudaOptimizerStep, RecordsSegmentsOutsideTheirRangeAndChangesNothing) {
  const auto& row = Sample<TypeParam>::kRow;
  expect_error<TypeParam>(10, 100, row, "");
  expect_error<TypeParam>(
      9, 100, row,
      "adam_step_: begin of segments[1]: expected at least the end of the segment before, or 0, "
      "got 9.");
  for (const auto& [begin, end] : {std::pair{10, 101}, std::pair{20, 19}}) {
    expect_error<TypeParam>(
        begin, end, row,
        "adam_step_: end of segments[1]: expected from the segment's begin to the number of "
        "elements, got " +
            std::to_string(end) + ".");
  }
}

// A number that is not as a field expects it, with the texts of both.
struct BadValue {
  core::ExpectedValue expected;
  double value;
  const char* text;
};
constexpr BadValue kBadValues[] = {
    {core::ExpectedValue::finite, std::numeric_limits<double>::infinity(), "finite, got inf."},
    {core::ExpectedValue::finite_not_negative, -1, "finite and not negative, got -1."},
    {core::ExpectedValue::finite_at_least_one, 0, "finite and at least 1, got 0."},
    {core::ExpectedValue::below_one, 1, "in [0, 1), got 1."},
    {core::ExpectedValue::below_one, -0.5, "in [0, 1), got -0.5."},
    {core::ExpectedValue::up_to_one, 1.5, "in (0, 1], got 1.5."},
    {core::ExpectedValue::up_to_one, 0, "in (0, 1], got 0."},
    {core::ExpectedValue::zero_or_one, 0.5, "0 or 1, got 0.5."},
};

TYPED_TEST(CudaOptimizerStep, RecordsHyperParametersOutsideTheirRangeAndChangesNothing) {
  for (int i = 0; i < TypeParam::kHyper; ++i) {
    const core::HyperField field = TypeParam::hyper_field(i);
    for (const BadValue& bad : kBadValues) {
      if (bad.expected != field.expected) continue;
      auto row = Sample<TypeParam>::kRow;
      row[static_cast<std::size_t>(i)] = bad.value;
      expect_error<TypeParam>(10, 20, row,
                              std::string("adam_step_: ") +
                                  core::text_of(field.field, core::kDeviceFields) +
                                  " of hyper[1]: expected " + bad.text);
    }
  }
}

}  // namespace
}  // namespace zero_ext::cuda
