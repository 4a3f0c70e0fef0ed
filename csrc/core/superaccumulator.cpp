#include "superaccumulator.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace zero_ext::core {
namespace {

constexpr std::int64_t kLimbMask = (std::int64_t{1} << Superaccumulator::kLimbBits) - 1;

// One addition grows a limb by less than 2^40, so this many stay below 2^62.
constexpr std::int64_t kAdditionsBeforeCarry = std::int64_t{1} << 22;

}  // namespace

void Superaccumulator::add(double value) {
  const auto bits = std::bit_cast<std::uint64_t>(value);
  const auto exponent = static_cast<int>((bits >> 52) & 0x7FFU);
  if (exponent == 0) return;  // zero: the smallest nonzero value, 2^-298, is a normal double
  std::uint64_t significand = (bits & ((std::uint64_t{1} << 52) - 1)) | (std::uint64_t{1} << 52);
  int position = exponent - 1075 - kLowestExponent;
  if (position < 0) {
    significand >>= -position;
    position = 0;
  }
  const int shift = position % kLimbBits;
  const bool negative = (bits >> 63) != 0;
  const auto limb = static_cast<std::size_t>(position / kLimbBits);
  for (std::size_t i = 0; i < 3; ++i) {
    const auto piece = static_cast<std::int64_t>(significand >> (kLimbBits * i)) & kLimbMask;
    limbs_[limb + i] += (negative ? -piece : piece) * (std::int64_t{1} << shift);
  }
  if (++pending_ == kAdditionsBeforeCarry) {
    normalise(limbs_);
    pending_ = 0;
  }
}

void Superaccumulator::merge(const Superaccumulator& other) {
  Superaccumulator addend = other;
  normalise(addend.limbs_);
  normalise(limbs_);
  pending_ = 0;
  for (std::size_t i = 0; i < kLimbs; ++i) limbs_[i] += addend.limbs_[i];
  non_finite_ += other.non_finite_;
}

void Superaccumulator::add_to(std::span<std::int64_t, kEntries> entries) {
  normalise(limbs_);
  pending_ = 0;
  for (std::size_t i = 0; i < kLimbs; ++i) entries[i] += limbs_[i];
  entries[kLimbs] += non_finite_;
  normalise(entries.first<kLimbs>());
}

void Superaccumulator::normalise(std::span<std::int64_t, kLimbs> limbs) {
  for (std::size_t i = 0; i + 1 < kLimbs; ++i) {
    limbs[i + 1] += limbs[i] >> kLimbBits;
    limbs[i] &= kLimbMask;
  }
}

bool Superaccumulator::value(std::span<const std::int64_t, kEntries> entries, double& result) {
  if (entries[kLimbs] != 0) {
    result = std::numeric_limits<double>::quiet_NaN();
    return true;
  }
  std::array<std::int64_t, kLimbs> limbs{};
  std::copy_n(entries.begin(), kLimbs, limbs.begin());
  normalise(limbs);
  if (limbs.back() < 0) return false;
  int top = kLimbs - 1;
  while (top > 0 && limbs[static_cast<std::size_t>(top)] == 0) --top;
  // The leading 64 bits, with every lower nonzero bit folded into the last one ("sticky"), round
  // to a double exactly as the whole number would.
  std::uint64_t leading = static_cast<std::uint64_t>(limbs[static_cast<std::size_t>(top)]);
  int exponent = kLowestExponent + kLimbBits * top;
  bool sticky = false;
  for (int i = top - 1; i >= 0; --i) {
    const auto limb = static_cast<std::uint64_t>(limbs[static_cast<std::size_t>(i)]);
    const int room = std::min(std::countl_zero(leading), kLimbBits);
    leading = (leading << room) | (limb >> (kLimbBits - room));
    exponent -= room;
    sticky = sticky || (limb & ((std::uint64_t{1} << (kLimbBits - room)) - 1)) != 0;
    if (room < kLimbBits) {
      for (int lower = i - 1; lower >= 0; --lower) {
        sticky = sticky || limbs[static_cast<std::size_t>(lower)] != 0;
      }
      break;
    }
  }
  if (sticky) leading |= 1U;
  result = std::ldexp(static_cast<double>(leading), exponent);
  return true;
}

}  // namespace zero_ext::core
