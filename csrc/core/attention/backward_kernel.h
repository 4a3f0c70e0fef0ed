// Backward of block-sparse attention. See optimizer_kernel.h on inclusion.
//
// Tiles of scores and of their gradients lie transposed, keys by queries, as in the forward. Sums
// over queries (keys' and values' gradients) run over lanes of a tile and then over tiles in
// order; sums over keys (queries' gradients) over a panel and then over panels in order. So it
// makes no difference to any bit which part of the work a call is given.
//
// Source: Dao, "FlashAttention-2" (arXiv 2307.08691), section 3.1.2.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "attention_kernels.h"
#include "forward_kernel.h"
#include "micro_gemm.h"
#include "score_tile.h"

namespace zero_ext::core {
namespace {

template <class U, class T>
struct AttentionBackward {
  using V = typename U::V;
  using Float = typename V::Float;
  using Element = typename U::Element;
  using Packs = Pack<U, T>;

  struct Scratch {
    std::int64_t dim;        // head dim, padded with zeros
    Element* query_rows;     // [kTile, dim]
    Element* grad_rows;      // [kTile, dim], of the output's gradient
    Unit* query;             // [head dim units, kTile]
    Unit* grad;              // [head dim units, kTile]
    Unit* query_down;        // [kTile units, dim]
    Unit* grad_down;         // [kTile units, dim]
    Element* key;            // [kTile, dim]
    Element* value;          // [kTile, dim]
    Unit* key_down;          // [kTile units, dim]
    float* grad_query;       // [dim, kTile]
    float* rows;             // [kTile, dim]
    float* scores;           // [kTile, kTile]; then the scores' gradients
    float* products;         // [kTile, kTile], of values and the output's gradient
    float* bias;             // [kTile, kTile]
    float* dropout_scale;    // [kTile, kTile]
    Element* weights;        // [kTile keys, kTile]
    Element* score_grads;    // [kTile keys, kTile]: the scores' gradients, by rows
    Unit* score_grads_down;  // [kTile key units, kTile]: the same, by units of consecutive keys
    float* logsumexp;        // [kTile], in base 2; infinity where no key is seen
    float* delta;            // [kTile]

    static constexpr std::int64_t kMatrices = 11;
    static constexpr std::int64_t kTiles = 7;

    Scratch(std::int64_t head_dim, float* memory) : dim(padded_dim(head_dim)) {
      const auto next = [&memory](std::int64_t floats) {
        float* const start = memory;
        memory += floats;
        return start;
      };
      const auto elements = [&next](std::int64_t floats) {
        return reinterpret_cast<Element*>(next(floats));
      };
      const auto units = [&next](std::int64_t floats) {
        return reinterpret_cast<Unit*>(next(floats));
      };
      const std::int64_t matrix = kTile * dim;
      query_rows = elements(matrix);
      grad_rows = elements(matrix);
      query = units(matrix);
      grad = units(matrix);
      query_down = units(matrix);
      grad_down = units(matrix);
      key = elements(matrix);
      value = elements(matrix);
      key_down = units(matrix);
      grad_query = next(matrix);
      rows = next(matrix);
      scores = next(kTile * kTile);
      products = next(kTile * kTile);
      bias = next(kTile * kTile);
      dropout_scale = next(kTile * kTile);
      weights = elements(kTile * kTile);
      score_grads = elements(kTile * kTile);
      score_grads_down = units(kTile * kTile);
      logsumexp = next(kTile);
      delta = next(kTile);
    }
  };

  static std::int64_t scratch_floats(std::int64_t head_dim) {
    return Scratch::kMatrices * kTile * padded_dim(head_dim) + Scratch::kTiles * kTile * kTile +
           2 * kTile;
  }

  static const T* rows_of(const RowsView& view, std::int64_t batch, std::int64_t head) {
    return static_cast<const T*>(view.data) + batch * view.batch_stride + head * view.head_stride;
  }

  // Units of `count` rows, transposed and by consecutive rows; the latter is returned.
  static const Unit* load_rows(const AttentionArgs& args, const RowsView& view,
                               const QueryTile& tile, std::int64_t lanes, const Scratch& scratch,
                               Element* rows, Unit* transposed, Unit* down) {
    Packs::rows(rows_of(view, tile.batch, tile.head), view.row_stride, tile.first, tile.count,
                round_up(lanes, 2), args.head_dim, scratch.dim, rows);
    Packs::transpose(reinterpret_cast<const Unit*>(rows), scratch.dim / U::kPair, lanes,
                     args.head_dim / U::kPair, transposed);
    return Packs::down(rows, round_up(lanes, U::kPair), scratch.dim, down);
  }

  struct LoadedRows {
    const Unit* query_down;
    const Unit* grad_down;
  };

  static LoadedRows load_tile(const AttentionArgs& args, const AttentionGradArgs& gradients,
                              const QueryTile& tile, std::int64_t lanes, const Scratch& scratch) {
    const LoadedRows loaded{load_rows(args, args.query, tile, lanes, scratch, scratch.query_rows,
                                      scratch.query, scratch.query_down),
                            load_rows(args, gradients.grad_output, tile, lanes, scratch,
                                      scratch.grad_rows, scratch.grad, scratch.grad_down)};
    const T* grad = rows_of(gradients.grad_output, tile.batch, tile.head);
    const T* output = rows_of(gradients.output, tile.batch, tile.head);
    const float* logsumexp = gradients.logsumexp +
                             (tile.batch * args.heads + tile.head) * args.query_length + tile.first;
    for (std::int64_t r = 0; r < kTile; ++r) {
      scratch.delta[r] = 0;
      scratch.logsumexp[r] = std::numeric_limits<float>::infinity();
      if (r >= tile.count) continue;
      const std::int64_t row = tile.first + r;
      float sum = 0;
      for (std::int64_t d = 0; d < args.head_dim; ++d) {
        sum += to_float(grad[row * gradients.grad_output.row_stride + d]) *
               to_float(output[row * gradients.output.row_stride + d]);
      }
      scratch.delta[r] = sum;
      if (logsumexp[r] != ScoreTile<V>::kMasked) scratch.logsumexp[r] = logsumexp[r];
    }
    return loaded;
  }

  // Weights and score gradients of a panel from scores and products.
  template <bool Dropped>
  static void differentiate(const Scratch& scratch, std::int64_t lanes, std::int64_t count,
                            float scale) {
    const Float factor = V::set(scale);
    for (std::int64_t r = 0; r < lanes; r += V::width) {
      const Float logsumexp = V::load(scratch.logsumexp + r);
      const Float delta = V::load(scratch.delta + r);
      for (std::int64_t c = 0; c < count; ++c) {
        const std::int64_t at = c * kTile + r;
        const Float score = V::mul(V::load(scratch.scores + at), factor);
        const Float weight = V::exp2(V::sub(score, logsumexp));
        Float product = V::load(scratch.products + at);
        Float used = weight;
        if constexpr (Dropped) {
          const Float dropout_scale = V::load(scratch.dropout_scale + at);
          used = V::mul(weight, dropout_scale);
          product = V::mul(product, dropout_scale);
        }
        const Float score_grad = V::mul(weight, V::sub(product, delta));
        V::store(scratch.weights + at, used);
        V::store(scratch.scores + at, score_grad);
      }
    }
  }

  // The score gradients in the forms that products read; what lies below `count` counts as zero.
  static const Unit* pack_score_grads(const Scratch& scratch, std::int64_t lanes,
                                      std::int64_t count) {
    if constexpr (U::kPair == 1) {
      return reinterpret_cast<const Unit*>(scratch.scores);
    } else {
      const Float zero = V::set(0.0F);
      for (std::int64_t c = 0; c < count; c += 2) {
        for (std::int64_t r = 0; r < lanes; r += V::width) {
          const Float first = V::load(scratch.scores + c * kTile + r);
          const Float second = c + 1 < count ? V::load(scratch.scores + (c + 1) * kTile + r) : zero;
          U::store_down(scratch.score_grads_down + c / 2 * kTile + r, first, second);
          V::store(scratch.score_grads + c * kTile + r, first);
          V::store(scratch.score_grads + (c + 1) * kTile + r, second);
        }
      }
      return scratch.score_grads_down;
    }
  }

  // Scores' gradients of a panel, as floats in scratch.scores.
  static void compute_score_grads(const AttentionArgs& args, const QueryTile& tile,
                                  const KeyPanel& panel, std::int64_t lanes,
                                  const Scratch& scratch) {
    const std::int64_t key_head = tile.head / args.group();
    using Forward = AttentionForward<U, T>;
    Forward::load_panel(args, args.key, tile.batch, key_head, panel, scratch.dim, scratch.key);
    Forward::load_panel(args, args.value, tile.batch, key_head, panel, scratch.dim, scratch.value);
    const std::int64_t depth = args.head_dim / U::kPair;
    const std::int64_t row = scratch.dim / U::kPair;
    MicroGemm<U, false>::run({reinterpret_cast<const Unit*>(scratch.key), row, 1},
                             {scratch.query, kTile}, {scratch.scores, kTile}, panel.count, lanes,
                             depth);
    MicroGemm<U, false>::run({reinterpret_cast<const Unit*>(scratch.value), row, 1},
                             {scratch.grad, kTile}, {scratch.products, kTile}, panel.count, lanes,
                             depth);
    if (!ScoreTile<V>::is_finished(args, tile, panel)) {
      ScoreTile<V>::finish(args, tile, panel, lanes, scratch.scores, scratch.bias);
    }
    const float scale = ScoreTile<V>::factor(args);
    if (args.dropout > 0) {
      ScoreTile<V>::fill_dropout_scale(args, tile, panel, lanes, scratch.dropout_scale);
      differentiate<true>(scratch, lanes, panel.count, scale);
    } else {
      differentiate<false>(scratch, lanes, panel.count, scale);
    }
  }

  // Adds left^T [keys, lanes] right [lanes, dim] to the sums of the panel's keys.
  static void add_key_sums(const KeyPanel& panel, std::int64_t lanes, std::int64_t dim,
                           const Element* left, const Unit* right, std::int64_t first_key,
                           float* sums) {
    std::int64_t position = 0;
    for (int i = 0; i < panel.range_count; ++i) {
      const auto [first, count] = panel.ranges[i];
      MicroGemm<U, true>::run(
          {reinterpret_cast<const Unit*>(left + position * kTile), kTile / U::kPair, 1},
          {right, dim}, {sums + (first - first_key) * dim, dim}, count, dim,
          round_up(lanes, U::kPair) / U::kPair);
      position += count;
    }
  }

  static void run_tile(const AttentionArgs& args, const AttentionGradArgs& gradients,
                       const BackwardWork& work, const QueryTile& tile, const Scratch& scratch) {
    const std::int64_t lanes = round_up(tile.count, V::width);
    const std::int64_t dim = scratch.dim;
    const LoadedRows loaded = load_tile(args, gradients, tile, lanes, scratch);
    if (work.needs_query) std::fill_n(scratch.grad_query, dim * kTile, 0.0F);
    for_each_key_panel(args, tile, work.first_key, work.end_key, [&](const KeyPanel& panel) {
      compute_score_grads(args, tile, panel, lanes, scratch);
      if (work.needs_bias) add_bias(args, gradients, tile, panel, scratch);
      const Unit* score_grads_down = pack_score_grads(scratch, lanes, panel.count);
      if (work.key_sums != nullptr) {
        const Element* score_grads = scratch.score_grads;
        if constexpr (U::kPair == 1) score_grads = scratch.scores;
        add_key_sums(panel, lanes, dim, scratch.weights, loaded.grad_down, work.first_key,
                     work.value_sums);
        add_key_sums(panel, lanes, dim, score_grads, loaded.query_down, work.first_key,
                     work.key_sums);
      }
      if (work.needs_query) {
        const std::int64_t depth = round_up(panel.count, U::kPair);
        const Unit* key_down = Packs::down(scratch.key, depth, dim, scratch.key_down);
        MicroGemm<U, true>::run({key_down, 1, dim}, {score_grads_down, kTile},
                                {scratch.grad_query, kTile}, args.head_dim, lanes,
                                depth / U::kPair);
      }
    });
    if (work.needs_query) write_query(args, gradients, tile, scratch);
  }

  static void write_query(const AttentionArgs& args, const AttentionGradArgs& gradients,
                          const QueryTile& tile, const Scratch& scratch) {
    for (std::int64_t r = 0; r < tile.count; ++r) {
      for (std::int64_t d = 0; d < args.head_dim; ++d) {
        scratch.rows[r * scratch.dim + d] = scratch.grad_query[d * kTile + r];
      }
    }
    const std::int64_t first =
        (tile.batch * args.heads + tile.head) * args.query_length + tile.first;
    write_rows(scratch.rows, tile.count, args.head_dim, args.scale,
               static_cast<T*>(gradients.query) + first * args.head_dim);
  }

  static void write_rows(const float* sums, std::int64_t rows, std::int64_t head_dim, float factor,
                         void* target) {
    const std::int64_t dim = padded_dim(head_dim);
    float row[kMaxHeadDim];
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t d = 0; d < head_dim; ++d) row[d] = sums[r * dim + d] * factor;
      Packs::store(row, head_dim, static_cast<T*>(target) + r * head_dim);
    }
  }

  static void run(const AttentionArgs& args, const AttentionGradArgs& gradients,
                  const BackwardWork& work, float* memory) {
    const Scratch scratch(args.head_dim, memory);
    for (std::int64_t head = work.first_head; head < work.end_head; ++head) {
      for (std::int64_t index = work.first_tile; index < work.end_tile; ++index) {
        run_tile(args, gradients, work, QueryTile::at(args, work.batch, head, index), scratch);
      }
    }
  }

  // Adds a panel's score gradients to the bias's gradient.
  static void add_bias(const AttentionArgs& args, const AttentionGradArgs& gradients,
                       const QueryTile& tile, const KeyPanel& panel, const Scratch& scratch) {
    const std::int64_t* sizes = args.bias.sizes;
    const std::int64_t key_stride = sizes[3] == 1 ? 0 : 1;
    const std::int64_t query_stride = sizes[2] == 1 ? 0 : sizes[3];
    const std::int64_t head = sizes[1] == 1 ? 0 : tile.head;
    const std::int64_t batch = sizes[0] == 1 ? 0 : tile.batch;
    float* const matrix = gradients.bias + (batch * sizes[1] + head) * sizes[2] * sizes[3] +
                          tile.first * query_stride;
    if (query_stride == 0) {
      panel.for_each([&](std::int64_t key, std::int64_t position) {
        const float* score_grads = scratch.scores + position * kTile;
        float sum = 0;
        for (std::int64_t r = 0; r < tile.count; ++r) sum += score_grads[r];
        matrix[key * key_stride] += sum;
      });
      return;
    }
    for (std::int64_t r = 0; r < tile.count; ++r) {
      float* row = matrix + r * query_stride;
      panel.for_each([&](std::int64_t key, std::int64_t position) {
        row[key * key_stride] += scratch.scores[position * kTile + r];
      });
    }
  }

  static void run_bias(const AttentionArgs& args, const AttentionGradArgs& gradients,
                       const BiasWork& work, float* memory) {
    const Scratch scratch(args.head_dim, memory);
    for (std::int64_t batch = work.first_batch; batch < work.end_batch; ++batch) {
      for (std::int64_t head = work.first_head; head < work.end_head; ++head) {
        for (std::int64_t index = work.first_tile; index < work.end_tile; ++index) {
          const QueryTile tile = QueryTile::at(args, batch, head, index);
          const std::int64_t lanes = round_up(tile.count, V::width);
          load_tile(args, gradients, tile, lanes, scratch);
          for_each_key_panel(args, tile, work.first_key, work.end_key, [&](const KeyPanel& panel) {
            compute_score_grads(args, tile, panel, lanes, scratch);
            add_bias(args, gradients, tile, panel, scratch);
          });
        }
      }
    }
  }
};

}  // namespace
}  // namespace zero_ext::core
