// Attention problems of small and odd sizes over random layouts, and their solution in float64.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "../../../core/attention/score_formula.h"
#include "../../../cuda/attention/attention_layout.h"
#include "../../../cuda/attention/attention_scores.h"
#include "../../test_support.h"
#include "../thread_block_emulator.h"

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
    const std::array<std::int64_t, 4> full = {sizes.batch, sizes.query_heads, sizes.query_length,
                                              sizes.key_length};
    return bias[static_cast<std::size_t>(dim)] ? full[static_cast<std::size_t>(dim)] : 1;
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
  std::unique_ptr<cuda::DeviceErrorRecord> errors = std::make_unique<cuda::DeviceErrorRecord>();

  bool in_layout(std::int64_t head, std::int64_t row, std::int64_t column) const {
    const std::int64_t own = problem.shared_layout ? 0 : head;
    return mask[static_cast<std::size_t>((own * row_blocks + row) * column_blocks + column)] != 0;
  }
  // As the op hands the device one of the layout's two copies, by rows or by columns.
  cuda::CheckLists layout(const Lists& of) const {
    const bool rows = &of == &by_rows;
    return {cuda::DeviceOp::attention_forward,
            rows ? cuda::DeviceArgument::row_pointers : cuda::DeviceArgument::column_pointers,
            rows ? cuda::DeviceArgument::columns : cuda::DeviceArgument::rows,
            errors.get(),
            of.pointers.data(),
            of.blocks.data(),
            problem.shared_layout ? 1 : problem.sizes.query_heads,
            rows ? row_blocks : column_blocks,
            static_cast<std::int64_t>(of.blocks.size()),
            rows ? column_blocks : row_blocks};
  }

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

  cuda::AttentionParams rules() const {
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

// What the device makes of a copy of the layout for blocks of threads of `rows` rows.
struct Unions {
  std::vector<std::int32_t> extents;
  std::vector<std::int32_t> entries;
  cuda::BlockLists lists;

  Unions(const cuda::CheckLists& layout, int shift, int rows, std::mt19937_64& generator,
         int warps = cuda::MergeLists::kWarps) {
    cuda::MergeLists merge = cuda::MergeLists::of(layout, shift, rows);
    extents.assign(static_cast<std::size_t>(2 * merge.layout.heads * merge.unions()), -1);
    entries.assign(static_cast<std::size_t>(layout.total), -1);
    merge.extents = extents.data();
    merge.entries = entries.data();
    const std::int64_t blocks = (merge.layout.heads * merge.unions() + warps - 1) / warps;
    emulate_grid(merge, blocks, warps, 0, generator);
    lists = merge.result(shift, rows);
  }
};

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

// With the blocks for which chosen(head, row, column) holds.
template <class T, class Chosen>
Data<T> make_data(const Problem& problem, std::mt19937_64& generator, const Chosen& chosen) {
  const AttentionSizes& sizes = problem.sizes;
  Data<T> data;
  data.problem = problem;
  const std::int64_t block = std::int64_t{1} << problem.shift;
  data.row_blocks = (sizes.query_length + block - 1) / block;
  data.column_blocks = (sizes.key_length + block - 1) / block;
  const std::int64_t heads = problem.shared_layout ? 1 : sizes.query_heads;
  for (std::int64_t i = 0; i < heads * data.row_blocks * data.column_blocks; ++i) {
    const std::int64_t row = i / data.column_blocks;
    data.mask.push_back(
        chosen(row / data.row_blocks, row % data.row_blocks, i % data.column_blocks) ? 1 : 0);
  }
  data.by_rows = compressed(data.mask, heads, data.row_blocks, data.column_blocks, false);
  data.by_columns = compressed(data.mask, heads, data.row_blocks, data.column_blocks, true);
  const std::int64_t query_rows = sizes.query_rows();
  const std::int64_t key_rows = sizes.key_rows();
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
    std::bernoulli_distribution is_visible(0.7);
    for (std::int64_t i = 0; i < count; ++i)
      data.padding[static_cast<std::size_t>(i)] = is_visible(generator);
  }
  data.seed = generator();
  return data;
}

// With any blocks, as many as the problem's density asks for.
template <class T>
Data<T> make_data(const Problem& problem, std::mt19937_64& generator) {
  std::bernoulli_distribution chosen(problem.density);
  return make_data<T>(problem, generator, [&](auto...) { return chosen(generator); });
}

// Results without gaps: [batch, heads, length, dim].
struct Solution {
  std::vector<double> output, logsumexp, grad_query, grad_key, grad_value, grad_bias;
  // Of an element of grad_key, the mean square of all that it sums, which may cancel.
  double key_terms = 0.0;
};

// Row by row in float64, straight from the definition.
template <class T>
class Solver {
 public:
  explicit Solver(const Data<T>& data) : data_(data), p_(data.problem), s_(p_.sizes) {
    const std::int64_t queries = s_.query_rows();
    const std::int64_t keys = s_.key_rows();
    found_.logsumexp.assign(static_cast<std::size_t>(queries),
                            -std::numeric_limits<double>::infinity());
    found_.output.assign(static_cast<std::size_t>(queries * s_.dim), 0.0);
    found_.grad_query = found_.output;
    found_.grad_key.assign(static_cast<std::size_t>(keys * s_.dim), 0.0);
    found_.grad_value = found_.grad_key;
    found_.grad_bias.assign(static_cast<std::size_t>(p_.bias_count()), 0.0);
  }

  Solution solve() {
    const std::int64_t heads = s_.batch * s_.query_heads;
    for (row_ = 0; row_ < heads * s_.query_length; ++row_) {
      query_ = row_ % s_.query_length;
      head_ = row_ / s_.query_length % s_.query_heads;
      batch_ = row_ / s_.query_length / s_.query_heads;
      const std::int64_t own = head_ / (s_.query_heads / s_.key_heads);
      first_key_ = (batch_ * s_.key_heads + own) * s_.key_length;
      look();
      if (!pairs_.empty()) spread();
    }
    return found_;
  }

 private:
  // A key that the query sees.
  struct Pair {
    std::int64_t key;
    double weight;
    double dropout_scale;  // what dropout multiplies the weight with
    double gradient;       // of the weight
  };
  static constexpr std::int64_t kGap = Data<T>::kGap;

  static double element(const std::vector<T>& of, std::int64_t at) {
    return double{core::to_float(of[static_cast<std::size_t>(at)])};
  }
  static void add(std::vector<double>& to, std::int64_t at, double amount) {
    to[static_cast<std::size_t>(at)] += amount;
  }
  double product(const std::vector<T>& a, const std::vector<T>& b, std::int64_t key) const {
    const std::int64_t stride = s_.dim + kGap;
    double sum = 0.0;
    for (std::int64_t c = 0; c < s_.dim; ++c) {
      sum += element(a, row_ * stride + c) * element(b, (first_key_ + key) * stride + c);
    }
    return sum;
  }
  std::int64_t bias_at(std::int64_t key) const {
    return batch_ * p_.bias_stride(0) + head_ * p_.bias_stride(1) + query_ * p_.bias_stride(2) +
           key * p_.bias_stride(3);
  }
  bool sees(std::int64_t key) const {
    return data_.in_layout(head_, query_ >> p_.shift, key >> p_.shift) &&
           (!p_.causal || key <= query_ + s_.key_length - s_.query_length) &&
           (!p_.padding || data_.padding[static_cast<std::size_t>(batch_ * s_.key_length + key)]);
  }
  double dropout_scale(std::int64_t key) const {
    if (p_.dropout == 0.0) return 1.0;
    const core::DropoutDraw draw{data_.seed, 7,
                                 static_cast<std::uint32_t>(batch_ * s_.query_heads + head_)};
    const auto words = core::dropout_words(draw, static_cast<std::uint32_t>(query_),
                                           static_cast<std::uint32_t>(key / 4 * 4));
    const bool drops = words.words[key % 4] < core::drop_threshold(p_.dropout);
    return drops ? 0.0 : 1 / (1 - p_.dropout);
  }

  // The keys that the row sees, and their weights.
  void look() {
    pairs_.clear();
    double highest = -std::numeric_limits<double>::infinity();
    for (std::int64_t key = 0; key < s_.key_length; ++key) {
      if (!sees(key)) continue;
      double score = product(data_.query, data_.key, key) * double{data_.scale()};
      if (p_.has_bias()) score += element(data_.bias, bias_at(key));
      if (std::isinf(score)) continue;
      highest = std::max(highest, score);
      const double gradient = product(data_.grad_output, data_.value, key) * dropout_scale(key);
      pairs_.push_back({key, score, dropout_scale(key), gradient});
    }
    if (pairs_.empty()) return;
    double total = 0.0;
    for (Pair& pair : pairs_) total += pair.weight = std::exp(pair.weight - highest);
    for (Pair& pair : pairs_) pair.weight /= total;
    found_.logsumexp[static_cast<std::size_t>(row_)] = (highest + std::log(total)) / std::log(2.0);
  }

  // What the row adds to the results.
  void spread() {
    double delta = 0.0;
    for (const Pair& pair : pairs_) delta += pair.weight * pair.gradient;
    const std::int64_t stride = s_.dim + kGap;
    for (const Pair& pair : pairs_) {
      const double change = pair.weight * (pair.gradient - delta);
      if (p_.has_bias()) add(found_.grad_bias, bias_at(pair.key), change);
      const double scaled = change * double{data_.scale()};
      const double weight = pair.weight * pair.dropout_scale;
      const double term = pair.weight * std::sqrt(static_cast<double>(s_.dim)) * data_.scale();
      for (std::int64_t c = 0; c < s_.dim; ++c) {
        const std::int64_t from = (first_key_ + pair.key) * stride + c;
        const std::int64_t mine = row_ * s_.dim + c;
        const std::int64_t theirs = (first_key_ + pair.key) * s_.dim + c;
        add(found_.output, mine, weight * element(data_.value, from));
        add(found_.grad_query, mine, scaled * element(data_.key, from));
        const double query = element(data_.query, row_ * stride + c);
        add(found_.grad_key, theirs, scaled * query);
        found_.key_terms +=
            term * query * term * query / static_cast<double>(found_.grad_key.size());
        add(found_.grad_value, theirs, weight * element(data_.grad_output, row_ * stride + c));
      }
    }
  }

  const Data<T>& data_;
  const Problem& p_;
  const AttentionSizes& s_;
  Solution found_;
  std::vector<Pair> pairs_;
  std::int64_t row_ = 0;
  std::int64_t query_ = 0;
  std::int64_t head_ = 0;
  std::int64_t batch_ = 0;
  std::int64_t first_key_ = 0;
};

// Fails where `found` is farther from `wanted` than `tolerance` of its norm, or has a NaN.
template <class T>
void expect_near(const char* what, const std::vector<T>& found, const std::vector<double>& expected,
                 double tolerance, double terms = 1.0) {
  ASSERT_EQ(found.size(), expected.size());
  double error = 0.0;
  double norm = 0.0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const double value = double{core::to_float(found[i])};
    if (std::isinf(expected[i]) && value == expected[i]) continue;
    error += (value - expected[i]) * (value - expected[i]);
    norm += expected[i] * expected[i];
  }
  // Elements are sums of so many products of the size of 1, which may cancel.
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
