#include <limits>

#include "../../../core/optimizers/adam.h"
#include "../../../core/optimizers/adam_formula.h"
#include "../../../core/optimizers/coefficients/adam_coefficients_math.h"
#include "../../../cuda/optimizers/optimizer_kernel.h"
#include "cuda_optimizer_support.h"

namespace zero_ext::cuda {
namespace {

using core::AdamBuffers;
using core::AdamSegment;
using core::NumericType;
using core::testing::fresh_generator;
using testing::Buffer;
using testing::kTypes;
using zero_ext::testing::emulate_launch;

struct Types {
  NumericType moments;
  NumericType grad;
  std::optional<NumericType> param;
};

struct Problem {
  Types types;
  Buffer master;
  Buffer exp_avg;
  Buffer exp_avg_sq;
  Buffer grad;
  Buffer param;

  Problem(std::int64_t count, const Types& with, std::int64_t shift, std::mt19937_64& generator)
      : types(with),
        master(count, NumericType::float32, shift, generator),
        exp_avg(count, with.moments, shift, generator),
        exp_avg_sq(count, with.moments, shift, generator, true),
        grad(count, with.grad, shift, generator),
        param(count, with.param.value_or(NumericType::float32), shift, generator) {}

  AdamBuffers buffers() {
    return {static_cast<float*>(master.data()),
            exp_avg.data(),
            exp_avg_sq.data(),
            types.moments,
            grad.data(),
            types.grad,
            types.param ? param.data() : nullptr,
            types.param};
  }
  bool operator==(const Problem& other) const {
    return master == other.master && exp_avg == other.exp_avg && exp_avg_sq == other.exp_avg_sq &&
           grad == other.grad && param == other.param;
  }
};

using AdamPlan = testing::Plan<core::AdamHyper>;

// lr, beta1, beta2, eps, weight_decay, step, decoupled, maximize
const std::vector<double> kDecoupled{1e-2, 0.9, 0.999, 1e-8, 0.1, 3, 1, 0};
const std::vector<double> kCoupled{2e-2, 0.4, 0.99, 1e-6, 0.2, 7, 0, 1};

AdamPlan random_plan(std::int64_t numel, std::mt19937_64& generator) {
  return testing::random_plan<core::AdamHyper>(numel, {kDecoupled, kCoupled}, generator, 900);
}

void emulate_step(Problem& problem, std::int64_t numel, const std::vector<AdamSegment>& segments,
                  std::int64_t threads, std::mt19937_64& generator) {
  const AdamBuffers buffers = problem.buffers();
  const auto run = [&]<class Moment, class Grad, class Param>(std::type_identity<Moment>,
                                                              std::type_identity<Grad>,
                                                              std::type_identity<Param>) {
    emulate_launch(OptimizerStep<core::AdamRule, Moment, Grad, Param>::of(
                       buffers, numel, segments.data(), static_cast<std::int64_t>(segments.size())),
                   threads, generator);
  };
  with_type(buffers.moments, [&]<class Moment>(std::type_identity<Moment> moment) {
    if constexpr (!std::is_same_v<Moment, core::Float16>) {
      with_type(buffers.grad_type, [&](auto grad) {
        if (!buffers.param_type) return run(moment, grad, std::type_identity<NoParam>{});
        with_type(*buffers.param_type, [&](auto param) { run(moment, grad, param); });
      });
    }
  });
}

TEST(CudaAdam, EveryTypeGridAndAlignmentYieldsTheBitsOfTheCpu) {
  auto generator = fresh_generator();
  for (const NumericType moments : {NumericType::float32, NumericType::bfloat16}) {
    for (const NumericType grad : kTypes) {
      for (int param = 0; param <= core::kNumericTypes; ++param) {
        const Types types{moments, grad,
                          param == core::kNumericTypes
                              ? std::nullopt
                              : std::optional(static_cast<NumericType>(param))};
        for (const std::int64_t shift : {0, 3}) {
          const auto numel = static_cast<std::int64_t>(1 + generator() % 3000);
          const AdamPlan plan = random_plan(numel, generator);
          const std::vector<AdamSegment> segments = plan.prepared(numel);
          const Problem start(numel, types, shift, generator);
          Problem expected = start;
          core::adam_step(expected.buffers(), segments, 0, numel);
          for (const std::int64_t threads : {1, 7, 1000}) {
            Problem problem = start;
            emulate_step(problem, numel, segments, threads, generator);
            EXPECT_TRUE(problem == expected)
                << "moments " << static_cast<int>(moments) << " grad " << static_cast<int>(grad)
                << " param " << param << " shift " << shift << " threads " << threads;
          }
        }
      }
    }
  }
}

TEST(CudaAdam, PreparesTheSegmentsThatTheCpuReads) {
  auto generator = fresh_generator();
  const AdamPlan plan = random_plan(500, generator);
  const std::vector<AdamSegment> segments = plan.prepared(500);
  for (std::size_t i = 0; i < segments.size(); ++i) {
    EXPECT_EQ(segments[i].begin, plan.bounds[2 * i]);
    EXPECT_EQ(segments[i].end, plan.bounds[2 * i + 1]);
    const auto expected = core::adam_coefficients(
        core::adam_hyperparameters(plan.hyper.data() + core::kAdamHyperparameters * i), 0.37F);
    EXPECT_EQ(segments[i].coefficients.step_size, expected.step_size);
    EXPECT_EQ(segments[i].coefficients.gradient_scale, expected.gradient_scale);
  }
}

TEST(CudaAdam, AScaleThatIsNotFiniteChangesNothing) {
  auto generator = fresh_generator();
  for (const float scale :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    AdamPlan plan = random_plan(300, generator);
    plan.scale = scale;
    const Types types{NumericType::float32, NumericType::bfloat16, NumericType::bfloat16};
    const Problem start(300, types, 0, generator);
    Problem problem = start;
    emulate_step(problem, 300, plan.prepared(300), 40, generator);
    EXPECT_TRUE(problem == start);
  }
}

// The first segment is good: nothing of it is stepped either.
TEST(CudaAdam, RecordsSegmentsAndHyperParametersOutsideTheirRangeAndChangesNothing) {
  auto generator = fresh_generator();
  const Types types{NumericType::float32, NumericType::bfloat16, NumericType::bfloat16};
  const auto expect = [&](std::int64_t begin, std::int64_t end, double beta1,
                          const char* expected) {
    AdamPlan plan;
    plan.add(0, 10, kDecoupled);
    std::vector<double> second = kDecoupled;
    second[1] = beta1;
    plan.add(begin, end, second);
    const auto [segments, error] = plan.attempted(100);
    EXPECT_EQ(error, expected);
    const Problem start(100, types, 0, generator);
    Problem problem = start;
    emulate_step(problem, 100, segments, 40, generator);
    EXPECT_EQ(problem == start, error != "");
  };
  expect(10, 100, 0.9, "");
  expect(9, 100, 0.9,
         "adam_step_: begin of segments[1]: expected at least the end of the segment before, or 0, "
         "got 9.");
  expect(10, 101, 0.9,
         "adam_step_: end of segments[1]: expected from the segment's begin to the number of "
         "elements, got 101.");
  expect(20, 19, 0.9,
         "adam_step_: end of segments[1]: expected from the segment's begin to the number of "
         "elements, got 19.");
  expect(10, 100, 1.0, "adam_step_: beta1 of hyper[1]: expected in [0, 1), got 1.");
}

}  // namespace
}  // namespace zero_ext::cuda
