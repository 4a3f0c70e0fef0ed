// One-lane vector: the reference instruction set, and the one formulas use on devices.
//
// Every vector type offers the same static members: `width` floats in a Float, split into `halves`
// Doubles; loads and stores that convert from and to the element types; float arithmetic for the
// optimizers; comparisons, tables and bytes for the 8-bit codes; for the exact norm, double
// arithmetic and extrema of the magnitudes' bit patterns, in the elements' own format (`lanes<T>`
// of them in a Bits).
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../base/host_device.h"
#include "../base/numeric_types.h"

namespace zero_ext::core {

struct ScalarVector {
  using Float = float;
  using Double = double;
  using Bits = std::uint32_t;
  static constexpr int width = 1;
  static constexpr int halves = 1;

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
  static void stream_bytes(void* target, const void* source, std::size_t bytes) {
    std::memcpy(target, source, bytes);
  }
  static ZERO_EXT_HOST_DEVICE void fence() {}

  static ZERO_EXT_HOST_DEVICE Float set(float value) { return value; }
  static ZERO_EXT_HOST_DEVICE Float add(Float a, Float b) { return a + b; }
  static ZERO_EXT_HOST_DEVICE Float sub(Float a, Float b) { return a - b; }
  static ZERO_EXT_HOST_DEVICE Float mul(Float a, Float b) { return a * b; }
  static ZERO_EXT_HOST_DEVICE Float div(Float a, Float b) { return a / b; }
  static ZERO_EXT_HOST_DEVICE Float fma(Float a, Float b, Float c) { return ::fmaf(a, b, c); }
  static ZERO_EXT_HOST_DEVICE Float sqrt(Float a) { return ::sqrtf(a); }
  static ZERO_EXT_HOST_DEVICE Float abs(Float a) { return ::fabsf(a); }
  static ZERO_EXT_HOST_DEVICE Float floor(Float a) { return ::floorf(a); }
  static ZERO_EXT_HOST_DEVICE Float min(Float a, Float b) { return a < b ? a : b; }
  static ZERO_EXT_HOST_DEVICE Float max(Float a, Float b) { return a > b ? a : b; }
  static ZERO_EXT_HOST_DEVICE Float max_magnitude(Float a, Float b) { return max(abs(a), abs(b)); }
  // Of a magnitude, which has no sign of its own.
  static ZERO_EXT_HOST_DEVICE Float copy_sign(Float magnitude, Float sign) {
    return ::copysignf(magnitude, sign);
  }
  static ZERO_EXT_HOST_DEVICE Float if_at_least(Float a, Float b, Float then, Float otherwise) {
    return a >= b ? then : otherwise;
  }
  static ZERO_EXT_HOST_DEVICE Bits add_if_at_least(Bits sum, std::uint32_t term, Float a, Float b) {
    return a >= b ? sum + term : sum;
  }
  // One bit for each lane, the first lane's lowest.
  static ZERO_EXT_HOST_DEVICE std::uint32_t lanes_at_least(Float a, Float b) { return a >= b; }
  // sum + term in the chosen lanes, sum - term in the others.
  static ZERO_EXT_HOST_DEVICE Float add_signed(Float sum, std::uint32_t chosen, float term) {
    return chosen != 0 ? sum + term : sum - term;
  }
  template <class T>
  static ZERO_EXT_HOST_DEVICE void store_chosen(T* target, std::uint32_t chosen, T then,
                                                T otherwise) {
    *target = chosen != 0 ? then : otherwise;
  }
  template <class T>
  static ZERO_EXT_HOST_DEVICE void stream_chosen(T* target, std::uint32_t chosen, T then,
                                                 T otherwise) {
    store_chosen(target, chosen, then, otherwise);
  }
  // The bits from bit `i` on, a multiple of the width.
  static ZERO_EXT_HOST_DEVICE std::uint32_t load_lanes(const std::uint32_t* words, std::int64_t i) {
    return (words[i / 32] >> (i % 32)) & 1U;
  }

  static ZERO_EXT_HOST_DEVICE Bits load_words(const void* source) {
    Bits words;
    std::memcpy(&words, source, sizeof words);
    return words;
  }
  static ZERO_EXT_HOST_DEVICE void store_words(std::uint32_t* target, Bits value) {
    *target = value;
  }
  static ZERO_EXT_HOST_DEVICE void stream_words(std::uint32_t* target, Bits value) {
    store_words(target, value);
  }
  // 2^(23 - BitOffset) plus the field of a word, shifted right, that starts at bit `BitOffset`.
  template <int Shift, int BitOffset>
  static ZERO_EXT_HOST_DEVICE Float get_field(Bits words, std::uint32_t mask) {
    return std::bit_cast<float>(((words >> Shift) & (mask << BitOffset)) |
                                (0x4B000000U - (static_cast<std::uint32_t>(BitOffset) << 23)));
  }
  // Combines words and the bits of two numbers, shifted, by exclusive or.
  template <int First, int Second>
  static ZERO_EXT_HOST_DEVICE Bits xor_shifted(Bits words, Float a, Float b) {
    return words ^ (std::bit_cast<std::uint32_t>(a) << First) ^
           (std::bit_cast<std::uint32_t>(b) << Second);
  }

  // Entry of a table by the index modulo 8.
  static ZERO_EXT_HOST_DEVICE Float lookup(const float (&table)[8], Bits index) {
    return table[index % 8];
  }
  // Entry of a table by the biased exponent, modulo 8, of a positive number.
  static ZERO_EXT_HOST_DEVICE Float by_exponent(const float (&table)[8], Float a) {
    return lookup(table, std::bit_cast<std::uint32_t>(a) >> 23);
  }
  // What a number's significand, in [1, 2), is above one.
  static ZERO_EXT_HOST_DEVICE Float fraction(Float a) {
    return std::bit_cast<float>((std::bit_cast<std::uint32_t>(a) & 0x7FFFFFU) | 0x3F800000U) - 1;
  }

  // Keys that order floats by magnitude, and the positive one of two equals last: the bits, with
  // the inverted sign for the lowest.
  static ZERO_EXT_HOST_DEVICE Bits magnitude_keys(const float* source) {
    return std::rotl(std::bit_cast<std::uint32_t>(*source), 1) ^ 1U;
  }
  static ZERO_EXT_HOST_DEVICE Float load_bytes(const std::uint8_t* source) { return *source; }
  // Of whole numbers 0..255.
  static ZERO_EXT_HOST_DEVICE void store_bytes(std::uint8_t* target, Float value) {
    *target = static_cast<std::uint8_t>(value);
  }

  template <int Half>
  static ZERO_EXT_HOST_DEVICE Double widen(Float value) {
    static_assert(Half == 0);
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
  // Unsigned integers in the order of the values; NaNs lie beyond the infinities.
  template <class T>
  static ZERO_EXT_HOST_DEVICE Bits ordered(const T* source) {
    static_assert(sizeof(T) == 2);
    const Bits bits = source->bits;
    return bits ^ (bits >> 15 != 0 ? 0xFFFFU : 0x8000U);
  }
  static ZERO_EXT_HOST_DEVICE Bits ordered_of(Float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    return bits ^ (bits >> 31 != 0 ? 0xFFFFFFFFU : 0x80000000U);
  }
  static ZERO_EXT_HOST_DEVICE Bits unordered(Bits ordered) {
    return ordered ^ (ordered >> 31 != 0 ? 0x80000000U : 0xFFFFFFFFU);
  }
  // Each half of every 32 bits, in the upper half; a vector of one lane has but one of 16 bits.
  static ZERO_EXT_HOST_DEVICE Bits low_halves(Bits value) { return value << 16; }
  static ZERO_EXT_HOST_DEVICE Bits high_halves(Bits value) { return value << 16; }
  // Of a bit pattern whose first bits are the value's.
  template <class T>
  static ZERO_EXT_HOST_DEVICE Float value_of_upper(Bits bits) {
    return to_float(std::bit_cast<T>(static_cast<UnsignedOf<T>>(bits >> (32 - 8 * sizeof(T)))));
  }
  // Lane i: the operation on all lanes of vector i, of as many vectors as lanes.
  template <class Operation>
  static ZERO_EXT_HOST_DEVICE Bits across(const Bits* each, const Operation&) {
    return each[0];
  }
  static ZERO_EXT_HOST_DEVICE Bits magnitudes_of(Float value) {
    return std::bit_cast<std::uint32_t>(value) & 0x7FFFFFFFU;
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
  static ZERO_EXT_HOST_DEVICE float lowest(Float value) { return value; }
  static ZERO_EXT_HOST_DEVICE float highest(Float value) { return value; }
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
