#include "non_finite.h"

#include <atomic>
#include <cstddef>

#include "../dispatch/kernels.h"

namespace zero_ext::core {

void raise_flag(std::int32_t* flag) {
  std::atomic_ref<std::int32_t>(*flag).store(1, std::memory_order_relaxed);
}

void flag_non_finite(const void* values, NumericType type, std::int64_t begin, std::int64_t end,
                     std::int32_t* flag) {
  const auto* bytes = static_cast<const std::byte*>(values) + begin * element_size(type);
  if (!active_kernels().all_finite[static_cast<int>(type)](bytes, end - begin)) raise_flag(flag);
}

}  // namespace zero_ext::core
