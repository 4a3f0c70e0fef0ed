// Blocks of values to integers and back. See step_kernel.h on inclusion.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>

#include "../vector_scalar.h"
#include "integer_block_formula.h"
#include "message.h"

namespace zero_ext::core {
namespace {

// Calls visit(std::integral_constant<int, f>) for f = 0 ... Fields - 1, written out.
template <int Fields, class Visit>
inline __attribute__((always_inline)) void each_field(const Visit& visit) {
  [&]<int... Field>(std::integer_sequence<int, Field...>) __attribute__((always_inline)) {
    (visit(std::integral_constant<int, Field>{}), ...);
  }(std::make_integer_sequence<int, Fields>{});
}

// Blocks of `words` words, a multiple of the vector's width, all fields of which are elements.
template <class V, class Code>
struct IntegerBlock {
  using Float = typename V::Float;
  static constexpr int kFields = Code::kFields;

  template <class T>
  static BlockScale scale_of(const T* values, std::int64_t count) {
    if constexpr (Code::kIsSymmetric) {
      auto highest = V::template set_bits<float>(0);
      for (std::int64_t i = 0; i < count; i += V::width) {
        highest = V::template max<float>(highest, V::magnitudes_of(V::load(values + i)));
      }
      return Code::scale_of_magnitude(V::template highest<float>(highest));
    } else {
      Float lowest = V::load(values);
      Float highest = lowest;
      Float zero = V::set(0.0F);
      for (std::int64_t i = 0; i < count; i += V::width) {
        const Float value = V::load(values + i);
        lowest = V::min(lowest, value);
        highest = V::max(highest, value);
        zero = V::fma(value, V::set(0.0F), zero);
      }
      const bool finite = V::lanes_at_least(zero, zero) == (1ULL << V::width) - 1;
      return Code::scale_of_range(V::lowest(lowest), V::highest(highest),
                                  finite ? 0.0F : std::numeric_limits<float>::quiet_NaN());
    }
  }

  template <class T>
  static void quantize(const T* values, std::int64_t words, std::uint32_t* target, float* scales) {
    const BlockScale by = scale_of(values, words * kFields);
    scales[0] = by.scale;
    if constexpr (!Code::kIsSymmetric) scales[1] = by.lowest;
    if (!by.divides()) {
      std::fill(target, target + words, Code::kZeroWord);
      return;
    }
    for (std::int64_t w = 0; w < words; w += V::width) {
      auto packed = V::template set_bits<float>(0);
      each_field<kFields>([&](auto field) __attribute__((always_inline)) {
        const Float value = V::load(values + field * words + w);
        packed = V::template put_field<field * Code::kBits>(
            packed, Code::template encode<V>(value, by), Code::kMask);
      });
      V::store_words(target + w, packed);
    }
  }

  // Adds the elements of words [w, w + width) to `sums`, one vector a field, or makes them so.
  template <bool IsFirst>
  static inline __attribute__((always_inline)) void decode(const std::uint32_t* words,
                                                           const float* scales,
                                                           Float (&sums)[kFields]) {
    const auto packed = V::load_words(words);
    const float lowest = Code::kIsSymmetric ? 0.0F : scales[Code::kScales - 1];
    each_field<kFields>([&](auto field) __attribute__((always_inline)) {
      const Float value = Code::template decode<V>(
          V::template get_field<field * Code::kBits>(packed, Code::kMask), scales[0], lowest);
      sums[field] = IsFirst ? value : V::add(sums[field], value);
    });
  }

  template <class T>
  static void dequantize(const std::uint32_t* source, const float* scales, std::int64_t words,
                         T* out) {
    for (std::int64_t w = 0; w < words; w += V::width) {
      Float values[kFields];
      decode<true>(source + w, scales, values);
      for (int f = 0; f < kFields; ++f) V::store(out + f * words + w, values[f]);
    }
  }

  // The block that starts at the messages' word `first_word` and has number `block`.
  static void sum(std::span<const MessageSource> messages, std::int64_t first_word,
                  std::int64_t block, std::int64_t words, float factor, float* out) {
    for (std::int64_t w = 0; w < words; w += V::width) {
      Float sums[kFields];
      const std::int64_t at = first_word + w;
      decode<true>(messages[0].words + at, messages[0].scales + block * Code::kScales, sums);
      for (const MessageSource& message : messages.subspan(1)) {
        decode<false>(message.words + at, message.scales + block * Code::kScales, sums);
      }
      for (int f = 0; f < kFields; ++f) {
        V::store(out + f * words + w, V::mul(sums[f], V::set(factor)));
      }
    }
  }
};

// All blocks of a message, the last of which may be short.
template <class V, class Code>
struct IntegerBlocks {
  using Whole = IntegerBlock<V, Code>;
  // Short blocks have any number of words, and fields past their last element.
  using Short = IntegerBlock<ScalarVector, Code>;
  static constexpr int kFields = Code::kFields;

  static constexpr std::int64_t words_of(std::int64_t count) {
    return BlockFormat{Code::kBits, Code::kIsSymmetric, 0}.words(count);
  }

  template <class T>
  static void quantize(const void* values, std::int64_t count, std::int64_t block,
                       MessageTarget message) {
    const auto* source = static_cast<const T*>(values);
    auto [words, scales] = message;
    for (; count >= block; count -= block) {
      Whole::quantize(source, words_of(block), words, scales);
      source += block;
      words += words_of(block);
      scales += Code::kScales;
    }
    if (count == 0) return;
    T padded[kHighestIntegerBlock];
    std::copy(source, source + count, padded);
    std::fill(padded + count, padded + words_of(count) * kFields, source[0]);
    Short::quantize(padded, words_of(count), words, scales);
  }

  template <class T>
  static void dequantize(MessageSource message, std::int64_t count, std::int64_t block, void* out) {
    auto* target = static_cast<T*>(out);
    auto [words, scales] = message;
    for (; count >= block; count -= block) {
      Whole::dequantize(words, scales, words_of(block), target);
      target += block;
      words += words_of(block);
      scales += Code::kScales;
    }
    if (count == 0) return;
    T padded[kHighestIntegerBlock];
    Short::dequantize(words, scales, words_of(count), padded);
    std::copy(padded, padded + count, target);
  }

  static void sum(std::span<const MessageSource> messages, std::int64_t first_block,
                  std::int64_t count, std::int64_t block, float factor, bool accumulate,
                  float* out) {
    alignas(64) float values[kHighestIntegerBlock];
    for (std::int64_t begin = 0; begin < count; begin += block) {
      const std::int64_t number = first_block + begin / block;
      const std::int64_t length = std::min(block, count - begin);
      const std::int64_t words = words_of(length);
      float* target = accumulate || length < block ? values : out + begin;
      if (length == block) {
        Whole::sum(messages, number * words, number, words, factor, target);
      } else {
        Short::sum(messages, number * words_of(block), number, words, factor, target);
      }
      if (accumulate) {
        for (std::int64_t i = 0; i < length; ++i) out[begin + i] = values[i] + out[begin + i];
      } else if (target == values) {
        std::copy(values, values + length, out + begin);
      }
    }
  }
};

}  // namespace
}  // namespace zero_ext::core
