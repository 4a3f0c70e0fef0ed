// One block to and from a dynamic code. See optimizer_kernel.h on inclusion.
#pragma once

#include <algorithm>
#include <cstdint>

#include "block_scale_formula.h"
#include "blockwise.h"
#include "dynamic_code_formula.h"

namespace zero_ext::core {
namespace {

// Values of one block; those past the end of a shorter one are zeros.
struct BlockValues {
  alignas(64) float values[kQuantizationBlock];
};

template <class V, class Code>
struct BlockCodec {
  static constexpr std::int64_t kBlock = kQuantizationBlock;
  static_assert(kBlock % V::width == 0 && kBlock % V::template lanes<float> == 0);

  static void decode_full(const std::uint8_t* codes, float scale, float* values) {
    const auto factor = V::set(scale);
    for (std::int64_t i = 0; i < kBlock; i += V::width) {
      V::store(values + i, V::mul(decode_dynamic<V, Code>(V::load_bytes(codes + i)), factor));
    }
  }

  static void encode_full(const float* values, float inverse_scale, std::uint8_t* codes) {
    const auto factor = V::set(inverse_scale);
    for (std::int64_t i = 0; i < kBlock; i += V::width) {
      V::store_bytes(codes + i, encode_dynamic<V, Code>(V::mul(V::load(values + i), factor)));
    }
  }

  // The value of largest magnitude, the positive one of two; NaN when a value is not finite.
  static float scale_of(const float* values) {
    auto highest = V::template set_bits<float>(0);
    for (std::int64_t i = 0; i < kBlock; i += V::template lanes<float>) {
      highest = V::template max<float>(highest, V::magnitude_keys(values + i));
    }
    return scale_of_key(V::template highest<float>(highest));
  }

  // Reads `count` elements' codes.
  static void load(const std::uint8_t* codes, float scale, std::int64_t count, BlockValues& block) {
    if (count == kBlock) return decode_full(codes, scale, block.values);
    std::uint8_t padded[kBlock];
    std::fill(std::copy(codes, codes + count, padded), padded + kBlock, Code::zero);
    decode_full(padded, scale, block.values);
  }

  // Writes `count` elements' codes; returns the scale.
  static float store(const BlockValues& block, std::int64_t count, std::uint8_t* codes) {
    const float scale = scale_of(block.values);
    if (!scale_divides(scale)) {
      std::fill(codes, codes + count, Code::zero);
      return stored_scale(scale);
    }
    if (count == kBlock) {
      encode_full(block.values, 1 / scale, codes);
    } else {
      std::uint8_t padded[kBlock];
      encode_full(block.values, 1 / scale, padded);
      std::copy(padded, padded + count, codes);
    }
    return scale;
  }

  static void quantize(const float* values, std::int64_t count, std::uint8_t* codes,
                       float* scales) {
    BlockValues block;
    for (std::int64_t begin = 0; begin < count; begin += kBlock) {
      const std::int64_t length = std::min(kBlock, count - begin);
      std::fill(std::copy(values + begin, values + begin + length, block.values),
                block.values + kBlock, 0.0F);
      scales[begin / kBlock] = store(block, length, codes + begin);
    }
  }

  static void dequantize(const std::uint8_t* codes, const float* scales, std::int64_t count,
                         float* values) {
    BlockValues block;
    for (std::int64_t begin = 0; begin < count; begin += kBlock) {
      const std::int64_t length = std::min(kBlock, count - begin);
      load(codes + begin, scales[begin / kBlock], length, block);
      std::copy(block.values, block.values + length, values + begin);
    }
  }
};

}  // namespace
}  // namespace zero_ext::core
