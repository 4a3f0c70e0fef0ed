// What attention needs of a vector type beyond vector_neon.h.
#pragma once

#include <arm_neon.h>

#include "../../simd/vector_neon.h"
#include "../exp2_formula.h"

namespace zero_ext::core {

struct NeonAttentionVector : NeonVector {
  static constexpr int kWide = 4;
  static constexpr int kWideRows = 6;
  static constexpr int kNarrowRows = 12;

  static Float exp2(Float a) {
    // Clamped, minus infinity included, to where the exponent's bits become zero.
    const float32x4_t clamped = max(set(-127.0F), min(set(128.0F), a));
    const float32x4_t integral = vrndnq_f32(clamped);
    const int32x4_t exponent = vaddq_s32(vcvtnq_s32_f32(clamped), vdupq_n_s32(127));
    const float32x4_t power = vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23));
    return mul(exp2_of_fraction<NeonAttentionVector>(sub(clamped, integral)), power);
  }
  static Float indices(float first) {
    constexpr float each[width] = {0, 1, 2, 3};
    return add(load(each), set(first));
  }
  static bool any_different(Float a, Float b) {
    // Equal lanes are all ones.
    return vminvq_u32(vceqq_f32(a, b)) == 0;
  }
};

}  // namespace zero_ext::core
