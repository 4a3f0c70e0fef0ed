#include "squared_norm.h"

#include <cstddef>

#include "../dispatch/kernels.h"
#include "../simd/fp_mode_guard.h"

namespace zero_ext::core {

void add_squares(const void* values, NumericType type, std::int64_t begin, std::int64_t end,
                 Superaccumulator& total) {
  [[maybe_unused]] const FpModeGuard fp_mode;
  const auto* bytes = static_cast<const std::byte*>(values) + begin * element_size(type);
  active_kernels().squared_norm[static_cast<int>(type)](bytes, end - begin, total);
}

}  // namespace zero_ext::core
