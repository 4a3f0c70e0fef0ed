#include "../../core/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <type_traits>

#include "../../core/attention/philox.h"
#include "../../core/attention/score_formula.h"
#include "../test_support.h"

namespace zero_ext::core {
namespace {

using testing::available_isas;
using testing::fresh_generator;
using testing::kTypeOf;
using testing::normal_values;
using testing::SelectedIsa;

// `count` threads, each of which is one worker.
Workers workers(std::int64_t count) {
  return {count, [](std::int64_t each, const std::function<void(std::int64_t)>& work) {
            std::vector<std::jthread> running;
            for (std::int64_t i = 0; i < each; ++i) running.emplace_back([&work, i] { work(i); });
          }};
}

// Inputs with a layout of one in `one_in` blocks, and what the kernels make of them.
template <class T>
struct Case {
  std::int64_t batch = 2, heads = 2, key_heads = 1, queries = 77, keys = 90, dim = 24, block;
  std::vector<T> query, key, value, grad_output, output, grad_query, grad_key, grad_value;
  std::vector<std::int32_t> pointers{0}, columns;
  std::vector<float> logsumexp, grad_bias, bias;
  AttentionArgs args;

  explicit Case(std::mt19937_64& generator, std::int64_t block_length = 32,
                std::uint64_t one_in = 2)
      : block(block_length) {
    const auto rows = [&](std::int64_t head_count, std::int64_t length) {
      return normal_values<T>(generator,
                              static_cast<std::size_t>(batch * head_count * length * dim));
    };
    query = rows(heads, queries);
    grad_output = rows(heads, queries);
    key = rows(key_heads, keys);
    value = rows(key_heads, keys);
    bias = normal_values<float>(generator, static_cast<std::size_t>(heads * keys));
    const std::int64_t row_blocks = (queries + block - 1) / block;
    for (std::int64_t row = 0; row < row_blocks; ++row) {
      for (std::int64_t column = 0; column * block < keys; ++column) {
        if (generator() % one_in == 0) columns.push_back(static_cast<std::int32_t>(column));
      }
      pointers.push_back(static_cast<std::int32_t>(columns.size()));
    }
    args.type = kTypeOf<T>;
    args.batch = batch;
    args.heads = heads;
    args.key_heads = key_heads;
    args.query_length = queries;
    args.key_length = keys;
    args.head_dim = dim;
    args.query = view(query.data(), heads, queries);
    args.key = view(key.data(), key_heads, keys);
    args.value = view(value.data(), key_heads, keys);
    args.layout = {pointers.data(), columns.data(), 1, row_blocks, block};
    args.bias = {bias.data(), NumericType::float32, {1, heads, 1, keys}, {0, keys, 0, 1}};
    args.scale = 0.3F;
    args.causal = true;
    args.dropout = 0.25;
    args.seed = generator();
  }

  RowsView view(const T* data, std::int64_t head_count, std::int64_t length) const {
    return {data, head_count * length * dim, length * dim, dim};
  }

  void run(std::int64_t threads) {
    // What is not written stays a NaN.
    const auto poison = [](auto& values, std::size_t count) {
      using Value = std::decay_t<decltype(values[0])>;
      values.assign(count, from_float<Value>(std::numeric_limits<float>::quiet_NaN()));
    };
    poison(output, query.size());
    poison(grad_query, query.size());
    poison(grad_key, key.size());
    poison(grad_value, value.size());
    poison(logsumexp, static_cast<std::size_t>(batch * heads * queries));
    poison(grad_bias, bias.size());
    attention_forward(args, {output.data(), logsumexp.data()}, workers(threads));
    attention_backward(
        args,
        {view(grad_output.data(), heads, queries), view(output.data(), heads, queries),
         logsumexp.data(), grad_query.data(), grad_key.data(), grad_value.data(),
         args.bias.data == nullptr ? nullptr : grad_bias.data()},
        workers(threads));
  }

  bool sees(std::int64_t query_index, std::int64_t key_index) const {
    const auto row = static_cast<std::size_t>(query_index / block);
    const auto first = columns.begin() + pointers[row];
    const auto last = columns.begin() + pointers[row + 1];
    return std::find(first, last, key_index / block) != last &&
           key_index <= query_index + keys - queries;
  }
};

double dot(const auto* a, const auto* b, std::int64_t count) {
  double sum = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    sum += static_cast<double>(to_float(a[i])) * static_cast<double>(to_float(b[i]));
  }
  return sum;
}

struct Exact {
  std::vector<double> output, grad_query, grad_key, grad_value, grad_bias;
};

// One query after the other, by the definition, in double.
template <class T>
Exact definition(const Case<T>& inputs) {
  Exact exact{std::vector<double>(inputs.query.size()), std::vector<double>(inputs.query.size()),
              std::vector<double>(inputs.key.size()), std::vector<double>(inputs.key.size()),
              std::vector<double>(inputs.bias.size())};
  const std::int64_t dim = inputs.dim;
  for (std::int64_t owner = 0; owner < inputs.batch * inputs.heads; ++owner) {
    const std::int64_t head = owner % inputs.heads;
    const std::int64_t group = inputs.heads / inputs.key_heads;
    const std::int64_t first_key =
        (owner / inputs.heads * inputs.key_heads + head / group) * inputs.keys;
    for (std::int64_t i = 0; i < inputs.queries; ++i) {
      const std::int64_t row = (owner * inputs.queries + i) * dim;
      std::vector<std::int64_t> seen;
      std::vector<double> weights, dropout_scale;
      for (std::int64_t j = 0; j < inputs.keys; ++j) {
        if (!inputs.sees(i, j)) continue;
        const Philox4 words =
            dropout_words({inputs.args.seed, 0, static_cast<std::uint32_t>(owner)},
                          static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(j / 4 * 4));
        seen.push_back(j);
        dropout_scale.push_back(words.words[j % 4] < drop_threshold(inputs.args.dropout)
                                    ? 0
                                    : 1 / (1 - inputs.args.dropout));
        const double product =
            dot(inputs.query.data() + row, inputs.key.data() + (first_key + j) * dim, dim);
        weights.push_back(std::exp(
            product * static_cast<double>(inputs.args.scale) +
            static_cast<double>(inputs.bias[static_cast<std::size_t>(head * inputs.keys + j)])));
      }
      const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
      double delta = 0;
      std::vector<double> products;
      for (std::size_t s = 0; s < seen.size(); ++s) {
        const std::int64_t at = (first_key + seen[s]) * dim;
        weights[s] /= sum;
        products.push_back(dropout_scale[s] *
                           dot(inputs.grad_output.data() + row, inputs.value.data() + at, dim));
        delta += weights[s] * products[s];
        for (std::int64_t d = 0; d < dim; ++d) {
          const auto in = static_cast<std::size_t>(at + d), out = static_cast<std::size_t>(row + d);
          const double weight = weights[s] * dropout_scale[s];
          exact.output[out] += weight * static_cast<double>(to_float(inputs.value[in]));
          exact.grad_value[in] += weight * static_cast<double>(to_float(inputs.grad_output[out]));
        }
      }
      for (std::size_t s = 0; s < seen.size(); ++s) {
        const double score_grad = weights[s] * (products[s] - delta);
        exact.grad_bias[static_cast<std::size_t>(head * inputs.keys + seen[s])] += score_grad;
        for (std::int64_t d = 0; d < dim; ++d) {
          const auto in = static_cast<std::size_t>((first_key + seen[s]) * dim + d);
          const auto out = static_cast<std::size_t>(row + d);
          const double scaled = score_grad * static_cast<double>(inputs.args.scale);
          exact.grad_query[out] += scaled * static_cast<double>(to_float(inputs.key[in]));
          exact.grad_key[in] += scaled * static_cast<double>(to_float(inputs.query[out]));
        }
      }
    }
  }
  return exact;
}

template <class T>
void expect_near(const std::vector<T>& found, const std::vector<double>& exact, double tolerance) {
  ASSERT_EQ(found.size(), exact.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_NEAR(static_cast<double>(to_float(found[i])), exact[i], tolerance) << "at " << i;
  }
}

template <class T>
void compare(std::mt19937_64& generator, double tolerance) {
  Case<T> inputs(generator);
  const Exact exact = definition(inputs);
  for (const std::int64_t threads : {1, 3}) {
    inputs.run(threads);
    expect_near(inputs.output, exact.output, tolerance);
    expect_near(inputs.grad_query, exact.grad_query, tolerance);
    expect_near(inputs.grad_key, exact.grad_key, tolerance);
    expect_near(inputs.grad_value, exact.grad_value, tolerance);
    expect_near(inputs.grad_bias, exact.grad_bias, 4 * tolerance);
  }
}

TEST(Attention, MatchesTheDefinition) {
  auto generator = fresh_generator();
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    compare<float>(generator, 2e-5);
    compare<BFloat16>(generator, 0.15);
    compare<Float16>(generator, 0.02);
  }
}

template <class T>
void expect_scalar_bits(std::mt19937_64& generator, bool plain) {
  Case<T> inputs(generator, 16, 1);
  if (plain) {
    inputs.args.bias = {};
    inputs.args.dropout = 0;
    inputs.args.causal = false;
  }
  const auto same = [](const std::vector<T>& a, const std::vector<T>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](T one, T other) { return to_float(one) == to_float(other); });
  };
  {
    const SelectedIsa selected(Isa::scalar);
    inputs.run(1);
  }
  const Case<T> scalar = inputs;
  for (const Isa isa : available_isas()) {
    // The products of pairs are added in another order.
    if (isa == Isa::avx512_bf16 && std::is_same_v<T, BFloat16>) continue;
    const SelectedIsa selected(isa);
    inputs.run(1);
    EXPECT_TRUE(same(inputs.output, scalar.output)) << "isa " << static_cast<int>(isa);
    EXPECT_EQ(inputs.logsumexp, scalar.logsumexp) << "isa " << static_cast<int>(isa);
    EXPECT_TRUE(same(inputs.grad_query, scalar.grad_query)) << "isa " << static_cast<int>(isa);
    EXPECT_TRUE(same(inputs.grad_key, scalar.grad_key)) << "isa " << static_cast<int>(isa);
    EXPECT_TRUE(same(inputs.grad_value, scalar.grad_value)) << "isa " << static_cast<int>(isa);
  }
}

TEST(Attention, InstructionSetsAgreeBitForBit) {
  auto generator = fresh_generator();
  for (const bool plain : {false, true}) {
    expect_scalar_bits<float>(generator, plain);
    expect_scalar_bits<BFloat16>(generator, plain);
    expect_scalar_bits<Float16>(generator, plain);
  }
}

void expect_the_same_for_any_threads(Case<float>& inputs) {
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    inputs.run(1);
    const Case<float> alone = inputs;
    for (const std::int64_t threads : {2, 3, 16}) {
      inputs.run(threads);
      EXPECT_EQ(inputs.output, alone.output);
      EXPECT_EQ(inputs.grad_query, alone.grad_query);
      EXPECT_EQ(inputs.grad_key, alone.grad_key);
      EXPECT_EQ(inputs.grad_value, alone.grad_value);
      if (inputs.args.bias.data != nullptr) {
        EXPECT_EQ(inputs.grad_bias, alone.grad_bias);
      }
    }
  }
}

// The passes that workers share differ with their number; a worker more than there is work too.
TEST(Attention, ThreadsDoNotChangeABit) {
  auto generator = fresh_generator();
  Case<float> inputs(generator);
  expect_the_same_for_any_threads(inputs);
}

// Blocks that share a panel with the diagonal for one number of threads, and not for another.
TEST(Attention, ThreadsDoNotChangeABitWithoutABias) {
  auto generator = fresh_generator();
  for (const std::int64_t block : {16, 32}) {
    Case<float> inputs(generator, block, 1);
    inputs.args.bias = {};
    inputs.args.dropout = 0;
    expect_the_same_for_any_threads(inputs);
  }
}

TEST(Attention, ErrorsOfALayoutAreNamed) {
  const std::vector<std::int32_t> columns{0, 2, 1};
  const auto error = [&](std::vector<std::int32_t> pointers) {
    return layout_error({pointers.data(), columns.data(), 1, 2, 16}, 3, 3);
  };
  EXPECT_EQ(error({0, 2, 3}), "");
  EXPECT_NE(error({0, 4, 3}).find("got 0 at [0, 0] and 4"), std::string::npos);
  EXPECT_NE(error({0, 3, 3}).find("got 1 at 2, in row [0, 0]"), std::string::npos);
  EXPECT_NE(error({2, 1, 3}).find("got 2 at"), std::string::npos);
  EXPECT_NE(error({-1, 1, 3}).find("got -1 at"), std::string::npos);
}

// The known answers of Random123 (Salmon et al. 2011).
TEST(Philox, YieldsTheKnownAnswers) {
  const Philox4 zeros = philox4x32({{0, 0, 0, 0}}, 0);
  EXPECT_EQ(zeros.words[0], 0x6627E8D5U);
  EXPECT_EQ(zeros.words[3], 0x9B00DBD8U);
  const Philox4 pi =
      philox4x32({{0x243F6A88U, 0x85A308D3U, 0x13198A2EU, 0x03707344U}}, 0x299F31D0A4093822U);
  EXPECT_EQ(pi.words[0], 0xD16CFE09U);
  EXPECT_EQ(pi.words[1], 0x94FDCCEBU);
  EXPECT_EQ(pi.words[2], 0x5001E420U);
  EXPECT_EQ(pi.words[3], 0x24126EA1U);
}

TEST(Dropout, TheThresholdIsTheShareThatIsDropped) {
  EXPECT_EQ(drop_threshold(0.0), 0U);
  EXPECT_EQ(drop_threshold(0.5), 0x80000000U);
  EXPECT_EQ(drop_threshold(std::nextafter(1.0, 0.0)), 0xFFFFFFFFU);
}

}  // namespace
}  // namespace zero_ext::core
