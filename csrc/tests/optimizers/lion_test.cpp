#include "../../core/optimizers/lion.h"

#include <cmath>
#include <limits>

#include "../test_support.h"

namespace zero_ext::core {
namespace {

using testing::available_isas;
using testing::fresh_generator;
using testing::normal_values;
using testing::SelectedIsa;
using testing::split_over_threads;

constexpr std::size_t kCount = 1021;
constexpr std::int64_t kTotal = 197 + 820;
constexpr LionHyperparameters kHyper{1e-2, 0.9, 0.99, 0.1, false};
constexpr LionHyperparameters kOther{3e-2, 0.2, 0.5, 0.0, true};

struct Problem {
  std::vector<float> master;
  std::vector<float> exp_avg;
  std::vector<BFloat16> grad;
  std::vector<Float16> param;

  explicit Problem(std::mt19937_64& generator)
      : master(normal_values<float>(generator, kCount)),
        exp_avg(normal_values<float>(generator, kCount)),
        grad(normal_values<BFloat16>(generator, kCount)),
        param(kCount, Float16{0x7E00}) {}

  LionBuffers buffers() {
    return {master.data(),         exp_avg.data(), NumericType::float32, grad.data(),
            NumericType::bfloat16, param.data(),   NumericType::float16};
  }
};

std::vector<LionSegment> segments() {
  return {{3, 200, lion_coefficients(kHyper, 0.5F)},
          {200, 200, lion_coefficients(kHyper, 0.5F)},
          {201, 1021, lion_coefficients(kOther, 0.5F)}};
}

TEST(Lion, MatchesDoubleReferenceAndLeavesTheRest) {
  auto generator = fresh_generator();
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    Problem problem(generator);
    const Problem before = problem;
    lion_step(problem.buffers(), segments(), 0, kTotal);
    for (std::size_t i = 0; i < kCount; ++i) {
      if (i < 3 || i == 200) {
        EXPECT_EQ(problem.master[i], before.master[i]);
        EXPECT_EQ(problem.exp_avg[i], before.exp_avg[i]);
        EXPECT_EQ(problem.param[i].bits, 0x7E00);
        continue;
      }
      const LionHyperparameters hyper = i < 200 ? kHyper : kOther;
      const double g = 0.5 * to_float(before.grad[i]) * (hyper.maximize ? -1 : 1);
      const double m = before.exp_avg[i];
      const double direction = hyper.beta1 * m + (1 - hyper.beta1) * g;
      const double old = before.master[i];
      const double expected =
          old - hyper.lr * (std::copysign(1.0, direction) + hyper.weight_decay * old);
      if (std::abs(direction) > 1e-6) {
        EXPECT_NEAR(problem.master[i], expected, 1e-6);
      }
      EXPECT_NEAR(problem.exp_avg[i], hyper.beta2 * m + (1 - hyper.beta2) * g, 1e-6);
      EXPECT_EQ(problem.param[i].bits, from_float<Float16>(problem.master[i]).bits);
    }
  }
}

TEST(Lion, InstructionSetsAndThreadSplitsAgreeBitForBit) {
  auto generator = fresh_generator();
  Problem start(generator);
  start.exp_avg[7] = start.exp_avg[900] = 0;  // directions of zero and NaN
  start.grad[7] = start.grad[900] = BFloat16{0x8000};
  start.grad[8] = start.grad[901] = BFloat16{0x7FC0};
  Problem full = start;
  {
    const SelectedIsa selected(Isa::scalar);
    lion_step(full.buffers(), segments(), 0, kTotal);
  }
  EXPECT_TRUE(std::isnan(full.master[8]) && std::isnan(full.master[901]));
  EXPECT_EQ(full.master[900], start.master[900]);
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    Problem split = start;
    const LionBuffers buffers = split.buffers();
    const std::vector<LionSegment> chunks = segments();
    split_over_threads(kTotal, 4, [&](std::int64_t begin, std::int64_t end) {
      lion_step(buffers, chunks, begin, end);
    });
    for (std::size_t i = 0; i < kCount; ++i) {
      if (i == 8 || i == 901) {
        EXPECT_TRUE(std::isnan(split.master[i]) && std::isnan(split.exp_avg[i]));
        continue;
      }
      EXPECT_EQ(split.master[i], full.master[i]);
      EXPECT_EQ(split.exp_avg[i], full.exp_avg[i]);
      EXPECT_EQ(split.param[i].bits, full.param[i].bits);
    }
  }
}

}  // namespace
}  // namespace zero_ext::core
