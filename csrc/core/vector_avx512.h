// Sixteen-lane vector on AVX-512 F, BW, DQ and VL. Included only inside that target's region.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "numeric_types.h"

namespace zero_ext::core {

struct Avx512Vector {
  using Float = __m512;
  using Double = __m512d;
  using Bits = __m512i;
  static constexpr int width = 16;
  static constexpr int parts = 2;

  static Float load(const float* source) { return _mm512_loadu_ps(source); }
  static Float load(const BFloat16* source) {
    const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(packed), 16));
  }
  static Float load(const Float16* source) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
  }

  static void store(float* target, Float value) { _mm512_storeu_ps(target, value); }
  // Integer rounding instead of the bfloat16 instructions, which flush subnormals to zero.
  static void store(BFloat16* target, Float value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    const __mmask16 unordered = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i halves = _mm512_mask_mov_epi32(rounded, unordered, _mm512_set1_epi32(0x7FC0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm512_cvtepi32_epi16(halves));
  }
  static void store(Float16* target, Float value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target),
                        _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  }

  static Float set(float value) { return _mm512_set1_ps(value); }
  static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
  static Float sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float div(Float a, Float b) { return _mm512_div_ps(a, b); }
  static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static Float sqrt(Float a) { return _mm512_sqrt_ps(a); }

  template <int Part>
  static Double widen(Float value) {
    return _mm512_cvtps_pd(_mm512_extractf32x8_ps(value, Part));
  }
  static Double set(double value) { return _mm512_set1_pd(value); }
  static Double add(Double a, Double b) { return _mm512_add_pd(a, b); }
  static Double sub(Double a, Double b) { return _mm512_sub_pd(a, b); }
  static Double mul(Double a, Double b) { return _mm512_mul_pd(a, b); }
  static double sum(Double value) { return _mm512_reduce_add_pd(value); }

  static Bits set_bits(std::uint32_t value) { return _mm512_set1_epi32(static_cast<int>(value)); }
  static Bits magnitude_bits(Float value) {
    return _mm512_and_si512(_mm512_castps_si512(value), _mm512_set1_epi32(0x7FFFFFFF));
  }
  static Bits decrement(Bits value) { return _mm512_sub_epi32(value, _mm512_set1_epi32(1)); }
  static Bits max(Bits a, Bits b) { return _mm512_max_epu32(a, b); }
  static Bits min(Bits a, Bits b) { return _mm512_min_epu32(a, b); }
  static std::uint32_t highest(Bits value) { return _mm512_reduce_max_epu32(value); }
  static std::uint32_t lowest(Bits value) { return _mm512_reduce_min_epu32(value); }
};

}  // namespace zero_ext::core
