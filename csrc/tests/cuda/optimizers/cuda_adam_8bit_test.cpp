#include <cmath>
#include <limits>

#include "../../../core/optimizers/optimizer_step.h"
#include "../../../cuda/optimizers/adam_8bit_kernel.h"
#include "cuda_optimizer_support.h"

namespace zero_ext::cuda {
namespace {

using core::NumericType;
using core::testing::fresh_generator;
using testing::Buffer;
using testing::kTypes;
using zero_ext::testing::emulate_launch;

using Sample = testing::Sample<core::AdamRule>;

std::vector<std::uint8_t> random_codes(std::int64_t count, std::mt19937_64& generator) {
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(count));
  for (auto& code : codes) code = static_cast<std::uint8_t>(generator());
  return codes;
}

std::vector<float> random_scales(std::int64_t count, std::mt19937_64& generator) {
  std::vector<float> scales(static_cast<std::size_t>(core::block_count(count)));
  for (auto& scale : scales) scale = std::ldexp(1.0F, static_cast<int>(generator() % 8) - 4);
  return scales;
}

struct Problem {
  std::int64_t count;
  std::int64_t shift;
  NumericType grad_type;
  std::optional<NumericType> param_type;
  Buffer master;
  Buffer grad;
  Buffer param;
  std::vector<std::uint8_t> codes[2];
  std::vector<float> scales[2];

  Problem(std::int64_t numel, std::int64_t by, NumericType grad_as,
          std::optional<NumericType> param_as, std::mt19937_64& generator)
      : count(numel),
        shift(by),
        grad_type(grad_as),
        param_type(param_as),
        master(numel, NumericType::float32, by, generator),
        grad(numel, grad_as, by, generator),
        param(numel, param_as.value_or(NumericType::float32), by, generator) {
    for (auto& each : codes) each = random_codes(numel + by, generator);
    for (auto& each : scales) each = random_scales(numel, generator);
  }

  core::Adam8BitBuffers buffers() {
    return {count,
            static_cast<float*>(master.data()),
            codes[0].data() + shift,
            codes[1].data() + shift,
            scales[0].data(),
            scales[1].data(),
            grad.data(),
            grad_type,
            param_type ? param.data() : nullptr,
            param_type};
  }
  bool operator==(const Problem& other) const {
    return master == other.master && grad == other.grad && param == other.param &&
           codes[0] == other.codes[0] && codes[1] == other.codes[1] &&
           scales[0] == other.scales[0] && scales[1] == other.scales[1];
  }
};

void emulate_step(Problem& problem, const std::vector<core::AdamSegment>& segments,
                  std::int64_t warps, std::mt19937_64& generator) {
  const core::Adam8BitBuffers buffers = problem.buffers();
  const auto run = [&]<class Grad, class Param>(std::type_identity<Grad>,
                                                std::type_identity<Param>) {
    emulate_launch(AdamBlocks<Grad, Param>::of(buffers, segments.data(),
                                               static_cast<std::int64_t>(segments.size())),
                   warps, generator);
  };
  with_type(problem.grad_type, [&](auto grad) {
    if (!problem.param_type) return run(grad, std::type_identity<NoParam>{});
    with_type(*problem.param_type, [&](auto param) { run(grad, param); });
  });
}

void cpu_step(Problem& problem, const std::vector<core::AdamSegment>& segments) {
  core::adam_step_8bit(problem.buffers(), segments, 0, core::block_count(problem.count));
}

TEST(CudaAdam8Bit, EveryTypeGridAndAlignmentYieldsTheBitsOfTheCpu) {
  auto generator = fresh_generator();
  for (const NumericType grad : kTypes) {
    for (int param = 0; param <= core::kNumericTypes; ++param) {
      const auto param_type = param == core::kNumericTypes
                                  ? std::nullopt
                                  : std::optional(static_cast<NumericType>(param));
      for (const std::int64_t shift : {0, 3}) {
        const auto count = static_cast<std::int64_t>(1 + generator() % 9000);
        const auto plan = testing::random_plan<core::AdamRule>(count, generator, 4000);
        const auto segments = plan.prepared(count);
        const Problem start(count, shift, grad, param_type, generator);
        Problem expected = start;
        cpu_step(expected, segments);
        EXPECT_FALSE(expected == start && core::total_of(segments) > 0);
        for (const std::int64_t warps : {1, 3, 64}) {
          Problem problem = start;
          emulate_step(problem, segments, warps, generator);
          EXPECT_TRUE(problem == expected) << "grad " << static_cast<int>(grad) << " param "
                                           << param << " shift " << shift << " warps " << warps;
        }
      }
    }
  }
}

// Empty segments in blocks of their own, a gap of several blocks, a border at a block's begin.
TEST(CudaAdam8Bit, BlocksThatNoSegmentTouchesStay) {
  auto generator = fresh_generator();
  testing::Plan<core::AdamRule> plan;
  plan.add(3, 200, Sample::kRow);
  plan.add(300, 300, Sample::kOther);
  plan.add(301, 301, Sample::kRow);
  plan.add(1024, 1030, Sample::kOther);
  plan.add(1030, 1280, Sample::kRow);
  const auto segments = plan.prepared(1500);
  const Problem start(1500, 0, NumericType::bfloat16, NumericType::bfloat16, generator);
  Problem expected = start;
  cpu_step(expected, segments);
  Problem problem = start;
  emulate_step(problem, segments, 5, generator);
  EXPECT_TRUE(problem == expected);
  for (const std::int64_t untouched : {256, 767, 1023, 1280, 1499}) {
    EXPECT_EQ(problem.codes[0][untouched], start.codes[0][untouched]);
    EXPECT_EQ(problem.scales[1][untouched / 256], start.scales[1][untouched / 256]);
  }
  EXPECT_NE(problem.scales[1][4], start.scales[1][4]);
}

TEST(CudaAdam8Bit, AScaleThatIsNotFiniteChangesNothing) {
  auto generator = fresh_generator();
  auto plan = testing::random_plan<core::AdamRule>(900, generator);
  plan.scale = std::numeric_limits<float>::infinity();
  const Problem start(900, 0, NumericType::float16, NumericType::float16, generator);
  Problem problem = start;
  emulate_step(problem, plan.prepared(900), 2, generator);
  EXPECT_TRUE(problem == start);
}

TEST(CudaAdam8Bit, ANaNUsesItsBlockAsOnTheCpu) {
  auto generator = fresh_generator();
  testing::Plan<core::AdamRule> plan;
  plan.add(0, 600, Sample::kRow);
  const auto segments = plan.prepared(600);
  Problem start(600, 0, NumericType::float32, std::nullopt, generator);
  static_cast<float*>(start.grad.data())[300] = std::numeric_limits<float>::quiet_NaN();
  Problem expected = start;
  cpu_step(expected, segments);
  Problem problem = start;
  emulate_step(problem, segments, 2, generator);
  for (int moment = 0; moment < 2; ++moment) {
    EXPECT_EQ(problem.codes[moment], expected.codes[moment]);
    EXPECT_TRUE(std::isnan(problem.scales[moment][1]));
    EXPECT_EQ(problem.scales[moment][0], expected.scales[moment][0]);
    EXPECT_EQ(problem.scales[moment][2], expected.scales[moment][2]);
  }
}

}  // namespace
}  // namespace zero_ext::cuda
