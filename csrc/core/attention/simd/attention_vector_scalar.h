// What attention needs of a vector type beyond vector_scalar.h, for one lane.
#pragma once

#include <bit>
#include <cstdint>

#include "../../simd/vector_scalar.h"
#include "../exp2_formula.h"

namespace zero_ext::core {

struct ScalarAttentionVector : ScalarVector {
  static constexpr int kWide = 4;  // vectors of a wide tile of a product, and its rows
  static constexpr int kWideRows = 4;
  static constexpr int kNarrowRows = 4;  // rows of a tile of one vector

  // NaN if `b` is.
  static Float max(Float a, Float b) { return a > b ? a : b; }
  // As the others, so that results are the same bits. The sum with 1.5 * 2^23 is rounded to an
  // integer, which its lowest bits hold; NaN stays.
  static Float exp2(Float a) {
    constexpr Float shift = 0x1.8p23F;
    const Float clamped = max(-127.0F, min(128.0F, a));
    const Float shifted = clamped + shift;
    const auto power = std::bit_cast<float>((std::bit_cast<std::uint32_t>(shifted) + 127U) << 23);
    return exp2_of_fraction<ScalarAttentionVector>(clamped - (shifted - shift)) * power;
  }
  static Float indices(float first) { return first; }
  static bool any_different(Float a, Float b) { return a != b; }
};

}  // namespace zero_ext::core
