// What attention needs of a vector type beyond vector_scalar.h, for one lane.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "../../simd/vector_scalar.h"

namespace zero_ext::core {

struct ScalarAttentionVector : ScalarVector {
  static constexpr int kWide = 4;  // vectors of a wide tile of a product, and its rows
  static constexpr int kWideRows = 4;
  static constexpr int kNarrowRows = 4;  // rows of a tile of one vector

  // NaN if `b` is.
  static Float max(Float a, Float b) { return a > b ? a : b; }
  static Float exp2(Float a) { return std::exp2(a); }
  static Float indices(float first) { return first; }
  static bool any_different(Float a, Float b) { return a != b; }
};

}  // namespace zero_ext::core
