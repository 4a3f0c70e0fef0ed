// Exact sum of squares, block by block. See optimizer_kernel.h on inclusion.
//
// A double holds the square of a float exactly. For each block the range of its exponents tells
// how many double accumulators hold the block's sum exactly. All but the last start from a large
// constant, so that adding a square rounds it to a multiple of that constant's last place; what
// was rounded off is exact too and goes to the next accumulator ("error-free extraction": Rump,
// Ogita and Oishi, "Accurate floating-point summation", SIAM J. Sci. Comput. 31, 2008).
#pragma once

#include <bit>
#include <cstdint>

#include "../base/host_device.h"
#include "../base/numeric_types.h"
#include "../dispatch/kernels.h"
#include "superaccumulator.h"
#include "superaccumulator_formula.h"

namespace zero_ext::core {
namespace {

// Total is a Superaccumulator, or one that the threads of a device share. Blocks that would take
// more than `MostAccumulators` go one by one.
template <class V, class T, class Total = Superaccumulator, int MostAccumulators = 4>
struct SquaredNorm {
  static constexpr int kBlockBits = 11;
  static constexpr std::int64_t kBlock = std::int64_t{1} << kBlockBits;
  static constexpr std::int64_t kGroup = 2 * V::width;  // block lengths are multiples of this
  static_assert(MostAccumulators == 3 || MostAccumulators == 4);
  static constexpr int kStep = 51 - kBlockBits;  // bits that one more accumulator adds

  struct Range {
    int highest;  // every magnitude is below 2^(highest + 1)
    int lowest;   // every nonzero magnitude is a multiple of 2^lowest
  };

  // Exponents of a block: false when it holds only zeros or a non-finite element.
  ZERO_EXT_FUNCTION static bool exponents(const T* values, std::int64_t count, Range& range,
                                          bool& finite) {
    auto highest = V::template set_bits<T>(0);
    auto lowest = V::template set_bits<T>(~std::uint32_t{0});
    ZERO_EXT_UNROLL_LOADS_BY(4)
    for (std::int64_t i = 0; i < count; i += V::template lanes<T>) {
      const auto bits = V::template magnitudes<T>(values + i);
      highest = V::template max<T>(highest, bits);
      // A zero wraps to the largest value and so never is the smallest.
      lowest = V::template min<T>(lowest, V::template decrement<T>(bits));
    }
    const UnsignedOf<T> top = V::template highest<T>(highest);
    finite = top < kInfinityBits<T>;
    if (!finite || top == 0) return false;
    const auto bottom = static_cast<UnsignedOf<T>>(V::template lowest<T>(lowest) + 1U);
    range.highest = exponent(std::bit_cast<T>(top));
    range.lowest = exponent(std::bit_cast<T>(bottom)) - (kSignificandBits<T> - 1);
    return true;
  }

  // A subnormal counts as the smallest normal one: its last place is the same.
  ZERO_EXT_FUNCTION static int exponent(T magnitude) {
    const auto biased = static_cast<int>(std::bit_cast<std::uint32_t>(to_float(magnitude)) >> 23);
    return (biased == 0 ? 1 : biased) - 127;
  }

  // 1.5 * 2^exponent, for exponents of normal doubles.
  ZERO_EXT_FUNCTION static double one_and_a_half(int exponent) {
    return std::bit_cast<double>((static_cast<std::uint64_t>(exponent + 1023) << 52) |
                                 (std::uint64_t{1} << 51));
  }

  // Sum of the block's squares in exactly `Count` accumulators.
  template <int Count>
  ZERO_EXT_FUNCTION static void accumulate(const T* values, std::int64_t count, int bound,
                                           Total& total) {
    typename V::Double start[Count];
    typename V::Double sums[Count][V::halves];
    for (int k = 0; k < Count; ++k) {
      // Extraction k rounds to multiples of 2^(exponent - 52); the 1.5 leaves room for both signs.
      const int exponent = bound + 2 - k * kStep;
      start[k] = V::set(k + 1 < Count ? one_and_a_half(exponent) : 0.0);
      for (int half = 0; half < V::halves; ++half) sums[k][half] = start[k];
    }
    ZERO_EXT_UNROLL_BY(2)
    for (std::int64_t i = 0; i < count; i += V::width) {
      const auto value = V::load(values + i);
      add_square<Count, 0>(value, sums);
      if constexpr (V::halves == 2) add_square<Count, V::halves - 1>(value, sums);
    }
    for (int k = 0; k < Count; ++k) {
      auto sum = V::sub(sums[k][0], start[k]);
      if constexpr (V::halves == 2) sum = V::add(sum, V::sub(sums[k][1], start[k]));
      total.add(V::sum(sum));
    }
  }

  template <int Count, int Half>
  static ZERO_EXT_HOST_DEVICE void add_square(typename V::Float value,
                                              typename V::Double (&sums)[Count][V::halves]) {
    const auto wide = V::template widen<Half>(value);
    if constexpr (Count == 1) {
      sums[0][Half] = V::multiply_add(wide, wide, sums[0][Half]);
    } else {
      const auto first = sums[0][Half];
      sums[0][Half] = V::multiply_add(wide, wide, first);
      auto rest = V::multiply_subtract(wide, wide, V::sub(sums[0][Half], first));
      for (int k = 1; k + 1 < Count; ++k) {
        const auto before = sums[k][Half];
        sums[k][Half] = V::add(before, rest);
        rest = V::sub(rest, V::sub(sums[k][Half], before));
      }
      sums[Count - 1][Half] = V::add(sums[Count - 1][Half], rest);
    }
  }

  // Any mixture of magnitudes and non-finite values, one element at a time.
  ZERO_EXT_FUNCTION static void one_by_one(const T* values, std::int64_t count, Total& total) {
    total.for_each(
        count, [values](std::int64_t i, auto& sum) { add_one_square(to_float(values[i]), sum); });
  }

  ZERO_EXT_FUNCTION static void block(const T* values, std::int64_t count, Total& total) {
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
    } else if (MostAccumulators == 4 && width <= 53 + 3 * kStep) {
      accumulate<MostAccumulators>(values, count, bound, total);
    } else {
      one_by_one(values, count, total);
    }
  }

  ZERO_EXT_FUNCTION static void run(const void* source, std::int64_t count, Total& total) {
    const auto* values = static_cast<const T*>(source);
    std::int64_t i = 0;
    for (; i + kBlock <= count; i += kBlock) block(values + i, kBlock, total);
    const std::int64_t full = (count - i) / kGroup * kGroup;
    if (full > 0) block(values + i, full, total);
    i += full;
    if (i < count) one_by_one(values + i, count - i, total);
  }
};

}  // namespace
}  // namespace zero_ext::core
