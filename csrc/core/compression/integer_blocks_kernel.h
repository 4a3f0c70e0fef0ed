// Payloads of blocks of integers. See optimizer_kernel.h on inclusion.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "../simd/non_temporal_stores.h"
#include "../simd/vector_scalar.h"
#include "integer_block_codec.h"
#include "integer_block_formula.h"
#include "integer_block_range.h"
#include "payload_layout.h"

namespace zero_ext::core {
namespace {

// All blocks of a payload, the last of which may be short.
template <class V, class Code>
struct IntegerBlocks {
  using FullBlock = IntegerBlock<V, Code>;
  // Short blocks have any number of words, and fields past their last element.
  using ShortBlock = IntegerBlock<ScalarVector, Code>;
  static constexpr int kFields = Code::kFields;

  static constexpr std::int64_t words_of(std::int64_t count) {
    return BlockFormat{Code::kBits, Code::kIsSymmetric, 0}.words(count);
  }
  // Blocks whose scales are found at once, and that stay in the first cache together.
  static constexpr std::int64_t group_of(std::int64_t block) {
    return std::clamp<std::int64_t>(kMaxIntegerBlock / block, 1, V::width);
  }

  // For each group calls begin(its first block, how many), which says what its scales are written
  // times, for each block extremes_of(b, slot) and, a group later, encode(b, slot, its scale): what
  // a group's scales wait for is done while the next one is read. Until then a slot, of group + 1,
  // is the block's own.
  template <class Block, class Begin, class ExtremesOf, class Encode>
  static inline __attribute__((always_inline)) void two_passes(std::int64_t blocks,
                                                               std::int64_t group, float* target,
                                                               const Begin& begin,
                                                               const ExtremesOf& extremes_of,
                                                               const Encode& encode) {
    GroupScales<typename Block::Vectors, decltype(extremes_of(0, 0))> scales;
    std::int64_t slot = 0;
    for (std::int64_t first = 0;; first += group) {
      const std::int64_t count = std::min(group, blocks - first);
      const float factor = count > 0 ? begin(first, count) : 1.0F;
      for (std::int64_t b = 0; b < group; ++b) {
        if (b < count) scales.set(b, extremes_of(first + b, slot));
        slot = slot == group ? 0 : slot + 1;
        const std::int64_t previous = first + b - group;
        if (previous >= 0 && previous < blocks) encode(previous, slot, scales[b]);
      }
      if (count <= 0) return;
      scales.find();
      scales.template write<typename Block::Format>(count, factor,
                                                    target + first * Block::Format::kScales);
    }
  }

  template <class T>
  static void quantize(const void* values, std::int64_t count, std::int64_t block,
                       PayloadTarget payload) {
    const auto* source = static_cast<const T*>(values);
    const std::int64_t full = count / block;
    if (use_non_temporal<V>(payload.words, words_of(count))) {
      quantize_blocks<FullBlock, true>(source, full, block, payload);
      V::fence();
    } else {
      quantize_blocks<FullBlock, false>(source, full, block, payload);
    }
    const std::int64_t rest = count % block;
    if (rest == 0) return;
    source += full * block;
    T padded[kMaxIntegerBlock];
    std::copy(source, source + rest, padded);
    const std::int64_t padded_count = words_of(rest) * kFields;
    std::fill(padded + rest, padded + padded_count, source[0]);
    quantize_blocks<ShortBlock, false>(
        padded, 1, padded_count,
        {payload.words + full * words_of(block), payload.scales + full * Code::kScales});
  }

  template <class Block, bool Streamed, class T>
  static void quantize_blocks(const T* values, std::int64_t blocks, std::int64_t block,
                              PayloadTarget payload) {
    const std::int64_t words = words_of(block);
    const std::int64_t group = std::min<std::int64_t>(group_of(block), Block::Vectors::width);
    two_passes<Block>(
        blocks, group, payload.scales, [](std::int64_t, std::int64_t) { return 1.0F; },
        [&](std::int64_t b, std::int64_t) __attribute__((always_inline)) {
          return Block::extremes_of(values + b * block, block);
        },
        [&](std::int64_t b, std::int64_t, const BlockScale& by) __attribute__((always_inline)) {
          Block::template encode<Streamed>(values + b * block, words, by,
                                           payload.words + b * words);
        });
  }

  template <class T>
  static void dequantize(PayloadSource payload, std::int64_t count, std::int64_t block, void* out) {
    auto* target = static_cast<T*>(out);
    auto [words, scales] = payload;
    const bool streamed = use_non_temporal<V>(target, count);
    for (; count >= block; count -= block) {
      if (streamed) {
        FullBlock::template dequantize<true>(words, scales, words_of(block), target);
      } else {
        FullBlock::template dequantize<false>(words, scales, words_of(block), target);
      }
      target += block;
      words += words_of(block);
      scales += Code::kScales;
    }
    if (streamed) V::fence();
    if (count == 0) return;
    T padded[kMaxIntegerBlock];
    ShortBlock::template dequantize<false>(words, scales, words_of(count), padded);
    std::copy(padded, padded + count, target);
  }

  static void sum(std::span<const PayloadSource> payloads, std::int64_t first_block,
                  std::int64_t count, std::int64_t block, float factor, bool accumulate,
                  float* out) {
    const bool streamed = use_non_temporal<V>(out, count);
    const std::int64_t words = words_of(block);
    PayloadBlocks of{payloads, first_block * words, first_block};
    for (; count >= block; count -= block) {
      if (streamed) {
        FullBlock::template sum<true>(of, words, factor, accumulate, out);
      } else {
        FullBlock::template sum<false>(of, words, factor, accumulate, out);
      }
      out += block;
      of.first_word += words;
      ++of.number;
    }
    if (streamed) V::fence();
    if (count == 0) return;
    float padded[kMaxIntegerBlock];
    std::copy(out, out + count, padded);
    ShortBlock::template sum<false>(of, words_of(count), factor, accumulate, padded);
    std::copy(padded, padded + count, out);
  }

  // The last whole block goes with the rest: what comes before it may be read ahead.
  template <class To>
  static void requantize(std::span<const PayloadSource> payloads, std::int64_t first_block,
                         std::int64_t count, std::int64_t block, float factor,
                         PayloadTarget payload) {
    using Target = IntegerBlocks<V, To>;
    const std::int64_t blocks = std::max<std::int64_t>(count / block - 1, 0);
    if (use_non_temporal<V>(payload.words, Target::words_of(count))) {
      requantize_blocks<To, true>(payloads, first_block, blocks, block, factor, payload);
      V::fence();
    } else {
      requantize_blocks<To, false>(payloads, first_block, blocks, block, factor, payload);
    }
    alignas(64) float sums[2 * kMaxIntegerBlock];
    const std::int64_t rest = count - blocks * block;
    sum(payloads, first_block + blocks, rest, block, factor, false, sums);
    Target::template quantize<float>(
        sums, rest, block,
        {payload.words + blocks * Target::words_of(block), payload.scales + blocks * To::kScales});
  }

  template <class To, bool Streamed>
  static void requantize_blocks(std::span<const PayloadSource> payloads, std::int64_t first_block,
                                std::int64_t blocks, std::int64_t block, float factor,
                                PayloadTarget payload) {
    using Target = IntegerBlock<V, To>;
    const std::int64_t words = words_of(block);
    const std::int64_t target_words = IntegerBlocks<V, To>::words_of(block);
    const std::int64_t group = group_of(block);
    // Slots are no whole pages apart: a load waits for stores to the same place of another page.
    constexpr std::int64_t stride_words = 32;
    alignas(64) float sums[2 * (kMaxIntegerBlock + stride_words)];
    const auto at = [&](std::int64_t slot) { return sums + slot * (block + stride_words); };
    bool is_plain = false;
    two_passes<Target>(
        blocks, group, payload.scales,
        [&](std::int64_t first, std::int64_t several) {
          is_plain = FullBlock::sums_are_plain(payloads, first_block + first, several, factor);
          return is_plain ? factor : 1.0F;
        },
        [&](std::int64_t b, std::int64_t slot) __attribute__((always_inline)) {
          const std::int64_t number = first_block + b;
          return FullBlock::template sum_and_extremes<To>({payloads, number * words, number}, words,
                                                          factor, is_plain, at(slot));
        },
        [&](std::int64_t b, std::int64_t slot, const BlockScale& by)
            __attribute__((always_inline)) {
              Target::template encode<Streamed>(at(slot), target_words, by,
                                                payload.words + b * target_words);
            });
  }
};

}  // namespace
}  // namespace zero_ext::core
