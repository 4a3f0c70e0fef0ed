#include "../../core/compression/blockwise.h"

#include <bit>
#include <cmath>
#include <limits>

#include "../test_support.h"

namespace zero_ext::core {
namespace {

using testing::available_isas;
using testing::fresh_generator;
using testing::SelectedIsa;
using testing::split_over_threads;

constexpr std::int64_t kBlock = kQuantizationBlock;
constexpr std::size_t kCount = 3 * kBlock + 29;
constexpr DynamicCode kCodes[] = {DynamicCode::is_signed, DynamicCode::is_unsigned};

struct Quantized {
  std::vector<std::uint8_t> codes;
  std::vector<float> scales;
};

// The values of a code from its definition, bit by bit, sorted.
std::vector<double> values_of(DynamicCode code) {
  const bool is_signed = code == DynamicCode::is_signed;
  std::vector<double> values{0, 1};
  for (int zeros = 0; zeros < 7; ++zeros) {
    const int cells = 1 << ((is_signed ? 6 : 7) - zeros);
    for (int cell = 0; cell < cells; ++cell) {
      const double value = std::pow(10.0, -zeros) * (0.1 + 0.9 * (cell + 0.5) / cells);
      values.push_back(value);
      if (is_signed) values.push_back(-value);
    }
  }
  std::sort(values.begin(), values.end());
  return values;
}

// Magnitudes over nine decades, exact zeros among them.
std::vector<float> spread_values(std::mt19937_64& generator, DynamicCode code) {
  std::uniform_real_distribution<float> exponent(-9, 0);
  std::vector<float> values(kCount);
  for (float& value : values) {
    value = generator() % 16 == 0 ? 0.0F : 3e-5F * std::pow(10.0F, exponent(generator));
    if (code == DynamicCode::is_signed && generator() % 2 == 0) value = -value;
  }
  return values;
}

Quantized quantize(const std::vector<float>& values, DynamicCode code) {
  Quantized result{std::vector<std::uint8_t>(values.size(), 0xAA),
                   std::vector<float>(block_count(std::ssize(values)), -7)};
  quantize_blockwise(values.data(), std::ssize(values), code, result.codes.data(),
                     result.scales.data());
  return result;
}

std::vector<float> dequantize(const Quantized& quantized, DynamicCode code) {
  std::vector<float> values(quantized.codes.size(), -7);
  dequantize_blockwise(quantized.codes.data(), quantized.scales.data(), std::ssize(values), code,
                       values.data());
  return values;
}

TEST(Blockwise, CodesStandForTheValuesOfTheirDefinition) {
  Quantized all{std::vector<std::uint8_t>(256), {1.0F}};
  for (int i = 0; i < 256; ++i) all.codes[i] = static_cast<std::uint8_t>(i);
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    for (const DynamicCode code : kCodes) {
      const std::vector<double> expected = values_of(code);
      ASSERT_EQ(expected.size(), 256U);
      const std::vector<float> values = dequantize(all, code);
      for (int i = 0; i < 256; ++i) {
        EXPECT_NEAR(values[i], expected[i], 1.2e-7 * std::abs(expected[i])) << i;
      }
      EXPECT_EQ(quantize(values, code).codes, all.codes);
    }
  }
}

TEST(Blockwise, EachElementUsesTheNearestValue) {
  auto generator = fresh_generator();
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    for (const DynamicCode code : kCodes) {
      const std::vector<double> table = values_of(code);
      const double smallest = *std::upper_bound(table.begin(), table.end(), 0.0);
      const std::vector<float> values = spread_values(generator, code);
      const Quantized quantized = quantize(values, code);
      const std::vector<float> back = dequantize(quantized, code);
      for (std::size_t i = 0; i < kCount; ++i) {
        const double scale = quantized.scales[i / kBlock];
        double nearest = std::numeric_limits<double>::infinity();
        for (const double value : table) {
          nearest = std::min(nearest, std::abs(value * scale - values[i]));
        }
        if (code == DynamicCode::is_unsigned && values[i] > 0 && values[i] < smallest * scale) {
          EXPECT_EQ(quantized.codes[i], 1);
          continue;
        }
        EXPECT_LE(std::abs(static_cast<double>(back[i]) - values[i]),
                  nearest * (1 + 0x1p-12) + 4e-7 * std::abs(values[i]))
            << values[i] / scale;
      }
      for (std::size_t begin = 0; begin < kCount; begin += kBlock) {
        float largest = 0;
        for (std::size_t i = begin; i < std::min<std::size_t>(begin + kBlock, kCount); ++i) {
          if (std::abs(values[i]) > std::abs(largest)) largest = values[i];
        }
        EXPECT_EQ(quantized.scales[begin / kBlock], largest);
      }
    }
  }
}

TEST(Blockwise, OfTwoEqualMagnitudesThePositiveOneIsTheScale) {
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    for (const float last : {-2.0F, 2.0F}) {
      EXPECT_EQ(quantize({1.0F, -last, -1.5F, last}, DynamicCode::is_signed).scales[0], 2.0F);
    }
    EXPECT_EQ(quantize({1.0F, -2.0F, 1.5F}, DynamicCode::is_signed).scales[0], -2.0F);
  }
}

TEST(Blockwise, QuantizingAgainChangesNothing) {
  auto generator = fresh_generator();
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    for (const DynamicCode code : kCodes) {
      const bool is_signed = code == DynamicCode::is_signed;
      Quantized quantized{
          std::vector<std::uint8_t>(kCount),
          {is_signed ? -3.3F : 3.3F, 0.0F, std::numeric_limits<float>::min(), 1e38F}};
      for (std::uint8_t& each : quantized.codes) each = static_cast<std::uint8_t>(generator());
      for (std::size_t i = 0; i < kCount; i += kBlock) quantized.codes[i] = 255;
      const std::uint8_t zero = is_signed ? 127 : 0;
      std::fill_n(quantized.codes.begin() + kBlock, kBlock, zero);
      const Quantized again = quantize(dequantize(quantized, code), code);
      EXPECT_EQ(again.codes, quantized.codes);
      EXPECT_EQ(again.scales, quantized.scales);
      const Quantized once = quantize(spread_values(generator, code), code);
      const Quantized twice = quantize(dequantize(once, code), code);
      EXPECT_EQ(twice.codes, once.codes);
      EXPECT_EQ(twice.scales, once.scales);
    }
  }
}

TEST(Blockwise, NonFiniteBlocksReadBackAsNaNAndTinyOnesAsZeros) {
  auto generator = fresh_generator();
  constexpr float infinity = std::numeric_limits<float>::infinity();
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    for (const DynamicCode code : kCodes) {
      std::vector<float> values = spread_values(generator, code);
      values[5] = std::numeric_limits<float>::quiet_NaN();
      for (std::int64_t i = kBlock; i < 2 * kBlock; ++i) values[i] = i % 2 == 0 ? 1e-39F : 0;
      values[kCount - 1] = infinity;
      const Quantized quantized = quantize(values, code);
      const std::vector<float> back = dequantize(quantized, code);
      for (std::int64_t i = 0; i < std::ssize(back); ++i) {
        const std::int64_t block = i / kBlock;
        EXPECT_EQ(std::isnan(back[i]), block == 0 || block == 3) << i;
        EXPECT_TRUE(block != 1 || back[i] == 0) << i;
      }
    }
  }
}

TEST(Blockwise, InstructionSetsAndThreadSplitsAgreeBitForBit) {
  auto generator = fresh_generator();
  for (const DynamicCode code : kCodes) {
    const std::vector<float> values = spread_values(generator, code);
    Quantized expected;
    std::vector<float> expected_back;
    {
      const SelectedIsa selected(Isa::scalar);
      expected = quantize(values, code);
      expected_back = dequantize(expected, code);
    }
    for (const Isa isa : available_isas()) {
      const SelectedIsa selected(isa);
      Quantized split{std::vector<std::uint8_t>(kCount, 0xAA), std::vector<float>(4, -7)};
      split_over_threads(4, 3, [&](std::int64_t first, std::int64_t last) {
        const std::int64_t begin = first * kBlock;
        const auto end = std::min<std::int64_t>(last * kBlock, kCount);
        quantize_blockwise(values.data() + begin, end - begin, code, split.codes.data() + begin,
                           split.scales.data() + first);
      });
      EXPECT_EQ(split.codes, expected.codes);
      EXPECT_EQ(split.scales, expected.scales);
      const std::vector<float> back = dequantize(split, code);
      for (std::size_t i = 0; i < kCount; ++i) {
        EXPECT_EQ(std::bit_cast<std::uint32_t>(back[i]),
                  std::bit_cast<std::uint32_t>(expected_back[i]));
      }
    }
  }
}

}  // namespace
}  // namespace zero_ext::core
