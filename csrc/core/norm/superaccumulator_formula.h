// The limbs of one number in a Superaccumulator, and their carries.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "../base/host_device.h"
#include "superaccumulator.h"

namespace zero_ext::core {

inline constexpr std::int64_t kLimbMask = (std::int64_t{1} << Superaccumulator::kLimbBits) - 1;

// Calls add(limb, amount) for the limbs of `value`, a finite multiple of 2^-298 below 2^300 in
// magnitude. Amounts are below 2^40 in magnitude.
template <class Add>
ZERO_EXT_HOST_DEVICE void split_into_limbs(double value, const Add& add) {
  const auto bits = std::bit_cast<std::uint64_t>(value);
  const auto exponent = static_cast<int>((bits >> 52) & 0x7FFU);
  if (exponent == 0) return;  // zero: the smallest nonzero value, 2^-298, is a normal double
  std::uint64_t significand = (bits & ((std::uint64_t{1} << 52) - 1)) | (std::uint64_t{1} << 52);
  int position = exponent - 1075 - Superaccumulator::kLowestExponent;
  if (position < 0) {
    significand >>= -position;
    position = 0;
  }
  const int shift = position % Superaccumulator::kLimbBits;
  const bool negative = (bits >> 63) != 0;
  const int limb = position / Superaccumulator::kLimbBits;
  for (int i = 0; i < 3; ++i) {
    const auto digit =
        static_cast<std::int64_t>(significand >> (Superaccumulator::kLimbBits * i)) & kLimbMask;
    add(limb + i, (negative ? -digit : digit) * (std::int64_t{1} << shift));
  }
}

// Leaves all limbs but the highest in [0, 2^20).
ZERO_EXT_HOST_DEVICE void carry_limbs(std::int64_t* limbs) {
  for (int i = 0; i + 1 < Superaccumulator::kLimbs; ++i) {
    limbs[i + 1] += limbs[i] >> Superaccumulator::kLimbBits;
    limbs[i] &= kLimbMask;
  }
}

// Superaccumulator::value.
ZERO_EXT_FUNCTION inline bool rounded_sum(const std::int64_t* entries, double& result) {
  constexpr int kLimbs = Superaccumulator::kLimbs;
  constexpr int kLimbBits = Superaccumulator::kLimbBits;
  if (entries[kLimbs] != 0) {
    result = std::numeric_limits<double>::quiet_NaN();
    return true;
  }
  std::int64_t limbs[kLimbs];
  for (int i = 0; i < kLimbs; ++i) limbs[i] = entries[i];
  carry_limbs(limbs);
  if (limbs[kLimbs - 1] < 0) return false;
  int top = kLimbs - 1;
  while (top > 0 && limbs[top] == 0) --top;
  // The leading 64 bits, with every lower nonzero bit folded into the last one ("sticky"), round
  // to a double exactly as the whole number would.
  auto leading = static_cast<std::uint64_t>(limbs[top]);
  int exponent = Superaccumulator::kLowestExponent + kLimbBits * top;
  bool sticky = false;
  for (int i = top - 1; i >= 0; --i) {
    const auto limb = static_cast<std::uint64_t>(limbs[i]);
    int leading_zeros = 0;  // leading zeros, at most a limb's bits
    while (leading_zeros < kLimbBits && leading >> (63 - leading_zeros) == 0) ++leading_zeros;
    leading = (leading << leading_zeros) | (limb >> (kLimbBits - leading_zeros));
    exponent -= leading_zeros;
    sticky = sticky || (limb & ((std::uint64_t{1} << (kLimbBits - leading_zeros)) - 1)) != 0;
    if (leading_zeros < kLimbBits) {
      for (int lower = i - 1; lower >= 0; --lower) sticky = sticky || limbs[lower] != 0;
      break;
    }
  }
  if (sticky) leading |= 1U;
  result = ::ldexp(static_cast<double>(leading), exponent);
  return true;
}

// Adds the square of a finite value exactly; any other counts as not finite.
template <class Total>
ZERO_EXT_HOST_DEVICE void add_one_square(float value, Total& total) {
  if ((std::bit_cast<std::uint32_t>(value) & 0x7FFFFFFFU) >= 0x7F800000U) {
    total.add_non_finite(1);
  } else {
    total.add(static_cast<double>(value) * static_cast<double>(value));
  }
}

}  // namespace zero_ext::core
