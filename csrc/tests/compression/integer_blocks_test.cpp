#include "../../core/compression/integer_blocks.h"

#include <bit>
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

constexpr std::int64_t kBlock = 256;
constexpr std::int64_t kCount = 3 * kBlock + 29;
constexpr std::int64_t kBlocks = 4;
constexpr BlockFormat kFormats[] = {
    {4, false, kBlock}, {4, true, kBlock}, {8, false, kBlock}, {8, true, kBlock}};

struct Payload {
  explicit Payload(const BlockFormat& of, std::int64_t count = kCount)
      : format(of),
        words(of.words(count), 0xA5A5A5A5U),
        scales(of.blocks(count) * of.scales(), -7.0F) {}

  PayloadTarget from(std::int64_t block) {
    return {words.data() + block * format.words(format.block),
            scales.data() + block * format.scales()};
  }
  PayloadSource source() const { return {words.data(), scales.data()}; }

  // What element i of kCount stands for, from the definition.
  double at(std::int64_t i) const {
    const std::int64_t block = i / kBlock;
    const std::int64_t own = format.words(std::min(kBlock, kCount - block * kBlock));
    const std::int64_t element = i % kBlock;
    const std::uint32_t word = words[block * format.words(kBlock) + element % own];
    const std::uint32_t mask = (1U << format.bits) - 1;
    const double code = (word >> (format.bits * (element / own))) & mask;
    const float* of_block = scales.data() + block * format.scales();
    if (format.is_symmetric) return (code - (mask + 1) / 2) * of_block[0];
    return code * of_block[0] + static_cast<double>(of_block[1]);
  }
  std::vector<std::uint32_t> bits() const {
    std::vector<std::uint32_t> result = words;
    for (const float scale : scales) result.push_back(std::bit_cast<std::uint32_t>(scale));
    return result;
  }

  BlockFormat format;
  std::vector<std::uint32_t> words;
  std::vector<float> scales;
};

Payload quantize(const std::vector<float>& values, const BlockFormat& format) {
  Payload payload(format, std::ssize(values));
  quantize_blocks(values.data(), NumericType::float32, std::ssize(values), format, payload.from(0));
  return payload;
}

std::vector<std::uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<std::uint32_t> result;
  for (const float value : values) result.push_back(std::bit_cast<std::uint32_t>(value));
  return result;
}

TEST(IntegerBlocks, ErrorsAreHalfAScaleAtMost) {
  auto generator = fresh_generator();
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    for (const BlockFormat& format : kFormats) {
      const auto values = normal_values<float>(generator, kCount);
      const Payload payload = quantize(values, format);
      std::vector<float> back(kCount, -7);
      dequantize_blocks(payload.source(), kCount, format, back.data(), NumericType::float32);
      for (std::int64_t i = 0; i < kCount; ++i) {
        const double scale = payload.scales[i / kBlock * format.scales()];
        EXPECT_LE(std::abs(payload.at(i) - values[i]), scale * (0.5 + 4e-5)) << i;
        EXPECT_NEAR(back[i], payload.at(i), 3e-7) << i;
      }
    }
  }
}

TEST(IntegerBlocks, InstructionSetsTypesAndThreadSplitsAgreeBitForBit) {
  auto generator = fresh_generator();
  const auto values = normal_values<BFloat16>(generator, kCount);
  std::vector<float> wide;
  for (const BFloat16 value : values) wide.push_back(to_float(value));
  for (const BlockFormat& format : kFormats) {
    Payload expected(format);
    std::vector<float> expected_back(kCount);
    {
      const SelectedIsa selected(Isa::scalar);
      expected = quantize(wide, format);
      dequantize_blocks(expected.source(), kCount, format, expected_back.data(),
                        NumericType::float32);
    }
    for (const Isa isa : available_isas()) {
      const SelectedIsa selected(isa);
      Payload split(format);
      std::vector<float> back(kCount);
      split_over_threads(kBlocks, 3, [&](std::int64_t first, std::int64_t last) {
        const std::int64_t begin = first * kBlock;
        const std::int64_t count = std::min(last * kBlock, kCount) - begin;
        quantize_blocks(values.data() + begin, NumericType::bfloat16, count, format,
                        split.from(first));
        const PayloadTarget own = split.from(first);
        dequantize_blocks({own.words, own.scales}, count, format, back.data() + begin,
                          NumericType::float32);
      });
      EXPECT_EQ(split.bits(), expected.bits());
      EXPECT_EQ(bits_of(back), bits_of(expected_back));
    }
  }
}

TEST(IntegerBlocks, SumsAddUpInOrderAndAreQuantizedAgain) {
  auto generator = fresh_generator();
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    for (const BlockFormat& from : kFormats) {
      std::vector<Payload> payloads;
      for (int i = 0; i < 3; ++i) {
        payloads.push_back(quantize(normal_values<float>(generator, kCount), from));
      }
      std::vector<PayloadSource> sources;
      std::vector<float> total(kCount);
      for (const Payload& payload : payloads) {
        sources.push_back(payload.source());
        std::vector<float> own(kCount);
        dequantize_blocks(payload.source(), kCount, from, own.data(), NumericType::float32);
        for (std::int64_t i = 0; i < kCount; ++i) total[i] += own[i];
      }
      for (float& value : total) value *= 0.3F;
      std::vector<float> out(kCount, 2);
      sum_quantized(sources, 0, kCount, from, 0.3F, true, out.data());
      for (std::int64_t i = 0; i < kCount; ++i) EXPECT_EQ(out[i], total[i] + 2) << i;
      for (const BlockFormat& to : kFormats) {
        Payload again(to);
        split_over_threads(kBlocks, 2, [&](std::int64_t first, std::int64_t last) {
          requantize_blocks(sources, first, std::min(last * kBlock, kCount) - first * kBlock, from,
                            to, 0.3F, again.from(first));
        });
        EXPECT_EQ(again.bits(), quantize(total, to).bits());
      }
    }
  }
}

TEST(IntegerBlocks, StreamedResultsAreTheSame) {
  auto generator = fresh_generator();
  constexpr std::int64_t count = (std::int64_t{1} << 18) + 77;
  const auto values = normal_values<float>(generator, count);
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    for (const BlockFormat& format : kFormats) {
      const Payload payload = quantize(values, format);
      // Long enough to be streamed where it is aligned; 32 bytes past that where it is not.
      for (const std::size_t past : {0, 8}) {
        std::vector<float> memory(count + 32);
        const auto at = reinterpret_cast<std::uintptr_t>(memory.data()) % 64 / sizeof(float);
        float* const out = memory.data() + (16 - at) % 16 + past;
        for (const NumericType type : {NumericType::float32, NumericType::bfloat16}) {
          dequantize_blocks(payload.source(), count, format, out, type);
          const double tolerance = type == NumericType::float32 ? 0.0 : 0x1p-8;
          for (std::int64_t i = 0; i < count; ++i) {
            const double scale = payload.scales[i / kBlock * format.scales()];
            const float back = type == NumericType::float32
                                   ? out[i]
                                   : to_float(reinterpret_cast<const BFloat16*>(out)[i]);
            ASSERT_LE(std::abs(back - values[i]),
                      scale * (0.5 + 4e-5) + tolerance * std::abs(back) + 3e-7)
                << i;
          }
        }
      }
    }
  }
}

TEST(IntegerBlocks, NonFiniteBlocksReadBackAsNaNAndZeroBlocksAsZeros) {
  auto generator = fresh_generator();
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    for (const BlockFormat& format : kFormats) {
      auto values = normal_values<float>(generator, kCount);
      values[5] = std::numeric_limits<float>::quiet_NaN();
      std::fill_n(values.begin() + kBlock, kBlock, -0.0F);
      values[kCount - 1] = -std::numeric_limits<float>::infinity();
      const Payload payload = quantize(values, format);
      std::vector<float> back(kCount);
      dequantize_blocks(payload.source(), kCount, format, back.data(), NumericType::float32);
      for (std::int64_t i = 0; i < kCount; ++i) {
        const std::int64_t block = i / kBlock;
        EXPECT_EQ(std::isnan(back[i]), block == 0 || block == 3) << i;
        EXPECT_TRUE(block != 1 || std::bit_cast<std::uint32_t>(back[i]) == 0) << i;
      }
    }
  }
}

TEST(IntegerBlocks, ElementsAreFoundFromTheBytesOfAPayload) {
  for (const BlockFormat& format : kFormats) {
    for (std::int64_t count = 0; count < 700; ++count) {
      const std::int64_t most = format.max_elements(format.payload_bytes(count));
      EXPECT_EQ(most, (count + 7) / 8 * 8) << count;
    }
    EXPECT_EQ(format.max_elements(4), -1);
    EXPECT_EQ(format.max_elements(format.payload_bytes(kBlock) + 4), -1);
  }
}

}  // namespace
}  // namespace zero_ext::core
