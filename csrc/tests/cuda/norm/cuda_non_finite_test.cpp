#include <limits>

#include "../../../cuda/norm/non_finite_kernel.h"
#include "../../../cuda/optimizers/adam_8bit_kernel.h"
#include "../../../cuda/optimizers/optimizer_kernel.h"
#include "../optimizers/cuda_optimizer_support.h"

namespace zero_ext::cuda {
namespace {

using core::NumericType;
using core::testing::fresh_generator;
using testing::Buffer;
using testing::kTypes;
using zero_ext::testing::emulate_launch;

constexpr float kBad[] = {std::numeric_limits<float>::quiet_NaN(),
                          std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()};

TEST(CudaNonFinite, OneElementAnywhereRaisesTheFlagAtEveryGridAndAlignment) {
  auto generator = fresh_generator();
  for (const NumericType type : kTypes) {
    with_type(type, [&]<class T>(std::type_identity<T>) {
      for (const std::int64_t count : {0, 1, 7, 8, 9, 255, 1030}) {
        for (const std::int64_t shift : {0, 1, 3}) {
          for (const std::int64_t threads : {1, 5, 400}) {
            Buffer values(count, type, shift, generator);
            std::int32_t flag = 0;
            emulate_launch(FlagNonFinite<T>::of(values.data(), count, &flag), threads, generator);
            EXPECT_EQ(flag, 0);
            if (count == 0) continue;
            const auto index = static_cast<std::int64_t>(generator() % count);
            values.set(index, kBad[generator() % 3]);
            emulate_launch(FlagNonFinite<T>::of(values.data(), count, &flag), threads, generator);
            EXPECT_EQ(flag, 1) << count << " elements, " << index << " of them";
          }
        }
      }
    });
  }
}

constexpr std::int64_t kCount = 600;

using testing::Sample;
using testing::StepProblem;

constexpr testing::StepTypes kStepTypes{NumericType::float32, NumericType::bfloat16,
                                        NumericType::bfloat16};

// Where a step over two segments with a gap raises the flag; `step` runs it on so many threads.
template <class Rule, class Step>
void expect_the_flag(const Step& step) {
  auto generator = fresh_generator();
  testing::Plan<Rule> plan;
  plan.add(3, 301, Sample<Rule>::kRow);
  plan.add(302, kCount, Sample<Rule>::kRow);
  const auto segments = plan.prepared(kCount);
  for (const std::int64_t shift : {0, 3}) {
    for (const std::int64_t threads : {1, 7, 1000}) {
      StepProblem<Rule> fine(kCount, kStepTypes, shift, generator);
      step(fine, segments, threads, generator);
      EXPECT_EQ(fine.flag, 0);
      for (const std::int64_t index : {0, 3, 64, 301, 302, 599}) {
        StepProblem<Rule> problem(kCount, kStepTypes, shift, generator);
        problem.grad.set(index, kBad[generator() % 3]);
        step(problem, segments, threads, generator);
        EXPECT_EQ(problem.flag, index == 0 || index == 301 ? 0 : 1)
            << "element " << index << ", " << threads << " threads, shift " << shift;
      }
    }
  }
}

template <class Rule>
class CudaNonFiniteStep : public ::testing::Test {};
TYPED_TEST_SUITE(CudaNonFiniteStep, core::testing::TypesOf<core::OptimizerRules>::All);

TYPED_TEST(CudaNonFiniteStep, RaisesTheFlag) {
  expect_the_flag<TypeParam>([](auto& problem, const auto& segments, std::int64_t threads,
                                std::mt19937_64& generator) {
    emulate_launch(
        OptimizerStep<TypeParam, float, core::BFloat16, core::BFloat16>::of(
            problem.buffers(), kCount, segments.data(), static_cast<std::int64_t>(segments.size())),
        threads, generator);
  });
}

TEST(CudaNonFinite, AdamWithEightBitsRaisesTheFlag) {
  expect_the_flag<core::AdamRule>(
      [](auto& problem, const auto& segments, std::int64_t threads, std::mt19937_64& generator) {
        std::vector<std::uint8_t> codes[] = {std::vector<std::uint8_t>(kCount),
                                             std::vector<std::uint8_t>(kCount)};
        std::vector<float> scales[] = {std::vector<float>(core::block_count(kCount)),
                                       std::vector<float>(core::block_count(kCount))};
        const core::StepBuffers step = problem.buffers();
        const core::Adam8BitBuffers buffers{kCount,          step.master,      codes[0].data(),
                                            codes[1].data(), scales[0].data(), scales[1].data(),
                                            step.grad,       step.grad_type,   step.param,
                                            step.param_type, step.non_finite};
        emulate_launch(AdamBlocks<core::BFloat16, core::BFloat16>::of(
                           buffers, segments.data(), static_cast<std::int64_t>(segments.size())),
                       threads, generator);
      });
}

}  // namespace
}  // namespace zero_ext::cuda
