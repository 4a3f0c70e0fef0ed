// One-lane vector: the reference instruction set, and the one formulas use on devices.
//
// Every vector type offers the same static members: `width` floats in a Float, split into `parts`
// Doubles; loads and stores that convert from and to the element types; float arithmetic for the
// optimizers; for the exact norm, double arithmetic and extrema of the magnitudes' bit patterns, in
// the elements' own format (`lanes<T>` of them in a Bits).
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "numeric_types.h"
#include "portability.h"

namespace zero_ext::core {

struct ScalarVector {
  using Float = float;
  using Double = double;
  using Bits = std::uint32_t;
  static constexpr int width = 1;
  static constexpr int parts = 1;

  template <class T>
  static ZERO_EXT_HOST_DEVICE Float load(const T* source) {
    return to_float(*source);
  }
  template <class T>
  static ZERO_EXT_HOST_DEVICE void store(T* target, Float value) {
    *target = from_float<T>(value);
  }

  template <class T>
  static ZERO_EXT_HOST_DEVICE void stream(T* target, Float value) {
    store(target, value);
  }
  static ZERO_EXT_HOST_DEVICE void fence() {}

  static ZERO_EXT_HOST_DEVICE Float set(float value) { return value; }
  static ZERO_EXT_HOST_DEVICE Float add(Float a, Float b) { return a + b; }
  static ZERO_EXT_HOST_DEVICE Float sub(Float a, Float b) { return a - b; }
  static ZERO_EXT_HOST_DEVICE Float mul(Float a, Float b) { return a * b; }
  static ZERO_EXT_HOST_DEVICE Float div(Float a, Float b) { return a / b; }
  static ZERO_EXT_HOST_DEVICE Float fma(Float a, Float b, Float c) { return ::fmaf(a, b, c); }
  static ZERO_EXT_HOST_DEVICE Float sqrt(Float a) { return ::sqrtf(a); }

  template <int Part>
  static ZERO_EXT_HOST_DEVICE Double widen(Float value) {
    static_assert(Part == 0);
    return value;
  }
  static ZERO_EXT_HOST_DEVICE Double set(double value) { return value; }
  static ZERO_EXT_HOST_DEVICE Double add(Double a, Double b) { return a + b; }
  static ZERO_EXT_HOST_DEVICE Double sub(Double a, Double b) { return a - b; }
  // Used only where a * b is exact, so that fusing makes no difference.
  static ZERO_EXT_HOST_DEVICE Double multiply_add(Double a, Double b, Double c) {
    return a * b + c;
  }
  static ZERO_EXT_HOST_DEVICE Double multiply_subtract(Double a, Double b, Double c) {
    return a * b - c;
  }
  static ZERO_EXT_HOST_DEVICE double sum(Double value) { return value; }

  template <class T>
  static constexpr int lanes = 1;
  template <class T>
  static ZERO_EXT_HOST_DEVICE Bits set_bits(std::uint32_t value) {
    return static_cast<UnsignedOf<T>>(value);
  }
  template <class T>
  static ZERO_EXT_HOST_DEVICE Bits magnitudes(const T* source) {
    return std::bit_cast<UnsignedOf<T>>(*source) & (0x7FFFFFFFU >> (32 - 8 * sizeof(T)));
  }
  template <class T>
  static ZERO_EXT_HOST_DEVICE Bits decrement(Bits value) {
    return static_cast<UnsignedOf<T>>(value - 1U);
  }
  template <class T>
  static ZERO_EXT_HOST_DEVICE Bits max(Bits a, Bits b) {
    return a > b ? a : b;
  }
  template <class T>
  static ZERO_EXT_HOST_DEVICE Bits min(Bits a, Bits b) {
    return a < b ? a : b;
  }
  template <class T>
  static ZERO_EXT_HOST_DEVICE UnsignedOf<T> highest(Bits value) {
    return static_cast<UnsignedOf<T>>(value);
  }
  template <class T>
  static ZERO_EXT_HOST_DEVICE UnsignedOf<T> lowest(Bits value) {
    return static_cast<UnsignedOf<T>>(value);
  }
};

}  // namespace zero_ext::core
