#include "../../core/optimizers/adam.h"

#include <bit>
#include <cmath>

#include "../test_support.h"

namespace zero_ext::core {
namespace {

using testing::available_isas;
using testing::fresh_generator;
using testing::normal_values;
using testing::SelectedIsa;
using testing::split_over_threads;

constexpr std::size_t kCount = 1021;

// Buffers of exactly kCount elements, so that a sanitizer sees any access past the end.
struct Problem {
  std::vector<float> master;
  std::vector<float> exp_avg;
  std::vector<float> exp_avg_sq;
  std::vector<BFloat16> grad;
  std::vector<Float16> param;

  explicit Problem(std::mt19937_64& generator)
      : master(normal_values<float>(generator, kCount)),
        exp_avg(normal_values<float>(generator, kCount)),
        exp_avg_sq(normal_values<float>(generator, kCount)),
        grad(normal_values<BFloat16>(generator, kCount)),
        param(kCount, Float16{0x7E00}) {
    for (float& value : exp_avg_sq) value *= value;
  }

  AdamBuffers buffers() {
    return {master.data(), exp_avg.data(),        exp_avg_sq.data(), NumericType::float32,
            grad.data(),   NumericType::bfloat16, param.data(),      NumericType::float16};
  }
};

constexpr AdamHyperparameters kHyper{1e-2, 0.9, 0.999, 1e-8, 0.1, 3, true, false};

std::vector<AdamSegment> segments() {
  AdamHyperparameters coupled = kHyper;
  coupled.decoupled = false;
  coupled.maximize = true;
  coupled.beta1 = 0.2;
  return {{3, 200, adam_coefficients(kHyper, 0.5F)},
          {200, 200, adam_coefficients(kHyper, 0.5F)},
          {201, 1021, adam_coefficients(coupled, 0.5F)}};
}

// The update in double, straight from the papers.
double reference(double master, double exp_avg, double exp_avg_sq, double grad,
                 const AdamHyperparameters& hyper) {
  double g = 0.5 * grad * (hyper.maximize ? -1 : 1);
  if (hyper.decoupled) {
    master *= 1 - hyper.lr * hyper.weight_decay;
  } else {
    g += hyper.weight_decay * master;
  }
  const double m = hyper.beta1 * exp_avg + (1 - hyper.beta1) * g;
  const double v = hyper.beta2 * exp_avg_sq + (1 - hyper.beta2) * g * g;
  const double m_hat = m / (1 - std::pow(hyper.beta1, hyper.step));
  const double v_hat = v / (1 - std::pow(hyper.beta2, hyper.step));
  return master - hyper.lr * m_hat / (std::sqrt(v_hat) + hyper.eps);
}

TEST(Adam, MatchesDoubleReferenceAndLeavesTheRest) {
  auto generator = fresh_generator();
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    Problem problem(generator);
    const Problem before = problem;
    adam_step(problem.buffers(), segments(), 0, 197 + 820);
    for (std::size_t i = 0; i < kCount; ++i) {
      if (i < 3 || i == 200) {
        EXPECT_EQ(problem.master[i], before.master[i]);
        EXPECT_EQ(problem.param[i].bits, 0x7E00);
        continue;
      }
      AdamHyperparameters hyper = kHyper;
      if (i > 200) {
        hyper.decoupled = false;
        hyper.maximize = true;
        hyper.beta1 = 0.2;
      }
      const double expected = reference(before.master[i], before.exp_avg[i], before.exp_avg_sq[i],
                                        to_float(before.grad[i]), hyper);
      EXPECT_NEAR(problem.master[i], expected, 4e-6 * (1 + std::abs(expected)));
      EXPECT_EQ(problem.param[i].bits, from_float<Float16>(problem.master[i]).bits);
    }
  }
}

TEST(Adam, InstructionSetsAndThreadSplitsAgreeBitForBit) {
  auto generator = fresh_generator();
  const Problem start(generator);
  Problem full = start;
  {
    const SelectedIsa selected(Isa::scalar);
    adam_step(full.buffers(), segments(), 0, 197 + 820);
  }
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    Problem split = start;
    const AdamBuffers buffers = split.buffers();
    const std::vector<AdamSegment> chunks = segments();
    split_over_threads(197 + 820, 4, [&](std::int64_t begin, std::int64_t end) {
      adam_step(buffers, chunks, begin, end);
    });
    EXPECT_EQ(split.master, full.master);
    EXPECT_EQ(split.exp_avg, full.exp_avg);
    EXPECT_EQ(split.exp_avg_sq, full.exp_avg_sq);
    for (std::size_t i = 0; i < kCount; ++i) EXPECT_EQ(split.param[i].bits, full.param[i].bits);
  }
}

}  // namespace
}  // namespace zero_ext::core
