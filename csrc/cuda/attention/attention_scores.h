// From products of queries and keys to scores: scale, additive bias, which pairs are masked, and
// which weights are dropped.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "../../core/attention/score_formula.h"
#include "attention_params.h"
#include "warp_mma.h"

namespace zero_ext::cuda {

using core::kLog2E;
inline constexpr float kMasked = -std::numeric_limits<float>::infinity();

// Which weights of one batch and query head are dropped, drawn as the CPU draws them.
struct HeadDropout {
  bool drops;
  std::uint32_t threshold;
  float scale;  // of the weights that stay
  core::DropoutDraw draw;

  // What the weights of a query and of two neighboring keys, the first of them even, are
  // multiplied with: `scale`, or 0 for the dropped ones.
  ZERO_EXT_HOST_DEVICE void factors(std::int32_t query, std::int32_t even_key,
                                    float (&pair)[2]) const {
    const core::Philox4 drawn = words(query, even_key);
    const bool low = even_key % 4 == 0;
    pair[0] = of(low ? drawn.words[0] : drawn.words[2]);
    pair[1] = of(low ? drawn.words[1] : drawn.words[3]);
  }
  ZERO_EXT_HOST_DEVICE float factor(std::int32_t query, std::int32_t key) const {
    float pair[2];
    factors(query, key & ~1, pair);
    return key % 2 == 0 ? pair[0] : pair[1];
  }

 private:
  ZERO_EXT_HOST_DEVICE core::Philox4 words(std::int32_t query, std::int32_t key) const {
    return core::dropout_words(draw, static_cast<std::uint32_t>(query),
                               static_cast<std::uint32_t>(key & ~3));
  }
  ZERO_EXT_HOST_DEVICE float of(std::uint32_t word) const {
    return word < threshold ? 0.0F : scale;
  }
};

struct Dropout {
  double probability;
  std::uint64_t seed;
  std::uint32_t offset;

  ZERO_EXT_FUNCTION HeadDropout of(std::int64_t batch_and_head) const {
    return {probability > 0.0,
            core::drop_threshold(probability),
            static_cast<float>(1.0 / (1.0 - probability)),
            {seed, offset, static_cast<std::uint32_t>(batch_and_head)}};
  }
};

// The parameters of one batch and query head.
struct HeadParams {
  float scale;  // of products, in units of log2 e
  bool causal;
  std::int32_t shift;  // a query i sees keys up to i + shift
  std::int32_t query_length;
  std::int32_t key_length;
  const bool* key_padding;  // [key length], or null: no key is padding
  AttentionBias bias;       // its data is this head's

  // Whether all pairs of 16 queries and 16 keys are there and none is masked by its position.
  ZERO_EXT_FUNCTION bool is_unmasked(std::int32_t query, std::int32_t key) const {
    return query + 16 <= query_length && key + 16 <= key_length &&
           (!causal || key + 15 <= query + shift);
  }
  ZERO_EXT_FUNCTION bool is_plain() const { return key_padding == nullptr && bias.data == nullptr; }
  ZERO_EXT_FUNCTION bool is_visible(std::int32_t query, std::int32_t key) const {
    return query < query_length && key < key_length && (!causal || key <= query + shift) &&
           (key_padding == nullptr || key_padding[key]);
  }
  ZERO_EXT_FUNCTION float bias_of(std::int32_t query, std::int32_t key) const {
    const std::int64_t at = query * bias.query_stride + key * bias.key_stride;
    switch (bias.type) {
      case core::NumericType::float32:
        return static_cast<const float*>(bias.data)[at];
      case core::NumericType::bfloat16:
        return core::to_float(static_cast<const core::BFloat16*>(bias.data)[at]);
      case core::NumericType::float16:
        return core::to_float(static_cast<const core::Float16*>(bias.data)[at]);
    }
    return 0.0F;
  }
  ZERO_EXT_FUNCTION float score(std::int32_t query, std::int32_t key, float product) const {
    if (!is_visible(query, key)) return kMasked;
    const float scaled = product * scale;
    return bias.data == nullptr ? scaled : std::fmaf(bias_of(query, key), kLog2E, scaled);
  }
};

struct AttentionParams {
  AttentionSizes sizes;
  float scale;
  bool causal;
  const bool* key_padding;  // [batch, key length], or null
  std::int64_t key_padding_stride;
  AttentionBias bias;
  Dropout dropout;

  ZERO_EXT_FUNCTION HeadParams of(std::int32_t batch, std::int32_t head) const {
    HeadParams params{scale * kLog2E,
                      causal,
                      sizes.key_length - sizes.query_length,
                      sizes.query_length,
                      sizes.key_length,
                      key_padding == nullptr ? nullptr : key_padding + batch * key_padding_stride,
                      bias};
    if (bias.data != nullptr) {
      const std::int64_t bytes = core::element_size(bias.type);
      const std::int64_t offset = batch * bias.batch_stride + head * bias.head_stride;
      params.bias.data = static_cast<const char*>(bias.data) + offset * bytes;
    }
    return params;
  }
  ZERO_EXT_FUNCTION HeadDropout dropout_of(std::int32_t batch, std::int32_t head) const {
    return dropout.of(batch * sizes.query_heads + head);
  }
};

// Which query and key each score of a band belongs to: its 16 rows are queries, `first` and the
// following, and the tile's columns keys; the other way round if kKeysAreRows.
template <bool kKeysAreRows, int kGroups>
struct TilePositions {
  std::int32_t first;
  std::int32_t starts[kGroups];  // of each 16 columns
  GroupMask mask;

  static ZERO_EXT_DEVICE int row(int lane, int i) { return lane / 4 + i % 4 / 2 * 8; }
  static ZERO_EXT_DEVICE int column(int lane, int i) { return i / 4 * 8 + 2 * (lane % 4) + i % 2; }

  ZERO_EXT_DEVICE std::int32_t down(int lane, int i) const { return first + row(lane, i); }
  ZERO_EXT_DEVICE std::int32_t across(int lane, int i) const {
    return starts[i / 8] + column(lane, i) % 16;
  }
  ZERO_EXT_DEVICE std::int32_t query(int lane, int i) const {
    return kKeysAreRows ? across(lane, i) : down(lane, i);
  }
  ZERO_EXT_DEVICE std::int32_t key(int lane, int i) const {
    return kKeysAreRows ? down(lane, i) : across(lane, i);
  }

  // Calls visit(group) for the groups of 16 columns in the band's mask.
  template <class Visit>
  ZERO_EXT_DEVICE void each_group(const Visit& visit) const {
    ZERO_EXT_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      if (has_group(mask, group)) visit(group);
    }
  }
  // Calls visit(local, lane, i) for the scores in them.
  template <class Visit>
  ZERO_EXT_DEVICE void each_score(const Visit& visit) const {
    each_group([&](int group) {
      each_lane([&](int local, int lane) {
        ZERO_EXT_UNROLL
        for (int i = 8 * group; i < 8 * group + 8; ++i) visit(local, lane, i);
      });
    });
  }
};

// Products become scores.
template <bool kKeysAreRows, int kGroups>
ZERO_EXT_DEVICE void make_scores(const HeadParams& params,
                                 const TilePositions<kKeysAreRows, kGroups>& positions,
                                 Registers<float, 8 * kGroups>& products) {
  bool is_full = params.is_plain();
  positions.each_group([&](int group) {
    const std::int32_t start = positions.starts[group];
    is_full &= params.is_unmasked(kKeysAreRows ? start : positions.first,
                                  kKeysAreRows ? positions.first : start);
  });
  if (is_full) {
    positions.each_score([&](int local, int, int i) { products.at[local][i] *= params.scale; });
    return;
  }
  positions.each_score([&](int local, int lane, int i) {
    float& product = products.at[local][i];
    product = params.score(positions.query(lane, i), positions.key(lane, i), product);
  });
}

// Calls visit(local, i, factor) for every weight that a band wants: what dropout multiplies it
// with.
template <bool kKeysAreRows, int kGroups, class Visit>
ZERO_EXT_DEVICE void each_factor(const HeadDropout& dropout,
                                 const TilePositions<kKeysAreRows, kGroups>& positions,
                                 const Visit& visit) {
  if (!dropout.drops) {
    positions.each_score([&](int local, int, int i) { visit(local, i, 1.0F); });
    return;
  }
  positions.each_group([&](int group) {
    each_lane([&](int local, int lane) {
      ZERO_EXT_UNROLL
      for (int i = 8 * group; i < 8 * group + 8; i += 2) {
        float pair[2];
        if constexpr (!kKeysAreRows) {
          dropout.factors(positions.query(lane, i), positions.key(lane, i), pair);
        } else {
          pair[0] = dropout.factor(positions.query(lane, i), positions.key(lane, i));
          pair[1] = dropout.factor(positions.query(lane, i + 1), positions.key(lane, i + 1));
        }
        visit(local, i, pair[0]);
        visit(local, i + 1, pair[1]);
      }
    });
  });
}

}  // namespace zero_ext::cuda
