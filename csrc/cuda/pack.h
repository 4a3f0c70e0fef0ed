// Eight elements that a thread moves at once, in accesses of 16 bytes.
#pragma once

#include <cstdint>

#include "../core/numeric_types.h"
#include "../core/portability.h"

namespace zero_ext::cuda {

inline constexpr int kPackElements = 8;
inline constexpr std::uintptr_t kAccessBytes = 16;

template <class T>
struct alignas(kAccessBytes) Pack {
  T values[kPackElements];
};

// Needs an address that is a multiple of kAccessBytes.
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

}  // namespace zero_ext::cuda
