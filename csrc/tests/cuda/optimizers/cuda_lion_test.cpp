#include <limits>

#include "../../../core/optimizers/coefficients/lion_coefficients_math.h"
#include "../../../core/optimizers/lion.h"
#include "../../../core/optimizers/lion_formula.h"
#include "../../../cuda/optimizers/optimizer_kernel.h"
#include "cuda_optimizer_support.h"

namespace zero_ext::cuda {
namespace {

using core::NumericType;
using core::testing::fresh_generator;
using testing::Buffer;
using testing::kTypes;
using zero_ext::testing::emulate_launch;

// lr, beta1, beta2, weight_decay, maximize
const std::vector<std::vector<double>> kRows{{1e-2, 0.9, 0.99, 0.1, 0}, {2e-2, 0.4, 0.5, 0.2, 1}};

struct Types {
  NumericType moments;
  NumericType grad;
  std::optional<NumericType> param;
};

struct Problem {
  Types types;
  Buffer master;
  Buffer exp_avg;
  Buffer grad;
  Buffer param;

  Problem(std::int64_t count, const Types& with, std::int64_t shift, std::mt19937_64& generator)
      : types(with),
        master(count, NumericType::float32, shift, generator),
        exp_avg(count, with.moments, shift, generator),
        grad(count, with.grad, shift, generator),
        param(count, with.param.value_or(NumericType::float32), shift, generator) {}

  core::LionBuffers buffers() {
    return {static_cast<float*>(master.data()),
            exp_avg.data(),
            types.moments,
            grad.data(),
            types.grad,
            types.param ? param.data() : nullptr,
            types.param};
  }
  bool operator==(const Problem& other) const {
    return master == other.master && exp_avg == other.exp_avg && grad == other.grad &&
           param == other.param;
  }
};

void emulate_step(Problem& problem, std::int64_t numel,
                  const std::vector<core::LionSegment>& segments, std::int64_t threads,
                  std::mt19937_64& generator) {
  const core::LionBuffers buffers = problem.buffers();
  const auto run = [&]<class Moment, class Grad, class Param>(std::type_identity<Moment>,
                                                              std::type_identity<Grad>,
                                                              std::type_identity<Param>) {
    emulate_launch(OptimizerStep<core::LionRule, Moment, Grad, Param>::of(
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

TEST(CudaLion, EveryTypeGridAndAlignmentYieldsTheBitsOfTheCpu) {
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
          const auto plan = testing::random_plan<core::LionHyper>(numel, kRows, generator, 900);
          const auto segments = plan.prepared(numel);
          const Problem start(numel, types, shift, generator);
          Problem expected = start;
          core::lion_step(expected.buffers(), segments, 0, testing::total_of(segments));
          EXPECT_FALSE(expected == start && testing::total_of(segments) > 0);
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

TEST(CudaLion, AScaleThatIsNotFiniteChangesNothing) {
  auto generator = fresh_generator();
  auto plan = testing::random_plan<core::LionHyper>(300, kRows, generator);
  plan.scale = std::numeric_limits<float>::quiet_NaN();
  const Types types{NumericType::float32, NumericType::float16, NumericType::float16};
  const Problem start(300, types, 0, generator);
  Problem problem = start;
  emulate_step(problem, 300, plan.prepared(300), 40, generator);
  EXPECT_TRUE(problem == start);
}

TEST(CudaLion, RecordsHyperParametersOutsideTheirRangeAndChangesNothing) {
  auto generator = fresh_generator();
  testing::Plan<core::LionHyper> plan;
  plan.add(0, 10, kRows[0]);
  plan.add(10, 20, {1e-2, 0.9, 1.0, 0.1, 0});
  const auto [segments, error] = plan.attempted(20);
  EXPECT_EQ(error, "adam_step_: beta2 of hyper[1]: expected in [0, 1), got 1.");
  const Types types{NumericType::float32, NumericType::float16, NumericType::float16};
  const Problem start(20, types, 0, generator);
  Problem problem = start;
  emulate_step(problem, 20, segments, 40, generator);
  EXPECT_TRUE(problem == start);
}

}  // namespace
}  // namespace zero_ext::cuda
