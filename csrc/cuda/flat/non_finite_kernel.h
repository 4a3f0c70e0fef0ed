// Whether a flat tensor holds a number that is not finite, as a thread of a grid looks.
#pragma once

#include <bit>
#include <cstdint>

#include "../../core/numeric_types.h"
#include "../machine/vector_access.h"

namespace zero_ext::cuda {

template <class T>
struct FlagNonFinite {
  const T* values;
  std::int64_t count;
  std::int64_t head;  // elements before the first aligned one
  std::int32_t* flag;

  static FlagNonFinite of(const void* values, std::int64_t count, std::int32_t* flag) {
    const auto past = reinterpret_cast<std::uintptr_t>(values) % kAccessBytes;
    const auto head = static_cast<std::int64_t>((kAccessBytes - past) % kAccessBytes / sizeof(T));
    return {static_cast<const T*>(values), count, head < count ? head : count, flag};
  }

  ZERO_EXT_HOST_DEVICE std::int64_t packs() const { return (count - head) / kPackElements; }

  // Threads that raise the flag write the same value.
  ZERO_EXT_HOST_DEVICE void operator()(std::int64_t thread, std::int64_t threads) const {
    bool finite = true;
    for (std::int64_t i = thread; i < packs(); i += threads) {
      const Pack<T> pack = load_pack(values + head + i * kPackElements);
      ZERO_EXT_UNROLL
      for (int k = 0; k < kPackElements; ++k) finite = finite && is_finite(pack.values[k]);
    }
    if (thread == 0) {
      for (std::int64_t i = 0; i < head; ++i) finite = finite && is_finite(values[i]);
      const std::int64_t done = head + packs() * kPackElements;
      for (std::int64_t i = done; i < count; ++i) finite = finite && is_finite(values[i]);
    }
    if (!finite) *flag = 1;
  }

 private:
  static ZERO_EXT_HOST_DEVICE bool is_finite(T value) {
    const std::uint32_t bits = std::bit_cast<core::UnsignedOf<T>>(value);
    return (bits & core::kInfinityBits<T>) != core::kInfinityBits<T>;
  }
};

}  // namespace zero_ext::cuda
