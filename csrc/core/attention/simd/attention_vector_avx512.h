// What attention needs of a vector type beyond vector_avx512.h. Included only inside that target's
// region.
#pragma once

#include <immintrin.h>

#include "../../simd/vector_avx512.h"
#include "../exp2_formula.h"

namespace zero_ext::core {

struct Avx512AttentionVector : Avx512Vector {
  static constexpr int kWide = 4;
  static constexpr int kWideRows = 6;
  static constexpr int kNarrowRows = 12;

  static Float max(Float a, Float b) { return _mm512_max_ps(a, b); }
  static Float exp2(Float a) {
    // Far below, minus infinity included, becomes zero; NaN stays.
    const __m512 clamped = _mm512_max_ps(set(-256.0F), a);
    const __m512 integral =
        _mm512_roundscale_ps(clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_scalef_ps(exp2_of_fraction<Avx512AttentionVector>(sub(clamped, integral)),
                            integral);
  }
  static Float indices(float first) {
    const __m512 each = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return add(each, set(first));
  }
  static bool any_different(Float a, Float b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ) != 0; }
};

}  // namespace zero_ext::core
