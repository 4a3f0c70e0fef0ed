// Whether a flat tensor holds a number that is not finite, as a warp of a grid looks.
#pragma once

#include <bit>
#include <cstdint>

#include "../../core/base/numeric_types.h"
#include "../common/warp_tile.h"

namespace zero_ext::cuda {

template <class T>
struct FlagNonFinite {
  using Tile = WarpTileOf<4, T>;

  const T* values;
  std::int64_t count;
  std::int64_t head;  // elements before the first aligned one
  std::int32_t* flag;

  static FlagNonFinite of(const void* values, std::int64_t count, std::int32_t* flag) {
    const auto past = reinterpret_cast<std::uintptr_t>(values) % kAccessBytes;
    const auto head = static_cast<std::int64_t>((kAccessBytes - past) % kAccessBytes / sizeof(T));
    return {static_cast<const T*>(values), count, head < count ? head : count, flag};
  }

  ZERO_EXT_HOST_DEVICE std::int64_t tiles() const { return (count - head) / Tile::kElements; }

  // Threads that raise the flag write the same value.
  ZERO_EXT_HOST_DEVICE void operator()(std::int64_t warp, std::int64_t warps) const {
    bool finite[kThreadLanes];
    each_lane([&](int local, int) { finite[local] = true; });
    const std::int64_t full = tiles();
    for (std::int64_t i = warp; i < full; i += warps) {
      typename Tile::template Fragment<T> own;
      Tile::load(values + head + i * Tile::kElements, own);
      each_lane([&](int local, int) {
        ZERO_EXT_UNROLL
        for (const T& value : own.at[local]) finite[local] = finite[local] && is_finite(value);
      });
    }
    if (warp == 0) {
      const auto look = [&](int local, std::int64_t i) {
        finite[local] = finite[local] && is_finite(values[i]);
      };
      for_each_strided(0, head, look);
      for_each_strided(head + full * Tile::kElements, count, look);
    }
    each_lane([&](int local, int) {
      if (!finite[local]) *flag = 1;
    });
  }

 private:
  static ZERO_EXT_HOST_DEVICE bool is_finite(T value) {
    const std::uint32_t bits = std::bit_cast<core::UnsignedOf<T>>(value);
    return (bits & core::kInfinityBits<T>) != core::kInfinityBits<T>;
  }
};

}  // namespace zero_ext::cuda
