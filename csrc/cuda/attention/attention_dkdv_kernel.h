// The gradients of the keys and values, and that of a bias which differs from key to key only: a
// block of threads has 16 to 64 keys and passes over the queries that any of them has in its
// blocks, of all the query heads that share its key head.
#pragma once

#include <cstdint>

#include "attention_gradient.h"

namespace zero_ext::cuda {

// Head dims whose two sums a thread has no registers for take two passes.
enum class ColumnPart : std::uint8_t { both, keys, values };

template <class T, int kDim, ColumnPart kPart>
struct AttentionColumnGradient : AttentionGradient<T, kDim, AttentionPass::column_gradient> {
  using Base = AttentionGradient<T, kDim, AttentionPass::column_gradient>;
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
  static constexpr bool kOfKeys = kPart != ColumnPart::values;
  static constexpr bool kOfValues = kPart != ColumnPart::keys;

  OutputRows<T> grad_key;
  OutputRows<T> grad_value;

  template <class Machine>
  ZERO_EXT_DEVICE void operator()(const Machine& machine) const {
    this->each_head(machine,
                    [&](Stream<Machine>& stream, std::int32_t batch, std::int32_t head,
                        std::int32_t first) { one_key_head(machine, stream, batch, head, first); });
  }

 private:
  // Of the bands of a warp, whose rows are keys. Sums that are not asked for are never touched.
  struct State {
    Sums keys[kBands];
    Sums values[kBands];
  };

  template <class Machine>
  ZERO_EXT_DEVICE void one_key_head(const Machine& machine, Stream<Machine>& stream,
                                    std::int32_t batch, std::int32_t key_head,
                                    std::int32_t first) const {
    const AttentionSizes& sizes = inputs.rules.sizes;
    const std::int32_t shared_by = sizes.query_heads / sizes.key_heads;
    const std::int32_t head = key_head * shared_by;
    const auto index = [&](int row) { return first + row; };
    T* keys = reinterpret_cast<T*>(machine.memory());
    T* values = reinterpret_cast<T*>(machine.memory() + Rows::bytes(Shape::kRows));
    copy_rows<kDim>(machine, inputs.keys(inputs.key, batch, head), Shape::kRows, index, keys);
    if constexpr (kOfKeys) {
      copy_rows<kDim>(machine, inputs.keys(inputs.value, batch, head), Shape::kRows, index, values);
    }
    State state;
    ZERO_EXT_UNROLL
    for (int band = 0; band < kBands; ++band) {
      if constexpr (kOfKeys) state.keys[band].fill(0.0F);
      if constexpr (kOfValues) state.values[band].fill(0.0F);
    }
    for (std::int32_t i = head; i < head + shared_by; ++i) {
      one_query_head(machine, stream, batch, i, first, state);
    }
    stream.end();
    finish(machine, batch, key_head, first, state);
  }

  template <class Machine>
  ZERO_EXT_DEVICE void one_query_head(const Machine& machine, Stream<Machine>& stream,
                                      std::int32_t batch, std::int32_t head, std::int32_t first,
                                      State& state) const {
    const std::int64_t row = inputs.first_row(batch, head);
    const std::int32_t length = inputs.rules.sizes.query_length;
    stream.begin(lists.of(head, first), inputs.queries(inputs.query, batch, head),
                 inputs.queries(inputs.grad_output, batch, head),
                 {{inputs.reference + row, length}, {inputs.delta + row, length}});
    const HeadRules rules = inputs.rules.of(batch, head);
    const HeadDropout dropout = inputs.rules.dropout_of(batch, head);
    float* const bias = this->bias_of(batch, head);
    for (std::int32_t i = 0; i < stream.tiles(); ++i) {
      stream.take(i);
      one_tile(machine, stream, i, rules, dropout, first, bias, state);
      stream.release(i);
    }
  }

  template <class Machine>
  ZERO_EXT_DEVICE void one_tile(const Machine& machine, const Stream<Machine>& stream,
                                std::int32_t tile, const HeadRules& rules,
                                const HeadDropout& dropout, std::int32_t first, float* bias,
                                State& state) const {
    const int place = machine.warp() * kBands;
    const T* keys = reinterpret_cast<const T*>(machine.memory()) + place * Rows::kBandElements;
    const T* values = keys + Shape::kRows * Rows::kStride;
    float* const scratch = Base::scratch(machine);
    Wanted wanted[kBands];
    stream.wanted(tile, place, wanted);
    Scores weights[kBands];
    Scores gradient[kBands];
    Multiply<Machine>::scores(machine, keys, stream.first(tile), wanted, weights);
    if constexpr (kOfKeys) {
      Multiply<Machine>::scores(machine, values, stream.second(tile), wanted, gradient);
    }
    ZERO_EXT_UNROLL
    for (int band = 0; band < kBands; ++band) {
      if (wanted[band] == 0) continue;
      const TilePlaces places =
          stream.template places<true>(tile, first + (place + band) * kBandRows, wanted[band]);
      make_scores(rules, places, weights[band]);
      differentiate(dropout, places, stream.numbers(tile, 0), stream.numbers(tile, 1),
                    weights[band], gradient[band]);
      if (kOfKeys && bias != nullptr) {
        add_to_bias(places, gradient[band], bias);
      }
    }
    if constexpr (kOfValues) {
      Multiply<Machine>::add(machine, weights, stream.second(tile), scratch, wanted, state.values);
    }
    if constexpr (kOfKeys) {
      Multiply<Machine>::add(machine, gradient, stream.first(tile), scratch, wanted, state.keys);
    }
  }

  // Scores become dropped weights, and their gradient that of the scores.
  static ZERO_EXT_DEVICE void differentiate(const HeadDropout& dropout, const TilePlaces& places,
                                            const float* reference, const float* delta,
                                            Scores& scores, Scores& gradient) {
    each_factor(dropout, places, [&](int here, int i, float factor) {
      const int column = TilePlaces::column(lane_number(here), i);
      float& weight = scores.at[here][i];
      weight = fast_exp2(weight - reference[column]);
      if constexpr (kOfKeys) {
        float& value = gradient.at[here][i];
        value = score_gradient(weight, value, factor, delta[column]);
      }
      weight *= factor;
    });
  }

  // Sums over the queries of a tile: a lane alone adds to an element, tile after tile.
  ZERO_EXT_DEVICE void add_to_bias(const TilePlaces& places, const Scores& gradient,
                                   float* bias) const {
    Registers<float, 2> sums;
    sums.fill(0.0F);
    places.each_score(
        [&](int here, int, int i) { sums.at[here][i % 4 / 2] += gradient.at[here][i]; });
    sum_of_quad(sums);
    each_lane([&](int here, int lane) {
      ZERO_EXT_UNROLL
      for (int row = 0; row < 2; ++row) {
        const std::int32_t index = places.first + lane / 4 + 8 * row;
        if (lane % 4 != 0 || index >= inputs.rules.sizes.key_length) continue;
        bias[index * grad_bias.key_stride] += sums.at[here][row];
      }
    });
  }

  template <class Machine>
  ZERO_EXT_DEVICE void finish(const Machine& machine, std::int32_t batch, std::int32_t key_head,
                              std::int32_t first, const State& state) const {
    T* keys = reinterpret_cast<T*>(machine.memory());
    Registers<float, 2> scales;
    Registers<float, 2> ones;
    scales.fill(inputs.rules.scale);
    ones.fill(1.0F);
    ZERO_EXT_UNROLL
    for (int band = 0; band < kBands; ++band) {
      const int place = machine.warp() * kBands + band;
      const std::int32_t band_first = first + place * kBandRows;
      T* staging = keys + place * Rows::kBandElements;
      if constexpr (kOfKeys) {
        grad_key.template store<kDim>(machine, batch, key_head, band_first, scales,
                                      state.keys[band], staging);
      }
      if constexpr (kOfValues) {
        grad_value.template store<kDim>(machine, batch, key_head, band_first, ones,
                                        state.values[band], staging);
      }
    }
  }
};

}  // namespace zero_ext::cuda
