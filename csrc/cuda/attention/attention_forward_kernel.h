// Block-sparse attention with an online softmax: a block of threads has the queries of one row of
// blocks (a part of them where blocks are large) and passes over the keys of its blocks.
//
// Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning"
// (2023), the forward pass; Milakov and Gimelshein, "Online normalizer calculation for softmax"
// (2018).
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention_scores.h"
#include "attention_shape.h"
#include "attention_stream.h"

namespace zero_ext::cuda {

template <class T, int kDim>
struct AttentionForward {
  using Shape = AttentionShape<T, kDim, AttentionPass::forward>;
  static constexpr int kTile = Shape::kTile;

  AttentionRules rules;
  BlockLists lists;  // by rows
  Heads<const T> query;
  Heads<const T> key;
  Heads<const T> value;
  T* output;         // [batch, query heads, query length, dim]
  float* logsumexp;  // [batch, query heads, query length], in base 2

  template <class Machine>
  using Stream = TileStream<Machine, T, kDim, kTile, Shape::kStages, 0>;

  ZERO_EXT_FUNCTION int rows() const { return Shape::rows(lists.shift); }
  ZERO_EXT_FUNCTION std::int64_t row_tiles() const {
    return (rules.sizes.query_length + std::int64_t{rows()} - 1) / rows();
  }
  std::int64_t blocks() const { return row_tiles() * rules.sizes.batch * rules.sizes.query_heads; }
  template <class Machine>
  static constexpr int shared_bytes(int rows) {
    return TileRows<T, kDim>::bytes(rows) + Stream<Machine>::kBytes +
           rows / kWarpRows * Product<Machine, T, kDim, kTile>::kScratch * 4;
  }

  // What a warp keeps of its 16 queries.
  template <class Machine>
  struct State {
    Registers<float, kDim / 2, Machine::kLanes> sums;  // weights times values
    Registers<float, 2, Machine::kLanes> highest;      // score of a row
    Registers<float, 2, Machine::kLanes> total;        // of the weights that this lane has
  };

  template <class Machine>
  ZERO_EXT_DEVICE void operator()(const Machine& machine) const {
    using Multiply = Product<Machine, T, kDim, kTile>;
    const AttentionSizes& sizes = rules.sizes;
    const std::int64_t pairs = sizes.batch * sizes.query_heads;
    const std::int64_t pair = machine.block() % pairs;
    const std::int64_t batch = pair / sizes.query_heads;
    const std::int64_t head = pair % sizes.query_heads;
    // Of causal layouts the last rows have most blocks: they begin first.
    const std::int64_t turn = machine.block() / pairs;
    const std::int64_t tile = rules.causal ? row_tiles() - 1 - turn : turn;
    const auto first = static_cast<std::int32_t>(tile * rows());

    T* own = reinterpret_cast<T*>(machine.memory());
    std::byte* rest = machine.memory() + TileRows<T, kDim>::bytes(rows());
    float* scratch = reinterpret_cast<float*>(rest + Stream<Machine>::kBytes) +
                     machine.warp() * Multiply::kScratch;
    Stream<Machine> stream(machine, rest);
    copy_rows<kDim>(
        machine, matrix(query, batch, head, sizes.query_length), rows(),
        [&](int row) { return first + row; }, own);
    const std::int64_t key_head = head / (sizes.query_heads / sizes.key_heads);
    stream.begin(lists.of(head, first >> lists.shift),
                 matrix(key, batch, key_head, sizes.key_length),
                 matrix(value, batch, key_head, sizes.key_length), {{nullptr, 0}});

    const HeadRules own_rules = rules.of(batch, head);
    const HeadDropout dropout = rules.dropout_of(batch, head);
    const T* warp_rows = own + machine.warp() * kWarpRows * TileRows<T, kDim>::kStride;
    const std::int32_t warp_first = first + machine.warp() * kWarpRows;
    State<Machine> state;
    state.sums.fill(0.0F);
    state.highest.fill(kMasked);
    state.total.fill(0.0F);
    for (std::int64_t i = 0; i < stream.tiles(); ++i) {
      stream.take(i);
      typename Multiply::Scores scores;
      Multiply::scores(machine, warp_rows, stream.first(i), scores);
      const Places<false> places{warp_first, stream.starts(i)};
      make_scores(machine, own_rules, places, scores);
      weigh(machine, scores, state);
      if (dropout.drops) {
        each_factor<kTile / 2>(machine, dropout, places, [&](int here, int at, float factor) {
          scores.at[here][at] *= factor;
        });
      }
      Multiply::add(machine, scores, stream.second(i), scratch, state.sums);
      stream.release(i);
    }
    finish(machine, state, pair, warp_first);
  }

 private:
  ZERO_EXT_DEVICE Matrix<const T> matrix(const Heads<const T>& of, std::int64_t batch,
                                         std::int64_t head, std::int32_t length) const {
    return {of.of(batch, head), of.row_stride, length, rules.sizes.dim};
  }

  // Scores become weights relative to the highest score so far, and so do the sums.
  template <class Machine, int kCount>
  static ZERO_EXT_DEVICE void weigh(const Machine& machine,
                                    Registers<float, kCount, Machine::kLanes>& scores,
                                    State<Machine>& state) {
    Registers<float, 2, Machine::kLanes> highest = state.highest;
    each_lane(machine, [&](int here, int) {
      ZERO_EXT_UNROLL
      for (int i = 0; i < kCount; ++i) {
        float& so_far = highest.at[here][i % 4 / 2];
        so_far = Machine::max(so_far, scores.at[here][i]);
      }
    });
    machine.max_of_quad(highest);
    each_lane(machine, [&](int here, int) {
      float reference[2];
      ZERO_EXT_UNROLL
      for (int row = 0; row < 2; ++row) {
        const float high = highest.at[here][row];
        reference[row] = high == kMasked ? 0.0F : high;
        const float factor = Machine::exp2(state.highest.at[here][row] - reference[row]);
        state.highest.at[here][row] = high;
        state.total.at[here][row] *= factor;
        ZERO_EXT_UNROLL
        for (int i = 0; i < kDim / 2; ++i) {
          if (i % 4 / 2 == row) state.sums.at[here][i] *= factor;
        }
      }
      ZERO_EXT_UNROLL
      for (int i = 0; i < kCount; ++i) {
        float& weight = scores.at[here][i];
        weight = Machine::exp2(weight - reference[i % 4 / 2]);
        state.total.at[here][i % 4 / 2] += weight;
      }
    });
  }

  template <class Machine>
  ZERO_EXT_DEVICE void finish(const Machine& machine, State<Machine>& state, std::int64_t pair,
                              std::int32_t first) const {
    const AttentionSizes& sizes = rules.sizes;
    machine.sum_of_quad(state.total);
    each_lane(machine, [&](int here, int lane) {
      ZERO_EXT_UNROLL
      for (int row = 0; row < 2; ++row) {
        const std::int32_t index = first + lane / 4 + 8 * row;
        if (index >= sizes.query_length) continue;
        const float total = state.total.at[here][row];
        const bool empty = total == 0.0F;
        const float factor = empty ? 0.0F : 1.0F / total;
        const std::int64_t at = pair * sizes.query_length + index;
        if (lane % 4 == 0) {
          logsumexp[at] = empty ? kMasked : state.highest.at[here][row] + Machine::log2(total);
        }
        T* to = output + at * sizes.dim + 2 * (lane % 4);
        ZERO_EXT_UNROLL
        for (int n = 0; n < kDim / 8; ++n) {
          if (8 * n >= sizes.dim) continue;
          const float* from = &state.sums.at[here][4 * n + 2 * row];
          to[8 * n] = core::from_float<T>(from[0] * factor);
          to[8 * n + 1] = core::from_float<T>(from[1] * factor);
        }
      }
    });
  }
};

}  // namespace zero_ext::cuda
