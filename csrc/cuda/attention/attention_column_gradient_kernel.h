// The gradients of the keys and values, and that of a bias which differs from key to key only: a
// block of threads has a part of a column of blocks and passes over the queries of its blocks, of
// all the query heads that share its key head.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention_gradient.h"

namespace zero_ext::cuda {

// Head dims whose two sums a thread has no registers for take two passes.
enum class ColumnPart : std::uint8_t { both, keys, values };

template <class T, int kDim, ColumnPart kPart>
struct AttentionColumnGradient {
  using Shape = AttentionShape<T, kDim, AttentionPass::column_gradient>;
  static constexpr int kTile = Shape::kTile;
  static constexpr bool kOfKeys = kPart != ColumnPart::values;
  static constexpr bool kOfValues = kPart != ColumnPart::keys;

  GradientInputs<T> inputs;
  BlockLists lists;  // by columns
  GradientOutput<T> grad_key;
  GradientOutput<T> grad_value;
  BiasGradient grad_bias;
  // Batches and key heads that one block of threads takes: see AttentionRowGradient.
  std::int64_t batches_each;
  std::int64_t heads_each;

  template <class Machine>
  using Stream = TileStream<Machine, T, kDim, kTile, Shape::kStages, 2>;
  template <class Machine>
  using Multiply = Product<Machine, T, kDim, kTile>;

  ZERO_EXT_FUNCTION int rows() const { return Shape::rows(lists.shift); }
  ZERO_EXT_FUNCTION std::int64_t column_tiles() const {
    return (inputs.rules.sizes.key_length + std::int64_t{rows()} - 1) / rows();
  }
  ZERO_EXT_FUNCTION std::int64_t groups() const {
    return inputs.rules.sizes.batch / batches_each * (inputs.rules.sizes.key_heads / heads_each);
  }
  std::int64_t blocks() const { return column_tiles() * groups(); }
  template <class Machine>
  static constexpr int shared_bytes(int rows) {
    return 2 * TileRows<T, kDim>::bytes(rows) + Stream<Machine>::kBytes +
           rows / kWarpRows * Multiply<Machine>::kScratch * 4;
  }

  template <class Machine>
  ZERO_EXT_DEVICE void operator()(const Machine& machine) const {
    const AttentionSizes& sizes = inputs.rules.sizes;
    const std::int64_t group = machine.block() % groups();
    // Of causal layouts the first columns have most blocks: they begin first.
    const auto first = static_cast<std::int32_t>(machine.block() / groups() * rows());
    const std::int64_t head_groups = sizes.key_heads / heads_each;
    const std::int64_t first_batch = group / head_groups * batches_each;
    const std::int64_t first_head = group % head_groups * heads_each;
    std::byte* rest = machine.memory() + 2 * TileRows<T, kDim>::bytes(rows());
    Stream<Machine> stream(machine, rest);
    for (std::int64_t batch = first_batch; batch < first_batch + batches_each; ++batch) {
      for (std::int64_t head = first_head; head < first_head + heads_each; ++head) {
        one_key_head(machine, stream, batch, head, first);
        stream.end();
      }
    }
  }

 private:
  // Of a warp's rows, which are keys.
  template <class Machine>
  struct State {
    Registers<float, kOfKeys ? kDim / 2 : 1, Machine::kLanes> keys;
    Registers<float, kOfValues ? kDim / 2 : 1, Machine::kLanes> values;
    Registers<float, 2, Machine::kLanes> bias;  // sums over the queries that this lane has
  };

  template <class Machine>
  ZERO_EXT_DEVICE void one_key_head(const Machine& machine, Stream<Machine>& stream,
                                    std::int64_t batch, std::int64_t key_head,
                                    std::int32_t first) const {
    const AttentionSizes& sizes = inputs.rules.sizes;
    const std::int64_t shared_by = sizes.query_heads / sizes.key_heads;
    const std::int64_t head = key_head * shared_by;
    const auto index = [&](int row) { return first + row; };
    T* keys = reinterpret_cast<T*>(machine.memory());
    T* values = reinterpret_cast<T*>(machine.memory() + TileRows<T, kDim>::bytes(rows()));
    copy_rows<kDim>(machine, inputs.keys(inputs.key, batch, head), rows(), index, keys);
    if constexpr (kOfKeys) {
      copy_rows<kDim>(machine, inputs.keys(inputs.value, batch, head), rows(), index, values);
    }
    State<Machine> state;
    state.keys.fill(0.0F);
    state.values.fill(0.0F);
    for (std::int64_t i = head; i < head + shared_by; ++i) {
      one_query_head(machine, stream, batch, i, first, state);
    }
    const std::int32_t warp_first = first + machine.warp() * kWarpRows;
    if constexpr (kOfKeys) {
      grad_key.store(machine, batch, key_head, warp_first, inputs.rules.scale, state.keys);
    }
    if constexpr (kOfValues) {
      grad_value.store(machine, batch, key_head, warp_first, 1.0F, state.values);
    }
  }

  template <class Machine>
  ZERO_EXT_DEVICE void one_query_head(const Machine& machine, Stream<Machine>& stream,
                                      std::int64_t batch, std::int64_t head, std::int32_t first,
                                      State<Machine>& state) const {
    const std::int64_t row = inputs.first_row(batch, head);
    const std::int32_t length = inputs.rules.sizes.query_length;
    stream.begin(lists.of(head, first >> lists.shift), inputs.queries(inputs.query, batch, head),
                 inputs.queries(inputs.grad_output, batch, head),
                 {{inputs.reference + row, length}, {inputs.delta + row, length}});
    const HeadRules rules = inputs.rules.of(batch, head);
    const HeadDropout dropout = inputs.rules.dropout_of(batch, head);
    const std::int32_t warp_first = first + machine.warp() * kWarpRows;
    state.bias.fill(0.0F);
    for (std::int64_t i = 0; i < stream.tiles(); ++i) {
      stream.take(i);
      one_tile(machine, stream, i, rules, dropout, warp_first, state);
      stream.release(i);
    }
    if (kOfKeys && grad_bias.data != nullptr) {
      finish_bias(machine, warp_first, state,
                  grad_bias.data + batch * grad_bias.batch_stride + head * grad_bias.head_stride);
    }
  }

  template <class Machine>
  ZERO_EXT_DEVICE void one_tile(const Machine& machine, const Stream<Machine>& stream,
                                std::int64_t tile, const HeadRules& rules,
                                const HeadDropout& dropout, std::int32_t first,
                                State<Machine>& state) const {
    constexpr int kElements = TileRows<T, kDim>::bytes(kWarpRows) / static_cast<int>(sizeof(T));
    const T* keys = reinterpret_cast<T*>(machine.memory()) + machine.warp() * kElements;
    const T* values = keys + TileRows<T, kDim>::bytes(rows()) / static_cast<int>(sizeof(T));
    float* scratch =
        reinterpret_cast<float*>(machine.memory() + 2 * TileRows<T, kDim>::bytes(rows()) +
                                 Stream<Machine>::kBytes) +
        machine.warp() * Multiply<Machine>::kScratch;
    const Places<true> places{first, stream.starts(tile)};
    typename Multiply<Machine>::Scores weights;
    typename Multiply<Machine>::Scores gradient;
    Multiply<Machine>::scores(machine, keys, stream.first(tile), weights);
    make_scores(machine, rules, places, weights);
    if constexpr (kOfKeys) {
      Multiply<Machine>::scores(machine, values, stream.second(tile), gradient);
    }
    differentiate(machine, dropout, places, stream.numbers(tile, 0), stream.numbers(tile, 1),
                  weights, gradient);
    if constexpr (kOfValues) {
      Multiply<Machine>::add(machine, weights, stream.second(tile), scratch, state.values);
    }
    if constexpr (kOfKeys) {
      if (grad_bias.data != nullptr) {
        each_lane(machine, [&](int here, int) {
          ZERO_EXT_UNROLL
          for (int i = 0; i < kTile / 2; ++i) {
            state.bias.at[here][i % 4 / 2] += gradient.at[here][i];
          }
        });
      }
      Multiply<Machine>::add(machine, gradient, stream.first(tile), scratch, state.keys);
    }
  }

  // Scores become dropped weights, and their gradient that of the scores.
  template <class Machine, int kCount>
  static ZERO_EXT_DEVICE void differentiate(const Machine& machine, const HeadDropout& dropout,
                                            const Places<true>& places, const float* reference,
                                            const float* delta,
                                            Registers<float, kCount, Machine::kLanes>& scores,
                                            Registers<float, kCount, Machine::kLanes>& gradient) {
    each_factor<kCount>(machine, dropout, places, [&](int here, int i, float factor) {
      const int column = Places<true>::column(machine.lane(here), i);
      float& weight = scores.at[here][i];
      weight = Machine::exp2(weight - reference[column]);
      if constexpr (kOfKeys) {
        float& value = gradient.at[here][i];
        value = score_gradient(weight, value, factor, delta[column]);
      }
      weight *= factor;
    });
  }

  template <class Machine>
  ZERO_EXT_DEVICE void finish_bias(const Machine& machine, std::int32_t first,
                                   State<Machine>& state, float* bias) const {
    machine.sum_of_quad(state.bias);
    each_lane(machine, [&](int here, int lane) {
      ZERO_EXT_UNROLL
      for (int row = 0; row < 2; ++row) {
        const std::int32_t index = first + lane / 4 + 8 * row;
        if (lane % 4 != 0 || index >= inputs.rules.sizes.key_length) continue;
        bias[index * grad_bias.key_stride] += state.bias.at[here][row];
      }
    });
  }
};

}  // namespace zero_ext::cuda
