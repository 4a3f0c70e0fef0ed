// Block-sparse attention with an online softmax: a block of threads has 64 queries and passes over
// the keys that any of them has in its blocks.
//
// Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning"
// (2023), the forward pass; Milakov and Gimelshein, "Online normalizer calculation for softmax"
// (2018).
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "attention_output.h"
#include "attention_scores.h"
#include "attention_tiling.h"
#include "tile_loader.h"

namespace zero_ext::cuda {

template <class T, int kDim>
struct AttentionForward {
  using Shape = AttentionShape<T, kDim, AttentionPass::forward>;
  using Rows = TileRows<T, kDim>;
  static constexpr int kTile = Shape::kTile;
  static constexpr int kBands = Shape::kBands;
  using Scores = Registers<float, kTile / 2>;
  using Sums = Registers<float, kDim / 2>;

  AttentionRules rules;
  BlockLists lists;  // by rows
  Heads<const T> query;
  Heads<const T> key;
  Heads<const T> value;
  OutputRows<T> output;
  float* logsumexp;  // [batch, query heads, query length], in base 2

  template <class Machine>
  using Stream = TileStream<Machine, T, kDim, kTile, Shape::kStages, 0>;
  template <class Machine>
  using Multiply = Product<Machine, T, kDim, kTile, kBands>;

  ZERO_EXT_FUNCTION std::int32_t row_tiles() const {
    return (rules.sizes.query_length + Shape::kRows - 1) / Shape::kRows;
  }
  std::int64_t blocks() const {
    return std::int64_t{row_tiles()} * rules.sizes.batch * rules.sizes.query_heads;
  }
  template <class Machine>
  static constexpr int shared_bytes() {
    return Rows::bytes(Shape::kRows) + Stream<Machine>::kBytes +
           Shape::kWarps * Multiply<Machine>::kScratch * 4;
  }

  template <class Machine>
  ZERO_EXT_DEVICE void operator()(const Machine& machine) const {
    const AttentionSizes& sizes = rules.sizes;
    const std::int32_t pairs = sizes.batch * sizes.query_heads;
    const auto number = static_cast<std::int32_t>(machine.block());
    const std::int32_t batch = number % pairs / sizes.query_heads;
    const std::int32_t head = number % pairs % sizes.query_heads;
    // Of causal layouts the last rows have most blocks: they begin first.
    const std::int32_t turn = number / pairs;
    const std::int32_t tile = rules.causal ? row_tiles() - 1 - turn : turn;
    const std::int32_t first = tile * Shape::kRows;

    T* own = reinterpret_cast<T*>(machine.memory());
    Stream<Machine> stream(machine, machine.memory() + Rows::bytes(Shape::kRows));
    copy_rows<kDim>(
        machine, matrix(query, batch, head, sizes.query_length), Shape::kRows,
        [&](int row) { return first + row; }, own);
    const std::int32_t key_head = head / (sizes.query_heads / sizes.key_heads);
    stream.begin(lists.of(head, first), matrix(key, batch, key_head, sizes.key_length),
                 matrix(value, batch, key_head, sizes.key_length), {{nullptr, 0}});
    State state;
    attend(machine, stream, rules.of(batch, head), rules.dropout_of(batch, head), first, state);
    stream.end();
    ZERO_EXT_UNROLL
    for (int band = 0; band < kBands; ++band) {
      const int place = machine.warp() * kBands + band;
      finish(machine, state, band, batch, head, first + place * kBandRows,
             own + place * Rows::kBandElements);
    }
  }

 private:
  // Of the bands of a warp.
  struct State {
    Sums sums[kBands];                    // weights times values
    Registers<float, 2> highest[kBands];  // score of a row
    Registers<float, 2> total[kBands];    // of the weights of this lane
  };

  ZERO_EXT_DEVICE Matrix<const T> matrix(const Heads<const T>& of, std::int32_t batch,
                                         std::int32_t head, std::int32_t length) const {
    return {of.of(batch, head), of.row_stride, length, rules.sizes.dim};
  }

  template <class Machine>
  static ZERO_EXT_DEVICE void attend(const Machine& machine, Stream<Machine>& stream,
                                     const HeadRules& rules, const HeadDropout& dropout,
                                     std::int32_t first, State& state) {
    const int place = machine.warp() * kBands;
    const T* own = reinterpret_cast<const T*>(machine.memory()) + place * Rows::kBandElements;
    float* scratch = reinterpret_cast<float*>(machine.memory() + Rows::bytes(Shape::kRows) +
                                              Stream<Machine>::kBytes) +
                     machine.warp() * Multiply<Machine>::kScratch;
    ZERO_EXT_UNROLL
    for (int band = 0; band < kBands; ++band) {
      state.sums[band].fill(0.0F);
      state.highest[band].fill(kMasked);
      state.total[band].fill(0.0F);
    }
    for (std::int32_t i = 0; i < stream.tiles(); ++i) {
      stream.take(i);
      Wanted wanted[kBands];
      stream.wanted(i, place, wanted);
      Scores scores[kBands];
      Multiply<Machine>::scores(machine, own, stream.first(i), wanted, scores);
      ZERO_EXT_UNROLL
      for (int band = 0; band < kBands; ++band) {
        if (wanted[band] == 0) continue;
        const auto places =
            stream.template places<false>(i, first + (place + band) * kBandRows, wanted[band]);
        make_scores(rules, places, scores[band]);
        weigh(places, scores[band], state, band);
        if (!dropout.drops) continue;
        each_factor(dropout, places,
                    [&](int here, int at, float factor) { scores[band].at[here][at] *= factor; });
      }
      Multiply<Machine>::add(machine, scores, stream.second(i), scratch, wanted, state.sums);
      stream.release(i);
    }
  }

  // Scores become weights relative to the highest score so far, and so do the sums.
  static ZERO_EXT_DEVICE void weigh(const Places<false, kTile / 16>& places, Scores& scores,
                                    State& state, int band) {
    Registers<float, 2> highest = state.highest[band];
    places.each_score([&](int here, int, int i) {
      float& so_far = highest.at[here][i % 4 / 2];
      so_far = ::fmaxf(so_far, scores.at[here][i]);
    });
    max_of_quad(highest);
    Registers<float, 2> reference;
    each_lane([&](int here, int) {
      ZERO_EXT_UNROLL
      for (int row = 0; row < 2; ++row) {
        const float high = highest.at[here][row];
        reference.at[here][row] = high == kMasked ? 0.0F : high;
        const float factor = fast_exp2(state.highest[band].at[here][row] - reference.at[here][row]);
        state.highest[band].at[here][row] = high;
        state.total[band].at[here][row] *= factor;
        ZERO_EXT_UNROLL
        for (int i = 0; i < kDim / 2; ++i) {
          if (i % 4 / 2 == row) state.sums[band].at[here][i] *= factor;
        }
      }
    });
    places.each_score([&](int here, int, int i) {
      float& weight = scores.at[here][i];
      weight = fast_exp2(weight - reference.at[here][i % 4 / 2]);
      state.total[band].at[here][i % 4 / 2] += weight;
    });
  }

  template <class Machine>
  ZERO_EXT_DEVICE void finish(const Machine& machine, State& state, int band, std::int32_t batch,
                              std::int32_t head, std::int32_t first, T* staging) const {
    const AttentionSizes& sizes = rules.sizes;
    sum_of_quad(state.total[band]);
    Registers<float, 2> factors;
    each_lane([&](int here, int lane) {
      ZERO_EXT_UNROLL
      for (int row = 0; row < 2; ++row) {
        const float total = state.total[band].at[here][row];
        const bool empty = total == 0.0F;
        factors.at[here][row] = empty ? 0.0F : 1.0F / total;
        const std::int32_t index = first + lane / 4 + 8 * row;
        if (lane % 4 != 0 || index >= sizes.query_length) continue;
        logsumexp[(std::int64_t{batch} * sizes.query_heads + head) * sizes.query_length + index] =
            empty ? kMasked : state.highest[band].at[here][row] + ::log2f(total);
      }
    });
    output.template store<kDim>(machine, batch, head, first, factors, state.sums[band], staging);
  }
};

}  // namespace zero_ext::cuda
