// The gradient of the queries, and that of a bias which differs from query to query: a block of
// threads has 16 to 64 queries and passes over the keys that any of them has in its blocks.
#pragma once

#include <cstdint>

#include "attention_gradient.h"

namespace zero_ext::cuda {

template <class T, int kDim>
struct AttentionDq : AttentionGradient<T, kDim, AttentionPass::dq> {
  using Base = AttentionGradient<T, kDim, AttentionPass::dq>;
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

  OutputRows<T> grad_query;

  template <class ThreadBlock>
  ZERO_EXT_DEVICE void operator()(const ThreadBlock& thread_block) const {
    this->each_head(thread_block, [&](Loader<ThreadBlock>& loader, std::int32_t batch,
                                      std::int32_t head, std::int32_t first) {
      one_head(thread_block, loader, batch, head, first);
    });
  }

 private:
  // Of the bands of a warp; of a row: lane / 4 and 8 below.
  struct State {
    Sums sums[kBands];
    Registers<float, 2> reference[kBands];
    Registers<float, 2> delta[kBands];
    Registers<float, 2> bias[kBands];  // sums over the keys that this lane has
  };

  template <class ThreadBlock>
  ZERO_EXT_DEVICE void one_head(const ThreadBlock& thread_block, Loader<ThreadBlock>& loader,
                                std::int32_t batch, std::int32_t head, std::int32_t first) const {
    const auto index = [&](int row) { return first + row; };
    T* queries = reinterpret_cast<T*>(thread_block.shared_memory());
    T* grads = reinterpret_cast<T*>(thread_block.shared_memory() + Rows::bytes(Tiling::kRows));
    copy_rows<kDim>(thread_block, inputs.queries(inputs.query, batch, head), Tiling::kRows, index,
                    queries);
    copy_rows<kDim>(thread_block, inputs.queries(inputs.grad_output, batch, head), Tiling::kRows,
                    index, grads);
    loader.begin(lists.of(head, first), inputs.keys(inputs.key, batch, head),
                 inputs.keys(inputs.value, batch, head), {{nullptr, 0}});
    const int band_index = thread_block.warp() * kBands;
    float* const bias = this->bias_of(batch, head);
    State state;
    begin(inputs.first_row(batch, head), first + band_index * kBandRows, state);
    pass(thread_block, loader, inputs.params.of(batch, head), inputs.params.dropout_of(batch, head),
         first, bias, state);
    loader.end();
    Registers<float, 2> factors;
    factors.fill(inputs.params.scale);
    ZERO_EXT_UNROLL
    for (int band = 0; band < kBands; ++band) {
      const std::int32_t band_first = first + (band_index + band) * kBandRows;
      grad_query.template store<kDim>(thread_block, batch, head, band_first, factors,
                                      state.sums[band],
                                      queries + (band_index + band) * Rows::kBandElements);
      if (bias != nullptr && grad_bias.key_stride == 0) {
        finish_bias(band_first, state.bias[band], bias);
      }
    }
  }

  ZERO_EXT_DEVICE void begin(std::int64_t first_row, std::int32_t first, State& state) const {
    ZERO_EXT_UNROLL
    for (int band = 0; band < kBands; ++band) {
      state.sums[band].fill(0.0F);
      state.bias[band].fill(0.0F);
      each_lane([&](int local, int lane) {
        ZERO_EXT_UNROLL
        for (int row = 0; row < 2; ++row) {
          const std::int32_t index = first + band * kBandRows + lane / 4 + 8 * row;
          const bool there = index < inputs.params.sizes.query_length;
          state.reference[band].at[local][row] = there ? inputs.reference[first_row + index] : 0.0F;
          state.delta[band].at[local][row] = there ? inputs.delta[first_row + index] : 0.0F;
        }
      });
    }
  }

  // Over the tiles of keys and values.
  template <class ThreadBlock>
  ZERO_EXT_DEVICE void pass(const ThreadBlock& thread_block, Loader<ThreadBlock>& loader,
                            const HeadParams& params, const HeadDropout& dropout,
                            std::int32_t first, float* bias, State& state) const {
    const int band_index = thread_block.warp() * kBands;
    const T* queries =
        reinterpret_cast<const T*>(thread_block.shared_memory()) + band_index * Rows::kBandElements;
    const T* grads = queries + Tiling::kRows * Rows::kStride;
    float* const scratch = Base::scratch(thread_block);
    for (std::int32_t i = 0; i < loader.tiles(); ++i) {
      loader.acquire(i);
      const auto one_tile = [&](const GroupMask(&masks)[kBands]) {
        Scores scores[kBands];
        Scores gradient[kBands];
        Mma<ThreadBlock>::scores(thread_block, queries, loader.first(i), masks, scores);
        Mma<ThreadBlock>::scores(thread_block, grads, loader.second(i), masks, gradient);
        ZERO_EXT_UNROLL
        for (int band = 0; band < kBands; ++band) {
          if (masks[band] == 0) continue;
          const ScorePositions positions = loader.template positions<false>(
              i, first + (band_index + band) * kBandRows, masks[band]);
          make_scores(params, positions, scores[band]);
          differentiate(dropout, positions, state, band, scores[band], gradient[band]);
          if (bias != nullptr) {
            add_to_bias(params, positions, gradient[band], bias, state.bias[band]);
          }
        }
        Mma<ThreadBlock>::add(thread_block, gradient, loader.first(i), scratch, masks, state.sums);
      };
      GroupMask masks[kBands];
      loader.masks(i, band_index, masks);
      if (const AllGroups<Tiling::kTile / 16, kBands> all; all.are(masks)) {
        one_tile(all.masks);
      } else {
        one_tile(masks);
      }
      loader.release(i);
    }
  }

  // The gradient of the dropped weights becomes that of the scores.
  static ZERO_EXT_DEVICE void differentiate(const HeadDropout& dropout,
                                            const ScorePositions& positions, const State& state,
                                            int band, const Scores& scores, Scores& gradient) {
    each_factor(dropout, positions, [&](int local, int i, float factor) {
      const int row = i % 4 / 2;
      const float weight = fast_exp2(scores.at[local][i] - state.reference[band].at[local][row]);
      float& value = gradient.at[local][i];
      value = score_gradient(weight, value, factor, state.delta[band].at[local][row]);
    });
  }

  // One warp alone adds to an element, in one order: its lanes may change from head to head.
  ZERO_EXT_DEVICE void add_to_bias(const HeadParams& params, const ScorePositions& positions,
                                   const Scores& gradient, float* bias,
                                   Registers<float, 2>& sums) const {
    positions.each_score([&](int local, int lane, int i) {
      const std::int32_t query = positions.query(lane, i);
      const std::int32_t key = positions.key(lane, i);
      if (grad_bias.key_stride == 0) {
        sums.at[local][i % 4 / 2] += gradient.at[local][i];
      } else if (query < params.query_length && key < params.key_length) {
        bias[query * grad_bias.query_stride + key * grad_bias.key_stride] += gradient.at[local][i];
      }
    });
    sync_warp();
  }

  ZERO_EXT_DEVICE void finish_bias(std::int32_t first, Registers<float, 2>& sums,
                                   float* bias) const {
    sum_of_quad(sums);
    each_lane([&](int local, int lane) {
      ZERO_EXT_UNROLL
      for (int row = 0; row < 2; ++row) {
        const std::int32_t index = first + lane / 4 + 8 * row;
        if (lane % 4 != 0 || index >= inputs.params.sizes.query_length) continue;
        bias[index * grad_bias.query_stride] += sums.at[local][row];
      }
    });
  }
};

}  // namespace zero_ext::cuda
