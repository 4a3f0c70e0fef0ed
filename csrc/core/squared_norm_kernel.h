// Exact sum of squares, block by block. See adam_kernel.h on inclusion.
//
// A double holds the square of a float exactly. For each block the range of its exponents tells
// how many double accumulators hold the block's sum exactly. All but the last start from a large
// constant, so that adding a square rounds it to a multiple of that constant's last place; what
// was rounded off is exact too and goes to the next accumulator ("error-free extraction": Rump,
// Ogita and Oishi, "Accurate floating-point summation", SIAM J. Sci. Comput. 31, 2008).
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels.h"
#include "numeric_types.h"
#include "superaccumulator.h"

namespace zero_ext::core {
namespace {

template <class V, class T>
struct SquaredNorm {
  static constexpr int kBlockBits = 10;
  static constexpr std::int64_t kBlock = std::int64_t{1} << kBlockBits;
  static constexpr int kMostAccumulators = 4;
  static constexpr int kStep = 51 - kBlockBits;  // bits that one more accumulator adds
  static constexpr std::uint32_t kInfinityBits = 0x7F800000U;

  struct Range {
    int highest;  // every magnitude is below 2^(highest + 1)
    int lowest;   // every nonzero magnitude is a multiple of 2^lowest
  };

  // Exponents of a block: false when it holds only zeros or a non-finite element.
  static bool exponents(const T* values, std::int64_t count, Range& range, bool& finite) {
    auto highest = V::set_bits(0);
    auto lowest = V::set_bits(~std::uint32_t{0});
    for (std::int64_t i = 0; i < count; i += V::width) {
      const auto bits = V::magnitude_bits(V::load(values + i));
      highest = V::max(highest, bits);
      lowest = V::min(lowest, V::decrement(bits));  // a zero wraps to the largest value
    }
    const std::uint32_t top = V::highest(highest);
    finite = top < kInfinityBits;
    if (!finite || top == 0) return false;
    range.highest = exponent(top);
    range.lowest = exponent(V::lowest(lowest) + 1U) - (kSignificandBits<T> - 1);
    return true;
  }

  // A subnormal counts as the smallest normal one: its last place is the same.
  static int exponent(std::uint32_t magnitude) {
    const auto biased = static_cast<int>(magnitude >> 23);
    return (biased == 0 ? 1 : biased) - 127;
  }

  // Sum of the block's squares in exactly `Count` accumulators.
  template <int Count>
  static void accumulate(const T* values, std::int64_t count, int bound, Superaccumulator& total) {
    typename V::Double start[Count];
    typename V::Double sums[Count][V::parts];
    for (int k = 0; k < Count; ++k) {
      // Extraction k rounds to multiples of 2^(exponent - 52); the 1.5 leaves room for both signs.
      const int exponent = bound + 2 - k * kStep;
      start[k] = V::set(k + 1 < Count ? std::ldexp(1.5, exponent) : 0.0);
      for (int part = 0; part < V::parts; ++part) sums[k][part] = start[k];
    }
    for (std::int64_t i = 0; i < count; i += V::width) {
      const auto value = V::load(values + i);
      add_square<Count, 0>(value, sums);
      if constexpr (V::parts == 2) add_square<Count, V::parts - 1>(value, sums);
    }
    for (int k = 0; k < Count; ++k) {
      auto sum = V::sub(sums[k][0], start[k]);
      if constexpr (V::parts == 2) sum = V::add(sum, V::sub(sums[k][1], start[k]));
      total.add(V::sum(sum));
    }
  }

  template <int Count, int Part>
  static inline __attribute__((always_inline)) void add_square(
      typename V::Float value, typename V::Double (&sums)[Count][V::parts]) {
    const auto wide = V::template widen<Part>(value);
    auto rest = V::mul(wide, wide);
    for (int k = 0; k + 1 < Count; ++k) {
      const auto before = sums[k][Part];
      sums[k][Part] = V::add(before, rest);
      rest = V::sub(rest, V::sub(sums[k][Part], before));
    }
    sums[Count - 1][Part] = V::add(sums[Count - 1][Part], rest);
  }

  // Any mixture of magnitudes and non-finite values, one element at a time.
  static void one_by_one(const T* values, std::int64_t count, Superaccumulator& total) {
    std::int64_t non_finite = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      const float value = to_float(values[i]);
      const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(value) & 0x7FFFFFFFU;
      if (magnitude >= kInfinityBits) {
        ++non_finite;
      } else {
        total.add(static_cast<double>(value) * static_cast<double>(value));
      }
    }
    total.add_non_finite(non_finite);
  }

  static void block(const T* values, std::int64_t count, Superaccumulator& total) {
    Range range{};
    bool finite = true;
    if (!exponents(values, count, range, finite)) {
      if (!finite) one_by_one(values, count, total);
      return;
    }
    const int bound = 2 * (range.highest + 1) + kBlockBits;  // the sum is at most 2^bound
    const int width = bound - 2 * range.lowest;              // bits of the exact sum
    if (width <= 53) {
      accumulate<1>(values, count, bound, total);
    } else if (width <= 53 + kStep) {
      accumulate<2>(values, count, bound, total);
    } else if (width <= 53 + 2 * kStep) {
      accumulate<3>(values, count, bound, total);
    } else if (width <= 53 + 3 * kStep) {
      accumulate<kMostAccumulators>(values, count, bound, total);
    } else {
      one_by_one(values, count, total);
    }
  }

  static void run(const void* source, std::int64_t count, Superaccumulator& total) {
    const auto* values = static_cast<const T*>(source);
    std::int64_t i = 0;
    for (; i + kBlock <= count; i += kBlock) block(values + i, kBlock, total);
    const std::int64_t whole = (count - i) / V::width * V::width;
    if (whole > 0) block(values + i, whole, total);
    i += whole;
    if (i < count) one_by_one(values + i, count - i, total);
  }
};

}  // namespace
}  // namespace zero_ext::core
