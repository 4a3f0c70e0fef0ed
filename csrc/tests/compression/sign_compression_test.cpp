#include "../../core/compression/sign_compression.h"

#include <bit>
#include <cmath>
#include <limits>

#include "../test_support.h"

namespace zero_ext::core {
namespace {

using testing::available_isas;
using testing::fresh_generator;
using testing::kTypeOf;
using testing::normal_values;
using testing::SelectedIsa;
using testing::split_over_threads;

// Two whole blocks, and one that ends inside a group, a row of lanes and a word.
constexpr std::int64_t kCount = 2 * kSignBlock + 333;

struct Payload {
  std::vector<std::uint32_t> words = std::vector<std::uint32_t>(sign_words(kCount), 0xA5A5A5A5U);
  std::vector<float> scales = std::vector<float>(sign_blocks(kCount), -7);

  PayloadTarget from(std::int64_t block) {
    return {words.data() + block * (kSignBlock / 32), scales.data() + block};
  }
  PayloadSource source() const { return {words.data(), scales.data()}; }
  double at(std::int64_t i) const {
    const double scale = scales[i / kSignBlock];
    return (words[i / 32] >> (i % 32) & 1U) != 0 ? scale : -scale;
  }
  bool operator==(const Payload&) const = default;
};

template <class T>
Payload compress(const std::vector<T>& values, float factor, std::vector<float>& error) {
  Payload payload;
  compress_1bit(values.data(), kTypeOf<T>, factor, kCount, error.data(), payload.from(0));
  return payload;
}

template <class T>
class SignCompression : public ::testing::Test {};
using ElementTypes = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(SignCompression, ElementTypes);

TYPED_TEST(SignCompression, StandsForTheMeanMagnitudeAndLeavesTheRest) {
  auto generator = fresh_generator();
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    const auto values = normal_values<TypeParam>(generator, kCount);
    const auto before = normal_values<float>(generator, kCount);
    auto error = before;
    const Payload payload = compress(values, 0.5F, error);
    std::vector<double> sums(payload.scales.size());
    for (std::int64_t i = 0; i < kCount; ++i) {
      const double exact = 0.5 * to_float(values[i]) + before[i];
      sums[i / kSignBlock] += std::abs(exact);
      EXPECT_EQ(payload.at(i) > 0, exact >= 0) << i;
      EXPECT_NEAR(error[i], exact - payload.at(i), 1e-6) << i;
    }
    for (std::int64_t b = 0; b < std::ssize(sums); ++b) {
      const std::int64_t length = std::min(kSignBlock, kCount - b * kSignBlock);
      EXPECT_NEAR(payload.scales[b], sums[b] / static_cast<double>(length), 1e-6);
    }
    EXPECT_EQ(payload.words.back() >> (kCount % 32), 0U);
  }
}

TYPED_TEST(SignCompression, InstructionSetsAndThreadSplitsAgreeBitForBit) {
  auto generator = fresh_generator();
  const auto values = normal_values<TypeParam>(generator, kCount);
  const auto before = normal_values<float>(generator, kCount);
  Payload expected;
  auto expected_error = before;
  std::vector<TypeParam> expected_values(kCount);
  {
    const SelectedIsa selected(Isa::scalar);
    expected = compress(values, 0.3F, expected_error);
    decompress_1bit(expected.source(), kCount, 0.7F, false, expected_values.data(),
                    kTypeOf<TypeParam>);
  }
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    Payload split;
    auto error = before;
    std::vector<TypeParam> expanded(kCount);
    split_over_threads(3, 3, [&](std::int64_t first, std::int64_t last) {
      const std::int64_t begin = first * kSignBlock;
      const std::int64_t count = std::min(last * kSignBlock, kCount) - begin;
      if (count <= 0) return;
      compress_1bit(values.data() + begin, kTypeOf<TypeParam>, 0.3F, count, error.data() + begin,
                    split.from(first));
      const PayloadTarget own = split.from(first);
      decompress_1bit({own.words, own.scales}, count, 0.7F, false, expanded.data() + begin,
                      kTypeOf<TypeParam>);
    });
    EXPECT_EQ(split, expected);
    EXPECT_EQ(error, expected_error);
    for (std::int64_t i = 0; i < kCount; ++i) {
      EXPECT_EQ(to_float(expanded[i]), to_float(expected_values[i])) << i;
    }
  }
}

TEST(SignSums, AddUpInOrderAndAreCompressedAgain) {
  auto generator = fresh_generator();
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    std::vector<Payload> payloads;
    std::vector<PayloadSource> sources;
    for (int i = 0; i < 3; ++i) {
      std::vector<float> none(kCount);
      payloads.push_back(compress(normal_values<float>(generator, kCount), 1.0F, none));
    }
    for (const Payload& payload : payloads) sources.push_back(payload.source());
    std::vector<float> total(kCount);
    for (std::int64_t i = 0; i < kCount; ++i) {
      for (const Payload& payload : payloads) total[i] += static_cast<float>(payload.at(i));
    }
    std::vector<float> out(kCount, 2);
    sum_1bit(sources, 0, kCount, 0.3F, true, out.data());
    for (std::int64_t i = 0; i < kCount; ++i) EXPECT_EQ(out[i], total[i] * 0.3F + 2) << i;

    const auto before = normal_values<float>(generator, kCount);
    auto expected_error = before;
    const Payload expected = compress(total, 0.3F, expected_error);
    Payload reduced;
    auto error = before;
    split_over_threads(3, 2, [&](std::int64_t first, std::int64_t last) {
      const std::int64_t begin = first * kSignBlock;
      reduce_1bit(sources, first, std::min(last * kSignBlock, kCount) - begin, 0.3F,
                  error.data() + begin, reduced.from(first));
    });
    EXPECT_EQ(reduced, expected);
    EXPECT_EQ(error, expected_error);
  }
}

TEST(SignSums, StreamedResultsAreTheSame) {
  auto generator = fresh_generator();
  constexpr std::int64_t count = (std::int64_t{1} << 18) + 77;
  const auto values = normal_values<float>(generator, count);
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    std::vector<std::uint32_t> words(sign_words(count));
    std::vector<float> scales(sign_blocks(count));
    std::vector<float> error(count);
    compress_1bit(values.data(), NumericType::float32, 1.0F, count, error.data(),
                  {words.data(), scales.data()});
    std::vector<float> memory(count + 16);
    const auto past = reinterpret_cast<std::uintptr_t>(memory.data()) % 64 / sizeof(float);
    float* const aligned = memory.data() + (16 - past) % 16;
    decompress_1bit({words.data(), scales.data()}, count, 1.0F, false, aligned,
                    NumericType::float32);
    for (std::int64_t i = 0; i < count; ++i) {
      ASSERT_EQ(std::abs(aligned[i]), scales[i / kSignBlock]) << i;
      ASSERT_EQ(aligned[i] > 0, values[i] >= 0) << i;
    }
  }
}

TEST(SignSums, NonFiniteValuesAreSeenInAllOfTheirBlock) {
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    std::vector<float> values(kCount, 1.0F);
    values[kSignBlock + 3] = std::numeric_limits<float>::quiet_NaN();
    values[kCount - 1] = -std::numeric_limits<float>::infinity();
    std::vector<float> error(kCount);
    const Payload payload = compress(values, 1.0F, error);
    EXPECT_EQ(payload.scales[0], 1.0F);
    EXPECT_TRUE(std::isnan(payload.scales[1]));
    EXPECT_TRUE(std::isinf(payload.scales[2]));
  }
}

}  // namespace
}  // namespace zero_ext::core
