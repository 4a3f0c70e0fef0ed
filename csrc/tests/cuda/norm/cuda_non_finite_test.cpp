#include <cstring>
#include <limits>

#include "../../../core/optimizers/adam_formula.h"
#include "../../../core/optimizers/coefficients/adam_coefficients_math.h"
#include "../../../core/optimizers/coefficients/lion_coefficients_math.h"
#include "../../../core/optimizers/lion.h"
#include "../../../core/optimizers/lion_formula.h"
#include "../../../cuda/norm/non_finite_kernel.h"
#include "../../../cuda/optimizers/adam_8bit_kernel.h"
#include "../../../cuda/optimizers/lamb_kernel.h"
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

template <class T>
void poison(Buffer& buffer, std::int64_t index, float value) {
  const T element = core::from_float<T>(value);
  std::memcpy(static_cast<T*>(buffer.data()) + index, &element, sizeof(T));
}

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
            poison<T>(values, index, kBad[generator() % 3]);
            emulate_launch(FlagNonFinite<T>::of(values.data(), count, &flag), threads, generator);
            EXPECT_EQ(flag, 1) << count << " elements, " << index << " of them";
          }
        }
      }
    });
  }
}

constexpr std::int64_t kCount = 600;

// Buffers of a step with one poisoned gradient, or none.
struct Problem {
  Buffer master;
  Buffer exp_avg;
  Buffer exp_avg_sq;
  Buffer grad;
  Buffer param;
  std::vector<std::uint8_t> codes[2];
  std::vector<float> scales[2];
  std::int32_t flag = 0;

  Problem(std::int64_t shift, std::mt19937_64& generator)
      : master(kCount, NumericType::float32, shift, generator),
        exp_avg(kCount, NumericType::float32, shift, generator),
        exp_avg_sq(kCount, NumericType::float32, shift, generator, true),
        grad(kCount, NumericType::bfloat16, shift, generator),
        param(kCount, NumericType::bfloat16, shift, generator) {
    for (auto& each : codes) each.assign(kCount, 0);
    for (auto& each : scales) each.assign(core::block_count(kCount), 0.0F);
  }

  core::AdamBuffers adam() {
    return {static_cast<float*>(master.data()),
            exp_avg.data(),
            exp_avg_sq.data(),
            NumericType::float32,
            grad.data(),
            NumericType::bfloat16,
            param.data(),
            NumericType::bfloat16,
            &flag};
  }
  core::LambBuffers lamb() {
    return {static_cast<float*>(master.data()),
            exp_avg.data(),
            exp_avg_sq.data(),
            NumericType::float32,
            grad.data(),
            NumericType::bfloat16,
            param.data(),
            NumericType::bfloat16,
            &flag};
  }
  core::LionBuffers lion() {
    return {static_cast<float*>(master.data()),
            exp_avg.data(),
            NumericType::float32,
            grad.data(),
            NumericType::bfloat16,
            param.data(),
            NumericType::bfloat16,
            &flag};
  }
  core::Adam8BitBuffers adam_8bit() {
    return {kCount,
            static_cast<float*>(master.data()),
            codes[0].data(),
            codes[1].data(),
            scales[0].data(),
            scales[1].data(),
            grad.data(),
            NumericType::bfloat16,
            param.data(),
            NumericType::bfloat16,
            &flag};
  }
};

// Where a step over two segments with a gap raises the flag; `step` runs it on so many threads.
template <class Hyper, class Step>
void expect_the_flag(const std::vector<double>& row, const Step& step) {
  auto generator = fresh_generator();
  testing::Plan<Hyper> plan;
  plan.add(3, 301, row);
  plan.add(302, kCount, row);
  const auto segments = plan.prepared(kCount);
  for (const std::int64_t shift : {0, 3}) {
    for (const std::int64_t threads : {1, 7, 1000}) {
      Problem fine(shift, generator);
      step(fine, segments, threads, generator);
      EXPECT_EQ(fine.flag, 0);
      for (const std::int64_t index : {0, 3, 64, 301, 302, 599}) {
        Problem problem(shift, generator);
        poison<core::BFloat16>(problem.grad, index, kBad[generator() % 3]);
        step(problem, segments, threads, generator);
        EXPECT_EQ(problem.flag, index == 0 || index == 301 ? 0 : 1)
            << "element " << index << ", " << threads << " threads, shift " << shift;
      }
    }
  }
}

const std::vector<double> kAdam{1e-2, 0.9, 0.999, 1e-8, 0.1, 3, 1, 0};

TEST(CudaNonFinite, AdamRaisesTheFlag) {
  expect_the_flag<core::AdamHyper>(kAdam, [](Problem& problem, const auto& segments,
                                             std::int64_t threads, std::mt19937_64& generator) {
    emulate_launch(
        OptimizerStep<core::AdamRule, float, core::BFloat16, core::BFloat16>::of(
            problem.adam(), kCount, segments.data(), static_cast<std::int64_t>(segments.size())),
        threads, generator);
  });
}

TEST(CudaNonFinite, AdamWithEightBitsRaisesTheFlag) {
  expect_the_flag<core::AdamHyper>(kAdam, [](Problem& problem, const auto& segments,
                                             std::int64_t threads, std::mt19937_64& generator) {
    emulate_launch(
        AdamBlocks<core::BFloat16, core::BFloat16>::of(problem.adam_8bit(), segments.data(),
                                                       static_cast<std::int64_t>(segments.size())),
        threads, generator);
  });
}

TEST(CudaNonFinite, LionRaisesTheFlag) {
  expect_the_flag<core::LionHyper>(
      {1e-2, 0.9, 0.99, 0.1, 0},
      [](Problem& problem, const auto& segments, std::int64_t threads, std::mt19937_64& generator) {
        emulate_launch(OptimizerStep<core::LionRule, float, core::BFloat16, core::BFloat16>::of(
                           problem.lion(), kCount, segments.data(),
                           static_cast<std::int64_t>(segments.size())),
                       threads, generator);
      });
}

TEST(CudaNonFinite, LambRaisesTheFlag) {
  expect_the_flag<core::LambHyper>(
      {1e-3, 0.9, 0.99, 1e-8, 0.1, 0.1, 0.01, 0, 0, 1},
      [](Problem& problem, const auto& segments, std::int64_t threads, std::mt19937_64& generator) {
        emulate_launch(OptimizerStep<core::LambRule, float, core::BFloat16, core::BFloat16>::of(
                           problem.lamb(), kCount, segments.data(),
                           static_cast<std::int64_t>(segments.size())),
                       threads, generator);
      });
}

}  // namespace
}  // namespace zero_ext::cuda
