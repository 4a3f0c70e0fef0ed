#include "../../core/optimizers/lamb.h"

#include <array>
#include <cmath>

#include "../../core/norm/squared_norm.h"
#include "../test_support.h"

namespace zero_ext::core {
namespace {

using testing::available_isas;
using testing::fresh_generator;
using testing::normal_values;
using testing::SelectedIsa;
using testing::split_over_threads;

constexpr std::size_t kCount = 5021;  // more than two blocks of the exact norm
constexpr std::int64_t kTotal = 197 + 4820;
constexpr LambHyperparameters kHyper{1e-2, 0.9, 0.99, 1e-6, 0.1, 0.3, 0.04, false, false, 1.5};
constexpr LambHyperparameters kOther{3e-2, 0.2, 0.5, 1e-1, 0.0, 1.0, 1.0, true, true, 0.3};

struct Problem {
  std::vector<float> master;
  std::vector<BFloat16> exp_avg;
  std::vector<BFloat16> exp_avg_sq;
  std::vector<Float16> grad;
  std::vector<BFloat16> param;

  explicit Problem(std::mt19937_64& generator)
      : master(normal_values<float>(generator, kCount)),
        exp_avg(normal_values<BFloat16>(generator, kCount)),
        exp_avg_sq(normal_values<BFloat16>(generator, kCount)),
        grad(normal_values<Float16>(generator, kCount)),
        param(kCount, BFloat16{0x7FC0}) {
    for (BFloat16& each : exp_avg_sq) each.bits &= 0x7FFF;
  }

  LambBuffers buffers() {
    return {master.data(), exp_avg.data(),       exp_avg_sq.data(), NumericType::bfloat16,
            grad.data(),   NumericType::float16, param.data(),      NumericType::bfloat16};
  }
};

std::vector<LambSegment> segments() {
  return {{3, 200, lamb_coefficients(kHyper, 0.5F)},
          {200, 200, lamb_coefficients(kHyper, 0.5F)},
          {201, 5021, lamb_coefficients(kOther, 0.5F)}};
}

double sum_of(Superaccumulator& total) {
  std::array<std::int64_t, Superaccumulator::kEntries> entries{};
  total.add_to(entries);
  double result = -1;
  EXPECT_TRUE(Superaccumulator::value(entries, result));
  return result;
}

// Element i's update before the trust ratio, from the values before the step.
double update_of(const Problem& before, std::size_t i, const LambHyperparameters& hyper) {
  const double g = 0.5 * to_float(before.grad[i]) * (hyper.maximize ? -1 : 1);
  const double m = hyper.beta1 * to_float(before.exp_avg[i]) + (1 - hyper.beta1) * g;
  const double v = hyper.beta2 * to_float(before.exp_avg_sq[i]) + (1 - hyper.beta2) * g * g;
  const double square = v / hyper.correction2;
  const double root =
      hyper.eps_inside_sqrt ? std::sqrt(square + hyper.eps) : std::sqrt(square) + hyper.eps;
  return m / hyper.correction1 / root + hyper.weight_decay * before.master[i];
}

TEST(Lamb, MatchesDoubleReferenceAndLeavesTheRest) {
  auto generator = fresh_generator();
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    Problem problem(generator);
    const Problem before = problem;
    std::vector<LambNorms> norms(3);
    std::mutex mutex;
    lamb_norms(problem.buffers(), segments(), 0, kTotal, norms, mutex);
    EXPECT_EQ(problem.master, before.master);
    lamb_step(problem.buffers(), segments(), 0, kTotal);
    std::array<double, 3> expected{};
    for (std::size_t i = 0; i < kCount; ++i) {
      if (i < 3 || i == 200) {
        EXPECT_EQ(problem.master[i], before.master[i]);
        EXPECT_EQ(problem.exp_avg[i].bits, before.exp_avg[i].bits);
        EXPECT_EQ(problem.param[i].bits, 0x7FC0);
        continue;
      }
      const LambHyperparameters hyper = i < 200 ? kHyper : kOther;
      const double update = update_of(before, i, hyper);
      expected[i < 200 ? 0 : 2] += update * update;
      const double old = before.master[i];
      EXPECT_NEAR(problem.master[i], old - hyper.lr * hyper.trust_ratio * update,
                  1e-6 * (1 + std::abs(update)));
      EXPECT_EQ(problem.param[i].bits, from_float<BFloat16>(problem.master[i]).bits);
    }
    for (std::size_t i = 0; i < norms.size(); ++i) {
      EXPECT_NEAR(sum_of(norms[i].updates), expected[i], 1e-5 * expected[i]);
    }
    Superaccumulator weights;
    add_squares(before.master.data(), NumericType::float32, 201, 5021, weights);
    EXPECT_EQ(sum_of(norms[2].weights), sum_of(weights));
  }
}

TEST(Lamb, InstructionSetsAndThreadSplitsAgreeBitForBit) {
  auto generator = fresh_generator();
  Problem start(generator);
  Problem full = start;
  std::vector<LambNorms> reference(3);
  std::mutex mutex;
  {
    const SelectedIsa selected(Isa::scalar);
    lamb_norms(full.buffers(), segments(), 0, kTotal, reference, mutex);
    lamb_step(full.buffers(), segments(), 0, kTotal);
  }
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    Problem split = start;
    const LambBuffers buffers = split.buffers();
    const std::vector<LambSegment> chunks = segments();
    std::vector<LambNorms> norms(3);
    split_over_threads(kTotal, 4, [&](std::int64_t begin, std::int64_t end) {
      lamb_norms(buffers, chunks, begin, end, norms, mutex);
    });
    split_over_threads(kTotal, 4, [&](std::int64_t begin, std::int64_t end) {
      lamb_step(buffers, chunks, begin, end);
    });
    EXPECT_EQ(split.master, full.master);
    for (std::size_t i = 0; i < kCount; ++i) {
      EXPECT_EQ(split.exp_avg[i].bits, full.exp_avg[i].bits);
      EXPECT_EQ(split.exp_avg_sq[i].bits, full.exp_avg_sq[i].bits);
    }
    for (std::size_t i = 0; i < norms.size(); ++i) {
      LambNorms expected = reference[i];
      EXPECT_EQ(sum_of(norms[i].updates), sum_of(expected.updates));
      EXPECT_EQ(sum_of(norms[i].weights), sum_of(expected.weights));
    }
  }
}

}  // namespace
}  // namespace zero_ext::core
