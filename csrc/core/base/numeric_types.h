// The three floating-point element types of flat buffers, and their scalar conversions.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "host_device.h"

namespace zero_ext::core {

enum class NumericType : std::uint8_t { float32 = 0, bfloat16 = 1, float16 = 2 };
inline constexpr int kNumericTypes = 3;

struct BFloat16 {
  std::uint16_t bits;
};

struct Float16 {
  std::uint16_t bits;
};

template <class T>
inline constexpr int kSignificandBits = 24;
template <>
inline constexpr int kSignificandBits<BFloat16> = 8;
template <>
inline constexpr int kSignificandBits<Float16> = 11;

// Unsigned integer of an element type's size, for its bit pattern.
template <class T>
using UnsignedOf = std::conditional_t<sizeof(T) == 2, std::uint16_t, std::uint32_t>;

// Bit pattern of infinity: larger magnitudes are NaNs, smaller ones finite.
template <class T>
inline constexpr std::uint32_t kInfinityBits = 0x7F800000U;
template <>
inline constexpr std::uint32_t kInfinityBits<BFloat16> = 0x7F80U;
template <>
inline constexpr std::uint32_t kInfinityBits<Float16> = 0x7C00U;

constexpr std::int64_t element_size(NumericType type) {
  return type == NumericType::float32 ? 4 : 2;
}

ZERO_EXT_HOST_DEVICE float to_float(float value) { return value; }

ZERO_EXT_HOST_DEVICE float to_float(BFloat16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

ZERO_EXT_HOST_DEVICE float to_float(Float16 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000U) << 16;
  const std::uint32_t exponent = (value.bits >> 10) & 0x1FU;
  const std::uint32_t fraction = value.bits & 0x3FFU;
#if defined(__CUDA_ARCH__)
  // The instruction is exact, but what it makes of a NaN's bits is not said.
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  const float special = std::bit_cast<float>(sign | 0x7F800000U | (fraction << 13));
  return exponent == 0x1FU ? special : wide;
#else
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) * 0x1p-24F;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | sign);
  }
  const std::uint32_t wide = exponent == 0x1FU ? 0xFFU : exponent + 112U;
  return std::bit_cast<float>(sign | (wide << 23) | (fraction << 13));
#endif
}

template <class T>
ZERO_EXT_HOST_DEVICE T from_float(float value);

template <>
ZERO_EXT_HOST_DEVICE float from_float<float>(float value) {
  return value;
}

// Round to nearest even; every NaN becomes the canonical quiet one, as torch does. A device's
// instruction rounds alike, subnormals too, but makes another NaN.
template <>
ZERO_EXT_HOST_DEVICE BFloat16 from_float<BFloat16>(float value) {
#if defined(__CUDA_ARCH__)
  std::uint16_t rounded;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
  return BFloat16{value != value ? std::uint16_t{0x7FC0} : rounded};
#else
  if (value != value) return BFloat16{0x7FC0};
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return BFloat16{static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16)};
#endif
}

// Round to nearest even; values of 65520 and more become infinity. NaNs keep their sign and upper
// bits, which a device's instruction drops.
template <>
ZERO_EXT_HOST_DEVICE Float16 from_float<Float16>(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
#if defined(__CUDA_ARCH__)
  std::uint16_t rounded;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
  const std::uint32_t nan = 0x7E00U | ((magnitude >> 13) & 0x3FFU) | sign;
  return Float16{magnitude > 0x7F800000U ? static_cast<std::uint16_t>(nan) : rounded};
#else
  std::uint32_t result = 0;
  if (magnitude > 0x7F800000U) {
    result = 0x7E00U | ((magnitude >> 13) & 0x3FFU);
  } else if (magnitude >= 0x477FF000U) {
    result = 0x7C00U;
  } else if (magnitude >= 0x38800000U) {
    const std::uint32_t rounded = magnitude + 0xFFFU + ((magnitude >> 13) & 1U);
    result = (rounded - 0x38000000U) >> 13;
  } else {
    // Adding 0.5 leaves the subnormal's integer value, rounded, in the low bits.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    result = std::bit_cast<std::uint32_t>(shifted) - 0x3F000000U;
  }
  return Float16{static_cast<std::uint16_t>(result | sign)};
#endif
}

}  // namespace zero_ext::core
