// Exact sum of squares of float32-or-narrower values.
//
// A fixed-point number wide enough for every float32 square, held in 64-bit limbs of 20 bits each.
// Integer addition is associative, so the sum is the same for every order, split and thread count.
// Source of the idea: Kulisch's long accumulator; Demmel and Nguyen, "Parallel reproducible
// summation", IEEE Transactions on Computers 64 (2015).
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace zero_ext::core {

class Superaccumulator {
 public:
  static constexpr int kLimbs = 32;
  static constexpr int kLimbBits = 20;
  static constexpr int kLowestExponent = -298;  // limb i counts multiples of 2^(20 i - 298)
  static constexpr int kEntries = kLimbs + 1;   // the limbs, then the count of non-finite elements

  // Adds `value`, a finite multiple of 2^-298 below 2^300 in magnitude, exactly.
  void add(double value);

  // Calls visit(i, *this) for i in [0, count): the form of totals that several threads share.
  template <class Visit>
  void for_each(std::int64_t count, const Visit& visit) {
    for (std::int64_t i = 0; i < count; ++i) visit(i, *this);
  }

  void add_non_finite(std::int64_t count) { non_finite_ += count; }

  // Adds another accumulator's entries.
  void merge(const Superaccumulator& other);

  // Adds the entries to `entries` and leaves those carry-normalized: limbs below the highest lie
  // in [0, 2^20), so 65,536 of them can be summed in int64.
  void add_to(std::span<std::int64_t, kEntries> entries);

  // The sum of the entries, correctly rounded to nearest even; NaN when any element was not
  // finite. False when the entries are no sum of squares (the total is negative).
  static bool value(std::span<const std::int64_t, kEntries> entries, double& result);

 private:
  static void normalize(std::span<std::int64_t, kLimbs> limbs);

  std::array<std::int64_t, kLimbs> limbs_{};
  std::int64_t non_finite_ = 0;
  std::int64_t pending_ = 0;  // additions since the limbs were last normalized
};

}  // namespace zero_ext::core
