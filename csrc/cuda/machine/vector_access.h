// Eight elements that a thread moves at once, in accesses of 16 bytes (8 for bytes).
#pragma once

#include <cstdint>
#include <cstring>

#include "../../core/numeric_types.h"
#include "../../core/portability.h"

namespace zero_ext::cuda {

inline constexpr int kPackElements = 8;
inline constexpr std::uintptr_t kAccessBytes = 16;

// What one access moves.
struct AccessWords {
  std::uint32_t at[kAccessBytes / sizeof(std::uint32_t)];
};

ZERO_EXT_HOST_DEVICE AccessWords load_words(const void* source) {
#if defined(__CUDA_ARCH__)
  const uint4 words = *static_cast<const uint4*>(source);
  return {{words.x, words.y, words.z, words.w}};
#else
  AccessWords words;
  std::memcpy(&words, source, sizeof words);
  return words;
#endif
}

ZERO_EXT_HOST_DEVICE void store_words(void* target, const AccessWords& words) {
#if defined(__CUDA_ARCH__)
  *static_cast<uint4*>(target) = make_uint4(words.at[0], words.at[1], words.at[2], words.at[3]);
#else
  std::memcpy(target, &words, sizeof words);
#endif
}

// To global memory, in one instruction: the compiler splits some of the stores above.
ZERO_EXT_HOST_DEVICE void store_words_globally(void* target, const AccessWords& words) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(target)),
               "r"(words.at[0]), "r"(words.at[1]), "r"(words.at[2]), "r"(words.at[3])
               : "memory");
#else
  store_words(target, words);
#endif
}

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
