#include "../../core/norm/non_finite.h"

#include <cmath>
#include <limits>

#include "../../core/optimizers/adam.h"
#include "../../core/optimizers/adam_8bit.h"
#include "../../core/optimizers/lamb.h"
#include "../../core/optimizers/lion.h"
#include "../test_support.h"

namespace zero_ext::core {
namespace {

using testing::available_isas;
using testing::fresh_generator;
using testing::normal_values;
using testing::SelectedIsa;
using testing::split_over_threads;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <class T>
constexpr NumericType kType = NumericType::float32;
template <>
constexpr NumericType kType<BFloat16> = NumericType::bfloat16;
template <>
constexpr NumericType kType<Float16> = NumericType::float16;

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
      flag_non_finite(values.data(), kType<TypeParam>, 0, end, &flag);
      EXPECT_EQ(flag, 0);
      for (const float bad : {kNan, -kNan, kInfinity, -kInfinity}) {
        auto poisoned = values;
        const auto index = static_cast<std::int64_t>(generator() % count);
        poisoned[static_cast<std::size_t>(index)] = from_float<TypeParam>(bad);
        flag = 0;
        flag_non_finite(poisoned.data(), kType<TypeParam>, begin, end, &flag);
        EXPECT_EQ(flag, index >= begin ? 1 : 0) << count << " values, " << index << " of " << begin;
        flag_non_finite(poisoned.data(), kType<TypeParam>, 0, end, &flag);
        EXPECT_EQ(flag, 1);
        flag_non_finite(values.data(), kType<TypeParam>, 0, end, &flag);
        EXPECT_EQ(flag, 1) << "finite values lowered the flag";
      }
    }
  }
}

TYPED_TEST(NonFinite, NoElementsAreFinite) {
  std::int32_t flag = 0;
  flag_non_finite(nullptr, kType<TypeParam>, 0, 0, &flag);
  EXPECT_EQ(flag, 0);
}

// Buffers of an optimizer's step over elements [0, count), of which [begin, end) is a segment.
struct Problem {
  std::size_t count;
  std::vector<float> master;
  std::vector<float> exp_avg;
  std::vector<float> exp_avg_sq;
  std::vector<BFloat16> grad;
  std::vector<BFloat16> param;
  std::vector<std::uint8_t> codes[2];
  std::vector<float> scales[2];
  std::int32_t flag = 0;

  Problem(std::size_t numel, std::mt19937_64& generator)
      : count(numel),
        master(normal_values<float>(generator, numel)),
        exp_avg(normal_values<float>(generator, numel)),
        exp_avg_sq(numel, 0.5F),
        grad(normal_values<BFloat16>(generator, numel)),
        param(numel) {
    for (auto& each : codes) each.assign(numel, 0);
    for (auto& each : scales) each.assign((numel + 255) / 256, 0.0F);
  }

  AdamBuffers adam() {
    return {master.data(),        exp_avg.data(),        exp_avg_sq.data(),
            NumericType::float32, grad.data(),           NumericType::bfloat16,
            param.data(),         NumericType::bfloat16, &flag};
  }
  LionBuffers lion() {
    return {master.data(),         exp_avg.data(), NumericType::float32,  grad.data(),
            NumericType::bfloat16, param.data(),   NumericType::bfloat16, &flag};
  }
  LambBuffers lamb() {
    return {master.data(),        exp_avg.data(),        exp_avg_sq.data(),
            NumericType::float32, grad.data(),           NumericType::bfloat16,
            param.data(),         NumericType::bfloat16, &flag};
  }
  Adam8BitBuffers adam_8bit() {
    return {static_cast<std::int64_t>(count),
            master.data(),
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

// Without eps, the step of an element whose moments are zero is NaN.
template <class Step>
void expect_the_flag_of_what_is_stepped(const Step& step) {
  auto generator = fresh_generator();
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    // The last one is long enough to be stored past the caches, at any alignment.
    for (const std::size_t count : {5UL, 17UL, 700UL, (1UL << 18) + 77UL}) {
      const auto begin = static_cast<std::int64_t>(generator() % 4);
      const auto end = static_cast<std::int64_t>(count - generator() % 2);
      for (const float bad : {0.0F, kNan, kInfinity, -kInfinity}) {
        Problem problem(count, generator);
        const std::size_t index = generator() % count;
        if (bad != 0.0F) problem.grad[index] = from_float<BFloat16>(bad);
        const auto at = static_cast<std::int64_t>(index);
        const int expected = bad != 0.0F && begin <= at && at < end ? 1 : 0;
        step(problem, begin, end);
        EXPECT_EQ(problem.flag, expected)
            << count << " elements, " << bad << " at " << index << " of " << begin << " to " << end;
      }
      Problem problem(count, generator);
      problem.master[static_cast<std::size_t>(begin)] = kNan;
      step(problem, begin, end);
      EXPECT_EQ(problem.flag, 1) << "a weight that was not finite before";
    }
  }
}

constexpr AdamHyperparameters kAdam{1e-2, 0.9, 0.999, 1e-8, 0.1, 3, true, false};

TEST(NonFiniteStep, AdamRaisesTheFlag) {
  expect_the_flag_of_what_is_stepped([](Problem& problem, std::int64_t begin, std::int64_t end) {
    const std::vector<AdamSegment> segments{{begin, end, adam_coefficients(kAdam, 0.5F)}};
    adam_step(problem.adam(), segments, 0, end - begin);
  });
}

TEST(NonFiniteStep, AnyThreadOfAdamRaisesTheFlag) {
  expect_the_flag_of_what_is_stepped([](Problem& problem, std::int64_t begin, std::int64_t end) {
    const std::vector<AdamSegment> segments{{begin, end, adam_coefficients(kAdam, 0.5F)}};
    split_over_threads(end - begin, 3, [&](std::int64_t first, std::int64_t last) {
      adam_step(problem.adam(), segments, first, last);
    });
  });
}

TEST(NonFiniteStep, AdamWithEightBitsRaisesTheFlag) {
  expect_the_flag_of_what_is_stepped([](Problem& problem, std::int64_t begin, std::int64_t end) {
    const std::vector<AdamSegment> segments{{begin, end, adam_coefficients(kAdam, 0.5F)}};
    adam_step_8bit(problem.adam_8bit(), segments, 0,
                   block_count(static_cast<std::int64_t>(problem.count)));
  });
}

TEST(NonFiniteStep, LionRaisesTheFlag) {
  expect_the_flag_of_what_is_stepped([](Problem& problem, std::int64_t begin, std::int64_t end) {
    const LionHyperparameters hyper{1e-2, 0.9, 0.99, 0.1, false};
    const std::vector<LionSegment> segments{{begin, end, lion_coefficients(hyper, 0.5F)}};
    lion_step(problem.lion(), segments, 0, end - begin);
  });
}

TEST(NonFiniteStep, LambRaisesTheFlag) {
  expect_the_flag_of_what_is_stepped([](Problem& problem, std::int64_t begin, std::int64_t end) {
    const LambHyperparameters hyper{1e-2, 0.9, 0.99, 1e-6, 0.1, 0.1, 0.01, false, false, 0.7};
    const std::vector<LambSegment> segments{{begin, end, lamb_coefficients(hyper, 0.5F)}};
    lamb_step(problem.lamb(), segments, 0, end - begin);
  });
}

TEST(NonFiniteStep, AMomentThatOverflowsRaisesTheFlagWhereTheWeightStaysFinite) {
  auto generator = fresh_generator();
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    for (const std::size_t index : {3UL, 40UL}) {
      Problem problem(41, generator);
      problem.grad[index] = from_float<BFloat16>(1e38F);  // its square is infinite in float32
      const std::vector<AdamSegment> segments{{0, 41, adam_coefficients(kAdam, 1.0F)}};
      adam_step(problem.adam(), segments, 0, 41);
      EXPECT_TRUE(std::isfinite(problem.master[index]));
      EXPECT_EQ(problem.flag, 1);
    }
  }
}

// The lanes behind the last element divide zero by zero.
TEST(NonFiniteStep, LanesBehindTheLastElementDoNotCount) {
  auto generator = fresh_generator();
  AdamHyperparameters hyper = kAdam;
  hyper.eps = 0;
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    Problem problem(3, generator);
    const std::vector<AdamSegment> segments{{0, 3, adam_coefficients(hyper, 0.5F)}};
    adam_step(problem.adam(), segments, 0, 3);
    EXPECT_EQ(problem.flag, 0);
    problem.exp_avg[1] = problem.exp_avg_sq[1] = 0;
    problem.grad[1] = from_float<BFloat16>(0.0F);
    adam_step(problem.adam(), segments, 0, 3);
    EXPECT_EQ(problem.flag, 1);
  }
}

TEST(NonFiniteStep, WithoutAFlagNothingIsWritten) {
  auto generator = fresh_generator();
  Problem problem(50, generator);
  problem.grad[20] = from_float<BFloat16>(kNan);
  AdamBuffers buffers = problem.adam();
  buffers.non_finite = nullptr;
  const std::vector<AdamSegment> segments{{0, 50, adam_coefficients(kAdam, 0.5F)}};
  adam_step(buffers, segments, 0, 50);
  EXPECT_EQ(problem.flag, 0);
  EXPECT_TRUE(std::isnan(problem.master[20]));
}

}  // namespace
}  // namespace zero_ext::core
