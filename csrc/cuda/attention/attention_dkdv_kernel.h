// The gradients of the keys and values, and that of a bias which differs from key to key only: a
// block of threads has 16 to 64 keys and passes over the queries that any of them has in its
// blocks, of all the query heads that share its key head.
#pragma once

#include <cstdint>

#include "attention_gradient.h"

namespace zero_ext::cuda {

// Head dims whose two sums a thread has no registers for take two passes.
enum class DkDvOutputs : std::uint8_t { both, keys, values };

template <class T, int kDim, DkDvOutputs kOutputs>
struct AttentionDkDv : AttentionGradient<T, kDim, AttentionPass::dkdv> {
  using Base = AttentionGradient<T, kDim, AttentionPass::dkdv>;
  using Base::grad_bias;
  using Base::inputs;
  using Base::kBands;
  using Base::lists;
  using typename Base::Rows;
  using typename Base::ScorePositions;
  using typename Base::Scores;
  using typename Base::Sums;
  using typename Base::Tiling;
  template <class ThreadBlock>
  using Loader = typename Base::template Loader<ThreadBlock>;
  template <class ThreadBlock>
  using Mma = typename Base::template Mma<ThreadBlock>;
  static constexpr bool kComputesDk = kOutputs != DkDvOutputs::values;
  static constexpr bool kComputesDv = kOutputs != DkDvOutputs::keys;

  OutputRows<T> grad_key;
  OutputRows<T> grad_value;

  template <class ThreadBlock>
  ZERO_EXT_DEVICE void operator()(const ThreadBlock& thread_block) const {
    this->each_head(thread_block, [&](Loader<ThreadBlock>& loader, std::int32_t batch,
                                      std::int32_t head, std::int32_t first) {
      one_key_head(thread_block, loader, batch, head, first);
    });
  }

 private:
  // Of the bands of a warp, whose rows are keys. Sums that are not asked for are never touched.
  struct State {
    Sums keys[kBands];
    Sums values[kBands];
  };

  template <class ThreadBlock>
  ZERO_EXT_DEVICE void one_key_head(const ThreadBlock& thread_block, Loader<ThreadBlock>& loader,
                                    std::int32_t batch, std::int32_t key_head,
                                    std::int32_t first) const {
    const AttentionSizes& sizes = inputs.params.sizes;
    const std::int32_t shared_by = sizes.query_heads / sizes.key_heads;
    const std::int32_t head = key_head * shared_by;
    const auto index = [&](int row) { return first + row; };
    T* keys = reinterpret_cast<T*>(thread_block.shared_memory());
    T* values = reinterpret_cast<T*>(thread_block.shared_memory() + Rows::bytes(Tiling::kRows));
    copy_rows<kDim>(thread_block, inputs.keys(inputs.key, batch, head), Tiling::kRows, index, keys);
    if constexpr (kComputesDk) {
      copy_rows<kDim>(thread_block, inputs.keys(inputs.value, batch, head), Tiling::kRows, index,
                      values);
    }
    State state;
    ZERO_EXT_UNROLL
    for (int band = 0; band < kBands; ++band) {
      if constexpr (kComputesDk) state.keys[band].fill(0.0F);
      if constexpr (kComputesDv) state.values[band].fill(0.0F);
    }
    for (std::int32_t i = head; i < head + shared_by; ++i) {
      one_query_head(thread_block, loader, batch, i, first, state);
    }
    loader.end();
    finish(thread_block, batch, key_head, first, state);
  }

  template <class ThreadBlock>
  ZERO_EXT_DEVICE void one_query_head(const ThreadBlock& thread_block, Loader<ThreadBlock>& loader,
                                      std::int32_t batch, std::int32_t head, std::int32_t first,
                                      State& state) const {
    const std::int64_t row = inputs.first_row(batch, head);
    const std::int32_t length = inputs.params.sizes.query_length;
    loader.begin(lists.of(head, first), inputs.queries(inputs.query, batch, head),
                 inputs.queries(inputs.grad_output, batch, head),
                 {{inputs.reference + row, length}, {inputs.delta + row, length}});
    const HeadParams params = inputs.params.of(batch, head);
    const HeadDropout dropout = inputs.params.dropout_of(batch, head);
    float* const bias = this->bias_of(batch, head);
    for (std::int32_t i = 0; i < loader.tiles(); ++i) {
      loader.acquire(i);
      GroupMask masks[kBands];
      loader.masks(i, thread_block.warp() * kBands, masks);
      if (const AllGroups<Tiling::kTile / 16, kBands> all; all.are(masks)) {
        one_tile(thread_block, loader, i, all.masks, params, dropout, first, bias, state);
      } else {
        one_tile(thread_block, loader, i, masks, params, dropout, first, bias, state);
      }
      loader.release(i);
    }
  }

  template <class ThreadBlock>
  ZERO_EXT_DEVICE void one_tile(const ThreadBlock& thread_block, const Loader<ThreadBlock>& loader,
                                std::int32_t tile, const GroupMask (&masks)[kBands],
                                const HeadParams& params, const HeadDropout& dropout,
                                std::int32_t first, float* bias, State& state) const {
    const int band_index = thread_block.warp() * kBands;
    const T* keys =
        reinterpret_cast<const T*>(thread_block.shared_memory()) + band_index * Rows::kBandElements;
    const T* values = keys + Tiling::kRows * Rows::kStride;
    float* const scratch = Base::scratch(thread_block);
    Scores weights[kBands];
    Scores gradient[kBands];
    Mma<ThreadBlock>::scores(thread_block, keys, loader.first(tile), masks, weights);
    if constexpr (kComputesDk) {
      Mma<ThreadBlock>::scores(thread_block, values, loader.second(tile), masks, gradient);
    }
    ZERO_EXT_UNROLL
    for (int band = 0; band < kBands; ++band) {
      if (masks[band] == 0) continue;
      const ScorePositions positions = loader.template positions<true>(
          tile, first + (band_index + band) * kBandRows, masks[band]);
      make_scores(params, positions, weights[band]);
      differentiate(dropout, positions, loader.scalars(tile, 0), loader.scalars(tile, 1),
                    weights[band], gradient[band]);
      if (kComputesDk && bias != nullptr) {
        add_to_bias(positions, gradient[band], bias);
      }
    }
    if constexpr (kComputesDv) {
      Mma<ThreadBlock>::add(thread_block, weights, loader.second(tile), scratch, masks,
                            state.values);
    }
    if constexpr (kComputesDk) {
      Mma<ThreadBlock>::add(thread_block, gradient, loader.first(tile), scratch, masks, state.keys);
    }
  }

  // Scores become dropped weights, and their gradient that of the scores.
  static ZERO_EXT_DEVICE void differentiate(const HeadDropout& dropout,
                                            const ScorePositions& positions, const float* reference,
                                            const float* delta, Scores& scores, Scores& gradient) {
    each_factor(dropout, positions, [&](int local, int i, float factor) {
      const int column = ScorePositions::column(lane_number(local), i);
      float& weight = scores.at[local][i];
      weight = fast_exp2(weight - reference[column]);
      if constexpr (kComputesDk) {
        float& value = gradient.at[local][i];
        value = score_gradient(weight, value, factor, delta[column]);
      }
      weight *= factor;
    });
  }

  // Sums over the queries of a tile: a lane alone adds to an element, tile after tile.
  ZERO_EXT_DEVICE void add_to_bias(const ScorePositions& positions, const Scores& gradient,
                                   float* bias) const {
    Registers<float, 2> sums;
    sums.fill(0.0F);
    positions.each_score(
        [&](int local, int, int i) { sums.at[local][i % 4 / 2] += gradient.at[local][i]; });
    sum_of_quad(sums);
    each_lane([&](int local, int lane) {
      ZERO_EXT_UNROLL
      for (int row = 0; row < 2; ++row) {
        const std::int32_t index = positions.first + lane / 4 + 8 * row;
        if (lane % 4 != 0 || index >= inputs.params.sizes.key_length) continue;
        bias[index * grad_bias.key_stride] += sums.at[local][row];
      }
    });
  }

  template <class ThreadBlock>
  ZERO_EXT_DEVICE void finish(const ThreadBlock& thread_block, std::int32_t batch,
                              std::int32_t key_head, std::int32_t first, const State& state) const {
    T* keys = reinterpret_cast<T*>(thread_block.shared_memory());
    Registers<float, 2> scales;
    Registers<float, 2> ones;
    scales.fill(inputs.params.scale);
    ones.fill(1.0F);
    ZERO_EXT_UNROLL
    for (int band = 0; band < kBands; ++band) {
      const int band_index = thread_block.warp() * kBands + band;
      const std::int32_t band_first = first + band_index * kBandRows;
      T* staging = keys + band_index * Rows::kBandElements;
      if constexpr (kComputesDk) {
        grad_key.template store<kDim>(thread_block, batch, key_head, band_first, scales,
                                      state.keys[band], staging);
      }
      if constexpr (kComputesDv) {
        grad_value.template store<kDim>(thread_block, batch, key_head, band_first, ones,
                                        state.values[band], staging);
      }
    }
  }
};

}  // namespace zero_ext::cuda
