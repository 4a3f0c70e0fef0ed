// When results are stored past the caches. See optimizer_kernel.h on inclusion.
#pragma once

#include <cstdint>

namespace zero_ext::core {
namespace {

// Ranges of this many elements do not stay in a core's caches: what they write is then stored past
// them, which spares reading what is about to be overwritten (measured: 9% of Adam's step).
inline constexpr std::int64_t kStreamedElements = std::int64_t{1} << 18;

// Whether `count` elements from `target` on are; whole vectors of float32 are aligned then.
template <class V>
bool use_non_temporal(const void* target, std::int64_t count) {
  return count >= kStreamedElements &&
         reinterpret_cast<std::uintptr_t>(target) % (V::width * sizeof(float)) == 0;
}

template <class V, bool Streamed, class T>
inline __attribute__((always_inline)) void store_or_stream(T* target, typename V::Float value) {
  if constexpr (Streamed) {
    V::stream(target, value);
  } else {
    V::store(target, value);
  }
}

}  // namespace
}  // namespace zero_ext::core
