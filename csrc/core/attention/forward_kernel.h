// Forward of block-sparse attention for one row tile. See optimizer_kernel.h on inclusion.
//
// Scores are computed transposed, keys by queries, so that the softmax of a query runs down one
// lane: its maximum, sum and rescaling are vertical. The output of a tile is collected transposed
// too, head dim by queries.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "attention_kernels.h"
#include "micro_gemm.h"
#include "pack_rows.h"
#include "score_tile.h"

namespace zero_ext::core {
namespace {

template <class U, class T>
struct AttentionForward {
  using V = typename U::V;
  using Float = typename V::Float;
  using Element = typename U::Element;

  // Floats of scratch memory, in the order of the members of Scratch.
  static std::int64_t scratch_floats(std::int64_t head_dim) {
    const std::int64_t dim = padded_dim(head_dim);
    return 8 * kTile * dim + 4 * kTile * kTile + 2 * kTile;
  }

  struct Scratch {
    std::int64_t dim;    // head dim, padded with zeros
    Element* rows;       // [kTile, dim]: queries, keys, in turn
    Unit* query;         // [head dim units, kTile]
    Element* key;        // [kTile, dim]
    Element* value;      // [kTile, dim]
    Unit* value_down;    // [kTile units, dim]
    float* output;       // [dim, kTile]
    float* output_rows;  // [kTile, dim]
    float* scores;       // [kTile, kTile]
    float* bias;         // [kTile, kTile]
    float* kept;         // [kTile, kTile]
    Unit* weights;       // [kTile units, kTile]
    float* highest;      // [kTile], of scores in base 2
    float* sums;         // [kTile]

    Scratch(std::int64_t head_dim, float* memory) : dim(padded_dim(head_dim)) {
      const auto next = [&memory](std::int64_t floats) {
        float* const part = memory;
        memory += floats;
        return part;
      };
      const std::int64_t matrix = kTile * dim;
      rows = reinterpret_cast<Element*>(next(matrix));
      query = reinterpret_cast<Unit*>(next(matrix));
      key = reinterpret_cast<Element*>(next(matrix));
      value = reinterpret_cast<Element*>(next(matrix));
      value_down = reinterpret_cast<Unit*>(next(matrix));
      output = next(matrix);
      output_rows = next(matrix);
      scores = next(kTile * kTile);
      bias = next(kTile * kTile);
      kept = next(kTile * kTile);
      weights = reinterpret_cast<Unit*>(next(kTile * kTile));
      highest = next(kTile);
      sums = next(kTile);
    }
  };

  static void load_query(const AttentionProblem& problem, const RowTile& tile, std::int64_t lanes,
                         const Scratch& scratch) {
    const auto* head = static_cast<const T*>(problem.query.data) +
                       tile.batch * problem.query.batch_stride +
                       tile.head * problem.query.head_stride;
    Pack<U, T>::rows(head, problem.query.row_stride, tile.first, tile.count, lanes,
                     problem.head_dim, scratch.dim, scratch.rows);
    Pack<U, T>::transpose(reinterpret_cast<const Unit*>(scratch.rows), scratch.dim / U::kPair,
                          lanes, problem.head_dim / U::kPair, scratch.query);
  }

  // Keys or values of a panel, padded with rows of zeros to whole units.
  static void load_panel(const AttentionProblem& problem, const RowsView& view, std::int64_t batch,
                         std::int64_t key_head, const Panel& panel, std::int64_t dim,
                         Element* target) {
    const auto* head =
        static_cast<const T*>(view.data) + batch * view.batch_stride + key_head * view.head_stride;
    std::int64_t place = 0;
    for (int i = 0; i < panel.runs; ++i) {
      const std::int64_t padded =
          i + 1 == panel.runs ? round_to(panel.count, U::kPair) - place : panel.run[i].count;
      Pack<U, T>::rows(head, view.row_stride, panel.run[i].first, panel.run[i].count, padded,
                       problem.head_dim, dim, target + place * dim);
      place += panel.run[i].count;
    }
  }

  // Weights of one vector of lanes: exp2(score * scale - highest), their sum, stored for the
  // product with the values. Scaled scores are rounded before the subtraction, as the highest is:
  // in one rounding they would differ from it by its own, which exp2 makes a factor, and a large
  // one where scores are.
  static Float weigh(const Scratch& scratch, std::int64_t r, std::int64_t count, Float scale,
                     Float highest, bool dropped) {
    Float sum = V::set(0.0F);
    const auto weight = [&](std::int64_t c) {
      const Float score = V::mul(V::load(scratch.scores + c * kTile + r), scale);
      const Float exact = V::exp2(V::sub(score, highest));
      sum = V::add(sum, exact);
      return dropped ? V::mul(exact, V::load(scratch.kept + c * kTile + r)) : exact;
    };
    if constexpr (U::kPair == 1) {
      auto* weights = reinterpret_cast<float*>(scratch.weights);
      for (std::int64_t c = 0; c < count; ++c) V::store(weights + c * kTile + r, weight(c));
    } else {
      std::int64_t c = 0;
      for (; c + 2 <= count; c += 2) {
        const Float first = weight(c);
        U::store_down(scratch.weights + c / 2 * kTile + r, first, weight(c + 1));
      }
      if (c < count) {
        U::store_down(scratch.weights + c / 2 * kTile + r, weight(c), V::set(0.0F));
      }
    }
    return sum;
  }

  // The online softmax of one panel; rescales what was collected where a maximum rose.
  static void soften(const Scratch& scratch, std::int64_t lanes, std::int64_t count, float scale,
                     bool dropped) {
    const Float factor = V::set(scale);
    const Float lowest = V::set(Scores<V>::kHidden);
    for (std::int64_t r = 0; r < lanes; r += V::width) {
      Float top = lowest;
      for (std::int64_t c = 0; c < count; ++c) {
        top = V::max(top, V::load(scratch.scores + c * kTile + r));
      }
      const Float before = V::load(scratch.highest + r);
      const Float highest = V::max(before, V::mul(top, factor));
      // A query that has seen no key yet counts from zero: its weights are exp2(-inf).
      const Float base = V::if_at_least(lowest, highest, V::set(0.0F), highest);
      const Float sum = weigh(scratch, r, count, factor, base, dropped);
      const Float shrink = V::exp2(V::sub(before, base));
      V::store(scratch.sums + r, V::fma(V::load(scratch.sums + r), shrink, sum));
      V::store(scratch.highest + r, highest);
      if (V::any_different(shrink, V::set(1.0F))) {
        for (std::int64_t d = 0; d < scratch.dim; ++d) {
          float* at = scratch.output + d * kTile + r;
          V::store(at, V::mul(V::load(at), shrink));
        }
      }
    }
  }

  static void add_panel(const AttentionProblem& problem, const RowTile& tile, const Panel& panel,
                        std::int64_t lanes, const Scratch& scratch) {
    const std::int64_t key_head = tile.head / problem.group();
    load_panel(problem, problem.key, tile.batch, key_head, panel, scratch.dim, scratch.key);
    load_panel(problem, problem.value, tile.batch, key_head, panel, scratch.dim, scratch.value);
    Product<U, false>::run({reinterpret_cast<const Unit*>(scratch.key), scratch.dim / U::kPair, 1},
                           {scratch.query, kTile}, {scratch.scores, kTile}, panel.count, lanes,
                           problem.head_dim / U::kPair);
    if (!Scores<V>::are_plain(problem, tile, panel)) {
      Scores<V>::finish(problem, tile, panel, lanes, scratch.scores, scratch.bias);
    }
    const bool dropped = problem.dropout > 0;
    if (dropped) Scores<V>::fill_kept(problem, tile, panel, lanes, scratch.kept);
    soften(scratch, lanes, panel.count, Scores<V>::factor(problem), dropped);
    const std::int64_t depth = round_to(panel.count, U::kPair);
    const Unit* down = Pack<U, T>::down(scratch.value, depth, scratch.dim, scratch.value_down);
    Product<U, true>::run({down, 1, scratch.dim}, {scratch.weights, kTile}, {scratch.output, kTile},
                          problem.head_dim, lanes, depth / U::kPair);
  }

  static void write_rows(const AttentionProblem& problem, const AttentionResult& result,
                         const RowTile& tile, const Scratch& scratch) {
    const std::int64_t first =
        (tile.batch * problem.heads + tile.head) * problem.query_length + tile.first;
    for (std::int64_t r = 0; r < tile.count; ++r) {
      const float sum = scratch.sums[r];
      const float inverse = sum == 0 ? 0.0F : 1 / sum;
      result.logsumexp[first + r] =
          sum == 0 ? Scores<V>::kHidden
                   : static_cast<float>(static_cast<double>(scratch.highest[r]) +
                                        std::log2(static_cast<double>(sum)));
      float* row = scratch.output_rows + r * scratch.dim;
      for (std::int64_t d = 0; d < problem.head_dim; ++d) {
        row[d] = scratch.output[d * kTile + r] * inverse;
      }
      Pack<U, T>::store(row, problem.head_dim,
                        static_cast<T*>(result.output) + (first + r) * problem.head_dim);
    }
  }

  static void run(const AttentionProblem& problem, const AttentionResult& result,
                  std::int64_t batch, std::int64_t head, std::int64_t index, float* memory) {
    const Scratch scratch(problem.head_dim, memory);
    const RowTile tile = RowTile::at(problem, batch, head, index);
    const std::int64_t lanes = round_to(tile.count, V::width);
    load_query(problem, tile, lanes, scratch);
    std::fill_n(scratch.output, scratch.dim * kTile, 0.0F);
    std::fill_n(scratch.highest, kTile, Scores<V>::kHidden);
    std::fill_n(scratch.sums, kTile, 0.0F);
    for_each_panel(problem, tile, 0, problem.key_length,
                   [&](const Panel& panel) { add_panel(problem, tile, panel, lanes, scratch); });
    write_rows(problem, result, tile, scratch);
  }
};

}  // namespace
}  // namespace zero_ext::core
