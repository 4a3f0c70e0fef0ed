#include <cstring>
#include <limits>
#include <mutex>

#include "../../../core/optimizers/optimizer_step.h"
#include "../../../cuda/optimizers/lamb_norms_kernel.h"
#include "cuda_optimizer_support.h"

namespace zero_ext::cuda {
namespace {

using core::NumericType;
using core::Superaccumulator;
using core::testing::fresh_generator;
using testing::Buffer;
using testing::kTypes;
using zero_ext::testing::emulate_launch;

using Problem = testing::StepProblem<core::LambRule>;

// Calls visit(std::type_identity<Moment>, std::type_identity<Grad>).
template <class Visit>
void with_types(const core::StepBuffers& buffers, const Visit& visit) {
  with_type(buffers.grad_type, [&](auto grad) {
    if (buffers.moment_type == NumericType::float32)
      return visit(std::type_identity<float>{}, grad);
    visit(std::type_identity<core::BFloat16>{}, grad);
  });
}

using Sums = std::vector<std::int64_t>;

Sums sums_of_the_cpu(Problem& problem, const std::vector<core::LambSegment>& segments,
                     const Sums& before) {
  std::vector<core::LambNorms> norms(segments.size());
  std::mutex mutex;
  core::lamb_norms(problem.buffers(), segments, 0, core::total_of(segments), norms, mutex);
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
  const core::StepBuffers buffers = problem.buffers();
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

// Of segments within a chunk and over many; added to what is there, twice.
TEST(CudaLambNorms, AreTheCpusBits) {
  auto generator = fresh_generator();
  for (const NumericType moments : {NumericType::float32, NumericType::bfloat16}) {
    for (const NumericType grad : kTypes) {
      const auto numel = static_cast<std::int64_t>(1 + generator() % 20000);
      const auto plan = testing::random_plan<core::LambRule>(numel, generator, 5000);
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

TEST(CudaLambNorms, AScaleThatIsNotFiniteAndARefusedSegmentAddNothing) {
  auto generator = fresh_generator();
  testing::Plan<core::LambRule> plan;
  plan.add(0, 150, testing::Sample<core::LambRule>::kRow);
  plan.add(150, 300, testing::Sample<core::LambRule>::kOther);
  Problem problem(300, {}, 0, generator);
  const Sums nothing(4 * Superaccumulator::kEntries);
  EXPECT_NE(emulated_sums(problem, 300, plan.prepared(300), nothing, 2, generator), nothing);
  const auto refused = plan.attempted(299).first;
  EXPECT_EQ(emulated_sums(problem, 300, refused, nothing, 2, generator), nothing);
  plan.scale = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(emulated_sums(problem, 300, plan.prepared(300), nothing, 2, generator), nothing);
}

}  // namespace
}  // namespace zero_ext::cuda
