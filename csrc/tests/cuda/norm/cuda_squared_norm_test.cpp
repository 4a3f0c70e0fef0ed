#include <array>
#include <cmath>
#include <limits>

#include "../../../core/norm/squared_norm.h"
#include "../../../cuda/norm/squared_norm_kernel.h"
#include "../../test_support.h"

namespace zero_ext::cuda {
namespace {

using core::Superaccumulator;
using core::testing::fresh_generator;
using core::testing::kTypeOf;

using Entries = std::array<std::int64_t, Superaccumulator::kEntries>;

template <class T>
Entries of_the_cpu(const std::vector<T>& values, std::int64_t skipped) {
  Superaccumulator total;
  core::add_squares(values.data(), kTypeOf<T>, skipped, static_cast<std::int64_t>(values.size()),
                    total);
  Entries entries{};
  total.add_to(entries);
  return entries;
}

// Warps in a random order, each with memory that it must clear itself.
template <class T>
Entries emulated(const std::vector<T>& values, std::int64_t skipped, std::int64_t warps,
                 std::mt19937_64& generator) {
  Entries entries{};
  const auto add = AddSquares<T>::of(
      values.data() + skipped, static_cast<std::int64_t>(values.size()) - skipped, entries.data());
  std::vector<std::int64_t> order(static_cast<std::size_t>(warps));
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int64_t>(i);
  std::shuffle(order.begin(), order.end(), generator);
  for (const std::int64_t warp : order) {
    Entries own;
    own.fill(0x5A5A5A5A5A5A5A5A);
    add(warp, warps, own.data());
  }
  CarryAccumulator{entries.data()}(0, 1);
  return entries;
}

template <class T>
void expect_the_bits_of_the_cpu(const std::vector<T>& values, std::mt19937_64& generator) {
  for (const std::int64_t skipped : {0, 1, 5}) {
    if (skipped > static_cast<std::int64_t>(values.size())) continue;
    const Entries expected = of_the_cpu(values, skipped);
    for (const std::int64_t warps : {1, 3, 64}) {
      EXPECT_EQ(emulated(values, skipped, warps, generator), expected)
          << values.size() << " values, " << skipped << " skipped, " << warps << " warps";
    }
  }
}

template <class T>
class CudaSquaredNorm : public ::testing::Test {};
using Types = ::testing::Types<float, core::BFloat16, core::Float16>;
TYPED_TEST_SUITE(CudaSquaredNorm, Types);

TYPED_TEST(CudaSquaredNorm, EveryLengthGridAndAlignmentYieldsTheBitsOfTheCpu) {
  auto generator = fresh_generator();
  for (const std::size_t count : {0, 1, 7, 9, 255, 2047, 2048, 2049, 10000}) {
    expect_the_bits_of_the_cpu(core::testing::normal_values<TypeParam>(generator, count, 0.01F),
                               generator);
  }
}

// So wide a range of magnitudes in a block takes every number of accumulators, or none.
TYPED_TEST(CudaSquaredNorm, MixedMagnitudesAndNonFiniteElementsToo) {
  auto generator = fresh_generator();
  for (const int range : {1, 8, 24, 60, 250}) {
    std::vector<TypeParam> values =
        core::testing::normal_values<TypeParam>(generator, 3 * 2048 + 77);
    std::uniform_int_distribution<int> exponent(-range / 2, range / 2);
    for (TypeParam& value : values) {
      value = core::from_float<TypeParam>(std::ldexp(core::to_float(value), exponent(generator)));
    }
    expect_the_bits_of_the_cpu(values, generator);
    values[2500] = core::from_float<TypeParam>(std::numeric_limits<float>::quiet_NaN());
    values.back() = core::from_float<TypeParam>(std::numeric_limits<float>::infinity());
    expect_the_bits_of_the_cpu(values, generator);
    EXPECT_GE(emulated(values, 0, 2, generator).back(), 2);
  }
}

TEST(CudaSquaredNormValue, IsTheCpusAndNaNForANegativeSumWhichIsRecorded) {
  auto generator = fresh_generator();
  const auto values = core::testing::normal_values<float>(generator, 5000);
  Entries entries = of_the_cpu(values, 0);
  double expected = 0;
  ASSERT_TRUE(Superaccumulator::value(entries, expected));
  double result = -1;
  DeviceErrorRecord record{};
  ReadAccumulator{&record, entries.data(), &result}(0, 1);
  EXPECT_EQ(result, expected);
  EXPECT_FALSE(has_error(&record));
  entries[Superaccumulator::kLimbs - 1] = -1;
  ReadAccumulator{&record, entries.data(), &result}(0, 1);
  EXPECT_TRUE(std::isnan(result));
  EXPECT_EQ(core::device_error_text(record),
            "squared_norm_value: entry of accumulator[31]: expected 0 or more in a sum of squares, "
            "got -1.");
}

}  // namespace
}  // namespace zero_ext::cuda
