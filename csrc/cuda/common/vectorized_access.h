// Accesses of 16 bytes.
#pragma once

#include <cstdint>
#include <cstring>

#include "../../core/base/host_device.h"

namespace zero_ext::cuda {

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
ZERO_EXT_HOST_DEVICE void store_words_global(void* target, const AccessWords& words) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(target)),
               "r"(words.at[0]), "r"(words.at[1]), "r"(words.at[2]), "r"(words.at[3])
               : "memory");
#else
  store_words(target, words);
#endif
}

// A null pointer is aligned: there is nothing to access.
ZERO_EXT_HOST_DEVICE bool is_aligned(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address) % kAccessBytes == 0;
}

}  // namespace zero_ext::cuda
