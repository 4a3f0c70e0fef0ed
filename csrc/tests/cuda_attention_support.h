// Attention problems of small and odd sizes over random layouts, and their solution in float64.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "../core/attention/score_formula.h"
#include "../cuda/attention_scores.h"
#include "emulated_machine.h"
#include "test_support.h"

namespace zero_ext::testing {

using cuda::AttentionSizes;

struct Problem {
  AttentionSizes sizes;
  int shift;  // log2 of the layout's block
  bool shared_layout = true;
  bool causal = false;
  bool padding = false;
  // Which dimensions of [batch, heads, queries, keys] the bias has; all false: no bias.
  std::array<bool, 4> bias = {};
  double hidden = 0.0;  // share of the bias's entries that are minus infinity
  double dropout = 0.0;
  double density = 0.5;

  bool has_bias() const { return bias[0] || bias[1] || bias[2] || bias[3]; }
  std::int64_t bias_size(int dim) const {
    const std::array<std::int64_t, 4> whole = {sizes.batch, sizes.query_heads, sizes.query_length,
                                               sizes.key_length};
    return bias[static_cast<std::size_t>(dim)] ? whole[static_cast<std::size_t>(dim)] : 1;
  }
  // Contiguous, 0 along dimensions that are repeated.
  std::int64_t bias_stride(int dim) const {
    if (!bias[static_cast<std::size_t>(dim)]) return 0;
    std::int64_t stride = 1;
    for (int i = dim + 1; i < 4; ++i) stride *= bias_size(i);
    return stride;
  }
  std::int64_t bias_count() const {
    return bias_size(0) * bias_size(1) * bias_size(2) * bias_size(3);
  }
};

// Blocks by rows or by columns.
struct Lists {
  std::vector<std::int32_t> pointers;
  std::vector<std::int32_t> blocks;
};

template <class T>
struct Data {
  Problem problem;
  std::vector<char> mask;  // [layout heads, row blocks, column blocks]
  std::int64_t row_blocks;
  std::int64_t column_blocks;
  Lists by_rows;
  Lists by_columns;
  std::vector<T> query, key, value, grad_output;
  std::vector<T> bias;
  std::unique_ptr<bool[]> padding;
  std::uint64_t seed;

  bool in_layout(std::int64_t head, std::int64_t row, std::int64_t column) const {
    const std::int64_t own = problem.shared_layout ? 0 : head;
    return mask[static_cast<std::size_t>((own * row_blocks + row) * column_blocks + column)] != 0;
  }
  cuda::BlockLists lists(const Lists& of, std::int64_t count) const {
    return {of.pointers.data(), of.blocks.data(), problem.shared_layout ? 0 : count + 1,
            problem.shift};
  }
  cuda::BlockLists rows() const { return lists(by_rows, row_blocks); }
  cuda::BlockLists columns() const { return lists(by_columns, column_blocks); }

  // A row is followed by a gap, so that strides count.
  static constexpr std::int64_t kGap = 16 / static_cast<std::int64_t>(sizeof(T));
  cuda::Heads<const T> heads(const std::vector<T>& of, std::int64_t heads,
                             std::int64_t rows) const {
    const std::int64_t row = problem.sizes.dim + kGap;
    return {of.data(), heads * rows * row, rows * row, row};
  }
  cuda::Heads<const T> queries(const std::vector<T>& of) const {
    return heads(of, problem.sizes.query_heads, problem.sizes.query_length);
  }
  cuda::Heads<const T> keys(const std::vector<T>& of) const {
    return heads(of, problem.sizes.key_heads, problem.sizes.key_length);
  }

  cuda::AttentionRules rules() const {
    constexpr auto type = std::is_same_v<T, float>            ? core::NumericType::float32
                          : std::is_same_v<T, core::BFloat16> ? core::NumericType::bfloat16
                                                              : core::NumericType::float16;
    const Problem& p = problem;
    return {p.sizes,
            scale(),
            p.causal,
            padding.get(),
            p.sizes.key_length,
            {p.has_bias() ? bias.data() : nullptr, type, p.bias_stride(0), p.bias_stride(1),
             p.bias_stride(2), p.bias_stride(3)},
            {p.dropout, seed, 7}};
  }
  float scale() const { return 1.0F / std::sqrt(static_cast<float>(problem.sizes.dim)); }
};

inline Lists compressed(const std::vector<char>& mask, std::int64_t heads, std::int64_t rows,
                        std::int64_t columns, bool transposed) {
  Lists lists;
  for (std::int64_t head = 0; head < heads; ++head) {
    for (std::int64_t i = 0; i < (transposed ? columns : rows); ++i) {
      lists.pointers.push_back(static_cast<std::int32_t>(lists.blocks.size()));
      for (std::int64_t j = 0; j < (transposed ? rows : columns); ++j) {
        const std::int64_t row = transposed ? j : i;
        const std::int64_t column = transposed ? i : j;
        if (mask[static_cast<std::size_t>((head * rows + row) * columns + column)] != 0) {
          lists.blocks.push_back(static_cast<std::int32_t>(j));
        }
      }
    }
    lists.pointers.push_back(static_cast<std::int32_t>(lists.blocks.size()));
  }
  return lists;
}

// Elements of [heads and batches, rows, dim + gap]; the gaps are NaNs.
template <class T>
std::vector<T> rows_with_gaps(std::mt19937_64& generator, std::int64_t rows, std::int64_t dim) {
  const std::int64_t gap = Data<T>::kGap;
  auto values =
      core::testing::normal_values<T>(generator, static_cast<std::size_t>(rows * (dim + gap)));
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t i = dim; i < dim + gap; ++i) {
      values[static_cast<std::size_t>(row * (dim + gap) + i)] =
          core::from_float<T>(std::numeric_limits<float>::quiet_NaN());
    }
  }
  return values;
}

template <class T>
Data<T> make_data(const Problem& problem, std::mt19937_64& generator) {
  const AttentionSizes& sizes = problem.sizes;
  Data<T> data;
  data.problem = problem;
  const std::int64_t block = std::int64_t{1} << problem.shift;
  data.row_blocks = (sizes.query_length + block - 1) / block;
  data.column_blocks = (sizes.key_length + block - 1) / block;
  const std::int64_t heads = problem.shared_layout ? 1 : sizes.query_heads;
  std::bernoulli_distribution chosen(problem.density);
  for (std::int64_t i = 0; i < heads * data.row_blocks * data.column_blocks; ++i) {
    data.mask.push_back(chosen(generator) ? 1 : 0);
  }
  data.by_rows = compressed(data.mask, heads, data.row_blocks, data.column_blocks, false);
  data.by_columns = compressed(data.mask, heads, data.row_blocks, data.column_blocks, true);
  const std::int64_t query_rows = sizes.batch * sizes.query_heads * sizes.query_length;
  const std::int64_t key_rows = sizes.batch * sizes.key_heads * sizes.key_length;
  data.query = rows_with_gaps<T>(generator, query_rows, sizes.dim);
  data.grad_output = rows_with_gaps<T>(generator, query_rows, sizes.dim);
  data.key = rows_with_gaps<T>(generator, key_rows, sizes.dim);
  data.value = rows_with_gaps<T>(generator, key_rows, sizes.dim);
  data.bias =
      core::testing::normal_values<T>(generator, static_cast<std::size_t>(problem.bias_count()));
  std::bernoulli_distribution hidden(problem.hidden);
  for (T& each : data.bias) {
    if (hidden(generator)) each = core::from_float<T>(-std::numeric_limits<float>::infinity());
  }
  if (problem.padding) {
    const std::int64_t count = sizes.batch * sizes.key_length;
    data.padding = std::make_unique<bool[]>(static_cast<std::size_t>(count));
    std::bernoulli_distribution kept(0.7);
    for (std::int64_t i = 0; i < count; ++i)
      data.padding[static_cast<std::size_t>(i)] = kept(generator);
  }
  data.seed = generator();
  return data;
}

// Results without gaps: [batch, heads, length, dim].
struct Solution {
  std::vector<double> output, logsumexp, grad_query, grad_key, grad_value, grad_bias;
};

// Row by row in float64, straight from the definition.
template <class T>
Solution solve(const Data<T>& data) {
  const Problem& p = data.problem;
  const AttentionSizes& s = p.sizes;
  const auto at = [](const auto& values, std::int64_t i) -> auto& {
    return values[static_cast<std::size_t>(i)];
  };
  const auto add = [](std::vector<double>& to, std::int64_t i, double amount) {
    to[static_cast<std::size_t>(i)] += amount;
  };
  const std::int64_t stride = s.dim + Data<T>::kGap;
  const std::int64_t queries = s.batch * s.query_heads * s.query_length;
  const std::int64_t keys = s.batch * s.key_heads * s.key_length;
  Solution found;
  found.logsumexp.assign(static_cast<std::size_t>(queries),
                         -std::numeric_limits<double>::infinity());
  found.output.assign(static_cast<std::size_t>(queries * s.dim), 0.0);
  found.grad_query = found.output;
  found.grad_key.assign(static_cast<std::size_t>(keys * s.dim), 0.0);
  found.grad_value = found.grad_key;
  found.grad_bias.assign(static_cast<std::size_t>(p.bias_count()), 0.0);
  for (std::int64_t row = 0; row < queries; ++row) {
    const std::int64_t i = row % s.query_length;
    const std::int64_t head = row / s.query_length % s.query_heads;
    const std::int64_t batch = row / s.query_length / s.query_heads;
    const std::int64_t key_row =
        (batch * s.key_heads + head / (s.query_heads / s.key_heads)) * s.key_length;
    const auto product = [&](const std::vector<T>& a, const std::vector<T>& b, std::int64_t j) {
      double sum = 0.0;
      for (std::int64_t c = 0; c < s.dim; ++c) {
        sum += double{core::to_float(at(a, row * stride + c))} *
               double{core::to_float(at(b, (key_row + j) * stride + c))};
      }
      return sum;
    };
    const auto bias_at = [&](std::int64_t j) {
      return batch * p.bias_stride(0) + head * p.bias_stride(1) + i * p.bias_stride(2) +
             j * p.bias_stride(3);
    };
    std::vector<std::int64_t> seen;
    std::vector<double> weights;
    double highest = -std::numeric_limits<double>::infinity();
    for (std::int64_t j = 0; j < s.key_length; ++j) {
      if (!data.in_layout(head, i >> p.shift, j >> p.shift)) continue;
      if (p.causal && !core::causal_sees(i, j, s.query_length, s.key_length)) continue;
      if (p.padding && !data.padding[static_cast<std::size_t>(batch * s.key_length + j)]) continue;
      double score = product(data.query, data.key, j) * double{data.scale()};
      if (p.has_bias()) score += double{core::to_float(at(data.bias, bias_at(j)))};
      if (std::isinf(score)) continue;
      seen.push_back(j);
      weights.push_back(score);
      highest = std::max(highest, score);
    }
    if (seen.empty()) continue;
    double total = 0.0;
    for (double& weight : weights) total += weight = std::exp(weight - highest);
    found.logsumexp[static_cast<std::size_t>(row)] = highest + std::log(total);
    std::vector<double> kept(seen.size(), 1.0);
    std::vector<double> gradient(seen.size());
    double delta = 0.0;
    for (std::size_t k = 0; k < seen.size(); ++k) {
      const auto j = static_cast<std::uint32_t>(seen[k]);
      weights[k] /= total;
      if (p.dropout > 0.0) {
        const core::DropoutDraw draw{data.seed, 7,
                                     static_cast<std::uint32_t>(batch * s.query_heads + head)};
        const auto words = core::dropout_words(draw, static_cast<std::uint32_t>(i), j / 4 * 4);
        kept[k] = words.words[j % 4] < core::drop_threshold(p.dropout) ? 0.0 : 1 / (1 - p.dropout);
      }
      gradient[k] = product(data.grad_output, data.value, seen[k]) * kept[k];
      delta += weights[k] * gradient[k];
    }
    for (std::size_t k = 0; k < seen.size(); ++k) {
      const double change = weights[k] * (gradient[k] - delta);
      if (p.has_bias()) add(found.grad_bias, bias_at(seen[k]), change);
      for (std::int64_t c = 0; c < s.dim; ++c) {
        const std::int64_t mine = row * s.dim + c;
        const std::int64_t theirs = (key_row + seen[k]) * s.dim + c;
        const std::int64_t from = (key_row + seen[k]) * stride + c;
        const double scaled = change * double{data.scale()};
        add(found.output, mine,
            weights[k] * kept[k] * double{core::to_float(at(data.value, from))});
        add(found.grad_query, mine, scaled * double{core::to_float(at(data.key, from))});
        add(found.grad_key, theirs,
            scaled * double{core::to_float(at(data.query, row * stride + c))});
        add(found.grad_value, theirs,
            weights[k] * kept[k] * double{core::to_float(at(data.grad_output, row * stride + c))});
      }
    }
  }
  return found;
}

// Fails where `found` is farther from `wanted` than `tolerance` of its norm, or has a NaN.
template <class T>
void expect_near(const char* what, const std::vector<T>& found, const std::vector<double>& wanted,
                 double tolerance, double terms = 1.0) {
  ASSERT_EQ(found.size(), wanted.size());
  double error = 0.0;
  double norm = 0.0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const double value = double{core::to_float(found[i])};
    if (std::isinf(wanted[i]) && value == wanted[i]) continue;
    error += (value - wanted[i]) * (value - wanted[i]);
    norm += wanted[i] * wanted[i];
  }
  // Elements are sums of so many terms of the size of 1, which may cancel.
  const double size = std::sqrt(norm) + 0.2 * std::sqrt(terms * static_cast<double>(found.size()));
  EXPECT_LE(std::sqrt(error), tolerance * size) << what;
}

// Of a result that is rounded once or twice on its way.
template <class T>
inline constexpr double kTolerance = 2e-6;
template <>
inline constexpr double kTolerance<core::BFloat16> = 8e-3;
template <>
inline constexpr double kTolerance<core::Float16> = 1e-3;

}  // namespace zero_ext::testing
