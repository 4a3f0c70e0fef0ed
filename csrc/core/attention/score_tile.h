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
struct Scores {
  static constexpr float kHidden = -std::numeric_limits<float>::infinity();

  // Whether scores are scaled where they become weights, without a pass of finish(). A positive
  // scale keeps the order of scores and leaves minus infinity what it is.
  static bool scaled_later(const AttentionProblem& problem) {
    return problem.bias.data == nullptr && problem.scale >= std::numeric_limits<float>::min();
  }

  // By what the results of finish(), or plain products, are still to be multiplied.
  static float factor(const AttentionProblem& problem) {
    return scaled_later(problem) ? problem.scale * kLog2E : 1.0F;
  }

  // Whether finish() has nothing to do.
  static bool are_plain(const AttentionProblem& problem, const RowTile& tile, const Panel& panel) {
    const std::int64_t shift = problem.key_length - problem.query_length;
    const bool diagonal = problem.causal && panel.last_key() > tile.first + shift;
    return !diagonal && problem.key_padding == nullptr && scaled_later(problem);
  }

  template <class B>
  static void fill_bias(const BiasView& bias, const RowTile& tile, const Panel& panel,
                        float* target) {
    const auto* at = static_cast<const B*>(bias.data) + tile.batch * bias.strides[0] +
                     tile.head * bias.strides[1] + tile.first * bias.strides[2];
    std::fill_n(target, panel.count * kTile, 0.0F);
    if (bias.strides[2] == 0) {
      panel.for_each([&](std::int64_t key, std::int64_t place) {
        std::fill_n(target + place * kTile, tile.count, to_float(at[key * bias.strides[3]]));
      });
      return;
    }
    // Along the keys, which lie side by side in a whole matrix.
    for (std::int64_t r = 0; r < tile.count; ++r) {
      const B* row = at + r * bias.strides[2];
      panel.for_each([&](std::int64_t key, std::int64_t place) {
        target[place * kTile + r] = to_float(row[key * bias.strides[3]]);
      });
    }
  }

  // Floats [keys, kTile] of the bias.
  static void fill_bias(const AttentionProblem& problem, const RowTile& tile, const Panel& panel,
                        float* target) {
    switch (problem.bias.type) {
      case NumericType::float32:
        return fill_bias<float>(problem.bias, tile, panel, target);
      case NumericType::bfloat16:
        return fill_bias<BFloat16>(problem.bias, tile, panel, target);
      case NumericType::float16:
        return fill_bias<Float16>(problem.bias, tile, panel, target);
    }
  }

  // Turns products of queries and keys into scores in base 2, minus infinity where hidden; with
  // scaled_later() they lack their scale.
  // `bias` is scratch for a tile of floats.
  static void finish(const AttentionProblem& problem, const RowTile& tile, const Panel& panel,
                     std::int64_t lanes, float* scores, float* bias) {
    if (problem.bias.data != nullptr) fill_bias(problem, tile, panel, bias);
    const bool later = scaled_later(problem);
    const auto scale = V::set(problem.scale * kLog2E);
    const auto hidden = V::set(kHidden);
    const std::int64_t shift = problem.key_length - problem.query_length;
    const bool* seen = problem.key_padding == nullptr
                           ? nullptr
                           : problem.key_padding + tile.batch * problem.key_padding_stride;
    panel.for_each([&](std::int64_t key, std::int64_t place) {
      float* row = scores + place * kTile;
      // The first lane that sees the key.
      std::int64_t first = problem.causal ? key - shift - tile.first : 0;
      if (seen != nullptr && !seen[key]) first = lanes;
      for (std::int64_t r = 0; r < lanes; r += V::width) {
        auto score = V::load(row + r);
        if (!later) score = V::mul(score, scale);
        if (problem.bias.data != nullptr) {
          score = V::fma(V::load(bias + place * kTile + r), V::set(kLog2E), score);
        }
        if (first > r) {
          score = V::if_at_least(V::indices(static_cast<float>(r)),
                                 V::set(static_cast<float>(first)), score, hidden);
        }
        V::store(row + r, score);
      }
    });
  }

  // Floats [keys, kTile] by which dropout multiplies weights: 0 or 1 / (1 - probability).
  static void fill_kept(const AttentionProblem& problem, const RowTile& tile, const Panel& panel,
                        std::int64_t lanes, float* target) {
    const std::uint32_t threshold = drop_threshold(problem.dropout);
    const auto kept = static_cast<float>(1 / (1 - problem.dropout));
    const DropoutDraw draw{problem.seed, problem.offset,
                           static_cast<std::uint32_t>(tile.batch * problem.heads + tile.head)};
    std::int64_t place = 0;
    for (int i = 0; i < panel.runs; ++i) {
      // Runs start at multiples of a block, so at multiples of the four keys of a draw.
      for (std::int64_t k = 0; k < panel.run[i].count; k += 4) {
        const auto key = static_cast<std::uint32_t>(panel.run[i].first + k);
        const std::int64_t words = std::min<std::int64_t>(4, panel.run[i].count - k);
        float drawn[4][kTile];
        for (std::int64_t r = 0; r < lanes; ++r) {
          const Philox4 random =
              dropout_words(draw, static_cast<std::uint32_t>(tile.first + r), key);
          for (int w = 0; w < 4; ++w) drawn[w][r] = random.words[w] < threshold ? 0.0F : kept;
        }
        for (std::int64_t w = 0; w < words; ++w, ++place) {
          std::copy(drawn[w], drawn[w] + lanes, target + place * kTile);
        }
      }
    }
  }
};

}  // namespace
}  // namespace zero_ext::core
