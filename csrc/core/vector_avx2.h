// Eight-lane vector on AVX2, FMA and F16C. Included only inside that target's region.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "numeric_types.h"

namespace zero_ext::core {

struct Avx2Vector {
  using Float = __m256;
  using Double = __m256d;
  using Bits = __m256i;
  static constexpr int width = 8;
  static constexpr int parts = 2;

  static Float load(const float* source) { return _mm256_loadu_ps(source); }
  static Float load(const BFloat16* source) {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(packed), 16));
  }
  static Float load(const Float16* source) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
  }

  static void store(float* target, Float value) { _mm256_storeu_ps(target, value); }
  // Integer rounding instead of the bfloat16 instructions, which flush subnormals to zero.
  static void store(BFloat16* target, Float value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const __m256i unordered = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i halves = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), unordered);
    const __m128i packed =
        _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), packed);
  }
  static void store(Float16* target, Float value) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target),
                     _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  }

  static Float set(float value) { return _mm256_set1_ps(value); }
  static Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
  static Float sub(Float a, Float b) { return _mm256_sub_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static Float div(Float a, Float b) { return _mm256_div_ps(a, b); }
  static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static Float sqrt(Float a) { return _mm256_sqrt_ps(a); }

  template <int Part>
  static Double widen(Float value) {
    return _mm256_cvtps_pd(_mm256_extractf128_ps(value, Part));
  }
  static Double set(double value) { return _mm256_set1_pd(value); }
  static Double add(Double a, Double b) { return _mm256_add_pd(a, b); }
  static Double sub(Double a, Double b) { return _mm256_sub_pd(a, b); }
  static Double mul(Double a, Double b) { return _mm256_mul_pd(a, b); }
  static double sum(Double value) {
    alignas(32) double lanes[4];
    _mm256_store_pd(lanes, value);
    return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
  }

  static Bits set_bits(std::uint32_t value) { return _mm256_set1_epi32(static_cast<int>(value)); }
  static Bits magnitude_bits(Float value) {
    return _mm256_and_si256(_mm256_castps_si256(value), _mm256_set1_epi32(0x7FFFFFFF));
  }
  static Bits decrement(Bits value) { return _mm256_sub_epi32(value, _mm256_set1_epi32(1)); }
  static Bits max(Bits a, Bits b) { return _mm256_max_epu32(a, b); }
  static Bits min(Bits a, Bits b) { return _mm256_min_epu32(a, b); }
  static std::uint32_t highest(Bits value) {
    alignas(32) std::uint32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), value);
    std::uint32_t result = lanes[0];
    for (const std::uint32_t lane : lanes) result = lane > result ? lane : result;
    return result;
  }
  static std::uint32_t lowest(Bits value) {
    return ~highest(_mm256_xor_si256(value, _mm256_set1_epi32(-1)));
  }
};

}  // namespace zero_ext::core
