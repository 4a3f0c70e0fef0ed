// What attention needs of a vector type beyond vector_avx2.h. Included only inside that target's
// region.
#pragma once

#include <immintrin.h>

#include "../../simd/vector_avx2.h"
#include "../exp2_formula.h"

namespace zero_ext::core {

struct Avx2AttentionVector : Avx2Vector {
  static constexpr int kWide = 2;
  static constexpr int kWideRows = 6;
  static constexpr int kNarrowRows = 8;

  static Float max(Float a, Float b) { return _mm256_max_ps(a, b); }
  static Float exp2(Float a) {
    // Clamped, minus infinity included, to where the exponent's bits become zero.
    const __m256 clamped = _mm256_max_ps(set(-127.0F), _mm256_min_ps(set(128.0F), a));
    const __m256 integral = _mm256_round_ps(clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(integral), _mm256_set1_epi32(127));
    const __m256 power = _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
    return mul(exp2_of_fraction<Avx2AttentionVector>(sub(clamped, integral)), power);
  }
  static Float indices(float first) {
    return add(_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), set(first));
  }
  static bool any_different(Float a, Float b) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NEQ_UQ)) != 0;
  }
};

}  // namespace zero_ext::core
