// Forward of block-sparse attention for one row tile. See optimizer_kernel.h on inclusion.
//
// Scores are computed transposed, keys by queries, so that the softmax of a query runs down one
// lane: its maximum, sum and rescaling are vertical. The output of a tile is collected transposed
// too, head dim by queries.
#pragma once

#include <cmath>
#include <cstdint>

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
    std::int64_t dim;      // head dim, padded with zeros
    Element* rows;         // [kTile, dim]: queries, keys, in turn
    Unit* query;           // [head dim units, kTile]
    Element* key;          // [kTile, dim]
    Element* value;        // [kTile, dim]
    Unit* value_down;      // [kTile units, dim]
    float* output;         // [dim, kTile]
    float* output_rows;    // [kTile, dim]
    float* scores;         // [kTile, kTile]
    float* bias;           // [kTile, kTile]
    float* dropout_scale;  // [kTile, kTile]
    Unit* weights;         // [kTile units, kTile]
    float* highest;        // [kTile], of scores in base 2
    float* sums;           // [kTile]

    Scratch(std::int64_t head_dim, float* memory) : dim(padded_dim(head_dim)) {
      const auto next = [&memory](std::int64_t floats) {
        float* const start = memory;
        memory += floats;
        return start;
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
      dropout_scale = next(kTile * kTile);
      weights = reinterpret_cast<Unit*>(next(kTile * kTile));
      highest = next(kTile);
      sums = next(kTile);
    }
  };

  static void load_query(const AttentionArgs& args, const QueryTile& tile, std::int64_t lanes,
                         const Scratch& scratch) {
    const auto* head = static_cast<const T*>(args.query.data) +
                       tile.batch * args.query.batch_stride + tile.head * args.query.head_stride;
    Pack<U, T>::rows(head, args.query.row_stride, tile.first, tile.count, lanes, args.head_dim,
                     scratch.dim, scratch.rows);
    Pack<U, T>::transpose(reinterpret_cast<const Unit*>(scratch.rows), scratch.dim / U::kPair,
                          lanes, args.head_dim / U::kPair, scratch.query);
  }

  // Keys or values of a panel, padded with rows of zeros to whole units.
  static void load_panel(const AttentionArgs& args, const RowsView& view, std::int64_t batch,
                         std::int64_t key_head, const KeyPanel& panel, std::int64_t dim,
                         Element* target) {
    const auto* head =
        static_cast<const T*>(view.data) + batch * view.batch_stride + key_head * view.head_stride;
    std::int64_t position = 0;
    for (int i = 0; i < panel.range_count; ++i) {
      const std::int64_t padded = i + 1 == panel.range_count
                                      ? round_up(panel.count, U::kPair) - position
                                      : panel.ranges[i].count;
      Pack<U, T>::rows(head, view.row_stride, panel.ranges[i].first, panel.ranges[i].count, padded,
                       args.head_dim, dim, target + position * dim);
      position += panel.ranges[i].count;
    }
  }

  // Weights of one vector of lanes: exp2(score * scale - highest), their sum, stored for the
  // product with the values. Scaled scores are rounded before the subtraction, as the highest is:
  // in one rounding they would differ from it by its own, which exp2 makes a factor, and a large
  // one where scores are.
  static Float exponentiate(const Scratch& scratch, std::int64_t r, std::int64_t count, Float scale,
                            Float highest, bool dropped) {
    Float sum = V::set(0.0F);
    const auto weight = [&](std::int64_t c) {
      const Float score = V::mul(V::load(scratch.scores + c * kTile + r), scale);
      const Float exact = V::exp2(V::sub(score, highest));
      sum = V::add(sum, exact);
      return dropped ? V::mul(exact, V::load(scratch.dropout_scale + c * kTile + r)) : exact;
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
  static void online_softmax(const Scratch& scratch, std::int64_t lanes, std::int64_t count,
                             float scale, bool dropped) {
    const Float factor = V::set(scale);
    const Float lowest = V::set(ScoreTile<V>::kMasked);
    for (std::int64_t r = 0; r < lanes; r += V::width) {
      Float top = lowest;
      for (std::int64_t c = 0; c < count; ++c) {
        top = V::max(top, V::load(scratch.scores + c * kTile + r));
      }
      const Float before = V::load(scratch.highest + r);
      const Float highest = V::max(before, V::mul(top, factor));
      // A query that has seen no key yet counts from zero: its weights are exp2(-inf).
      const Float base = V::if_at_least(lowest, highest, V::set(0.0F), highest);
      const Float sum = exponentiate(scratch, r, count, factor, base, dropped);
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

  static void add_panel(const AttentionArgs& args, const QueryTile& tile, const KeyPanel& panel,
                        std::int64_t lanes, const Scratch& scratch) {
    const std::int64_t key_head = tile.head / args.group();
    load_panel(args, args.key, tile.batch, key_head, panel, scratch.dim, scratch.key);
    load_panel(args, args.value, tile.batch, key_head, panel, scratch.dim, scratch.value);
    MicroGemm<U, false>::run(
        {reinterpret_cast<const Unit*>(scratch.key), scratch.dim / U::kPair, 1},
        {scratch.query, kTile}, {scratch.scores, kTile}, panel.count, lanes,
        args.head_dim / U::kPair);
    if (!ScoreTile<V>::is_finished(args, tile, panel)) {
      ScoreTile<V>::finish(args, tile, panel, lanes, scratch.scores, scratch.bias);
    }
    const bool dropped = args.dropout > 0;
    if (dropped) ScoreTile<V>::fill_dropout_scale(args, tile, panel, lanes, scratch.dropout_scale);
    online_softmax(scratch, lanes, panel.count, ScoreTile<V>::factor(args), dropped);
    const std::int64_t depth = round_up(panel.count, U::kPair);
    const Unit* down = Pack<U, T>::down(scratch.value, depth, scratch.dim, scratch.value_down);
    MicroGemm<U, true>::run({down, 1, scratch.dim}, {scratch.weights, kTile},
                            {scratch.output, kTile}, args.head_dim, lanes, depth / U::kPair);
  }

  static void write_rows(const AttentionArgs& args, const AttentionResult& result,
                         const QueryTile& tile, const Scratch& scratch) {
    const std::int64_t first =
        (tile.batch * args.heads + tile.head) * args.query_length + tile.first;
    for (std::int64_t r = 0; r < tile.count; ++r) {
      const float sum = scratch.sums[r];
      const float inverse = sum == 0 ? 0.0F : 1 / sum;
      result.logsumexp[first + r] =
          sum == 0 ? ScoreTile<V>::kMasked
                   : static_cast<float>(static_cast<double>(scratch.highest[r]) +
                                        std::log2(static_cast<double>(sum)));
      float* row = scratch.output_rows + r * scratch.dim;
      for (std::int64_t d = 0; d < args.head_dim; ++d) {
        row[d] = scratch.output[d * kTile + r] * inverse;
      }
      Pack<U, T>::store(row, args.head_dim,
                        static_cast<T*>(result.output) + (first + r) * args.head_dim);
    }
  }

  static void run(const AttentionArgs& args, const AttentionResult& result, std::int64_t batch,
                  std::int64_t head, std::int64_t index, float* memory) {
    const Scratch scratch(args.head_dim, memory);
    const QueryTile tile = QueryTile::at(args, batch, head, index);
    const std::int64_t lanes = round_up(tile.count, V::width);
    load_query(args, tile, lanes, scratch);
    std::fill_n(scratch.output, scratch.dim * kTile, 0.0F);
    std::fill_n(scratch.highest, kTile, ScoreTile<V>::kMasked);
    std::fill_n(scratch.sums, kTile, 0.0F);
    for_each_key_panel(args, tile, 0, args.key_length, [&](const KeyPanel& panel) {
      add_panel(args, tile, panel, lanes, scratch);
    });
    write_rows(args, result, tile, scratch);
  }
};

}  // namespace
}  // namespace zero_ext::core
