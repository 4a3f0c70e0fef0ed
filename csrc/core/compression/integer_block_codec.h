// One block of values to integers and back. See optimizer_kernel.h on inclusion.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <span>
#include <utility>

#include "../simd/non_temporal_stores.h"
#include "../simd/vector_scalar.h"
#include "integer_block_formula.h"
#include "integer_block_range.h"
#include "payload_layout.h"

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

// The block of each payload that starts at word `first_word` and has number `number`.
struct PayloadBlocks {
  std::span<const PayloadSource> payloads;
  std::int64_t first_word;
  std::int64_t number;
};

// Blocks of `words` words, a multiple of the vector's width, all fields of which are elements.
template <class V, class Code>
struct IntegerBlock {
  using Vectors = V;
  using Format = Code;
  using Float = typename V::Float;
  using Bits = typename V::Bits;
  static constexpr int kFields = Code::kFields;
  static constexpr bool kIsLookedUp = Code::kBits == 4 && requires { V::template lookup_field<0>; };
  // Between reading a block and the next one there is arithmetic enough to let memory wait.
  static constexpr std::int64_t kPrefetchBytes = 4096;
  static constexpr std::int64_t kPayloadPrefetchBytes = 1024;
  // 2^23 plus each code of four bits.
  alignas(64) static constexpr float kNumbers[16] = {
      0x800000, 0x800001, 0x800002, 0x800003, 0x800004, 0x800005, 0x800006, 0x800007,
      0x800008, 0x800009, 0x80000A, 0x80000B, 0x80000C, 0x80000D, 0x80000E, 0x80000F};

  template <class T>
  static inline __attribute__((always_inline)) auto extremes_of(const T* values,
                                                                std::int64_t count) {
    using Range = BlockRange<V, Code, T>;
    constexpr int vectors_at_once = 4;
    Range range;
    for (std::int64_t i = 0; i < count; i += vectors_at_once * Range::lanes) {
      typename Range::Vector some[vectors_at_once];
      each_field<vectors_at_once>([&](auto v) __attribute__((always_inline)) {
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
    // Times what encode_half() multiplies it by, the inverse must be a number.
    if (V::width > 1 && by.inverse > 0x1p100F) {
      IntegerBlock<ScalarVector, Code>::template encode<false>(values, words, by, target);
      return;
    }
    for (std::int64_t w = 0; w < words; w += V::width) {
      Bits packed;
      if constexpr (V::width > 1) {
        packed = V::template xor_shifted<0, 16>(V::template set_bits<float>(Code::kHalvesNoise),
                                                encode_half<0>(values + w, words, by),
                                                encode_half<kFields / 2>(values + w, words, by));
      } else {
        packed = encode_word(values + w, words, by);
      }
      if constexpr (Streamed) {
        V::stream_words(target + w, packed);
      } else {
        V::store_words(target + w, packed);
      }
    }
  }

  // Of one lane: codes one by one.
  template <class T>
  static Bits encode_word(const T* values, std::int64_t words, const BlockScale& by) {
    Bits packed = V::template set_bits<float>(Code::kNoise);
    each_field<kFields / 2>([&](auto pair) __attribute__((always_inline)) {
      const auto number_of = [&](int field) __attribute__((always_inline)) {
        return Code::template encode<V>(V::load(values + field * words), by);
      };
      packed = V::template xor_shifted<2 * pair * Code::kBits, (2 * pair + 1) * Code::kBits>(
          packed, number_of(2 * pair), number_of(2 * pair + 1));
    });
    return packed;
  }

  // 2^23 plus the 16 bits of codes from field First on. The last one's is found first, in units of
  // its place; what it gives, taken to the units of the place before, is what the next code is
  // rounded onto: all sums but that rounding are exact, and no code has to be shifted.
  template <int First, class T>
  static inline __attribute__((always_inline)) Float encode_half(const T* values,
                                                                 std::int64_t words,
                                                                 const BlockScale& by) {
    constexpr int count = kFields / 2;
    constexpr float radix = Code::kMask + 1;
    float unit = 0x1p16F / radix;
    Float number = V::set(unit * (0x1p23F + Code::kZero));
    each_field<count>([&](auto done) __attribute__((always_inline)) {
      if constexpr (done > 0) {
        unit /= radix;
        number = V::sub(number, V::set(unit * ((radix - 1) * 0x1p23F - Code::kZero)));
      }
      Float value = V::load(values + (First + count - 1 - done) * words);
      if constexpr (!Code::kIsSymmetric) value = V::sub(value, V::set(by.lowest));
      number = V::fma(value, V::set(unit * by.inverse), number);
    });
    return number;
  }

  // Calls visit(v, field, value) for the elements of the words of `Count` vectors. With `Ahead` up
  // to three bytes behind them are read: a load from a later byte is a shift that takes no
  // arithmetic.
  template <int Count, bool Ahead, class Visit>
  static inline __attribute__((always_inline)) void decode(const std::uint32_t* words,
                                                           const float* scales,
                                                           const Visit& visit) {
    const Float scale = V::set(scales[0]);
    const Float lowest = V::set(Code::kIsSymmetric ? 0.0F : scales[Code::kScales - 1]);
    [[maybe_unused]] Float table;
    if constexpr (kIsLookedUp)
      table = Code::template decode<V, 0>(V::load(kNumbers), scale, lowest);
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
          // The lower half of a word fits into a number's fraction: it is shifted once, if at all.
          constexpr int kBitOffset = kShift % 16;
          const Float number =
              V::template get_field<kShift - kBitOffset, kBitOffset>(packed, Code::kMask);
          visit(v, field, Code::template decode<V, kBitOffset>(number, scale, lowest));
        }
      });
    });
  }

  template <bool Streamed, class T>
  static void dequantize(const std::uint32_t* source, const float* scales, std::int64_t words,
                         T* out) {
    if constexpr (Streamed && sizeof(T) == 2) {
      // Half a line each, far apart, would be too many lines begun at once.
      alignas(64) T values[kMaxIntegerBlock];
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

  // Calls use(w, sums), of the words of `Count` vectors from word w of the block on, all fields of
  // a vector in a row.
  template <int Count, bool Ahead, class Use>
  static inline __attribute__((always_inline)) void sum_words(const PayloadBlocks& of,
                                                              std::int64_t w, const Use& use) {
    Float sums[Count * kFields];
    const auto over = [&](const PayloadSource& payload,
                          const auto& visit) __attribute__((always_inline)) {
      const std::uint32_t* const words = payload.words + of.first_word + w;
      each_field<Count>([&](auto v) __attribute__((always_inline)) {
        prefetch_past(words + v * V::width, kPayloadPrefetchBytes);
      });
      decode<Count, Ahead>(words, payload.scales + of.number * Code::kScales, visit);
    };
    over(of.payloads[0], [&](int v, int field, Float value)
                             __attribute__((always_inline)) { sums[v * kFields + field] = value; });
    for (const PayloadSource& payload : of.payloads.subspan(1)) {
      over(payload, [&](int v, int field, Float value) __attribute__((always_inline)) {
        sums[v * kFields + field] = V::add(sums[v * kFields + field], value);
      });
    }
    use(w, sums);
  }

  // What decode() makes of a block's scale is the same for all of its words: more of them at a
  // time, as many as there are registers for, spare making it.
  template <bool Ahead, class Use>
  static inline __attribute__((always_inline)) void each_sum(const PayloadBlocks& of,
                                                             std::int64_t words, const Use& use) {
    constexpr int vectors_at_once = V::width == 16 ? 16 / kFields : 1;
    std::int64_t w = 0;
    if constexpr (vectors_at_once > 1) {
      for (; w + vectors_at_once * V::width <= words; w += vectors_at_once * V::width) {
        sum_words<vectors_at_once, Ahead>(of, w, use);
      }
    }
    for (; w < words; w += V::width) sum_words<1, Ahead>(of, w, use);
  }

  template <bool Streamed>
  static void sum(const PayloadBlocks& of, std::int64_t words, float factor, bool accumulate,
                  float* out) {
    const auto write = [&]<int Count>(std::int64_t w,
                                      const Float(&sums)[Count]) __attribute__((always_inline)) {
      each_field<Count>([&](auto f) __attribute__((always_inline)) {
        float* const target = out + f % kFields * words + f / kFields * V::width + w;
        const Float value = V::mul(sums[f], V::set(factor));
        store_or_stream<V, Streamed>(target, accumulate ? V::add(value, V::load(target)) : value);
      });
    };
    each_sum<false>(of, words, write);
  }

  // Leaves the sum in `out`, or factor * the sum if it is not plain; returns its extremes in format
  // To. More words of the payloads follow.
  template <class To>
  static inline __attribute__((always_inline)) auto sum_and_extremes(const PayloadBlocks& of,
                                                                     std::int64_t words,
                                                                     float factor, bool is_plain,
                                                                     float* out) {
    if (!is_plain) {
      sum<false>(of, words, factor, false, out);
      return IntegerBlock<V, To>::extremes_of(out, words * kFields);
    }
    SumRange<V, To> range;
    const auto write = [&]<int Count>(std::int64_t w,
                                      const Float(&sums)[Count]) __attribute__((always_inline)) {
      each_field<Count>([&](auto f) __attribute__((always_inline)) {
        V::store(out + f % kFields * words + f / kFields * V::width + w, sums[f]);
      });
      range.include(sums);
    };
    each_sum<true>(of, words, write);
    return range.extremes();
  }

  // Whether the sums of these blocks of the payloads, whatever their codes, may be multiplied by
  // the factor after they are quantized, in the scales, with the same bits: all is exact then. The
  // factor is a power of two, sums are below 2^120 and multiples of 2^-84, and so are no scales
  // subnormal.
  static bool sums_are_plain(std::span<const PayloadSource> payloads, std::int64_t first_block,
                             std::int64_t blocks, float factor) {
    const bool is_power = (std::bit_cast<std::uint32_t>(factor) & 0x7FFFFFU) == 0;
    if (!is_power || factor < 0x1p-30F || factor > 0x1p30F) return false;
    Magnitudes<V> vectors;
    Magnitudes<ScalarVector> rest;
    for (const PayloadSource& payload : payloads) {
      const float* const scales = payload.scales + first_block * Code::kScales;
      const std::int64_t count = blocks * Code::kScales;
      std::int64_t i = 0;
      for (; i + V::width <= count; i += V::width) vectors.include(scales + i);
      for (; i < count; ++i) rest.include(scales + i);
    }
    return vectors.are_between(0x1p-60F, 0x1p50F) && rest.are_between(0x1p-60F, 0x1p50F) &&
           payloads.size() <= (std::size_t{1} << 20);
  }
};

}  // namespace
}  // namespace zero_ext::core
