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
    std::int64_t dim;     // head dim, padded with zeros
    Element* query_rows;  // [kTile, dim]
    Element* grad_rows;   // [kTile, dim], of the output's gradient
    Unit* query;          // [head dim units, kTile]
    Unit* grad;           // [head dim units, kTile]
    Unit* query_down;     // [kTile units, dim]
    Unit* grad_down;      // [kTile units, dim]
    Element* key;         // [kTile, dim]
    Element* value;       // [kTile, dim]
    Unit* key_down;       // [kTile units, dim]
    float* grad_query;    // [dim, kTile]
    float* rows;          // [kTile, dim]
    float* scores;        // [kTile, kTile]; then the scores' gradients
    float* products;      // [kTile, kTile], of values and the output's gradient
    float* bias;          // [kTile, kTile]
    float* kept;          // [kTile, kTile]
    Element* weights;     // [kTile keys, kTile]
    Element* slopes;      // [kTile keys, kTile]: the scores' gradients, by rows
    Unit* slopes_down;    // [kTile key units, kTile]: the same, by units of consecutive keys
    float* logsumexp;     // [kTile], in base 2; infinity where no key is seen
    float* delta;         // [kTile]

    static constexpr std::int64_t kMatrices = 11;
    static constexpr std::int64_t kTiles = 7;

    Scratch(std::int64_t head_dim, float* memory) : dim(padded_dim(head_dim)) {
      const auto next = [&memory](std::int64_t floats) {
        float* const part = memory;
        memory += floats;
        return part;
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
      kept = next(kTile * kTile);
      weights = elements(kTile * kTile);
      slopes = elements(kTile * kTile);
      slopes_down = units(kTile * kTile);
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
  static const Unit* load_rows(const AttentionProblem& problem, const RowsView& view,
                               const RowTile& tile, std::int64_t lanes, const Scratch& scratch,
                               Element* rows, Unit* transposed, Unit* down) {
    Packs::rows(rows_of(view, tile.batch, tile.head), view.row_stride, tile.first, tile.count,
                round_to(lanes, 2), problem.head_dim, scratch.dim, rows);
    Packs::transpose(reinterpret_cast<const Unit*>(rows), scratch.dim / U::kPair, lanes,
                     problem.head_dim / U::kPair, transposed);
    return Packs::down(rows, round_to(lanes, U::kPair), scratch.dim, down);
  }

  struct LoadedRows {
    const Unit* query_down;
    const Unit* grad_down;
  };

  static LoadedRows load_tile(const AttentionProblem& problem, const AttentionGradients& gradients,
                              const RowTile& tile, std::int64_t lanes, const Scratch& scratch) {
    const LoadedRows loaded{load_rows(problem, problem.query, tile, lanes, scratch,
                                      scratch.query_rows, scratch.query, scratch.query_down),
                            load_rows(problem, gradients.grad_output, tile, lanes, scratch,
                                      scratch.grad_rows, scratch.grad, scratch.grad_down)};
    const T* grad = rows_of(gradients.grad_output, tile.batch, tile.head);
    const T* output = rows_of(gradients.output, tile.batch, tile.head);
    const float* logsumexp = gradients.logsumexp +
                             (tile.batch * problem.heads + tile.head) * problem.query_length +
                             tile.first;
    for (std::int64_t r = 0; r < kTile; ++r) {
      scratch.delta[r] = 0;
      scratch.logsumexp[r] = std::numeric_limits<float>::infinity();
      if (r >= tile.count) continue;
      const std::int64_t row = tile.first + r;
      float sum = 0;
      for (std::int64_t d = 0; d < problem.head_dim; ++d) {
        sum += to_float(grad[row * gradients.grad_output.row_stride + d]) *
               to_float(output[row * gradients.output.row_stride + d]);
      }
      scratch.delta[r] = sum;
      if (logsumexp[r] != Scores<V>::kHidden) scratch.logsumexp[r] = logsumexp[r];
    }
    return loaded;
  }

  // Weights and slopes of a panel from scores and products.
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
          const Float kept = V::load(scratch.kept + at);
          used = V::mul(weight, kept);
          product = V::mul(product, kept);
        }
        const Float slope = V::mul(weight, V::sub(product, delta));
        V::store(scratch.weights + at, used);
        V::store(scratch.scores + at, slope);
      }
    }
  }

  // The slopes in the forms that products read; what lies below `count` counts as zero.
  static const Unit* spread_slopes(const Scratch& scratch, std::int64_t lanes, std::int64_t count) {
    if constexpr (U::kPair == 1) {
      return reinterpret_cast<const Unit*>(scratch.scores);
    } else {
      const Float zero = V::set(0.0F);
      for (std::int64_t c = 0; c < count; c += 2) {
        for (std::int64_t r = 0; r < lanes; r += V::width) {
          const Float first = V::load(scratch.scores + c * kTile + r);
          const Float second = c + 1 < count ? V::load(scratch.scores + (c + 1) * kTile + r) : zero;
          U::store_down(scratch.slopes_down + c / 2 * kTile + r, first, second);
          V::store(scratch.slopes + c * kTile + r, first);
          V::store(scratch.slopes + (c + 1) * kTile + r, second);
        }
      }
      return scratch.slopes_down;
    }
  }

  // Scores' gradients of a panel, as floats in scratch.scores.
  static void slopes_of(const AttentionProblem& problem, const RowTile& tile, const Panel& panel,
                        std::int64_t lanes, const Scratch& scratch) {
    const std::int64_t key_head = tile.head / problem.group();
    using Forward = AttentionForward<U, T>;
    Forward::load_panel(problem, problem.key, tile.batch, key_head, panel, scratch.dim,
                        scratch.key);
    Forward::load_panel(problem, problem.value, tile.batch, key_head, panel, scratch.dim,
                        scratch.value);
    const std::int64_t depth = problem.head_dim / U::kPair;
    const std::int64_t row = scratch.dim / U::kPair;
    Product<U, false>::run({reinterpret_cast<const Unit*>(scratch.key), row, 1},
                           {scratch.query, kTile}, {scratch.scores, kTile}, panel.count, lanes,
                           depth);
    Product<U, false>::run({reinterpret_cast<const Unit*>(scratch.value), row, 1},
                           {scratch.grad, kTile}, {scratch.products, kTile}, panel.count, lanes,
                           depth);
    if (!Scores<V>::are_plain(problem, tile, panel)) {
      Scores<V>::finish(problem, tile, panel, lanes, scratch.scores, scratch.bias);
    }
    const float scale = Scores<V>::factor(problem);
    if (problem.dropout > 0) {
      Scores<V>::fill_kept(problem, tile, panel, lanes, scratch.kept);
      differentiate<true>(scratch, lanes, panel.count, scale);
    } else {
      differentiate<false>(scratch, lanes, panel.count, scale);
    }
  }

  // Adds left^T [keys, lanes] right [lanes, dim] to the sums of the panel's keys.
  static void add_key_sums(const Panel& panel, std::int64_t lanes, std::int64_t dim,
                           const Element* left, const Unit* right, std::int64_t first_key,
                           float* sums) {
    std::int64_t place = 0;
    for (int i = 0; i < panel.runs; ++i) {
      const auto [first, count] = panel.run[i];
      Product<U, true>::run(
          {reinterpret_cast<const Unit*>(left + place * kTile), kTile / U::kPair, 1}, {right, dim},
          {sums + (first - first_key) * dim, dim}, count, dim,
          round_to(lanes, U::kPair) / U::kPair);
      place += count;
    }
  }

  static void run_tile(const AttentionProblem& problem, const AttentionGradients& gradients,
                       const BackwardPart& part, const RowTile& tile, const Scratch& scratch) {
    const std::int64_t lanes = round_to(tile.count, V::width);
    const std::int64_t dim = scratch.dim;
    const LoadedRows loaded = load_tile(problem, gradients, tile, lanes, scratch);
    if (part.wants_query) std::fill_n(scratch.grad_query, dim * kTile, 0.0F);
    for_each_panel(problem, tile, part.first_key, part.end_key, [&](const Panel& panel) {
      slopes_of(problem, tile, panel, lanes, scratch);
      if (part.wants_bias) add_bias(problem, gradients, tile, panel, scratch);
      const Unit* slopes_down = spread_slopes(scratch, lanes, panel.count);
      if (part.key_sums != nullptr) {
        const Element* slopes = scratch.slopes;
        if constexpr (U::kPair == 1) slopes = scratch.scores;
        add_key_sums(panel, lanes, dim, scratch.weights, loaded.grad_down, part.first_key,
                     part.value_sums);
        add_key_sums(panel, lanes, dim, slopes, loaded.query_down, part.first_key, part.key_sums);
      }
      if (part.wants_query) {
        const std::int64_t depth = round_to(panel.count, U::kPair);
        const Unit* key_down = Packs::down(scratch.key, depth, dim, scratch.key_down);
        Product<U, true>::run({key_down, 1, dim}, {slopes_down, kTile}, {scratch.grad_query, kTile},
                              problem.head_dim, lanes, depth / U::kPair);
      }
    });
    if (part.wants_query) write_query(problem, gradients, tile, scratch);
  }

  static void write_query(const AttentionProblem& problem, const AttentionGradients& gradients,
                          const RowTile& tile, const Scratch& scratch) {
    for (std::int64_t r = 0; r < tile.count; ++r) {
      for (std::int64_t d = 0; d < problem.head_dim; ++d) {
        scratch.rows[r * scratch.dim + d] = scratch.grad_query[d * kTile + r];
      }
    }
    const std::int64_t first =
        (tile.batch * problem.heads + tile.head) * problem.query_length + tile.first;
    write_rows(scratch.rows, tile.count, problem.head_dim, problem.scale,
               static_cast<T*>(gradients.query) + first * problem.head_dim);
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

  static void run(const AttentionProblem& problem, const AttentionGradients& gradients,
                  const BackwardPart& part, float* memory) {
    const Scratch scratch(problem.head_dim, memory);
    for (std::int64_t head = part.first_head; head < part.end_head; ++head) {
      for (std::int64_t index = part.first_tile; index < part.end_tile; ++index) {
        run_tile(problem, gradients, part, RowTile::at(problem, part.batch, head, index), scratch);
      }
    }
  }

  // Adds a panel's slopes to the bias's gradient.
  static void add_bias(const AttentionProblem& problem, const AttentionGradients& gradients,
                       const RowTile& tile, const Panel& panel, const Scratch& scratch) {
    const std::int64_t* sizes = problem.bias.sizes;
    const std::int64_t key_stride = sizes[3] == 1 ? 0 : 1;
    const std::int64_t query_stride = sizes[2] == 1 ? 0 : sizes[3];
    const std::int64_t head = sizes[1] == 1 ? 0 : tile.head;
    const std::int64_t batch = sizes[0] == 1 ? 0 : tile.batch;
    float* const matrix = gradients.bias + (batch * sizes[1] + head) * sizes[2] * sizes[3] +
                          tile.first * query_stride;
    if (query_stride == 0) {
      panel.for_each([&](std::int64_t key, std::int64_t place) {
        const float* slopes = scratch.scores + place * kTile;
        float sum = 0;
        for (std::int64_t r = 0; r < tile.count; ++r) sum += slopes[r];
        matrix[key * key_stride] += sum;
      });
      return;
    }
    for (std::int64_t r = 0; r < tile.count; ++r) {
      float* row = matrix + r * query_stride;
      panel.for_each([&](std::int64_t key, std::int64_t place) {
        row[key * key_stride] += scratch.scores[place * kTile + r];
      });
    }
  }

  static void run_bias(const AttentionProblem& problem, const AttentionGradients& gradients,
                       const BiasPart& part, float* memory) {
    const Scratch scratch(problem.head_dim, memory);
    for (std::int64_t batch = part.first_batch; batch < part.end_batch; ++batch) {
      for (std::int64_t head = part.first_head; head < part.end_head; ++head) {
        for (std::int64_t index = part.first_tile; index < part.end_tile; ++index) {
          const RowTile tile = RowTile::at(problem, batch, head, index);
          const std::int64_t lanes = round_to(tile.count, V::width);
          load_tile(problem, gradients, tile, lanes, scratch);
          for_each_panel(problem, tile, part.first_key, part.end_key, [&](const Panel& panel) {
            slopes_of(problem, tile, panel, lanes, scratch);
            add_bias(problem, gradients, tile, panel, scratch);
          });
        }
      }
    }
  }
};

}  // namespace
}  // namespace zero_ext::core
