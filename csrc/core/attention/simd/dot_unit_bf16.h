// Units of two bfloat16 numbers, multiplied by AVX-512's bfloat16 dot products. Included only
// inside that target's region.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "dot_unit.h"

namespace zero_ext::core {
namespace {

template <class Vector>
struct Bf16DotUnit {
  using V = Vector;
  using Element = BFloat16;
  static constexpr int kPair = 2;
  using Packed = __m512bh;

  static Packed load(const Unit* source) {
    return (__m512bh)_mm512_loadu_si512(static_cast<const void*>(source));
  }
  static Packed broadcast(const Unit* source) {
    return (__m512bh)_mm512_set1_epi32(static_cast<int>(*source));
  }
  static __m512 dot(__m512 sum, Packed a, Packed b) { return _mm512_dpbf16_ps(sum, a, b); }

  static __m512i widened(__m256i halves) { return _mm512_cvtepu16_epi32(halves); }
  static __m256i rounded(__m512 values) { return (__m256i)_mm512_cvtneps_pbh(values); }

  // Units of one lane each of two consecutive rows.
  static void store_down(Unit* target, __m512 first, __m512 second) {
    const __m512i high = _mm512_slli_epi32(widened(rounded(second)), 16);
    _mm512_storeu_si512(target, _mm512_or_si512(high, widened(rounded(first))));
  }

  // `count` is a multiple of the vector's width.
  static void interleave(const BFloat16* first, const BFloat16* second, std::int64_t count,
                         Unit* target) {
    for (std::int64_t i = 0; i < count; i += V::width) {
      const auto* low = reinterpret_cast<const __m256i*>(first + i);
      const auto* high = reinterpret_cast<const __m256i*>(second + i);
      const __m512i shifted = _mm512_slli_epi32(widened(_mm256_loadu_si256(high)), 16);
      _mm512_storeu_si512(target + i, _mm512_or_si512(shifted, widened(_mm256_loadu_si256(low))));
    }
  }
};

}  // namespace
}  // namespace zero_ext::core
