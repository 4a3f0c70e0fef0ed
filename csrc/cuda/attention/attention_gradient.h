// The base of both backward kernels: their arguments, the heads that a block processes, and the
// gradients of scores.
//
// Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning"
// (2023), the backward pass.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "../common/nested_grid.h"
#include "../common/warp_tile.h"
#include "attention_output.h"
#include "attention_scores.h"
#include "attention_tiling.h"
#include "tile_loader.h"

namespace zero_ext::cuda {

template <class T>
struct GradientInputs {
  AttentionParams params;
  Heads<const T> query;
  Heads<const T> key;
  Heads<const T> value;
  Heads<const T> grad_output;
  const float* reference;  // [batch, query heads, query length]: see PrepareGradients
  const float* delta;      // likewise

  ZERO_EXT_FUNCTION Matrix<const T> queries(const Heads<const T>& of, std::int32_t batch,
                                            std::int32_t head) const {
    return {of.of(batch, head), of.row_stride, params.sizes.query_length, params.sizes.dim};
  }
  // Of the key head that a query head shares.
  ZERO_EXT_FUNCTION Matrix<const T> keys(const Heads<const T>& of, std::int32_t batch,
                                         std::int32_t head) const {
    const std::int32_t own = head / (params.sizes.query_heads / params.sizes.key_heads);
    return {of.of(batch, own), of.row_stride, params.sizes.key_length, params.sizes.dim};
  }
  ZERO_EXT_FUNCTION std::int64_t first_row(std::int32_t batch, std::int32_t head) const {
    return (std::int64_t{batch} * params.sizes.query_heads + head) * params.sizes.query_length;
  }
};

// Gradient of one score, in natural units: of weight p, its value's product with the output's
// gradient, and delta, the sum of output times its gradient over the row. `dropout_scale` is
// 1 / (1 - probability) for a weight that was kept, 0 for a dropped one, 1 without
// dropout.
ZERO_EXT_HOST_DEVICE float score_gradient(float weight, float value_product, float dropout_scale,
                                          float delta) {
  return weight * std::fmaf(value_product, dropout_scale, -delta);
}

// For every row of queries: what its scores are compared with (the logarithm of the sum of
// exponentials; infinite where nothing was attended, so that every weight is 0), and
// the sum of its outputs times their gradients.
//
// A warp takes 32 neighboring rows of a head, some at a time: as many neighboring lanes have a
// row as it takes accesses of 16 bytes. Then lane L has the results of row L.
template <class T>
struct PrepareGradients {
  static constexpr int kGroup = static_cast<int>(kAccessBytes / sizeof(T));

  AttentionSizes sizes;
  Heads<const T> grad_output;
  Heads<const T> output;
  const float* logsumexp;  // [batch, query heads, query length], in base 2
  float* reference;
  float* delta;

  ZERO_EXT_HOST_DEVICE std::int64_t heads() const {
    return std::int64_t{sizes.batch} * sizes.query_heads;
  }
  ZERO_EXT_HOST_DEVICE std::int64_t runs_of_head() const {
    return (sizes.query_length + kWarpLanes - 1) / kWarpLanes;
  }
  // Warps that find something.
  std::int64_t work() const { return heads() * runs_of_head(); }

  ZERO_EXT_FUNCTION void operator()(std::int64_t warp, std::int64_t warps) const {
    for_each_nested(
        warp, warps, heads(), runs_of_head(), [&](std::int64_t number, std::int64_t run) {
          const auto batch = static_cast<std::int32_t>(number) / sizes.query_heads;
          const std::int32_t head = static_cast<std::int32_t>(number) - batch * sizes.query_heads;
          const auto first = static_cast<std::int32_t>(run) * kWarpLanes;
          const LaneWords sums =
              sum_rows(grad_output.of(batch, head), output.of(batch, head), first);
          write(number * sizes.query_length + first, sizes.query_length - first, sums);
        });
  }

  // Lanes that have a row: a power of two.
  ZERO_EXT_HOST_DEVICE int lanes_of_row() const {
    int lanes = 1;
    while (lanes < kWarpLanes && lanes * kGroup < sizes.dim) lanes *= 2;
    return lanes;
  }

  // The sums of 32 rows from `first` on, as bits.
  ZERO_EXT_HOST_DEVICE LaneWords sum_rows(const T* grads, const T* outputs,
                                          std::int32_t first) const {
    const int lanes = lanes_of_row();
    const int at_once = kWarpLanes / lanes;
    LaneWords result;
    each_lane([&](int local, int) { result.at[local] = 0; });
    ZERO_EXT_UNROLL_LOADS_BY(2)
    for (int step = 0; step < lanes; ++step) {
      double sums[kThreadLanes];
      each_lane([&](int local, int lane) {
        const std::int64_t row = first + step * at_once + lane / lanes;
        sums[local] = row < sizes.query_length
                          ? sum_some(grads + row * grad_output.row_stride,
                                     outputs + row * output.row_stride, lane % lanes, lanes)
                          : 0.0;
      });
      sum_of_group(sums, lanes);
      LaneWords own;
      each_lane([&](int local, int) {
        own.at[local] = std::bit_cast<std::uint32_t>(static_cast<float>(sums[local]));
      });
      const LaneWords received = shuffle(own, [&](int lane) { return lane % at_once * lanes; });
      each_lane([&](int local, int lane) {
        if (lane / at_once == step) result.at[local] = received.at[local];
      });
    }
    return result;
  }

  // What one of a row's lanes has of its sum. The elements behind its last whole access go one by
  // one, and all of a row that does not begin at a multiple of 16 bytes.
  ZERO_EXT_HOST_DEVICE double sum_some(const T* grads, const T* outputs, int own, int lanes) const {
    double sum = 0.0;
    const int full = is_aligned(grads) && is_aligned(outputs) ? sizes.dim / kGroup : 0;
    ZERO_EXT_UNROLL_BY(1)
    for (int group = own; group < full; group += lanes) {
      const auto grad = std::bit_cast<Group>(load_words(grads + group * kGroup));
      const auto out = std::bit_cast<Group>(load_words(outputs + group * kGroup));
      ZERO_EXT_UNROLL
      for (int k = 0; k < kGroup; ++k) sum += product(grad.at[k], out.at[k]);
    }
    ZERO_EXT_UNROLL_BY(1)
    for (int i = full * kGroup + own; i < sizes.dim; i += lanes) {
      sum += product(grads[i], outputs[i]);
    }
    return sum;
  }

  // Results of the first `count` rows from row `begin` of all on.
  ZERO_EXT_HOST_DEVICE void write(std::int64_t begin, std::int32_t count,
                                  const LaneWords& sums) const {
    const bool wide = count >= kWarpLanes && is_aligned(logsumexp + begin) &&
                      is_aligned(reference + begin) && is_aligned(delta + begin);
    LaneWords totals;
    if (wide) {
      totals = load_lane_words(logsumexp + begin);
    } else {
      each_lane([&](int local, int lane) {
        const float total = lane < count ? logsumexp[begin + lane] : 0.0F;
        totals.at[local] = std::bit_cast<std::uint32_t>(total);
      });
    }
    each_lane([&](int local, int) {
      if (std::bit_cast<float>(totals.at[local]) != kMasked) return;
      totals.at[local] = core::kInfinityBits<float>;
    });
    if (wide) {
      store_lane_words(delta + begin, sums);
      store_lane_words(reference + begin, totals);
      return;
    }
    each_lane([&](int local, int lane) {
      if (lane >= count) return;
      delta[begin + lane] = std::bit_cast<float>(sums.at[local]);
      reference[begin + lane] = std::bit_cast<float>(totals.at[local]);
    });
  }

 private:
  struct Group {
    T at[kGroup];
  };
  static ZERO_EXT_HOST_DEVICE double product(T grad, T out) {
    return static_cast<double>(core::to_float(grad)) * static_cast<double>(core::to_float(out));
  }
};

// What the kernels of both gradients share. A block of threads keeps some rows of two matrices in
// shared memory, and tiles of the two other matrices pass by them, for one head after another.
template <class T, int kDim, AttentionPass kPass>
struct AttentionGradient {
  static_assert(kPass != AttentionPass::forward);
  static constexpr bool kByRows = kPass == AttentionPass::dq;
  using Tiling = AttentionTiling<T, kDim, kPass>;
  using Rows = TileRows<T, kDim>;
  static constexpr int kTile = Tiling::kTile;
  static constexpr int kBands = Tiling::kBands;
  using Scores = Registers<float, kTile / 2>;
  using Sums = Registers<float, kDim / 2>;
  using ScorePositions = TilePositions<!kByRows, kTile / 16>;
  // The scalars of queries, reference and delta, pass by with them.
  template <class ThreadBlock>
  using Loader = TileLoader<ThreadBlock, T, kDim, kTile, Tiling::kStages, kByRows ? 0 : 2>;
  template <class ThreadBlock>
  using Mma = WarpMma<ThreadBlock, T, kDim, kTile, kBands>;

  GradientInputs<T> inputs;
  BlockLists lists;  // by rows or by columns, as the pass
  BiasGradient grad_bias;
  // Batches and heads (key heads by columns) that one block of threads takes, one after another:
  // those that share a bias whose gradient is asked for, else one.
  std::int32_t batches_each;
  std::int32_t heads_each;

  ZERO_EXT_FUNCTION std::int32_t heads() const {
    return kByRows ? inputs.params.sizes.query_heads : inputs.params.sizes.key_heads;
  }
  ZERO_EXT_FUNCTION std::int32_t row_tiles() const {
    const AttentionSizes& sizes = inputs.params.sizes;
    const std::int32_t length = kByRows ? sizes.query_length : sizes.key_length;
    return (length + Tiling::kRows - 1) / Tiling::kRows;
  }
  ZERO_EXT_FUNCTION std::int32_t groups() const {
    return inputs.params.sizes.batch / batches_each * (heads() / heads_each);
  }
  std::int64_t blocks() const { return std::int64_t{row_tiles()} * groups(); }
  template <class ThreadBlock>
  static constexpr int shared_bytes() {
    return 2 * Rows::bytes(Tiling::kRows) + Loader<ThreadBlock>::kBytes +
           Tiling::kWarps * Mma<ThreadBlock>::kScratch * 4;
  }

  // Calls visit(stream, batch, head, first row) for the heads of the running block of threads.
  template <class ThreadBlock, class Visit>
  ZERO_EXT_DEVICE void each_head(const ThreadBlock& thread_block, const Visit& visit) const {
    const auto number = static_cast<std::int32_t>(thread_block.block());
    const std::int32_t group = number % groups();
    // Of causal layouts the last rows and the first columns have most blocks: they begin first.
    const std::int32_t turn = number / groups();
    const bool reversed = kByRows && inputs.params.causal;
    const std::int32_t first = (reversed ? row_tiles() - 1 - turn : turn) * Tiling::kRows;
    const std::int32_t head_groups = heads() / heads_each;
    const std::int32_t first_batch = group / head_groups * batches_each;
    const std::int32_t first_head = group % head_groups * heads_each;
    Loader<ThreadBlock> loader(thread_block,
                               thread_block.shared_memory() + 2 * Rows::bytes(Tiling::kRows));
    for (std::int32_t batch = first_batch; batch < first_batch + batches_each; ++batch) {
      for (std::int32_t head = first_head; head < first_head + heads_each; ++head) {
        visit(loader, batch, head, first);
        thread_block.sync();  // before the next head's rows are copied
      }
    }
  }

  // Shared memory of the running warp alone, see Product::add.
  template <class ThreadBlock>
  static ZERO_EXT_DEVICE float* scratch(const ThreadBlock& thread_block) {
    std::byte* behind =
        thread_block.shared_memory() + 2 * Rows::bytes(Tiling::kRows) + Loader<ThreadBlock>::kBytes;
    return reinterpret_cast<float*>(behind) + thread_block.warp() * Mma<ThreadBlock>::kScratch;
  }

  // Of a batch and query head, or null if it is not asked for.
  ZERO_EXT_DEVICE float* bias_of(std::int32_t batch, std::int32_t head) const {
    if (grad_bias.data == nullptr) return nullptr;
    return grad_bias.data + batch * grad_bias.batch_stride + head * grad_bias.head_stride;
  }
};

}  // namespace zero_ext::cuda
