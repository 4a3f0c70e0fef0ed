#include "../../core/norm/squared_norm.h"

#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <mutex>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../test_support.h"

namespace zero_ext::core {
namespace {

using testing::available_isas;
using testing::fresh_generator;
using testing::normal_values;
using testing::SelectedIsa;
using testing::split_over_threads;

using Entries = std::array<std::int64_t, Superaccumulator::kEntries>;

Entries entries_of(Superaccumulator& total) {
  Entries entries{};
  total.add_to(entries);
  return entries;
}

template <class T>
Entries sum(const std::vector<T>& values, NumericType type) {
  Superaccumulator total;
  add_squares(values.data(), type, 0, static_cast<std::int64_t>(values.size()), total);
  return entries_of(total);
}

// The definition: one square after the other.
template <class T>
Entries reference(const std::vector<T>& values) {
  Superaccumulator total;
  for (const T value : values) {
    const double wide = to_float(value);
    if (std::isfinite(wide)) {
      total.add(wide * wide);
    } else {
      total.add_non_finite(1);
    }
  }
  return entries_of(total);
}

double value(const Entries& entries) {
  double result = -1;
  EXPECT_TRUE(Superaccumulator::value(entries, result));
  return result;
}

std::vector<float> random_bits(std::mt19937_64& generator, std::size_t count) {
  std::vector<float> values(count);
  for (float& each : values) each = std::bit_cast<float>(static_cast<std::uint32_t>(generator()));
  return values;
}

TEST(Superaccumulator, HoldsPowersOfTwoWhereTheyBelong) {
  for (int exponent = -298; exponent < 300; ++exponent) {
    Superaccumulator total;
    total.add(std::ldexp(1.0, exponent));
    const Entries entries = entries_of(total);
    const auto limb = static_cast<std::size_t>((exponent + 298) / 20);
    for (std::size_t i = 0; i < entries.size(); ++i) {
      EXPECT_EQ(entries[i], i == limb ? std::int64_t{1} << ((exponent + 298) % 20) : 0);
    }
    EXPECT_EQ(value(entries), std::ldexp(1.0, exponent));
  }
}

TEST(Superaccumulator, CancelsExactly) {
  auto generator = fresh_generator();
  const std::vector<float> values = random_bits(generator, 10'000);
  Superaccumulator total;
  for (const float each : values) {
    if (std::isfinite(each)) total.add(static_cast<double>(each) * each);
  }
  for (auto each = values.rbegin(); each != values.rend(); ++each) {
    if (std::isfinite(*each)) total.add(-static_cast<double>(*each) * *each);
  }
  EXPECT_EQ(entries_of(total), Entries{});
}

TEST(Superaccumulator, SurvivesMillionsOfAdditions) {
  constexpr int kDoublings = 25;
  const double addend = std::ldexp(std::ldexp(1.0, 53) - 1, 19 - 298 + 40);
  Superaccumulator total;
  for (std::int64_t i = 0; i < std::int64_t{1} << kDoublings; ++i) total.add(addend);
  EXPECT_EQ(value(entries_of(total)), std::ldexp(addend, kDoublings));
}

TEST(Superaccumulator, RoundsToNearestEven) {
  // An odd 53-bit number, half a unit in its last place, and perhaps one grain far below.
  const double odd = 0x1p53 - 1;
  Superaccumulator tie;
  tie.add(odd);
  tie.add(0.5);
  EXPECT_EQ(value(entries_of(tie)), 0x1p53);
  Superaccumulator below;
  below.add(odd - 1);
  below.add(0.5);
  EXPECT_EQ(value(entries_of(below)), odd - 1);
  below.add(0x1p-298);
  EXPECT_EQ(value(entries_of(below)), odd);
}

TEST(Superaccumulator, RefusesNegativeTotals) {
  Superaccumulator total;
  total.add(-1.0);
  double result = 0;
  EXPECT_FALSE(Superaccumulator::value(entries_of(total), result));
}

TEST(SquaredNorm, MatchesTheDefinitionOnAnyBits) {
  auto generator = fresh_generator();
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    for (const std::size_t count : {0UL, 1UL, 15UL, 1024UL, 2049UL, 5000UL}) {
      const std::vector<float> bits = random_bits(generator, count);
      EXPECT_EQ(sum(bits, NumericType::float32), reference(bits));
      std::vector<BFloat16> brain(count);
      for (BFloat16& each : brain) each.bits = static_cast<std::uint16_t>(generator());
      EXPECT_EQ(sum(brain, NumericType::bfloat16), reference(brain));
      std::vector<Float16> half(count);
      for (Float16& each : half) each.bits = static_cast<std::uint16_t>(generator());
      EXPECT_EQ(sum(half, NumericType::float16), reference(half));
    }
  }
}

TEST(SquaredNorm, MatchesTheDefinitionAtEveryWidthOfExponents) {
  auto generator = fresh_generator();
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    for (int spread = 1; spread < 120; spread += 3) {
      std::vector<float> values = normal_values<float>(generator, 3000);
      for (float& each : values) {
        each = std::ldexp(each, -static_cast<int>(generator() % static_cast<unsigned>(spread)));
      }
      EXPECT_EQ(sum(values, NumericType::float32), reference(values));
      std::vector<BFloat16> narrow(values.size());
      for (std::size_t i = 0; i < values.size(); ++i) narrow[i] = from_float<BFloat16>(values[i]);
      EXPECT_EQ(sum(narrow, NumericType::bfloat16), reference(narrow));
    }
  }
}

// Equal values round alike, so what extraction leaves over adds up as far as it can.
TEST(SquaredNorm, MatchesTheDefinitionWhenRoundingsAddUp) {
  auto generator = fresh_generator();
  std::uniform_real_distribution<float> significand(1.0F, 2.0F);
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    for (int round = 0; round < 300; ++round) {
      std::vector<float> values(1024, significand(generator));
      values[0] = std::ldexp(significand(generator), -round / 4);
      EXPECT_EQ(sum(values, NumericType::float32), reference(values));
    }
  }
}

TEST(SquaredNorm, ThreadsAndOrderDoNotMatter) {
  auto generator = fresh_generator();
  std::vector<float> values = normal_values<float>(generator, 100'003, 1e-4F);
  const Entries expected = sum(values, NumericType::float32);
  for (const int threads : {1, 2, 5}) {
    std::shuffle(values.begin(), values.end(), generator);
    Superaccumulator total;
    std::mutex mutex;
    split_over_threads(std::ssize(values), threads, [&](std::int64_t begin, std::int64_t end) {
      Superaccumulator half;
      add_squares(values.data(), NumericType::float32, begin, end, half);
      const std::lock_guard lock(mutex);
      total.merge(half);
    });
    EXPECT_EQ(entries_of(total), expected);
  }
}

#if defined(__x86_64__)
std::uint64_t floating_point_mode() { return _mm_getcsr(); }
void set_floating_point_mode(std::uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
constexpr std::uint64_t kFlushing = 0x8040;
#elif defined(__aarch64__)
std::uint64_t floating_point_mode() {
  std::uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
void set_floating_point_mode(std::uint64_t mode) {
  asm volatile("msr fpcr, %0" : : "r"(mode) : "memory");
}
constexpr std::uint64_t kFlushing = std::uint64_t{1} << 24;
#endif

#if defined(__x86_64__) || defined(__aarch64__)
TEST(SquaredNorm, CountsSubnormalsThatTheThreadFlushes) {
  auto generator = fresh_generator();
  const std::vector<float> values = normal_values<float>(generator, 3000, 1e-40F);
  const Entries expected = reference(values);
  ASSERT_NE(expected, Entries{});
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    const std::uint64_t before = floating_point_mode();
    set_floating_point_mode(before | kFlushing);
    const Entries found = sum(values, NumericType::float32);
    const std::uint64_t after = floating_point_mode();
    set_floating_point_mode(before);
    EXPECT_EQ(found, expected);
    EXPECT_EQ(after & kFlushing, kFlushing);
  }
}
#endif

TEST(SquaredNorm, LargestValuesFit) {
  const std::vector<float> values(1 << 20, std::numeric_limits<float>::max());
  const double square = std::pow(static_cast<double>(std::numeric_limits<float>::max()), 2);
  EXPECT_EQ(value(sum(values, NumericType::float32)), std::ldexp(square, 20));
}

}  // namespace
}  // namespace zero_ext::core
