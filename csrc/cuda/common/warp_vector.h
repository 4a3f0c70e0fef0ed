// A warp as a vector type for the formula of the exact norm (see vector_scalar.h): eight elements
// a lane, loaded in accesses of 16 bytes.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "../../core/base/numeric_types.h"
#include "warp_tile.h"

namespace zero_ext::cuda {

struct WarpVector {
  static constexpr int kOwnElements = 8;  // of a lane
  static constexpr int kThreadElements = kThreadLanes * kOwnElements;
  static constexpr int width = kWarpLanes * kOwnElements;
  static constexpr int halves = 1;
  template <class T>
  static constexpr int lanes = width;

  struct Float {
    float at[kThreadElements];
  };
  struct Double {
    double at[kThreadElements];
  };
  struct Bits {
    std::uint32_t at[kThreadElements];
  };

  // The running thread's elements of `width` aligned ones: sums and extremes have no order.
  template <class Result, class T, class Convert>
  static ZERO_EXT_HOST_DEVICE Result each_loaded(const T* source, const Convert& convert) {
    using Tile = WarpTile<static_cast<int>(kAccessBytes / sizeof(T)),
                          width / (kWarpLanes * static_cast<int>(kAccessBytes / sizeof(T)))>;
    static_assert(Tile::kPerLane == kOwnElements);
    typename Tile::template Fragment<T> own;
    Tile::load(source, own);
    Result result;
    each_lane([&](int local, int) {
      ZERO_EXT_UNROLL
      for (int k = 0; k < kOwnElements; ++k) {
        result.at[local * kOwnElements + k] = convert(own.at[local][k]);
      }
    });
    return result;
  }

  template <class Result, class Compute>
  static ZERO_EXT_HOST_DEVICE Result each(const Compute& compute) {
    Result result;
    ZERO_EXT_UNROLL
    for (int i = 0; i < kThreadElements; ++i) result.at[i] = compute(i);
    return result;
  }

  template <class T>
  static ZERO_EXT_HOST_DEVICE Float load(const T* source) {
    return each_loaded<Float>(source, [](T value) { return core::to_float(value); });
  }
  template <int Half>
  static ZERO_EXT_HOST_DEVICE Double widen(const Float& value) {
    return each<Double>([&](int i) { return static_cast<double>(value.at[i]); });
  }
  static ZERO_EXT_HOST_DEVICE Double set(double value) {
    return each<Double>([&](int) { return value; });
  }
  static ZERO_EXT_HOST_DEVICE Double add(const Double& a, const Double& b) {
    return each<Double>([&](int i) { return a.at[i] + b.at[i]; });
  }
  static ZERO_EXT_HOST_DEVICE Double sub(const Double& a, const Double& b) {
    return each<Double>([&](int i) { return a.at[i] - b.at[i]; });
  }
  static ZERO_EXT_HOST_DEVICE Double multiply_add(const Double& a, const Double& b,
                                                  const Double& c) {
    return each<Double>([&](int i) { return ::fma(a.at[i], b.at[i], c.at[i]); });
  }
  static ZERO_EXT_HOST_DEVICE Double multiply_subtract(const Double& a, const Double& b,
                                                       const Double& c) {
    return each<Double>([&](int i) { return ::fma(a.at[i], b.at[i], -c.at[i]); });
  }
  // Called where every order gives the same sum.
  static ZERO_EXT_HOST_DEVICE double sum(const Double& value) {
    double total = 0;
    ZERO_EXT_UNROLL
    for (int i = 0; i < kThreadElements; ++i) total += value.at[i];
    return sum_of_warp(total);
  }

  template <class T>
  static ZERO_EXT_HOST_DEVICE Bits set_bits(std::uint32_t value) {
    return each<Bits>([&](int) { return static_cast<core::UnsignedOf<T>>(value); });
  }
  template <class T>
  static ZERO_EXT_HOST_DEVICE Bits magnitudes(const T* source) {
    return each_loaded<Bits>(source, [](T value) {
      return std::bit_cast<core::UnsignedOf<T>>(value) & (0x7FFFFFFFU >> (32 - 8 * sizeof(T)));
    });
  }
  template <class T>
  static ZERO_EXT_HOST_DEVICE Bits decrement(const Bits& value) {
    return each<Bits>([&](int i) { return static_cast<core::UnsignedOf<T>>(value.at[i] - 1U); });
  }
  template <class T>
  static ZERO_EXT_HOST_DEVICE Bits max(const Bits& a, const Bits& b) {
    return each<Bits>([&](int i) { return a.at[i] > b.at[i] ? a.at[i] : b.at[i]; });
  }
  template <class T>
  static ZERO_EXT_HOST_DEVICE Bits min(const Bits& a, const Bits& b) {
    return each<Bits>([&](int i) { return a.at[i] < b.at[i] ? a.at[i] : b.at[i]; });
  }
  template <class T>
  static ZERO_EXT_HOST_DEVICE core::UnsignedOf<T> highest(const Bits& value) {
    std::uint32_t result = value.at[0];
    ZERO_EXT_UNROLL
    for (int i = 1; i < kThreadElements; ++i) result = value.at[i] > result ? value.at[i] : result;
    return static_cast<core::UnsignedOf<T>>(max_of_warp(result));
  }
  template <class T>
  static ZERO_EXT_HOST_DEVICE core::UnsignedOf<T> lowest(const Bits& value) {
    std::uint32_t result = value.at[0];
    ZERO_EXT_UNROLL
    for (int i = 1; i < kThreadElements; ++i) result = value.at[i] < result ? value.at[i] : result;
    return static_cast<core::UnsignedOf<T>>(min_of_warp(result));
  }
};

}  // namespace zero_ext::cuda
