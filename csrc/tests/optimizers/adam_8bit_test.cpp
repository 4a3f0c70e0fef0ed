#include "../../core/optimizers/adam_8bit.h"

#include <cmath>
#include <limits>

#include "../../core/optimizers/optimizer_step.h"
#include "step_samples.h"

namespace zero_ext::core {
namespace {

using testing::available_isas;
using testing::fresh_generator;
using testing::normal_values;
using testing::SelectedIsa;
using testing::split_over_threads;

constexpr std::int64_t kBlock = kQuantizationBlock;
constexpr std::size_t kCount = 6 * kBlock + 29;
constexpr std::int64_t kBlocks = 7;

using Sample = testing::Sample<AdamRule>;

// Buffers of exactly kCount elements, so that a sanitizer sees any access past the end.
struct Problem {
  std::vector<float> master;
  std::vector<std::uint8_t> exp_avg_codes;
  std::vector<std::uint8_t> exp_avg_sq_codes;
  std::vector<float> exp_avg_scales;
  std::vector<float> exp_avg_sq_scales;
  std::vector<BFloat16> grad;
  std::vector<Float16> param;

  explicit Problem(std::mt19937_64& generator)
      : master(normal_values<float>(generator, kCount)),
        exp_avg_codes(kCount),
        exp_avg_sq_codes(kCount),
        exp_avg_scales(kBlocks),
        exp_avg_sq_scales(kBlocks),
        grad(normal_values<BFloat16>(generator, kCount)),
        param(kCount, Float16{0x7E00}) {
    for (std::uint8_t& code : exp_avg_codes) code = static_cast<std::uint8_t>(generator());
    for (std::uint8_t& code : exp_avg_sq_codes) code = static_cast<std::uint8_t>(generator());
    std::uniform_real_distribution<float> scale(1e-3F, 10.0F);
    for (float& each : exp_avg_scales) each = scale(generator);
    for (float& each : exp_avg_sq_scales) each = scale(generator);
  }

  Adam8BitBuffers buffers() {
    return {static_cast<std::int64_t>(kCount),
            master.data(),
            exp_avg_codes.data(),
            exp_avg_sq_codes.data(),
            exp_avg_scales.data(),
            exp_avg_sq_scales.data(),
            grad.data(),
            NumericType::bfloat16,
            param.data(),
            NumericType::float16};
  }

  std::vector<float> moment(DynamicCode code) const {
    const bool first = code == DynamicCode::is_signed;
    std::vector<float> values(kCount);
    dequantize_blockwise(first ? exp_avg_codes.data() : exp_avg_sq_codes.data(),
                         first ? exp_avg_scales.data() : exp_avg_sq_scales.data(), kCount, code,
                         values.data());
    return values;
  }

  void set_moments(const std::vector<float>& exp_avg, const std::vector<float>& exp_avg_sq) {
    quantize_blockwise(exp_avg.data(), kCount, DynamicCode::is_signed, exp_avg_codes.data(),
                       exp_avg_scales.data());
    quantize_blockwise(exp_avg_sq.data(), kCount, DynamicCode::is_unsigned, exp_avg_sq_codes.data(),
                       exp_avg_sq_scales.data());
  }

  bool operator==(const Problem& other) const {
    for (std::size_t i = 0; i < kCount; ++i) {
      if (param[i].bits != other.param[i].bits) return false;
    }
    return master == other.master && exp_avg_codes == other.exp_avg_codes &&
           exp_avg_sq_codes == other.exp_avg_sq_codes && exp_avg_scales == other.exp_avg_scales &&
           exp_avg_sq_scales == other.exp_avg_sq_scales;
  }
};

// Borders inside blocks and on them, a gap of one element, an empty segment alone in block 2, block
// 3 untouched, two kinds of hyper-parameters in block 4.
std::vector<AdamSegment> segments() {
  const AdamRule::Coefficients plain = AdamRule::coefficients(Sample::kRow.data(), 0.5F);
  const AdamRule::Coefficients coupled = AdamRule::coefficients(Sample::kOther.data(), 0.5F);
  return {{3, 200, plain},
          {201, 2 * kBlock, coupled},
          {2 * kBlock + 9, 2 * kBlock + 9, plain},
          {4 * kBlock, 4 * kBlock + 7, plain},
          {4 * kBlock + 7, kCount - 1, coupled}};
}

constexpr bool untouched(std::int64_t element) {
  return element / kBlock == 2 || element / kBlock == 3;
}

TEST(Adam8Bit, EqualsAdamOnDequantizedMomentsThatAreQuantizedAgain) {
  auto generator = fresh_generator();
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    Problem problem(generator);
    const Problem before = problem;
    Problem expected = problem;
    std::vector<float> exp_avg = expected.moment(DynamicCode::is_signed);
    std::vector<float> exp_avg_sq = expected.moment(DynamicCode::is_unsigned);
    const std::vector<AdamSegment> chunks = segments();
    const StepBuffers unquantized{expected.master.data(), {exp_avg.data(), exp_avg_sq.data()},
                                  NumericType::float32,   expected.grad.data(),
                                  NumericType::bfloat16,  expected.param.data(),
                                  NumericType::float16};
    optimizer_step<AdamRule>(unquantized, chunks, 0, total_of(chunks));
    expected.set_moments(exp_avg, exp_avg_sq);
    for (std::int64_t i = 0; i < std::ssize(expected.exp_avg_codes); ++i) {
      if (!untouched(i)) continue;
      expected.exp_avg_codes[i] = before.exp_avg_codes[i];
      expected.exp_avg_sq_codes[i] = before.exp_avg_sq_codes[i];
      expected.exp_avg_scales[i / kBlock] = before.exp_avg_scales[i / kBlock];
      expected.exp_avg_sq_scales[i / kBlock] = before.exp_avg_sq_scales[i / kBlock];
    }
    adam_step_8bit(problem.buffers(), chunks, 0, kBlocks);
    EXPECT_TRUE(problem == expected);
    EXPECT_EQ(problem.master[kCount - 1], before.master[kCount - 1]);
    EXPECT_EQ(problem.param[200].bits, 0x7E00);
  }
}

TEST(Adam8Bit, InstructionSetsAndThreadSplitsAgreeBitForBit) {
  auto generator = fresh_generator();
  const Problem start(generator);
  const std::vector<AdamSegment> chunks = segments();
  Problem full = start;
  {
    const SelectedIsa selected(Isa::scalar);
    adam_step_8bit(full.buffers(), chunks, 0, kBlocks);
  }
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    Problem split = start;
    const Adam8BitBuffers buffers = split.buffers();
    split_over_threads(kBlocks, 4, [&](std::int64_t first, std::int64_t last) {
      adam_step_8bit(buffers, chunks, first, last);
    });
    EXPECT_TRUE(split == full);
  }
}

TEST(Adam8Bit, ANaNUsesItsBlockAndNoOther) {
  auto generator = fresh_generator();
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    Problem problem(generator);
    problem.grad[kBlock + 3] = BFloat16{0x7FC0};
    adam_step_8bit(problem.buffers(), segments(), 0, kBlocks);
    for (const DynamicCode code : {DynamicCode::is_signed, DynamicCode::is_unsigned}) {
      const std::vector<float> values = problem.moment(code);
      for (std::int64_t i = 0; i < std::ssize(values); ++i) {
        EXPECT_EQ(std::isnan(values[i]), i / kBlock == 1) << i;
      }
    }
    // The weights of the block's other elements were computed before it was quantized.
    for (std::int64_t i = 0; i < std::ssize(problem.master); ++i) {
      EXPECT_EQ(std::isnan(problem.master[i]), i == kBlock + 3) << i;
    }
    adam_step_8bit(problem.buffers(), segments(), 0, kBlocks);
    EXPECT_TRUE(std::isnan(problem.master[kBlock + 100]));
    EXPECT_FALSE(std::isnan(problem.master[kBlock - 1]));
  }
}

}  // namespace
}  // namespace zero_ext::core
