// The gradient of the queries, and that of a bias which differs from query to query: a block of
// threads has a part of a row of blocks and passes over the keys of its blocks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention_gradient.h"

namespace zero_ext::cuda {

template <class T, int kDim>
struct AttentionRowGradient {
  using Shape = AttentionShape<T, kDim, AttentionPass::row_gradient>;
  static constexpr int kTile = Shape::kTile;

  GradientInputs<T> inputs;
  BlockLists lists;  // by rows
  GradientOutput<T> grad_query;
  BiasGradient grad_bias;
  // Batches and heads that one block of threads takes, one after another: those that share a bias
  // whose gradient is asked for, else one.
  std::int64_t batches_each;
  std::int64_t heads_each;

  template <class Machine>
  using Stream = TileStream<Machine, T, kDim, kTile, Shape::kStages, 0>;
  template <class Machine>
  using Multiply = Product<Machine, T, kDim, kTile>;

  ZERO_EXT_FUNCTION int rows() const { return Shape::rows(lists.shift); }
  ZERO_EXT_FUNCTION std::int64_t row_tiles() const {
    return (inputs.rules.sizes.query_length + std::int64_t{rows()} - 1) / rows();
  }
  ZERO_EXT_FUNCTION std::int64_t groups() const {
    return inputs.rules.sizes.batch / batches_each * (inputs.rules.sizes.query_heads / heads_each);
  }
  std::int64_t blocks() const { return row_tiles() * groups(); }
  template <class Machine>
  static constexpr int shared_bytes(int rows) {
    return 2 * TileRows<T, kDim>::bytes(rows) + Stream<Machine>::kBytes +
           rows / kWarpRows * Multiply<Machine>::kScratch * 4;
  }

  template <class Machine>
  ZERO_EXT_DEVICE void operator()(const Machine& machine) const {
    const AttentionSizes& sizes = inputs.rules.sizes;
    const std::int64_t group = machine.block() % groups();
    const std::int64_t turn = machine.block() / groups();
    const std::int64_t tile = inputs.rules.causal ? row_tiles() - 1 - turn : turn;
    const auto first = static_cast<std::int32_t>(tile * rows());
    const std::int64_t head_groups = sizes.query_heads / heads_each;
    const std::int64_t first_batch = group / head_groups * batches_each;
    const std::int64_t first_head = group % head_groups * heads_each;
    std::byte* rest = machine.memory() + 2 * TileRows<T, kDim>::bytes(rows());
    Stream<Machine> stream(machine, rest);
    for (std::int64_t batch = first_batch; batch < first_batch + batches_each; ++batch) {
      for (std::int64_t head = first_head; head < first_head + heads_each; ++head) {
        one_head(machine, stream, batch, head, first);
        stream.end();
      }
    }
  }

 private:
  // Of a warp's rows: lane / 4 and 8 below.
  template <class Machine>
  struct State {
    Registers<float, kDim / 2, Machine::kLanes> sums;
    Registers<float, 2, Machine::kLanes> reference;
    Registers<float, 2, Machine::kLanes> delta;
    Registers<float, 2, Machine::kLanes> bias;  // sums over the keys that this lane has
  };

  template <class Machine>
  ZERO_EXT_DEVICE void one_head(const Machine& machine, Stream<Machine>& stream, std::int64_t batch,
                                std::int64_t head, std::int32_t first) const {
    constexpr int kBytes = TileRows<T, kDim>::bytes(kWarpRows);
    const auto index = [&](int row) { return first + row; };
    T* queries = reinterpret_cast<T*>(machine.memory());
    T* grads = reinterpret_cast<T*>(machine.memory() + TileRows<T, kDim>::bytes(rows()));
    copy_rows<kDim>(machine, inputs.queries(inputs.query, batch, head), rows(), index, queries);
    copy_rows<kDim>(machine, inputs.queries(inputs.grad_output, batch, head), rows(), index, grads);
    stream.begin(lists.of(head, first >> lists.shift), inputs.keys(inputs.key, batch, head),
                 inputs.keys(inputs.value, batch, head), {{nullptr, 0}});
    queries += machine.warp() * kBytes / static_cast<int>(sizeof(T));
    grads += machine.warp() * kBytes / static_cast<int>(sizeof(T));
    float* scratch =
        reinterpret_cast<float*>(machine.memory() + 2 * TileRows<T, kDim>::bytes(rows()) +
                                 Stream<Machine>::kBytes) +
        machine.warp() * Multiply<Machine>::kScratch;
    const HeadRules rules = inputs.rules.of(batch, head);
    const HeadDropout dropout = inputs.rules.dropout_of(batch, head);
    const std::int32_t warp_first = first + machine.warp() * kWarpRows;
    State<Machine> state = begin(machine, inputs.first_row(batch, head), warp_first);
    float* bias = grad_bias.data == nullptr ? nullptr
                                            : grad_bias.data + batch * grad_bias.batch_stride +
                                                  head * grad_bias.head_stride;
    for (std::int64_t i = 0; i < stream.tiles(); ++i) {
      stream.take(i);
      const Places<false> places{warp_first, stream.starts(i)};
      typename Multiply<Machine>::Scores scores;
      typename Multiply<Machine>::Scores gradient;
      Multiply<Machine>::scores(machine, queries, stream.first(i), scores);
      make_scores(machine, rules, places, scores);
      Multiply<Machine>::scores(machine, grads, stream.second(i), gradient);
      differentiate(machine, dropout, places, state, scores, gradient);
      if (bias != nullptr) add_to_bias(machine, rules, places, gradient, bias, state);
      Multiply<Machine>::add(machine, gradient, stream.first(i), scratch, state.sums);
      stream.release(i);
    }
    grad_query.store(machine, batch, head, warp_first, inputs.rules.scale, state.sums);
    if (bias != nullptr && grad_bias.key_stride == 0) {
      finish_bias(machine, warp_first, state, bias);
    }
  }

  template <class Machine>
  ZERO_EXT_DEVICE State<Machine> begin(const Machine& machine, std::int64_t first_row,
                                       std::int32_t first) const {
    State<Machine> state;
    state.sums.fill(0.0F);
    state.bias.fill(0.0F);
    each_lane(machine, [&](int here, int lane) {
      ZERO_EXT_UNROLL
      for (int row = 0; row < 2; ++row) {
        const std::int32_t index = first + lane / 4 + 8 * row;
        const bool there = index < inputs.rules.sizes.query_length;
        state.reference.at[here][row] = there ? inputs.reference[first_row + index] : 0.0F;
        state.delta.at[here][row] = there ? inputs.delta[first_row + index] : 0.0F;
      }
    });
    return state;
  }

  // The gradient of the dropped weights becomes that of the scores.
  template <class Machine, int kCount>
  static ZERO_EXT_DEVICE void differentiate(const Machine& machine, const HeadDropout& dropout,
                                            const Places<false>& places,
                                            const State<Machine>& state,
                                            const Registers<float, kCount, Machine::kLanes>& scores,
                                            Registers<float, kCount, Machine::kLanes>& gradient) {
    each_factor<kCount>(machine, dropout, places, [&](int here, int i, float factor) {
      const int row = i % 4 / 2;
      const float weight = Machine::exp2(scores.at[here][i] - state.reference.at[here][row]);
      float& value = gradient.at[here][i];
      value = score_gradient(weight, value, factor, state.delta.at[here][row]);
    });
  }

  // One warp alone adds to an element, in one order: its lanes may change from head to head.
  template <class Machine, int kCount>
  ZERO_EXT_DEVICE void add_to_bias(const Machine& machine, const HeadRules& rules,
                                   const Places<false>& places,
                                   const Registers<float, kCount, Machine::kLanes>& gradient,
                                   float* bias, State<Machine>& state) const {
    each_lane(machine, [&](int here, int lane) {
      ZERO_EXT_UNROLL
      for (int i = 0; i < kCount; ++i) {
        const std::int32_t query = places.query(lane, i);
        const std::int32_t key = places.key(lane, i);
        if (grad_bias.key_stride == 0) {
          state.bias.at[here][i % 4 / 2] += gradient.at[here][i];
        } else if (query < rules.query_length && key < rules.key_length) {
          bias[query * grad_bias.query_stride + key * grad_bias.key_stride] += gradient.at[here][i];
        }
      }
    });
    machine.meet_in_warp();
  }

  template <class Machine>
  ZERO_EXT_DEVICE void finish_bias(const Machine& machine, std::int32_t first,
                                   State<Machine>& state, float* bias) const {
    machine.sum_of_quad(state.bias);
    each_lane(machine, [&](int here, int lane) {
      ZERO_EXT_UNROLL
      for (int row = 0; row < 2; ++row) {
        const std::int32_t index = first + lane / 4 + 8 * row;
        if (lane % 4 != 0 || index >= inputs.rules.sizes.query_length) continue;
        bias[index * grad_bias.query_stride] += state.bias.at[here][row];
      }
    });
  }
};

}  // namespace zero_ext::cuda
