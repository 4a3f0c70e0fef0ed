#include "../../core/flat/flat_buffer.h"

#include <array>
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

TEST(Flat, CopiesAndAddsWithACastAtEveryLength) {
  auto generator = fresh_generator();
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    for (std::size_t count = 0; count < 70; ++count) {
      const std::vector<float> source = normal_values<float>(generator, count);
      std::vector<BFloat16> target(count);
      const auto length = static_cast<std::int64_t>(count);
      copy_cast(target.data(), NumericType::bfloat16, source.data(), NumericType::float32, length);
      for (std::size_t i = 0; i < count; ++i) {
        EXPECT_EQ(target[i].bits, from_float<BFloat16>(source[i]).bits);
      }
      accumulate_cast(target.data(), NumericType::bfloat16, source.data(), NumericType::float32,
                      length);
      for (std::size_t i = 0; i < count; ++i) {
        const float sum = to_float(from_float<BFloat16>(source[i])) + source[i];
        EXPECT_EQ(target[i].bits, from_float<BFloat16>(sum).bits);
      }
    }
  }
}

// Elements of a type with bits from a list; of float32 in the upper half of its bits.
template <class T>
std::vector<T> elements_of(const std::vector<std::uint32_t>& bits) {
  std::vector<T> result(bits.size());
  for (std::size_t i = 0; i < bits.size(); ++i) {
    if constexpr (sizeof(T) == 2) {
      result[i].bits = static_cast<std::uint16_t>(bits[i] >> 16);
    } else {
      result[i] = std::bit_cast<float>(bits[i]);
    }
  }
  return result;
}

template <class Source, class Target>
void expect_casts_of_any_bits(const std::vector<std::uint32_t>& bits, NumericType source_type,
                              NumericType target_type) {
  const std::vector<Source> source = elements_of<Source>(bits);
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    std::vector<Target> target(source.size());
    copy_cast(target.data(), target_type, source.data(), source_type, std::ssize(source));
    for (std::size_t i = 0; i < source.size(); ++i) {
      const Target expected = from_float<Target>(to_float(source[i]));
      if (std::isnan(to_float(expected))) {
        ASSERT_TRUE(std::isnan(to_float(target[i]))) << bits[i];
      } else {
        ASSERT_EQ(std::bit_cast<UnsignedOf<Target>>(target[i]),
                  std::bit_cast<UnsignedOf<Target>>(expected))
            << bits[i] << " isa " << static_cast<int>(isa);
      }
    }
  }
}

// All exponents, subnormals, infinities and NaNs: every half precision number among them, and
// float32 numbers around those that lie halfway between two.
TEST(Flat, CastsAnyBitsAlikeOnEveryInstructionSet) {
  auto generator = fresh_generator();
  std::vector<std::uint32_t> bits;
  for (std::uint32_t high = 0; high < 0x10000; ++high) {
    for (const std::uint32_t low : {0U, 0x7FFFU, 0x8000U, 0x8001U})
      bits.push_back(high << 16 | low);
    bits.push_back(high << 16 | static_cast<std::uint32_t>(generator() & 0xFFFFU));
  }
  expect_casts_of_any_bits<BFloat16, float>(bits, NumericType::bfloat16, NumericType::float32);
  expect_casts_of_any_bits<Float16, float>(bits, NumericType::float16, NumericType::float32);
  expect_casts_of_any_bits<float, BFloat16>(bits, NumericType::float32, NumericType::bfloat16);
  expect_casts_of_any_bits<float, Float16>(bits, NumericType::float32, NumericType::float16);
  // Halfway between two float16 numbers the last 13 bits are those of 2^12.
  for (std::uint32_t& each : bits) each = (each & 0xFFFFE000U) | 0x1000U;
  expect_casts_of_any_bits<float, Float16>(bits, NumericType::float32, NumericType::float16);
}

TEST(Flat, SumsShardsInListOrderOverThreadsAndInPlace) {
  auto generator = fresh_generator();
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    std::array<std::vector<float>, 3> shards;
    for (auto& shard : shards) shard = normal_values<float>(generator, 1003);
    std::vector<float> expected(1003);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      expected[i] = 0.25F * ((shards[0][i] + shards[1][i]) + shards[2][i]) + shards[2][i];
    }
    const std::array<const void*, 3> sources{shards[0].data(), shards[1].data(), shards[2].data()};
    split_over_threads(1003, 3, [&](std::int64_t begin, std::int64_t end) {
      sum_shards(shards[2].data(), NumericType::float32, sources, NumericType::float32, begin, end,
                 0.25F, true);
    });
    EXPECT_EQ(shards[2], expected);
  }
}

}  // namespace
}  // namespace zero_ext::core
