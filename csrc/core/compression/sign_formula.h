// Compression to signs with error feedback: one bit an element, one scale a block.
//
// What a block stands for is +-scale, the scale being the mean magnitude of its corrected elements;
// the difference is left behind, and added to the next values.
//
// A payload of n elements: ceil(n / 32) words, in which bit i % 32 of word i / 32 is set where
// element i is zero or more and bits past the last element are clear; ceil(n / 8192) scales.
//
// The sum of a block's magnitudes has one order, so that all instruction sets and devices agree bit
// for bit: lane l of 256 adds elements l, l + 256, l + 512 ... in that order to zero; then, for
// span = 128, 64 ... 1, each lane below the span adds the lane `span` further on.
//
// The sum of what payloads stand for starts from zero and adds +-scale in the order of payloads;
// then it is multiplied by the factor, and added to what is there.
//
// Source: Tang, Gan, Awan, Rajbhandari et al., "1-bit Adam", section 4.2 (arXiv 2102.02888).
#pragma once

#include <cstdint>

#include "../base/host_device.h"

namespace zero_ext::core {

// V is a vector type as described in vector_scalar.h.
template <class V>
struct SignRule {
  using Float = typename V::Float;

  // What is compressed.
  static ZERO_EXT_HOST_DEVICE Float corrected(Float value, Float factor, Float error) {
    return V::fma(value, factor, error);
  }
  // The lanes whose bits are set.
  static ZERO_EXT_HOST_DEVICE std::uint32_t bits(Float corrected) {
    return V::lanes_at_least(corrected, V::set(0.0F));
  }
  static ZERO_EXT_HOST_DEVICE Float residual(Float corrected, float scale) {
    return V::sub(corrected,
                  V::if_at_least(corrected, V::set(0.0F), V::set(scale), V::set(-scale)));
  }
};

// From the sum of the magnitudes of the block's `count` elements.
ZERO_EXT_HOST_DEVICE float sign_scale(float sum, std::int64_t count) {
  return sum / static_cast<float>(count);
}

}  // namespace zero_ext::core
