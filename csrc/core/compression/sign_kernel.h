// Blocks of values to signs and back. See optimizer_kernel.h on inclusion.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "../simd/non_temporal_stores.h"
#include "../simd/vector_scalar.h"
#include "payload_layout.h"
#include "sign_formula.h"

namespace zero_ext::core {
namespace {

// Terms of which elements are made: read<W>(i, terms) gives those of a few vectors of type W, from
// element i of the block on.
template <class T>
struct SignValues {
  const T* values;

  template <class W, int Count>
  inline __attribute__((always_inline)) void read(std::int64_t i,
                                                  typename W::Float (&terms)[Count]) const {
    for (int v = 0; v < Count; ++v) terms[v] = W::load(values + i + v * W::width);
  }
};

// The sum of what payloads stand for.
struct SignSum {
  std::span<const PayloadSource> payloads;
  std::int64_t block;

  template <class W, int Count>
  inline __attribute__((always_inline)) void read(std::int64_t i,
                                                  typename W::Float (&terms)[Count]) const {
    for (int v = 0; v < Count; ++v) terms[v] = W::set(0.0F);
    for (const PayloadSource& payload : payloads) {
      const std::uint32_t* words = payload.words + block * (kSignBlock / 32);
      for (int v = 0; v < Count; ++v) {
        terms[v] =
            W::add_signed(terms[v], W::load_lanes(words, i + v * W::width), payload.scales[block]);
      }
    }
  }
};

template <class V>
struct SignBlock {
  using Float = typename V::Float;
  static constexpr std::int64_t kVectors = kSignLanes / V::width;
  // Elements that are worked on together: two words of bits.
  static constexpr std::int64_t kGroup = 64;
  static constexpr int kGroupVectors = kGroup / V::width;

  // Magnitudes by lane, see sign_formula.h.
  struct Lanes {
    alignas(64) float sums[kSignLanes];

    float fold() {
      for (std::int64_t span = kSignLanes / 2; span > 0; span /= 2) {
        for (std::int64_t l = 0; l < span; ++l) sums[l] += sums[l + span];
      }
      return sums[0];
    }
  };

  // Corrects a vector of type W, in `error`; returns its bits.
  template <class W>
  static inline __attribute__((always_inline)) std::uint32_t correct(typename W::Float term,
                                                                     float factor, float* error,
                                                                     typename W::Float& sum) {
    const auto corrected = SignRule<W>::corrected(term, W::set(factor), W::load(error));
    W::store(error, corrected);
    sum = W::add(sum, W::abs(corrected));
    return SignRule<W>::bits(corrected);
  }

  // Leaves the corrected elements in `error`; returns their scale.
  template <class Terms>
  static float pack(const Terms& terms, float factor, std::int64_t count, float* error,
                    std::uint32_t* words) {
    Float sums[kVectors];
    std::fill(sums, sums + kVectors, V::set(0.0F));
    std::int64_t i = 0;
    for (; i + kSignLanes <= count; i += kSignLanes) {
      ZERO_EXT_UNROLL_BY(4)
      for (std::int64_t j = 0; j < kSignLanes; j += kGroup) {
        Float group[kGroupVectors];
        terms.template read<V>(i + j, group);
        std::uint64_t bits = 0;
        for (std::int64_t v = 0; v < kGroupVectors; ++v) {
          const std::uint64_t own =
              correct<V>(group[v], factor, error + i + j + v * V::width, sums[j / V::width + v]);
          bits |= own << (v * V::width);
        }
        words[(i + j) / 32] = static_cast<std::uint32_t>(bits);
        words[(i + j) / 32 + 1] = static_cast<std::uint32_t>(bits >> 32);
      }
    }
    Lanes lanes;
    for (std::int64_t j = 0; j < kVectors; ++j) V::store(lanes.sums + j * V::width, sums[j]);
    std::fill(words + i / 32, words + sign_words(count), 0U);
    for (; i < count; ++i) {
      float term[1];
      terms.template read<ScalarVector>(i, term);
      words[i / 32] |= correct<ScalarVector>(term[0], factor, error + i, lanes.sums[i % kSignLanes])
                       << i % 32;
    }
    return sign_scale(lanes.fold(), count);
  }

  template <class Terms>
  static void compress(const Terms& terms, float factor, std::int64_t count, float* error,
                       std::uint32_t* words, float* scale) {
    *scale = pack(terms, factor, count, error, words);
    std::int64_t i = 0;
    for (; i + V::width <= count; i += V::width) {
      V::store(error + i, SignRule<V>::residual(V::load(error + i), *scale));
    }
    for (; i < count; ++i) error[i] = SignRule<ScalarVector>::residual(error[i], *scale);
  }

  // out = factor * terms [+ out], of a few vectors of type W from element i on.
  template <class W, int Count, bool Streamed, class T>
  static inline __attribute__((always_inline)) void write_group(const SignSum& terms, float factor,
                                                                bool accumulate, T* out,
                                                                std::int64_t i) {
    typename W::Float group[Count];
    terms.template read<W>(i, group);
    for (int v = 0; v < Count; ++v) {
      T* const target = out + i + v * W::width;
      const auto value = W::mul(group[v], W::set(factor));
      store_or_stream<W, Streamed>(target, accumulate ? W::add(value, W::load(target)) : value);
    }
  }

  template <bool Streamed, class T>
  static void write(const SignSum& terms, std::int64_t count, float factor, bool accumulate,
                    T* out) {
    std::int64_t i = 0;
    for (; i + kGroup <= count; i += kGroup) {
      write_group<V, kGroupVectors, Streamed>(terms, factor, accumulate, out, i);
    }
    for (; i < count; ++i) write_group<ScalarVector, 1, false>(terms, factor, accumulate, out, i);
  }

  // out = either of two values, by the bits of one payload.
  template <bool Streamed, class T>
  static void choose(const std::uint32_t* words, std::int64_t count, T then, T otherwise, T* out) {
    std::int64_t i = 0;
    for (; i + V::width <= count; i += V::width) {
      const std::uint32_t bits = V::load_lanes(words, i);
      if constexpr (Streamed) {
        V::stream_chosen(out + i, bits, then, otherwise);
      } else {
        V::store_chosen(out + i, bits, then, otherwise);
      }
    }
    for (; i < count; ++i) {
      ScalarVector::store_chosen(out + i, ScalarVector::load_lanes(words, i), then, otherwise);
    }
  }
};

// Calls visit(block, begin, count) for the blocks of `count` elements.
template <class Visit>
inline void for_each_sign_block(std::int64_t count, const Visit& visit) {
  for (std::int64_t begin = 0; begin < count; begin += kSignBlock) {
    visit(begin / kSignBlock, begin, std::min(kSignBlock, count - begin));
  }
}

// Calls write(std::bool_constant<whether to stream>).
template <class V, class T, class Write>
inline void write_streamed(const T* out, std::int64_t count, const Write& write) {
  if (use_non_temporal<V>(out, count)) {
    write(std::true_type());
    V::fence();
  } else {
    write(std::false_type());
  }
}

template <class V, class T>
void run_compress_1bit(const void* values, float factor, std::int64_t count, float* error,
                       PayloadTarget payload) {
  for_each_sign_block(count, [&](std::int64_t block, std::int64_t begin, std::int64_t length) {
    const SignValues<T> terms{static_cast<const T*>(values) + begin};
    SignBlock<V>::compress(terms, factor, length, error + begin, payload.words + begin / 32,
                           payload.scales + block);
  });
}

template <class V>
void run_reduce_1bit(std::span<const PayloadSource> payloads, std::int64_t first_block,
                     float factor, std::int64_t count, float* error, PayloadTarget payload) {
  for_each_sign_block(count, [&](std::int64_t block, std::int64_t begin, std::int64_t length) {
    const SignSum terms{payloads, first_block + block};
    SignBlock<V>::compress(terms, factor, length, error + begin, payload.words + begin / 32,
                           payload.scales + block);
  });
}

template <class V, class T>
void run_decompress_1bit(PayloadSource payload, std::int64_t count, float factor, bool accumulate,
                         void* out) {
  T* const target = static_cast<T*>(out);
  if (accumulate) {
    for_each_sign_block(count, [&](std::int64_t block, std::int64_t begin, std::int64_t length) {
      SignBlock<V>::template write<false>({{&payload, 1}, block}, length, factor, true,
                                          target + begin);
    });
    return;
  }
  write_streamed<V>(target, count, [&]<bool Streamed>(std::bool_constant<Streamed>) {
    for_each_sign_block(count, [&](std::int64_t block, std::int64_t begin, std::int64_t length) {
      const float value = payload.scales[block] * factor;
      SignBlock<V>::template choose<Streamed>(payload.words + begin / 32, length,
                                              from_float<T>(value), from_float<T>(-value),
                                              target + begin);
    });
  });
}

template <class V>
void run_sum_1bit(std::span<const PayloadSource> payloads, std::int64_t first_block,
                  std::int64_t count, float factor, bool accumulate, float* out) {
  write_streamed<V>(out, count, [&]<bool Streamed>(std::bool_constant<Streamed>) {
    for_each_sign_block(count, [&](std::int64_t block, std::int64_t begin, std::int64_t length) {
      SignBlock<V>::template write<Streamed>({payloads, first_block + block}, length, factor,
                                             accumulate, out + begin);
    });
  });
}

}  // namespace
}  // namespace zero_ext::core
