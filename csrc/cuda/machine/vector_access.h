// Eight elements that a thread moves at once, in accesses of 16 bytes (8 for bytes).
#pragma once

#include <cstdint>

#include "../../core/numeric_types.h"
#include "../../core/portability.h"

namespace zero_ext::cuda {

inline constexpr int kPackElements = 8;
inline constexpr std::uintptr_t kAccessBytes = 16;

template <class T>
struct alignas(sizeof(T) * kPackElements < kAccessBytes ? sizeof(T) * kPackElements : kAccessBytes)
    Pack {
  T values[kPackElements];
};

// Needs an address that is a multiple of kAccessBytes (of 8 for bytes).
template <class T>
ZERO_EXT_HOST_DEVICE Pack<T> load_pack(const T* source) {
  return *reinterpret_cast<const Pack<T>*>(source);
}

template <class T>
ZERO_EXT_HOST_DEVICE void store_pack(T* target, const Pack<T>& pack) {
  *reinterpret_cast<Pack<T>*>(target) = pack;
}

// A null pointer is aligned: there is nothing to access.
ZERO_EXT_HOST_DEVICE bool is_aligned(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address) % kAccessBytes == 0;
}

// The elements of a pack that are there: [first, last), none where last <= first. `wide` if the
// pack's address allows it to be moved at once.
struct PackRange {
  int first;
  int last;
  bool wide;

  // Those of `begin` + [0, kPackElements) that lie in [low, high).
  static ZERO_EXT_HOST_DEVICE PackRange of(std::int64_t begin, std::int64_t low, std::int64_t high,
                                           bool aligned) {
    const std::int64_t first = low > begin ? low - begin : 0;
    const std::int64_t last = high - begin < kPackElements ? high - begin : kPackElements;
    const auto clipped = [](std::int64_t at) {
      return static_cast<int>(at < 0 ? 0 : at > kPackElements ? kPackElements : at);
    };
    return {clipped(first), clipped(last), aligned && first == 0 && last == kPackElements};
  }
  ZERO_EXT_HOST_DEVICE bool holds(int element) const { return first <= element && element < last; }
};

// Elements that are not there are `otherwise`.
template <class T>
ZERO_EXT_HOST_DEVICE Pack<T> load_pack(const T* source, const PackRange& range, T otherwise) {
  if (range.wide) return load_pack(source);
  Pack<T> pack;
  ZERO_EXT_UNROLL
  for (int k = 0; k < kPackElements; ++k) pack.values[k] = range.holds(k) ? source[k] : otherwise;
  return pack;
}

template <class T>
ZERO_EXT_HOST_DEVICE void store_pack(T* target, const Pack<T>& pack, const PackRange& range) {
  if (range.wide) return store_pack(target, pack);
  ZERO_EXT_UNROLL
  for (int k = 0; k < kPackElements; ++k) {
    if (range.holds(k)) target[k] = pack.values[k];
  }
}

}  // namespace zero_ext::cuda
