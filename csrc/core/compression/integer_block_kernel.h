// One block of values to integers and back. See step_kernel.h on inclusion.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <span>
#include <utility>

#include "../streamed_stores.h"
#include "../vector_scalar.h"
#include "integer_block_formula.h"
#include "integer_block_range.h"
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

// The address may be past the array's end, where no pointer of its type may point.
inline __attribute__((always_inline)) void prefetch_past(const void* source, std::int64_t bytes) {
  __builtin_prefetch(
      reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(source) + bytes));
}

// The block of each message that starts at word `first_word` and has number `number`.
struct BlockOfMessages {
  std::span<const MessageSource> messages;
  std::int64_t first_word;
  std::int64_t number;
};

// Blocks of `words` words, a multiple of the vector's width, all fields of which are elements.
template <class V, class Code>
struct IntegerBlock {
  using Vectors = V;
  using Format = Code;
  using Float = typename V::Float;
  static constexpr int kFields = Code::kFields;
  static constexpr bool kIsLookedUp = Code::kBits == 4 && requires { V::template lookup_field<0>; };
  // Between reading a block and the next one there is arithmetic enough to let memory wait.
  static constexpr std::int64_t kPrefetchBytes = 4096;
  static constexpr std::int64_t kMessagePrefetchBytes = 1024;
  // 2^23 plus each code of four bits.
  alignas(64) static constexpr float kNumbers[16] = {
      0x800000, 0x800001, 0x800002, 0x800003, 0x800004, 0x800005, 0x800006, 0x800007,
      0x800008, 0x800009, 0x80000A, 0x80000B, 0x80000C, 0x80000D, 0x80000E, 0x80000F};

  template <class T>
  static inline __attribute__((always_inline)) auto extremes_of(const T* values,
                                                                std::int64_t count) {
    using Range = BlockRange<V, Code, T>;
    constexpr int together = 4;
    Range range;
    for (std::int64_t i = 0; i < count; i += together * Range::lanes) {
      typename Range::Vector some[together];
      each_field<together>([&](auto v) __attribute__((always_inline)) {
        const T* const at = values + i + v * Range::lanes;
        prefetch_past(at, kPrefetchBytes);
        some[v] = Range::read(at);
      });
      range.include(some);
    }
    return range.extremes();
  }

  template <bool Streamed, class T>
  static inline __attribute__((always_inline)) void encode(const T* values, std::int64_t words,
                                                           const BlockScale& by,
                                                           std::uint32_t* target) {
    if (!by.divides()) {
      std::fill(target, target + words, Code::kZeroWord);
      return;
    }
    for (std::int64_t w = 0; w < words; w += V::width) {
      const auto number_of = [&](int field) __attribute__((always_inline)) {
        return Code::template encode<V>(V::load(values + field * words + w), by);
      };
      auto packed = V::template set_bits<float>(Code::kNoise);
      each_field<kFields / 2>([&](auto pair) __attribute__((always_inline)) {
        packed = V::template xor_shifted<2 * pair * Code::kBits, (2 * pair + 1) * Code::kBits>(
            packed, number_of(2 * pair), number_of(2 * pair + 1));
      });
      if constexpr (Streamed) {
        V::stream_words(target + w, packed);
      } else {
        V::store_words(target + w, packed);
      }
    }
  }

  // Calls visit(v, field, value) for the elements of the words of `Count` vectors. With `Ahead` up
  // to three bytes behind them are read: a load from a later byte is a shift that takes no
  // arithmetic.
  template <int Count, bool Ahead, class Visit>
  static inline __attribute__((always_inline)) void decode(const std::uint32_t* words,
                                                           const float* scales,
                                                           const Visit& visit) {
    const float lowest = Code::kIsSymmetric ? 0.0F : scales[Code::kScales - 1];
    [[maybe_unused]] Float table;
    if constexpr (kIsLookedUp) {
      table = Code::template decode<V>(V::load(kNumbers), scales[0], lowest);
    }
    each_field<Count>([&](auto v) __attribute__((always_inline)) {
      const std::uint32_t* const own = words + v * V::width;
      const auto packed = V::load_words(own);
      each_field<kFields>([&](auto field) __attribute__((always_inline)) {
        constexpr int kShift = field * Code::kBits;
        if constexpr (kIsLookedUp && Ahead) {
          const auto* const later = reinterpret_cast<const unsigned char*>(own) + kShift / 8;
          visit(v, field, V::template lookup_field<kShift % 8>(table, V::load_words(later)));
        } else if constexpr (kIsLookedUp) {
          visit(v, field, V::template lookup_field<kShift>(table, packed));
        } else {
          const Float number = V::template get_field<kShift>(packed, Code::kMask);
          visit(v, field, Code::template decode<V>(number, scales[0], lowest));
        }
      });
    });
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
      const auto write = [&](int, int field, Float value) __attribute__((always_inline)) {
        store_or_stream<V, Streamed>(out + field * words + w, value);
      };
      decode<1, false>(source + w, scales, write);
    }
  }

  // Calls use(w, factor * sums), of the words of `Count` vectors from word w of the block on, all
  // fields of a vector in a row.
  template <int Count, bool Ahead, class Use>
  static inline __attribute__((always_inline)) void sum_words(const BlockOfMessages& of,
                                                              std::int64_t w, float factor,
                                                              const Use& use) {
    Float sums[Count * kFields];
    const auto over = [&](const MessageSource& message,
                          const auto& visit) __attribute__((always_inline)) {
      const std::uint32_t* const words = message.words + of.first_word + w;
      each_field<Count>([&](auto v) __attribute__((always_inline)) {
        prefetch_past(words + v * V::width, kMessagePrefetchBytes);
      });
      decode<Count, Ahead>(words, message.scales + of.number * Code::kScales, visit);
    };
    over(of.messages[0], [&](int v, int field, Float value)
                             __attribute__((always_inline)) { sums[v * kFields + field] = value; });
    for (const MessageSource& message : of.messages.subspan(1)) {
      over(message, [&](int v, int field, Float value) __attribute__((always_inline)) {
        sums[v * kFields + field] = V::add(sums[v * kFields + field], value);
      });
    }
    each_field<Count * kFields>(
        [&](auto f) __attribute__((always_inline)) { sums[f] = V::mul(sums[f], V::set(factor)); });
    use(w, sums);
  }

  // What is looked up is the same for all words of a block: more of them at a time spare making it.
  template <bool Ahead, class Use>
  static inline __attribute__((always_inline)) void each_sum(const BlockOfMessages& of,
                                                             std::int64_t words, float factor,
                                                             const Use& use) {
    std::int64_t w = 0;
    if constexpr (kIsLookedUp) {
      for (; w + 2 * V::width <= words; w += 2 * V::width) {
        sum_words<2, Ahead>(of, w, factor, use);
      }
    }
    for (; w < words; w += V::width) sum_words<1, Ahead>(of, w, factor, use);
  }

  template <bool Streamed>
  static void sum(const BlockOfMessages& of, std::int64_t words, float factor, bool accumulate,
                  float* out) {
    const auto write = [&]<int Count>(std::int64_t w,
                                      const Float(&sums)[Count]) __attribute__((always_inline)) {
      each_field<Count>([&](auto f) __attribute__((always_inline)) {
        float* const target = out + f % kFields * words + f / kFields * V::width + w;
        store_or_stream<V, Streamed>(target,
                                     accumulate ? V::add(sums[f], V::load(target)) : sums[f]);
      });
    };
    each_sum<false>(of, words, factor, write);
  }

  // Leaves the sum in `out`; returns its extremes in format To. More words of the messages follow.
  template <class To>
  static inline __attribute__((always_inline)) auto sum_and_extremes(const BlockOfMessages& of,
                                                                     std::int64_t words,
                                                                     float factor, bool is_finite,
                                                                     float* out) {
    NumberRange<V, To> range;
    const auto write = [&]<int Count>(std::int64_t w,
                                      const Float(&sums)[Count]) __attribute__((always_inline)) {
      each_field<Count>([&](auto f) __attribute__((always_inline)) {
        V::store(out + f % kFields * words + f / kFields * V::width + w, sums[f]);
      });
      range.include(sums);
    };
    each_sum<true>(of, words, factor, write);
    if (is_finite) return range.extremes();
    return IntegerBlock<V, To>::extremes_of(out, words * kFields);
  }

  // Whether no sum of these blocks of the messages can be infinite or NaN, whatever their codes: it
  // is below 2^120.
  static bool sums_are_finite(std::span<const MessageSource> messages, std::int64_t first_block,
                              std::int64_t blocks, float factor) {
    auto highest = V::template set_bits<float>(0);
    std::uint32_t rest = 0;
    for (const MessageSource& message : messages) {
      const float* const scales = message.scales + first_block * Code::kScales;
      const std::int64_t count = blocks * Code::kScales;
      std::int64_t i = 0;
      for (; i + V::width <= count; i += V::width) {
        highest = V::template max<float>(highest, V::magnitudes(scales + i));
      }
      for (; i < count; ++i) rest = std::max(rest, ScalarVector::magnitudes(scales + i));
    }
    rest = std::max(rest, V::template highest<float>(highest));
    return rest <= std::bit_cast<std::uint32_t>(0x1p50F) && std::abs(factor) <= 0x1p40F &&
           messages.size() <= (std::size_t{1} << 20);
  }
};

}  // namespace
}  // namespace zero_ext::core
