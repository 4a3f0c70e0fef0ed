// Block-wise quantization to integers of 4 or 8 bits, symmetric or asymmetric.
//
// Symmetric: scale = largest magnitude / (2^(bits-1) - 1); an element is round(x / scale) * scale,
// and its code that integer plus 2^(bits-1). Asymmetric: scale = (highest - lowest) / (2^bits - 1);
// an element is lowest + code * scale. Rounding is to nearest even, of x times the reciprocal.
//
// A block of `length` elements, padded to a multiple of 8 by repeating its first one, has
// W = padded * bits / 32 words: element e is in word e % W, in the field of `bits` bits that is
// number e / W counted from the lowest. So neighboring elements are in neighboring words, and a
// vector or a warp packs without crossing lanes.
//
// A payload: the words of its blocks, the last of which may be short; then for each block its scale
// and, if asymmetric, its lowest element.
//
// A block that holds a NaN or an infinity, or whose range is beyond float32's, gets the scale NaN
// and reads back as NaN. One whose scale is below the smallest normal float32 has the scale zero:
// it reads back as zeros (symmetric) or as its lowest element (asymmetric).
//
// Source: Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit optimizers via block-wise
// quantization", section 2.1 (arXiv 2110.02861); Wang, Qin, Jacobs et al., "ZeRO++", sections 3.1
// and 3.3 (arXiv 2306.10209).
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "../base/host_device.h"
#include "../base/numeric_types.h"
#include "../simd/vector_scalar.h"

namespace zero_ext::core {

// What blocks' elements are made of, a block in each lane; `lowest` is zero in a symmetric format.
// The inverse is zero where all codes are zero's.
template <class V>
struct BlockScales {
  typename V::Float scale;
  typename V::Float lowest;
  typename V::Float inverse;

  // Of a single block.
  ZERO_EXT_HOST_DEVICE bool divides() const { return inverse != 0.0F; }
};

using BlockScale = BlockScales<ScalarVector>;

// Of blocks that are finite where `magnitude` is a finite number.
template <class V>
ZERO_EXT_HOST_DEVICE BlockScales<V> block_scales(typename V::Float scale, typename V::Float lowest,
                                                 typename V::Float magnitude) {
  const auto zero = V::set(0.0F);
  const auto nan = V::set(std::numeric_limits<float>::quiet_NaN());
  const auto most = V::set(std::numeric_limits<float>::max());
  const auto least = V::set(std::numeric_limits<float>::min());
  const auto inverse = V::if_at_least(scale, least, V::div(V::set(1.0F), scale), zero);
  return {V::if_at_least(most, magnitude, V::if_at_least(scale, least, scale, zero), nan),
          V::if_at_least(most, magnitude, lowest, nan),
          V::if_at_least(most, magnitude, inverse, zero)};
}

template <int Bits, bool IsSymmetric>
struct IntegerCode {
  static constexpr int kBits = Bits;
  static constexpr bool kIsSymmetric = IsSymmetric;
  static constexpr int kFields = 32 / Bits;
  static constexpr int kScales = IsSymmetric ? 1 : 2;
  static constexpr std::uint32_t kMask = (1U << Bits) - 1;
  static constexpr float kSteps = static_cast<float>(IsSymmetric ? kMask / 2 : kMask);
  static constexpr float kZero = static_cast<float>(IsSymmetric ? (kMask + 1) / 2 : 0);
  // The word of a block whose codes are all zero's.
  static constexpr std::uint32_t kZeroWord =
      IsSymmetric ? (0xFFFFFFFFU / kMask) * ((kMask + 1) / 2) : 0U;

  // What a word is left with when the numbers of all fields, see encode(), are shifted to their
  // places and combined by exclusive or, besides the codes.
  static constexpr std::uint32_t kNoise = [] {
    std::uint32_t noise = 0;
    for (int field = 0; field < kFields; ++field) noise ^= 0x4B400000U << (field * Bits);
    return noise;
  }();
  // And when the halves of a word are, each in the lowest bits of 2^23 and more.
  static constexpr std::uint32_t kHalvesNoise = 0x4B000000U ^ (0x4B000000U << 16);

  // From the highest of the elements' magnitudes.
  template <class V>
  static ZERO_EXT_HOST_DEVICE BlockScales<V> scales_of_magnitude(typename V::Float highest) {
    return block_scales<V>(V::div(highest, V::set(kSteps)), V::set(0.0F), highest);
  }
  // From its bit pattern.
  static ZERO_EXT_HOST_DEVICE BlockScale scale_of_magnitude(std::uint32_t highest) {
    return scales_of_magnitude<ScalarVector>(std::bit_cast<float>(highest));
  }

  // From the extreme elements; `zero` is the sum of all elements times zero, or zero if the
  // extremes show what is not finite. Zero is added so that a zero's sign does not depend on the
  // order in which the extremes were found.
  template <class V>
  static ZERO_EXT_HOST_DEVICE BlockScales<V> scales_of_range(typename V::Float lowest,
                                                             typename V::Float highest,
                                                             typename V::Float zero) {
    lowest = V::add(lowest, V::set(0.0F));
    const auto range = V::sub(V::add(highest, V::set(0.0F)), lowest);
    return block_scales<V>(V::div(range, V::set(kSteps)), lowest, V::add(range, zero));
  }
  static ZERO_EXT_HOST_DEVICE BlockScale scale_of_range(float lowest, float highest, float zero) {
    return scales_of_range<ScalarVector>(lowest, highest, zero);
  }

  // A number of [2^23, 2^24) whose lowest bits are the code.
  template <class V>
  static ZERO_EXT_HOST_DEVICE typename V::Float encode(typename V::Float value,
                                                       const BlockScale& by) {
    if constexpr (!IsSymmetric) value = V::sub(value, V::set(by.lowest));
    return V::fma(value, V::set(by.inverse), V::set(0x1.8p23F + kZero));
  }

  // From 2^(23 - BitOffset) plus the code, whose lowest bit is number `BitOffset`.
  template <class V, int BitOffset>
  static ZERO_EXT_HOST_DEVICE typename V::Float decode(typename V::Float number,
                                                       typename V::Float scale,
                                                       typename V::Float lowest) {
    constexpr float kBase = static_cast<float>(1 << (23 - BitOffset));
    const auto steps = V::sub(number, V::set(kBase + kZero));
    if constexpr (IsSymmetric) return V::mul(steps, scale);
    return V::fma(steps, scale, lowest);
  }
};

}  // namespace zero_ext::core
