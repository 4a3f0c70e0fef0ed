// Block-sparse attention with an online softmax: a block of threads has 64 queries and passes over
// the keys that any of them has in its blocks.
//
// Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning"
// (2023), the forward pass; Milakov and Gimelshein, "Online normalizer calculation for softmax"
// (2018).
#pragma once

#include <cmath>
#include <cstdint>

#include "attention_output.h"
#include "attention_scores.h"
#include "attention_tiling.h"
#include "tile_loader.h"

namespace zero_ext::cuda {

template <class T, int kDim>
struct AttentionForward {
  using Tiling = AttentionTiling<T, kDim, AttentionPass::forward>;
  using Rows = TileRows<T, kDim>;
  static constexpr int kTile = Tiling::kTile;
  static constexpr int kBands = Tiling::kBands;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr bool kSpecializesFullTiles = kDim != 128;  // there it spills registers
#else
  static constexpr bool kSpecializesFullTiles = true;
#endif
  using Scores = Registers<float, kTile / 2>;
  using Sums = Registers<float, kDim / 2>;

  AttentionParams params;
  BlockLists lists;  // by rows
  Heads<const T> query;
  Heads<const T> key;
  Heads<const T> value;
  OutputRows<T> output;
  float* logsumexp;  // [batch, query heads, query length], in base 2

  template <class ThreadBlock>
  using Loader = TileLoader<ThreadBlock, T, kDim, kTile, Tiling::kStages, 0>;
  template <class ThreadBlock>
  using Mma = WarpMma<ThreadBlock, T, kDim, kTile, kBands>;

  ZERO_EXT_FUNCTION std::int32_t row_tiles() const {
    return (params.sizes.query_length + Tiling::kRows - 1) / Tiling::kRows;
  }
  std::int64_t blocks() const {
    return std::int64_t{row_tiles()} * params.sizes.batch * params.sizes.query_heads;
  }
  template <class ThreadBlock>
  static constexpr int shared_bytes() {
    return Rows::bytes(Tiling::kRows) + Loader<ThreadBlock>::kBytes +
           Tiling::kWarps * Mma<ThreadBlock>::kScratch * 4;
  }

  template <class ThreadBlock>
  ZERO_EXT_DEVICE void operator()(const ThreadBlock& thread_block) const {
    const AttentionSizes& sizes = params.sizes;
    const std::int32_t pairs = sizes.batch * sizes.query_heads;
    const auto number = static_cast<std::int32_t>(thread_block.block());
    const std::int32_t batch = number % pairs / sizes.query_heads;
    const std::int32_t head = number % pairs % sizes.query_heads;
    // Of causal layouts the last rows have most blocks: they begin first.
    const std::int32_t turn = number / pairs;
    const std::int32_t tile = params.causal ? row_tiles() - 1 - turn : turn;
    const std::int32_t first = tile * Tiling::kRows;

    T* own = reinterpret_cast<T*>(thread_block.shared_memory());
    Loader<ThreadBlock> loader(thread_block,
                               thread_block.shared_memory() + Rows::bytes(Tiling::kRows));
    copy_rows<kDim>(
        thread_block, matrix(query, batch, head, sizes.query_length), Tiling::kRows,
        [&](int row) { return first + row; }, own);
    const std::int32_t key_head = head / (sizes.query_heads / sizes.key_heads);
    loader.begin(lists.of(head, first), matrix(key, batch, key_head, sizes.key_length),
                 matrix(value, batch, key_head, sizes.key_length), {{nullptr, 0}});
    State state;
    attend(thread_block, loader, params.of(batch, head), params.dropout_of(batch, head), first,
           state);
    loader.end();
    ZERO_EXT_UNROLL
    for (int band = 0; band < kBands; ++band) {
      const int band_index = thread_block.warp() * kBands + band;
      finish(thread_block, state, band, batch, head, first + band_index * kBandRows,
             own + band_index * Rows::kBandElements);
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
    return {of.of(batch, head), of.row_stride, length, params.sizes.dim};
  }

  template <class ThreadBlock>
  static ZERO_EXT_DEVICE void attend(const ThreadBlock& thread_block, Loader<ThreadBlock>& loader,
                                     const HeadParams& params, const HeadDropout& dropout,
                                     std::int32_t first, State& state) {
    const int band_index = thread_block.warp() * kBands;
    const T* own =
        reinterpret_cast<const T*>(thread_block.shared_memory()) + band_index * Rows::kBandElements;
    float* scratch =
        reinterpret_cast<float*>(thread_block.shared_memory() + Rows::bytes(Tiling::kRows) +
                                 Loader<ThreadBlock>::kBytes) +
        thread_block.warp() * Mma<ThreadBlock>::kScratch;
    ZERO_EXT_UNROLL
    for (int band = 0; band < kBands; ++band) {
      state.sums[band].fill(0.0F);
      state.highest[band].fill(kMasked);
      state.total[band].fill(0.0F);
    }
    const std::int32_t own_first = first + band_index * kBandRows;
    for (std::int32_t i = 0; i < loader.tiles(); ++i) {
      loader.acquire(i);
      GroupMask masks[kBands];
      loader.masks(i, band_index, masks);
      if (const AllGroups<kTile / 16, kBands> all; kSpecializesFullTiles && all.are(masks)) {
        one_tile(thread_block, loader, i, own, all.masks, params, dropout, own_first, scratch,
                 state);
      } else {
        one_tile(thread_block, loader, i, own, masks, params, dropout, own_first, scratch, state);
      }
      loader.release(i);
    }
  }

  template <class ThreadBlock>
  static ZERO_EXT_DEVICE void one_tile(const ThreadBlock& thread_block,
                                       const Loader<ThreadBlock>& loader, std::int32_t tile,
                                       const T* own, const GroupMask (&masks)[kBands],
                                       const HeadParams& params, const HeadDropout& dropout,
                                       std::int32_t first, float* scratch, State& state) {
    Scores scores[kBands];
    Mma<ThreadBlock>::scores(thread_block, own, loader.first(tile), masks, scores);
    ZERO_EXT_UNROLL
    for (int band = 0; band < kBands; ++band) {
      if (masks[band] == 0) continue;
      const auto positions =
          loader.template positions<false>(tile, first + band * kBandRows, masks[band]);
      make_scores(params, positions, scores[band]);
      weigh(positions, scores[band], state, band);
      if (!dropout.drops) continue;
      each_factor(dropout, positions,
                  [&](int local, int at, float factor) { scores[band].at[local][at] *= factor; });
    }
    Mma<ThreadBlock>::add(thread_block, scores, loader.second(tile), scratch, masks, state.sums);
  }

  // Scores become weights relative to the highest score so far, and so do the sums.
  static ZERO_EXT_DEVICE void weigh(const TilePositions<false, kTile / 16>& positions,
                                    Scores& scores, State& state, int band) {
    Registers<float, 2> highest = state.highest[band];
    positions.each_score([&](int local, int, int i) {
      float& so_far = highest.at[local][i % 4 / 2];
      so_far = ::fmaxf(so_far, scores.at[local][i]);
    });
    max_of_quad(highest);
    Registers<float, 2> reference;
    each_lane([&](int local, int) {
      ZERO_EXT_UNROLL
      for (int row = 0; row < 2; ++row) {
        const float high = highest.at[local][row];
        reference.at[local][row] = high == kMasked ? 0.0F : high;
        const float factor =
            fast_exp2(state.highest[band].at[local][row] - reference.at[local][row]);
        state.highest[band].at[local][row] = high;
        state.total[band].at[local][row] *= factor;
        ZERO_EXT_UNROLL
        for (int i = 0; i < kDim / 2; ++i) {
          if (i % 4 / 2 == row) state.sums[band].at[local][i] *= factor;
        }
      }
    });
    positions.each_score([&](int local, int, int i) {
      float& weight = scores.at[local][i];
      weight = fast_exp2(weight - reference.at[local][i % 4 / 2]);
      state.total[band].at[local][i % 4 / 2] += weight;
    });
  }

  template <class ThreadBlock>
  ZERO_EXT_DEVICE void finish(const ThreadBlock& thread_block, State& state, int band,
                              std::int32_t batch, std::int32_t head, std::int32_t first,
                              T* staging) const {
    const AttentionSizes& sizes = params.sizes;
    sum_of_quad(state.total[band]);
    Registers<float, 2> factors;
    each_lane([&](int local, int lane) {
      ZERO_EXT_UNROLL
      for (int row = 0; row < 2; ++row) {
        const float total = state.total[band].at[local][row];
        const bool empty = total == 0.0F;
        factors.at[local][row] = empty ? 0.0F : 1.0F / total;
        const std::int32_t index = first + lane / 4 + 8 * row;
        if (lane % 4 != 0 || index >= sizes.query_length) continue;
        logsumexp[(std::int64_t{batch} * sizes.query_heads + head) * sizes.query_length + index] =
            empty ? kMasked : state.highest[band].at[local][row] + ::log2f(total);
      }
    });
    output.template store<kDim>(thread_block, batch, head, first, factors, state.sums[band],
                                staging);
  }
};

}  // namespace zero_ext::cuda
