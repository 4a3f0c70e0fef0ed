// Blocks of values to signs and back. See step_kernel.h on inclusion.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "../vector_scalar.h"
#include "message.h"
#include "sign_formula.h"

namespace zero_ext::core {
namespace {

// The elements of one message from one of its blocks on.
template <class V>
struct SignLanes {
  static typename V::Float at(MessageSource message, std::int64_t i, float scale) {
    return SignRule<V>::expanded(V::load_lanes(message.words, i), scale);
  }
};

// Terms to be compressed, `vector<W>(i)` being those of W's lanes from element i of the block on.
template <class T>
struct SignValues {
  const T* values;

  template <class W>
  typename W::Float vector(std::int64_t i) const {
    return W::load(values + i);
  }
};

struct SignSum {
  std::span<const MessageSource> messages;
  std::int64_t block;

  template <class W>
  typename W::Float vector(std::int64_t i) const {
    typename W::Float sum = W::set(0.0F);
    for (const MessageSource& message : messages) {
      sum = W::add(sum, SignLanes<W>::at(message, block * kSignBlock + i, message.scales[block]));
    }
    return sum;
  }
};

template <class V>
struct SignBlock {
  static constexpr std::int64_t kVectors = kSignLanes / V::width;

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

  // Corrects W's lanes from element i on, in `error`; returns their bits.
  template <class W, class Terms>
  static std::uint32_t correct(const Terms& terms, float factor, float* error, std::int64_t i,
                               typename W::Float& sum) {
    const auto corrected =
        SignRule<W>::corrected(terms.template vector<W>(i), W::set(factor), W::load(error + i));
    W::store(error + i, corrected);
    sum = W::add(sum, W::abs(corrected));
    return SignRule<W>::bits(corrected);
  }

  // Leaves the corrected elements in `error`; returns their scale.
  template <class Terms>
  static float pack(const Terms& terms, float factor, std::int64_t count, float* error,
                    std::uint32_t* words) {
    typename V::Float sums[kVectors];
    std::fill(sums, sums + kVectors, V::set(0.0F));
    std::int64_t i = 0;
    for (; i + kSignLanes <= count; i += kSignLanes) {
      for (std::int64_t j = 0; j < kSignLanes; j += 32) {
        std::uint32_t word = 0;
        for (std::int64_t l = 0; l < 32; l += V::width) {
          word |= correct<V>(terms, factor, error, i + j + l, sums[(j + l) / V::width]) << l;
        }
        words[(i + j) / 32] = word;
      }
    }
    Lanes lanes;
    for (std::int64_t j = 0; j < kVectors; ++j) V::store(lanes.sums + j * V::width, sums[j]);
    std::fill(words + i / 32, words + sign_words(count), 0U);
    for (; i < count; ++i) {
      words[i / 32] |= correct<ScalarVector>(terms, factor, error, i, lanes.sums[i % kSignLanes])
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
      V::store(error + i, SignRule<V>::left_behind(V::load(error + i), *scale));
    }
    for (; i < count; ++i) error[i] = SignRule<ScalarVector>::left_behind(error[i], *scale);
  }

  // out = factor * terms [+ out], of one block.
  template <class W, class T, class Terms>
  static void write_lanes(const Terms& terms, float factor, bool accumulate, T* out,
                          std::int64_t i) {
    auto value = W::mul(terms.template vector<W>(i), W::set(factor));
    if (accumulate) value = W::add(value, W::load(out + i));
    W::store(out + i, value);
  }

  template <class T, class Terms>
  static void write(const Terms& terms, std::int64_t count, float factor, bool accumulate, T* out) {
    std::int64_t i = 0;
    for (; i + V::width <= count; i += V::width) {
      write_lanes<V>(terms, factor, accumulate, out, i);
    }
    for (; i < count; ++i) write_lanes<ScalarVector>(terms, factor, accumulate, out, i);
  }
};

// Calls visit(block, begin, count) for the blocks of `count` elements.
template <class Visit>
inline void over_sign_blocks(std::int64_t count, const Visit& visit) {
  for (std::int64_t begin = 0; begin < count; begin += kSignBlock) {
    visit(begin / kSignBlock, begin, std::min(kSignBlock, count - begin));
  }
}

template <class V, class T>
void run_compress_signs(const void* values, float factor, std::int64_t count, float* error,
                        MessageTarget message) {
  over_sign_blocks(count, [&](std::int64_t block, std::int64_t begin, std::int64_t length) {
    const SignValues<T> terms{static_cast<const T*>(values) + begin};
    SignBlock<V>::compress(terms, factor, length, error + begin, message.words + begin / 32,
                           message.scales + block);
  });
}

template <class V>
void run_reduce_signs(std::span<const MessageSource> messages, std::int64_t first_block,
                      float factor, std::int64_t count, float* error, MessageTarget message) {
  over_sign_blocks(count, [&](std::int64_t block, std::int64_t begin, std::int64_t length) {
    const SignSum terms{messages, first_block + block};
    SignBlock<V>::compress(terms, factor, length, error + begin, message.words + begin / 32,
                           message.scales + block);
  });
}

template <class V, class T>
void run_expand_signs(MessageSource message, std::int64_t count, float factor, bool accumulate,
                      void* out) {
  over_sign_blocks(count, [&](std::int64_t block, std::int64_t begin, std::int64_t length) {
    const SignSum terms{{&message, 1}, block};
    SignBlock<V>::write(terms, length, factor, accumulate, static_cast<T*>(out) + begin);
  });
}

template <class V>
void run_sum_signs(std::span<const MessageSource> messages, std::int64_t first_block,
                   std::int64_t count, float factor, bool accumulate, float* out) {
  over_sign_blocks(count, [&](std::int64_t block, std::int64_t begin, std::int64_t length) {
    const SignSum terms{messages, first_block + block};
    SignBlock<V>::write(terms, length, factor, accumulate, out + begin);
  });
}

}  // namespace
}  // namespace zero_ext::core
