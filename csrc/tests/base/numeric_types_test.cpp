#include "../../core/base/numeric_types.h"

#include <cmath>
#include <limits>

#include "../test_support.h"

namespace zero_ext::core {
namespace {

using testing::fresh_generator;

// Value of a half-precision bit pattern from its definition.
double half_value(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 0x1F;
  const int fraction = bits & 0x3FF;
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == 0x1F) return fraction != 0 ? std::nan("") : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

TEST(NumericTypes, EveryFloat16RoundTrips) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Float16 half{static_cast<std::uint16_t>(bits)};
    const double expected = half_value(half.bits);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(to_float(half)));
      EXPECT_TRUE(std::isnan(to_float(from_float<Float16>(to_float(half)))));
    } else {
      EXPECT_EQ(to_float(half), expected);
      EXPECT_EQ(from_float<Float16>(to_float(half)).bits, half.bits);
    }
  }
}

TEST(NumericTypes, EveryBFloat16RoundTrips) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const BFloat16 value{static_cast<std::uint16_t>(bits)};
    if (std::isnan(to_float(value))) {
      EXPECT_EQ(from_float<BFloat16>(to_float(value)).bits, 0x7FC0);
    } else {
      EXPECT_EQ(from_float<BFloat16>(to_float(value)).bits, value.bits);
    }
  }
}

// Between neighbors the nearer one wins, and a tie goes to the even bit pattern.
template <class T>
void expect_nearest_even(std::uint16_t infinity) {
  for (std::uint32_t bits = 0; bits + 1 < infinity; ++bits) {
    const double low = to_float(T{static_cast<std::uint16_t>(bits)});
    const double high = to_float(T{static_cast<std::uint16_t>(bits + 1)});
    const auto middle = static_cast<float>((low + high) / 2);
    if (static_cast<double>(middle) != (low + high) / 2) continue;  // below float32's own grid
    EXPECT_EQ(from_float<T>(middle).bits, (bits % 2 == 0) ? bits : bits + 1);
    EXPECT_EQ(from_float<T>(std::nextafter(middle, 0.0F)).bits, bits);
    EXPECT_EQ(from_float<T>(std::nextafter(middle, INFINITY)).bits, bits + 1);
    EXPECT_EQ(from_float<T>(-middle).bits, ((bits % 2 == 0) ? bits : bits + 1) | 0x8000U);
  }
}

TEST(NumericTypes, Float16RoundsToNearestEven) { expect_nearest_even<Float16>(0x7C00); }
TEST(NumericTypes, BFloat16RoundsToNearestEven) { expect_nearest_even<BFloat16>(0x7F80); }

TEST(NumericTypes, OverflowBecomesInfinity) {
  EXPECT_EQ(from_float<Float16>(65519.996F).bits, 0x7BFF);
  EXPECT_EQ(from_float<Float16>(65520.0F).bits, 0x7C00);
  EXPECT_EQ(from_float<Float16>(-INFINITY).bits, 0xFC00);
  EXPECT_EQ(from_float<BFloat16>(std::numeric_limits<float>::max()).bits, 0x7F80);
}

}  // namespace
}  // namespace zero_ext::core
