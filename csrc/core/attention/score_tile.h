// Scale, bias, masks and dropout of one tile of scores. See optimizer_kernel.h on inclusion.
//
// A tile of scores lies transposed: one row for each key, one lane for each query.
#pragma once

#include <cstdint>
#include <limits>

#include "query_tile.h"
#include "score_formula.h"

namespace zero_ext::core {
namespace {

template <class V>
struct ScoreTile {
  static constexpr float kMasked = -std::numeric_limits<float>::infinity();

  // Whether scores are scaled where they become weights, without a pass of finish(). A positive
  // scale keeps the order of scores and leaves minus infinity what it is.
  static bool scaled_later(const AttentionArgs& args) {
    return args.bias.data == nullptr && args.scale >= std::numeric_limits<float>::min();
  }

  // By what the results of finish(), or plain products, are still to be multiplied.
  static float factor(const AttentionArgs& args) {
    return scaled_later(args) ? args.scale * kLog2E : 1.0F;
  }

  // Whether finish() has nothing to do.
  static bool is_finished(const AttentionArgs& args, const QueryTile& tile, const KeyPanel& panel) {
    const std::int64_t shift = args.key_length - args.query_length;
    const bool diagonal = args.causal && panel.last_key() > tile.first + shift;
    return !diagonal && args.key_padding == nullptr && scaled_later(args);
  }

  template <class B>
  static void fill_bias(const BiasView& bias, const QueryTile& tile, const KeyPanel& panel,
                        float* target) {
    const auto* at = static_cast<const B*>(bias.data) + tile.batch * bias.strides[0] +
                     tile.head * bias.strides[1] + tile.first * bias.strides[2];
    std::fill_n(target, panel.count * kTile, 0.0F);
    if (bias.strides[2] == 0) {
      panel.for_each([&](std::int64_t key, std::int64_t position) {
        std::fill_n(target + position * kTile, tile.count, to_float(at[key * bias.strides[3]]));
      });
      return;
    }
    // Along the keys, which lie side by side in a whole matrix.
    for (std::int64_t r = 0; r < tile.count; ++r) {
      const B* row = at + r * bias.strides[2];
      panel.for_each([&](std::int64_t key, std::int64_t position) {
        target[position * kTile + r] = to_float(row[key * bias.strides[3]]);
      });
    }
  }

  // Floats [keys, kTile] of the bias.
  static void fill_bias(const AttentionArgs& args, const QueryTile& tile, const KeyPanel& panel,
                        float* target) {
    switch (args.bias.type) {
      case NumericType::float32:
        return fill_bias<float>(args.bias, tile, panel, target);
      case NumericType::bfloat16:
        return fill_bias<BFloat16>(args.bias, tile, panel, target);
      case NumericType::float16:
        return fill_bias<Float16>(args.bias, tile, panel, target);
    }
  }

  // Turns products of queries and keys into scores in base 2, minus infinity where hidden; with
  // scaled_later() they lack their scale.
  // `bias` is scratch for a tile of floats.
  static void finish(const AttentionArgs& args, const QueryTile& tile, const KeyPanel& panel,
                     std::int64_t lanes, float* scores, float* bias) {
    if (args.bias.data != nullptr) fill_bias(args, tile, panel, bias);
    const bool later = scaled_later(args);
    const auto scale = V::set(args.scale * kLog2E);
    const auto masked = V::set(kMasked);
    const std::int64_t shift = args.key_length - args.query_length;
    const bool* seen = args.key_padding == nullptr
                           ? nullptr
                           : args.key_padding + tile.batch * args.key_padding_stride;
    panel.for_each([&](std::int64_t key, std::int64_t position) {
      float* row = scores + position * kTile;
      // The first lane that sees the key.
      std::int64_t first = args.causal ? key - shift - tile.first : 0;
      if (seen != nullptr && !seen[key]) first = lanes;
      for (std::int64_t r = 0; r < lanes; r += V::width) {
        auto score = V::load(row + r);
        if (!later) score = V::mul(score, scale);
        if (args.bias.data != nullptr) {
          score = V::fma(V::load(bias + position * kTile + r), V::set(kLog2E), score);
        }
        if (first > r) {
          score = V::if_at_least(V::indices(static_cast<float>(r)),
                                 V::set(static_cast<float>(first)), score, masked);
        }
        V::store(row + r, score);
      }
    });
  }

  // Floats [keys, kTile] by which dropout multiplies weights: 0 or 1 / (1 - probability).
  static void fill_dropout_scale(const AttentionArgs& args, const QueryTile& tile,
                                 const KeyPanel& panel, std::int64_t lanes, float* target) {
    const std::uint32_t threshold = drop_threshold(args.dropout);
    const auto dropout_scale = static_cast<float>(1 / (1 - args.dropout));
    const DropoutDraw draw{args.seed, args.offset,
                           static_cast<std::uint32_t>(tile.batch * args.heads + tile.head)};
    std::int64_t position = 0;
    for (int i = 0; i < panel.range_count; ++i) {
      // Runs start at multiples of a block, so at multiples of the four keys of a draw.
      for (std::int64_t k = 0; k < panel.ranges[i].count; k += 4) {
        const auto key = static_cast<std::uint32_t>(panel.ranges[i].first + k);
        const std::int64_t words = std::min<std::int64_t>(4, panel.ranges[i].count - k);
        float drawn[4][kTile];
        for (std::int64_t r = 0; r < lanes; ++r) {
          const Philox4 random =
              dropout_words(draw, static_cast<std::uint32_t>(tile.first + r), key);
          for (int w = 0; w < 4; ++w)
            drawn[w][r] = random.words[w] < threshold ? 0.0F : dropout_scale;
        }
        for (std::int64_t w = 0; w < words; ++w, ++position) {
          std::copy(drawn[w], drawn[w] + lanes, target + position * kTile);
        }
      }
    }
  }
};

}  // namespace
}  // namespace zero_ext::core
