#include <array>
#include <limits>
#include <mutex>

#include "../../../cuda/optimizers/lamb_kernel.h"
#include "cuda_optimizer_support.h"

namespace zero_ext::cuda {
namespace {

using core::NumericType;
using core::Superaccumulator;
using core::testing::fresh_generator;
using testing::Buffer;
using testing::kTypes;
using zero_ext::testing::emulate_launch;

// lr, beta1, beta2, eps, weight_decay, correction1, correction2, eps_inside_sqrt, maximize,
// trust_ratio
const std::vector<std::vector<double>> kRows{{1e-2, 0.9, 0.99, 1e-6, 0.1, 0.3, 0.04, 0, 0, 1.5},
                                             {3e-2, 0.2, 0.5, 1e-1, 0, 1, 1, 1, 1, 0.3}};

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

  core::LambBuffers buffers() {
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

// Calls visit(std::type_identity<Moment>, std::type_identity<Grad>).
template <class Visit>
void with_types(const core::LambBuffers& buffers, const Visit& visit) {
  with_type(buffers.grad_type, [&](auto grad) {
    if (buffers.moments == NumericType::float32) return visit(std::type_identity<float>{}, grad);
    visit(std::type_identity<core::BFloat16>{}, grad);
  });
}

void emulate_step(Problem& problem, std::int64_t numel,
                  const std::vector<core::LambSegment>& segments, std::int64_t threads,
                  std::mt19937_64& generator) {
  const core::LambBuffers buffers = problem.buffers();
  with_types(
      buffers, [&]<class Moment, class Grad>(std::type_identity<Moment>, std::type_identity<Grad>) {
        const auto run = [&]<class Param>(std::type_identity<Param>) {
          emulate_launch(
              OptimizerStep<core::LambRule, Moment, Grad, Param>::of(
                  buffers, numel, segments.data(), static_cast<std::int64_t>(segments.size())),
              threads, generator);
        };
        if (!buffers.param_type) return run(std::type_identity<NoParam>{});
        with_type(*buffers.param_type, run);
      });
}

using Sums = std::vector<std::int64_t>;

Sums sums_of_the_cpu(Problem& problem, const std::vector<core::LambSegment>& segments,
                     const Sums& before) {
  std::vector<core::LambNorms> norms(segments.size());
  std::mutex mutex;
  core::lamb_norms(problem.buffers(), segments, 0, testing::total_of(segments), norms, mutex);
  Sums result = before;
  using Entries = std::span<std::int64_t, Superaccumulator::kEntries>;
  auto at = result.begin();
  for (core::LambNorms& each : norms) {
    for (Superaccumulator* total : {&each.weights, &each.updates}) {
      total->add_to(Entries(at, Superaccumulator::kEntries));
      at += Superaccumulator::kEntries;
    }
  }
  return result;
}

// Warps in a random order, each with memory that it must clear itself.
Sums emulated_sums(Problem& problem, std::int64_t numel,
                   const std::vector<core::LambSegment>& segments, Sums sums, std::int64_t warps,
                   std::mt19937_64& generator) {
  const auto count = static_cast<std::int64_t>(segments.size());
  const core::LambBuffers buffers = problem.buffers();
  with_types(buffers,
             [&]<class Moment, class Grad>(std::type_identity<Moment>, std::type_identity<Grad>) {
               using Add = AddLambSquares<Moment, Grad>;
               const Add add = Add::of(buffers, numel, segments.data(), count, sums.data());
               emulate_launch(
                   [&add](std::int64_t warp, std::int64_t all) {
                     typename Add::Memory own;
                     std::memset(&own, 0xFF, sizeof(own));
                     add(warp, all, own);
                   },
                   warps, generator);
             });
  emulate_launch(CarryLambNorms{sums.data(), 2 * count}, 3, generator);
  return sums;
}

TEST(CudaLamb, EveryTypeGridAndAlignmentYieldsTheBitsOfTheCpu) {
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
          const auto plan = testing::random_plan<core::LambHyper>(numel, kRows, generator, 900);
          const auto segments = plan.prepared(numel);
          const Problem start(numel, types, shift, generator);
          Problem expected = start;
          core::lamb_step(expected.buffers(), segments, 0, testing::total_of(segments));
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

// Of segments within a chunk and over many; added to what is there, twice.
TEST(CudaLamb, NormsAreTheCpusBits) {
  auto generator = fresh_generator();
  for (const NumericType moments : {NumericType::float32, NumericType::bfloat16}) {
    for (const NumericType grad : kTypes) {
      const auto numel = static_cast<std::int64_t>(1 + generator() % 20000);
      const auto plan = testing::random_plan<core::LambHyper>(numel, kRows, generator, 5000);
      const auto segments = plan.prepared(numel);
      Problem problem(numel, {moments, grad, std::nullopt}, 3, generator);
      auto* const master = static_cast<float*>(problem.master.data());
      master[generator() % static_cast<std::uint64_t>(numel)] = 1e30F;
      master[generator() % static_cast<std::uint64_t>(numel)] = 1e-40F;
      if (generator() % 2 == 0) {
        master[generator() % static_cast<std::uint64_t>(numel)] =
            std::numeric_limits<float>::infinity();
      }
      const Problem start = problem;
      const Sums nothing(2 * segments.size() * Superaccumulator::kEntries);
      const Sums once = sums_of_the_cpu(problem, segments, nothing);
      const Sums twice = sums_of_the_cpu(problem, segments, once);
      for (const std::int64_t warps : {1, 3, 64}) {
        const Sums found = emulated_sums(problem, numel, segments, nothing, warps, generator);
        EXPECT_EQ(found, once) << numel << " elements, " << warps << " warps";
        EXPECT_EQ(emulated_sums(problem, numel, segments, found, warps, generator), twice);
      }
      EXPECT_TRUE(problem == start);
    }
  }
}

TEST(CudaLamb, AScaleThatIsNotFiniteChangesNothing) {
  auto generator = fresh_generator();
  auto plan = testing::random_plan<core::LambHyper>(300, kRows, generator);
  plan.scale = std::numeric_limits<float>::quiet_NaN();
  const auto segments = plan.prepared(300);
  const Types types{NumericType::float32, NumericType::float16, NumericType::float16};
  const Problem start(300, types, 0, generator);
  Problem problem = start;
  emulate_step(problem, 300, segments, 40, generator);
  EXPECT_TRUE(problem == start);
  const Sums nothing(2 * segments.size() * Superaccumulator::kEntries);
  EXPECT_EQ(emulated_sums(problem, 300, segments, nothing, 2, generator), nothing);
}

TEST(CudaLamb, RecordsHyperParametersOutsideTheirRangeAndChangesNothing) {
  auto generator = fresh_generator();
  testing::Plan<core::LambHyper> plan;
  plan.add(0, 10, kRows[0]);
  plan.add(10, 20, {1e-2, 0.9, 0.99, 1e-6, 0.1, 0.3, 1.5, 0, 0, 1.5});
  const auto [segments, error] = plan.attempted(20);
  EXPECT_EQ(error, "adam_step_: correction2 of hyper[1]: expected in (0, 1], got 1.5.");
  const Types types{NumericType::float32, NumericType::float16, NumericType::float16};
  const Problem start(20, types, 0, generator);
  Problem problem = start;
  emulate_step(problem, 20, segments, 40, generator);
  EXPECT_TRUE(problem == start);
  const Sums nothing(2 * segments.size() * Superaccumulator::kEntries);
  EXPECT_EQ(emulated_sums(problem, 20, segments, nothing, 2, generator), nothing);
}

}  // namespace
}  // namespace zero_ext::cuda
