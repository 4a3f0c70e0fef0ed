// Blocks of values to integers and back. See step_kernel.h on inclusion.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>

#include "../streamed_stores.h"
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
  // Between reading a block and the next one there is arithmetic enough to let memory wait.
  static constexpr std::int64_t kPrefetchBytes = 4096;
  // 2^23 plus each code of four bits.
  alignas(64) static constexpr float kNumbers[16] = {
      0x800000, 0x800001, 0x800002, 0x800003, 0x800004, 0x800005, 0x800006, 0x800007,
      0x800008, 0x800009, 0x80000A, 0x80000B, 0x80000C, 0x80000D, 0x80000E, 0x80000F};

  // The extremes of a block's elements, in a few vectors that do not wait for one another.
  struct Range {
    static constexpr int kVectors = 4;
    typename V::Bits magnitude[kVectors];
    Float lowest[kVectors];
    Float highest[kVectors];
    Float zero[kVectors];

    inline __attribute__((always_inline)) void start(int v, Float value) {
      if constexpr (Code::kIsSymmetric) {
        magnitude[v] = V::magnitudes_of(value);
      } else {
        lowest[v] = highest[v] = value;
        zero[v] = V::mul(value, V::set(0.0F));
      }
    }
    inline __attribute__((always_inline)) void include(int v, Float value) {
      if constexpr (Code::kIsSymmetric) {
        magnitude[v] = V::template max<float>(magnitude[v], V::magnitudes_of(value));
      } else {
        lowest[v] = V::min(lowest[v], value);
        highest[v] = V::max(highest[v], value);
        zero[v] = V::fma(value, V::set(0.0F), zero[v]);
      }
    }
    BlockScale scale() {
      for (int span = kVectors / 2; span > 0; span /= 2) {
        for (int v = 0; v < span; ++v) merge(v, v + span);
      }
      if constexpr (Code::kIsSymmetric) {
        return Code::scale_of_magnitude(V::template highest<float>(magnitude[0]));
      } else {
        const bool finite = V::lanes_at_least(zero[0], zero[0]) == (1ULL << V::width) - 1;
        return Code::scale_of_range(V::lowest(lowest[0]), V::highest(highest[0]),
                                    finite ? 0.0F : std::numeric_limits<float>::quiet_NaN());
      }
    }

   private:
    void merge(int v, int other) {
      if constexpr (Code::kIsSymmetric) {
        magnitude[v] = V::template max<float>(magnitude[v], magnitude[other]);
      } else {
        lowest[v] = V::min(lowest[v], lowest[other]);
        highest[v] = V::max(highest[v], highest[other]);
        zero[v] = V::add(zero[v], zero[other]);
      }
    }
  };

  // Values of 16 bits are kept in `wide`, so that they are converted once.
  template <class T>
  static BlockScale scale_of(const T* values, std::int64_t count, float* wide) {
    Range range;
    const auto visit = [&](std::int64_t i, const auto& take) __attribute__((always_inline)) {
      for (int v = 0; v < Range::kVectors; ++v) {
        const std::int64_t at = i + v * V::width;
        __builtin_prefetch(reinterpret_cast<const char*>(values + at) + kPrefetchBytes);
        const Float value = V::load(values + at);
        if constexpr (sizeof(T) == 2) V::store(wide + at, value);
        take(v, value);
      }
    };
    visit(0, [&](int v, Float value) __attribute__((always_inline)) { range.start(v, value); });
    for (std::int64_t i = Range::kVectors * V::width; i < count; i += Range::kVectors * V::width) {
      visit(i, [&](int v, Float value) __attribute__((always_inline)) { range.include(v, value); });
    }
    return range.scale();
  }

  static void encode(const float* values, std::int64_t words, const BlockScale& by,
                     std::uint32_t* target, float* scales) {
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
    if constexpr (Code::kBits == 4 && requires { V::template lookup_field<0>; }) {
      const Float table = Code::template decode<V>(V::load(kNumbers), scales[0], lowest);
      each_field<kFields>([&](auto field) __attribute__((always_inline)) {
        const Float value = V::template lookup_field<field * Code::kBits>(table, packed);
        sums[field] = IsFirst ? value : V::add(sums[field], value);
      });
    } else {
      each_field<kFields>([&](auto field) __attribute__((always_inline)) {
        const Float value = Code::template decode<V>(
            V::template get_field<field * Code::kBits>(packed, Code::kMask), scales[0], lowest);
        sums[field] = IsFirst ? value : V::add(sums[field], value);
      });
    }
  }

  template <bool Streamed, class T>
  static void dequantize(const std::uint32_t* source, const float* scales, std::int64_t words,
                         T* out) {
    if constexpr (Streamed && sizeof(T) == 2) {
      // Half a line each, far apart, would be too many lines begun at once.
      alignas(64) T values[kHighestIntegerBlock];
      dequantize<false>(source, scales, words, values);
      V::stream_bytes(out, values, words * kFields * sizeof(T));
      return;
    }
    for (std::int64_t w = 0; w < words; w += V::width) {
      Float values[kFields];
      decode<true>(source + w, scales, values);
      for (int f = 0; f < kFields; ++f) {
        store_or_stream<V, Streamed>(out + f * words + w, values[f]);
      }
    }
  }

  // The block that starts at the messages' word `first_word` and has number `block`.
  template <bool Streamed>
  static void sum(std::span<const MessageSource> messages, std::int64_t first_word,
                  std::int64_t block, std::int64_t words, float factor, bool accumulate,
                  float* out) {
    for (std::int64_t w = 0; w < words; w += V::width) {
      Float sums[kFields];
      const std::int64_t at = first_word + w;
      decode<true>(messages[0].words + at, messages[0].scales + block * Code::kScales, sums);
      for (const MessageSource& message : messages.subspan(1)) {
        decode<false>(message.words + at, message.scales + block * Code::kScales, sums);
      }
      for (int f = 0; f < kFields; ++f) {
        float* const target = out + f * words + w;
        const Float value = V::mul(sums[f], V::set(factor));
        store_or_stream<V, Streamed>(target, accumulate ? V::add(value, V::load(target)) : value);
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

  // Of blocks that stay in the first cache all scales come first, and then all codes: what one
  // block's scale waits for is done while the next one is read.
  template <class T>
  static void quantize(const void* values, std::int64_t count, std::int64_t block,
                       MessageTarget message) {
    const auto* source = static_cast<const T*>(values);
    auto [words, scales] = message;
    const std::int64_t most = kHighestIntegerBlock / block;
    for (std::int64_t blocks = count / block; blocks > 0;) {
      const std::int64_t group = std::min(blocks, most);
      quantize_group<Whole>(source, group, block, words_of(block), {words, scales});
      source += group * block;
      words += group * words_of(block);
      scales += group * Code::kScales;
      blocks -= group;
    }
    const std::int64_t rest = count % block;
    if (rest == 0) return;
    T padded[kHighestIntegerBlock];
    std::copy(source, source + rest, padded);
    const std::int64_t padded_count = words_of(rest) * kFields;
    std::fill(padded + rest, padded + padded_count, source[0]);
    quantize_group<Short>(padded, 1, padded_count, words_of(rest), {words, scales});
  }

  // Values of 16 bits are converted once.
  template <class Block, class T>
  static void quantize_group(const T* values, std::int64_t blocks, std::int64_t count,
                             std::int64_t words, MessageTarget message) {
    alignas(64) float wide[sizeof(T) == 2 ? kHighestIntegerBlock : 1];
    BlockScale by[kHighestIntegerBlock / kIntegerBlockUnit];
    for (std::int64_t b = 0; b < blocks; ++b) {
      by[b] = Block::scale_of(values + b * count, count, wide + (sizeof(T) == 2 ? b * count : 0));
    }
    const float* from;
    if constexpr (sizeof(T) == 2) {
      from = wide;
    } else {
      from = values;
    }
    for (std::int64_t b = 0; b < blocks; ++b) {
      Block::encode(from + b * count, words, by[b], message.words + b * words,
                    message.scales + b * Code::kScales);
    }
  }

  template <class T>
  static void dequantize(MessageSource message, std::int64_t count, std::int64_t block, void* out) {
    auto* target = static_cast<T*>(out);
    auto [words, scales] = message;
    const bool streamed = are_streamed<V>(target, count);
    for (; count >= block; count -= block) {
      if (streamed) {
        Whole::template dequantize<true>(words, scales, words_of(block), target);
      } else {
        Whole::template dequantize<false>(words, scales, words_of(block), target);
      }
      target += block;
      words += words_of(block);
      scales += Code::kScales;
    }
    if (streamed) V::fence();
    if (count == 0) return;
    T padded[kHighestIntegerBlock];
    Short::template dequantize<false>(words, scales, words_of(count), padded);
    std::copy(padded, padded + count, target);
  }

  static void sum(std::span<const MessageSource> messages, std::int64_t first_block,
                  std::int64_t count, std::int64_t block, float factor, bool accumulate,
                  float* out) {
    const bool streamed = are_streamed<V>(out, count);
    const std::int64_t words = words_of(block);
    std::int64_t number = first_block;
    for (; count >= block; count -= block) {
      if (streamed) {
        Whole::template sum<true>(messages, number * words, number, words, factor, accumulate, out);
      } else {
        Whole::template sum<false>(messages, number * words, number, words, factor, accumulate,
                                   out);
      }
      out += block;
      ++number;
    }
    if (streamed) V::fence();
    if (count == 0) return;
    float padded[kHighestIntegerBlock];
    std::copy(out, out + count, padded);
    Short::template sum<false>(messages, number * words, number, words_of(count), factor,
                               accumulate, padded);
    std::copy(padded, padded + count, out);
  }
};

}  // namespace
}  // namespace zero_ext::core
