#include <bit>
#include <cmath>
#include <limits>
#include <string>

#include "../../../cuda/compression/blockwise_kernel.h"
#include "../../test_support.h"
#include "../emulated_launch.h"

namespace zero_ext::cuda {
namespace {

using core::DynamicCode;
using core::SignedDynamicCode;
using core::UnsignedDynamicCode;
using core::testing::fresh_generator;
using zero_ext::testing::emulate_launch;

template <class Code>
constexpr DynamicCode kCode = Code::is_signed ? DynamicCode::is_signed : DynamicCode::is_unsigned;

template <class Code>
class CudaBlockwise : public ::testing::Test {};
using Codes = ::testing::Types<SignedDynamicCode, UnsignedDynamicCode>;
TYPED_TEST_SUITE(CudaBlockwise, Codes);

// Magnitudes over twelve decades with exact zeros among them; in some blocks all is zero or tiny,
// or something is not finite.
template <class Code>
std::vector<float> values_of(std::size_t count, std::mt19937_64& generator) {
  std::uniform_real_distribution<float> exponent(-12, 0);
  std::vector<float> values(count);
  float factor = 1;
  for (std::size_t i = 0; i < count; ++i) {
    if (i % 256 == 0) {
      constexpr float kFactors[] = {1, 1, 3e7F, 1e-20F, 1e-33F, 1e-45F, 0};
      factor = kFactors[generator() % 7];
    }
    values[i] = generator() % 16 == 0 ? 0.0F : factor * std::pow(10.0F, exponent(generator));
    if (Code::is_signed && generator() % 2 == 0) values[i] = -values[i];
    if (generator() % 1500 == 0) values[i] = std::numeric_limits<float>::infinity();
    if (generator() % 1500 == 0) values[i] = std::numeric_limits<float>::quiet_NaN();
  }
  return values;
}

bool same_bits(const std::vector<float>& first, const std::vector<float>& second) {
  return std::equal(first.begin(), first.end(), second.begin(), second.end(), [](float a, float b) {
    return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
  });
}

// From element `shift` on: with none, vectors are aligned for packs.
template <class Code>
void expect_the_bits_of_the_cpu(std::int64_t count, std::int64_t shift,
                                std::mt19937_64& generator) {
  const auto size = static_cast<std::size_t>(count + shift);
  const auto blocks = static_cast<std::size_t>(core::block_count(count));
  const std::vector<float> values = values_of<Code>(size, generator);
  const bool aligned = shift == 0;
  std::vector<std::uint8_t> codes(size, 0xAA);
  std::vector<float> scales(blocks, -7);
  core::quantize_blockwise(values.data() + shift, count, kCode<Code>, codes.data() + shift,
                           scales.data());
  std::vector<float> read(size, -7);
  core::dequantize_blockwise(codes.data() + shift, scales.data(), count, kCode<Code>,
                             read.data() + shift);
  for (const std::int64_t warps : {1, 3, 64}) {
    std::vector<std::uint8_t> own_codes(size, 0xAA);
    std::vector<float> own_scales(blocks, -7);
    DeviceErrorRecord record{};
    emulate_launch(QuantizeBlocks<Code>{&record, values.data() + shift, count,
                                        own_codes.data() + shift, own_scales.data(), aligned},
                   warps, generator);
    EXPECT_FALSE(has_error(&record));
    EXPECT_EQ(own_codes, codes) << count << " elements, shift " << shift << ", " << warps;
    EXPECT_TRUE(same_bits(own_scales, scales)) << count << " elements, shift " << shift;
    std::vector<float> own_read(size, -7);
    emulate_launch(DequantizeBlocks<Code>{codes.data() + shift, scales.data(), count,
                                          own_read.data() + shift, aligned},
                   warps, generator);
    EXPECT_TRUE(same_bits(own_read, read)) << count << " elements, shift " << shift;
  }
}

TYPED_TEST(CudaBlockwise, EveryLengthGridAndAlignmentYieldsTheBitsOfTheCpu) {
  auto generator = fresh_generator();
  for (const std::int64_t count : {0, 1, 7, 8, 255, 256, 257, 1000, 12345}) {
    for (const std::int64_t shift : {0, 1, 5}) {
      expect_the_bits_of_the_cpu<TypeParam>(count, shift, generator);
    }
  }
}

// Not only codes that quantization writes.
TYPED_TEST(CudaBlockwise, EveryCodeAndScaleReadsAsOnTheCpu) {
  auto generator = fresh_generator();
  std::vector<std::uint8_t> codes(256 * 7);
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::uint8_t>(i);
  const std::vector<float> scales{1,
                                  -3.5F,
                                  1e-42F,
                                  3e38F,
                                  -0.0F,
                                  std::numeric_limits<float>::infinity(),
                                  std::numeric_limits<float>::quiet_NaN()};
  const auto count = static_cast<std::int64_t>(codes.size());
  std::vector<float> expected(codes.size());
  core::dequantize_blockwise(codes.data(), scales.data(), count, kCode<TypeParam>, expected.data());
  std::vector<float> read(codes.size(), -7);
  emulate_launch(DequantizeBlocks<TypeParam>{codes.data(), scales.data(), count, read.data(), true},
                 2, generator);
  for (std::size_t i = 0; i < read.size(); ++i) {
    if (std::isnan(expected[i])) {  // whose bits are the machine's affair
      EXPECT_TRUE(std::isnan(read[i])) << i;
    } else {
      EXPECT_EQ(std::bit_cast<std::uint32_t>(read[i]), std::bit_cast<std::uint32_t>(expected[i]))
          << i;
    }
  }
}

// In a run of four blocks, in blocks alone and in a chunk of one. The other blocks are the CPU's.
TEST(CudaBlockwiseUnsigned, ANegativeValueIsRecordedAndItsBlockIsNaN) {
  auto generator = fresh_generator();
  constexpr std::int64_t kCount = 4 * 256 + 256 + 40;
  for (const bool aligned : {true, false}) {
    for (const std::int64_t bad : {0, 255, 700, 1023, 1024, 1300, 1319}) {
      const auto block = static_cast<std::size_t>(bad / 256);
      const std::vector<float> good = values_of<UnsignedDynamicCode>(kCount, generator);
      std::vector<float> values = good;
      values[static_cast<std::size_t>(bad)] = -1e-30F;
      std::vector<std::uint8_t> expected_codes(kCount);
      std::vector<float> expected_scales(6);
      core::quantize_blockwise(good.data(), kCount, DynamicCode::is_unsigned, expected_codes.data(),
                               expected_scales.data());
      std::vector<std::uint8_t> codes(kCount, 0xAA);
      std::vector<float> scales(6, -7);
      DeviceErrorRecord record{};
      emulate_launch(QuantizeBlocks<UnsignedDynamicCode>{&record, values.data(), kCount,
                                                         codes.data(), scales.data(), aligned},
                     3, generator);
      EXPECT_EQ(record.state, DeviceErrorRecord::complete);
      EXPECT_EQ(record.error.index, bad);
      EXPECT_EQ(core::device_error_text(record),
                "quantize_blockwise: entry of values[" + std::to_string(bad) +
                    "]: expected 0 or more for the unsigned code, got " + "-1.00000000317108e-30.");
      EXPECT_TRUE(std::isnan(scales[block])) << bad;
      scales[block] = expected_scales[block];
      EXPECT_TRUE(same_bits(scales, expected_scales)) << bad;
      for (std::size_t i = 0; i < codes.size(); ++i) {
        if (i / 256 == block) continue;
        EXPECT_EQ(codes[i], expected_codes[i]) << bad << " " << i;
      }
    }
  }
}

}  // namespace
}  // namespace zero_ext::cuda
