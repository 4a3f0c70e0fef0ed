// The gradient of the queries, and that of a bias which differs from query to query: a block of
// threads has 16 to 64 queries and passes over the keys that any of them has in its blocks.
#pragma once

#include <cstdint>

#include "attention_gradient.h"

namespace zero_ext::cuda {

template <class T, int kDim>
struct AttentionRowGradient : AttentionGradient<T, kDim, AttentionPass::row_gradient> {
  using Base = AttentionGradient<T, kDim, AttentionPass::row_gradient>;
  using Base::grad_bias;
  using Base::inputs;
  using Base::kBands;
  using Base::lists;
  using typename Base::Rows;
  using typename Base::Scores;
  using typename Base::Shape;
  using typename Base::Sums;
  using typename Base::TilePlaces;
  template <class Machine>
  using Stream = typename Base::template Stream<Machine>;
  template <class Machine>
  using Multiply = typename Base::template Multiply<Machine>;

  OutputRows<T> grad_query;

  template <class Machine>
  ZERO_EXT_DEVICE void operator()(const Machine& machine) const {
    this->each_head(machine,
                    [&](Stream<Machine>& stream, std::int32_t batch, std::int32_t head,
                        std::int32_t first) { one_head(machine, stream, batch, head, first); });
  }

 private:
  // Of the bands of a warp; of a row: lane / 4 and 8 below.
  struct State {
    Sums sums[kBands];
    Registers<float, 2> reference[kBands];
    Registers<float, 2> delta[kBands];
    Registers<float, 2> bias[kBands];  // sums over the keys that this lane has
  };

  template <class Machine>
  ZERO_EXT_DEVICE void one_head(const Machine& machine, Stream<Machine>& stream, std::int32_t batch,
                                std::int32_t head, std::int32_t first) const {
    const auto index = [&](int row) { return first + row; };
    T* queries = reinterpret_cast<T*>(machine.memory());
    T* grads = reinterpret_cast<T*>(machine.memory() + Rows::bytes(Shape::kRows));
    copy_rows<kDim>(machine, inputs.queries(inputs.query, batch, head), Shape::kRows, index,
                    queries);
    copy_rows<kDim>(machine, inputs.queries(inputs.grad_output, batch, head), Shape::kRows, index,
                    grads);
    stream.begin(lists.of(head, first), inputs.keys(inputs.key, batch, head),
                 inputs.keys(inputs.value, batch, head), {{nullptr, 0}});
    const int place = machine.warp() * kBands;
    float* const bias = this->bias_of(batch, head);
    State state;
    begin(inputs.first_row(batch, head), first + place * kBandRows, state);
    pass(machine, stream, inputs.rules.of(batch, head), inputs.rules.dropout_of(batch, head), first,
         bias, state);
    stream.end();
    Registers<float, 2> factors;
    factors.fill(inputs.rules.scale);
    ZERO_EXT_UNROLL
    for (int band = 0; band < kBands; ++band) {
      const std::int32_t band_first = first + (place + band) * kBandRows;
      grad_query.template store<kDim>(machine, batch, head, band_first, factors, state.sums[band],
                                      queries + (place + band) * Rows::kBandElements);
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
      each_lane([&](int here, int lane) {
        ZERO_EXT_UNROLL
        for (int row = 0; row < 2; ++row) {
          const std::int32_t index = first + band * kBandRows + lane / 4 + 8 * row;
          const bool there = index < inputs.rules.sizes.query_length;
          state.reference[band].at[here][row] = there ? inputs.reference[first_row + index] : 0.0F;
          state.delta[band].at[here][row] = there ? inputs.delta[first_row + index] : 0.0F;
        }
      });
    }
  }

  // Over the tiles of keys and values.
  template <class Machine>
  ZERO_EXT_DEVICE void pass(const Machine& machine, Stream<Machine>& stream, const HeadRules& rules,
                            const HeadDropout& dropout, std::int32_t first, float* bias,
                            State& state) const {
    const int place = machine.warp() * kBands;
    const T* queries = reinterpret_cast<const T*>(machine.memory()) + place * Rows::kBandElements;
    const T* grads = queries + Shape::kRows * Rows::kStride;
    float* const scratch = Base::scratch(machine);
    for (std::int32_t i = 0; i < stream.tiles(); ++i) {
      stream.take(i);
      Wanted wanted[kBands];
      stream.wanted(i, place, wanted);
      Scores scores[kBands];
      Scores gradient[kBands];
      Multiply<Machine>::scores(machine, queries, stream.first(i), wanted, scores);
      Multiply<Machine>::scores(machine, grads, stream.second(i), wanted, gradient);
      ZERO_EXT_UNROLL
      for (int band = 0; band < kBands; ++band) {
        if (wanted[band] == 0) continue;
        const TilePlaces places =
            stream.template places<false>(i, first + (place + band) * kBandRows, wanted[band]);
        make_scores(rules, places, scores[band]);
        differentiate(dropout, places, state, band, scores[band], gradient[band]);
        if (bias != nullptr) {
          add_to_bias(rules, places, gradient[band], bias, state.bias[band]);
        }
      }
      Multiply<Machine>::add(machine, gradient, stream.first(i), scratch, wanted, state.sums);
      stream.release(i);
    }
  }

  // The gradient of the dropped weights becomes that of the scores.
  static ZERO_EXT_DEVICE void differentiate(const HeadDropout& dropout, const TilePlaces& places,
                                            const State& state, int band, const Scores& scores,
                                            Scores& gradient) {
    each_factor(dropout, places, [&](int here, int i, float factor) {
      const int row = i % 4 / 2;
      const float weight = fast_exp2(scores.at[here][i] - state.reference[band].at[here][row]);
      float& value = gradient.at[here][i];
      value = score_gradient(weight, value, factor, state.delta[band].at[here][row]);
    });
  }

  // One warp alone adds to an element, in one order: its lanes may change from head to head.
  ZERO_EXT_DEVICE void add_to_bias(const HeadRules& rules, const TilePlaces& places,
                                   const Scores& gradient, float* bias,
                                   Registers<float, 2>& sums) const {
    places.each_score([&](int here, int lane, int i) {
      const std::int32_t query = places.query(lane, i);
      const std::int32_t key = places.key(lane, i);
      if (grad_bias.key_stride == 0) {
        sums.at[here][i % 4 / 2] += gradient.at[here][i];
      } else if (query < rules.query_length && key < rules.key_length) {
        bias[query * grad_bias.query_stride + key * grad_bias.key_stride] += gradient.at[here][i];
      }
    });
    meet_in_warp();
  }

  ZERO_EXT_DEVICE void finish_bias(std::int32_t first, Registers<float, 2>& sums,
                                   float* bias) const {
    sum_of_quad(sums);
    each_lane([&](int here, int lane) {
      ZERO_EXT_UNROLL
      for (int row = 0; row < 2; ++row) {
        const std::int32_t index = first + lane / 4 + 8 * row;
        if (lane % 4 != 0 || index >= inputs.rules.sizes.query_length) continue;
        bias[index * grad_bias.query_stride] += sums.at[here][row];
      }
    });
  }
};

}  // namespace zero_ext::cuda
