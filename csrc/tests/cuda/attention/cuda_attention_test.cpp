#include <array>
#include <cstring>

#include "../../../cuda/attention/attention_dkdv_kernel.h"
#include "../../../cuda/attention/attention_dq_kernel.h"
#include "../../../cuda/attention/attention_forward_kernel.h"
#include "cuda_attention_support.h"

namespace zero_ext::testing {
namespace {

using core::testing::fresh_generator;
using cuda::AttentionDkDv;
using cuda::AttentionDq;
using cuda::AttentionForward;
using cuda::BiasGradient;
using cuda::DkDvOutputs;

template <class T>
struct Found {
  std::vector<T> output, grad_query, grad_key, grad_value;
  std::vector<float> logsumexp, grad_bias;
};

template <class T>
std::vector<T> poison(std::int64_t count) {
  return std::vector<T>(static_cast<std::size_t>(count),
                        core::from_float<T>(std::numeric_limits<float>::quiet_NaN()));
}

template <class T, int kDim>
void run_forward(const Data<T>& data, Found<T>& found, std::mt19937_64& generator) {
  const AttentionSizes& sizes = data.problem.sizes;
  const std::int64_t count = sizes.query_rows();
  found.output = poison<T>(count * sizes.dim);
  found.logsumexp = poison<float>(count);
  using Kernel = AttentionForward<T, kDim>;
  const Unions rows(data.layout(data.by_rows), data.problem.shift, Kernel::Tiling::kRows,
                    generator);
  emulate_blocks(Kernel{data.rules(),
                        rows.lists,
                        data.queries(data.query),
                        data.keys(data.key),
                        data.keys(data.value),
                        {found.output.data(), sizes.query_heads, sizes.query_length, sizes.dim},
                        found.logsumexp.data()},
                 generator);
}

template <class T, int kDim, DkDvOutputs kOutputs>
void run_columns(const Data<T>& data, const cuda::GradientInputs<T>& inputs, Found<T>& found,
                 const BiasGradient& bias, std::int32_t batches, std::int32_t heads,
                 std::mt19937_64& generator) {
  const AttentionSizes& s = data.problem.sizes;
  using Kernel = AttentionDkDv<T, kDim, kOutputs>;
  const Unions columns(data.layout(data.by_columns), data.problem.shift, Kernel::Tiling::kRows,
                       generator);
  emulate_blocks(Kernel{{inputs, columns.lists, bias, batches, heads},
                        {found.grad_key.data(), s.key_heads, s.key_length, s.dim},
                        {found.grad_value.data(), s.key_heads, s.key_length, s.dim}},
                 generator);
}

template <class T, int kDim>
void run_backward(const Data<T>& data, Found<T>& found, std::mt19937_64& generator) {
  const Problem& p = data.problem;
  const AttentionSizes& s = p.sizes;
  const std::int64_t rows = s.query_rows();
  std::vector<float> reference = poison<float>(rows);
  std::vector<float> delta = poison<float>(rows);
  const cuda::PrepareGradients<T> prepare{
      s,
      data.queries(data.grad_output),
      {found.output.data(), s.query_heads * s.query_length * s.dim,
       s.query_length * std::int64_t{s.dim}, s.dim},
      found.logsumexp.data(),
      reference.data(),
      delta.data()};
  for (const std::int64_t warp : {2, 0, 1}) prepare(warp, 3);
  const cuda::GradientInputs<T> inputs{
      data.rules(),          data.queries(data.query),       data.keys(data.key),
      data.keys(data.value), data.queries(data.grad_output), reference.data(),
      delta.data()};
  found.grad_query = poison<T>(rows * s.dim);
  found.grad_key = poison<T>(s.key_rows() * s.dim);
  found.grad_value = found.grad_key;
  const bool by_columns = !p.bias[2] && p.bias[3];
  const bool by_rows = p.has_bias() && !by_columns;
  // As the op: a row for each query where one entry is for all of them, and then their sum.
  Problem summed = p;
  summed.bias[2] = by_rows;
  std::vector<float> sums(static_cast<std::size_t>(summed.bias_count()));
  const BiasGradient none{};
  const BiasGradient bias{sums.data(), summed.bias_stride(0), summed.bias_stride(1),
                          summed.bias_stride(2), summed.bias_stride(3)};
  const std::int32_t batches = p.has_bias() && !p.bias[0] ? s.batch : 1;
  const bool all_heads = p.has_bias() && !p.bias[1];
  using RowKernel = AttentionDq<T, kDim>;
  const Unions unions(data.layout(data.by_rows), p.shift, RowKernel::Tiling::kRows, generator);
  emulate_blocks(RowKernel{{inputs, unions.lists, by_rows ? bias : none, by_rows ? batches : 1,
                            by_rows && all_heads ? s.query_heads : 1},
                           {found.grad_query.data(), s.query_heads, s.query_length, s.dim}},
                 generator);
  const BiasGradient& own = by_columns ? bias : none;
  const std::int32_t own_batches = by_columns ? batches : 1;
  const std::int32_t own_heads = by_columns && all_heads ? s.key_heads : 1;
  if constexpr (kDim <= 128) {
    run_columns<T, kDim, DkDvOutputs::both>(data, inputs, found, own, own_batches, own_heads,
                                            generator);
  } else {
    run_columns<T, kDim, DkDvOutputs::keys>(data, inputs, found, own, own_batches, own_heads,
                                            generator);
    run_columns<T, kDim, DkDvOutputs::values>(data, inputs, found, none, 1, 1, generator);
  }
  found.grad_bias.assign(static_cast<std::size_t>(p.bias_count()), 0.0F);
  const std::size_t inner = summed.bias[2] && !p.bias[2] ? sums.size() / found.grad_bias.size() : 1;
  for (std::size_t i = 0; i < sums.size(); ++i) found.grad_bias[i / inner] += sums[i];
}

template <class T, int kDim>
void expect_right(const Problem& problem, std::mt19937_64& generator) {
  const Data<T> data = make_data<T>(problem, generator);
  const Solution expected = Solver<T>(data).solve();
  Found<T> found;
  run_forward<T, kDim>(data, found, generator);
  expect_near("output", found.output, expected.output, kTolerance<T>);
  expect_near("logsumexp", found.logsumexp, expected.logsumexp, 1e-6);
  for (std::size_t i = 0; i < expected.logsumexp.size(); ++i) {
    if (!std::isinf(expected.logsumexp[i])) continue;
    EXPECT_EQ(found.logsumexp[i], expected.logsumexp[i]);
    EXPECT_EQ(core::to_float(found.output[i * static_cast<std::size_t>(problem.sizes.dim)]), 0.0F);
  }
  run_backward<T, kDim>(data, found, generator);
  expect_near("grad_query", found.grad_query, expected.grad_query, 2 * kTolerance<T>);
  // Few keys get the gradients of many rows, which cancel: a row's sum to zero over its keys.
  expect_near("grad_key", found.grad_key, expected.grad_key, 2 * kTolerance<T>,
              std::max(1.0, expected.key_terms));
  expect_near("grad_value", found.grad_value, expected.grad_value, 2 * kTolerance<T>);
  if (problem.has_bias()) {
    const AttentionSizes& s = problem.sizes;
    const double scores =
        static_cast<double>(s.batch * s.query_heads) * s.query_length * s.key_length;
    expect_near("grad_bias", found.grad_bias, expected.grad_bias, 2 * kTolerance<T>,
                scores * s.dim / static_cast<double>(problem.bias_count()));
  }
}

template <class T>
void expect_right(const Problem& problem, std::mt19937_64& generator) {
  const AttentionSizes& s = problem.sizes;
  SCOPED_TRACE(::testing::Message()
               << "batch " << s.batch << ", heads " << s.query_heads << "/" << s.key_heads
               << ", lengths " << s.query_length << "/" << s.key_length << ", dim " << s.dim
               << ", block " << (1 << problem.shift) << (problem.causal ? ", causal" : "")
               << (problem.padding ? ", padding" : "") << ", bias " << problem.bias[0]
               << problem.bias[1] << problem.bias[2] << problem.bias[3]
               << (problem.hidden > 0 ? ", hidden" : "")
               << (problem.shared_layout ? "" : ", a layout each") << ", density "
               << problem.density << ", dropout " << problem.dropout);
  if (s.dim <= 32) return expect_right<T, 32>(problem, generator);
  if (s.dim <= 64) return expect_right<T, 64>(problem, generator);
  if (s.dim <= 128) return expect_right<T, 128>(problem, generator);
  expect_right<T, 256>(problem, generator);
}

template <class T>
class CudaAttention : public ::testing::Test {};
using Types = ::testing::Types<float, core::BFloat16, core::Float16>;
TYPED_TEST_SUITE(CudaAttention, Types);

TYPED_TEST(CudaAttention, EveryBlockAndHeadDimOverRandomLayouts) {
  auto generator = fresh_generator();
  for (const int shift : {4, 5, 6, 7}) {
    for (const int dim : {16, 64, 72, 136}) {
      const std::int32_t queries = std::uniform_int_distribution<std::int32_t>(1, 200)(generator);
      const std::int32_t keys = std::uniform_int_distribution<std::int32_t>(1, 200)(generator);
      Problem problem{{1, 2, 2, queries, keys, dim}, shift};
      problem.shared_layout = generator() % 2 == 0;
      problem.causal = generator() % 2 == 0;
      expect_right<TypeParam>(problem, generator);
    }
  }
}

// Lengths below 100, head dims of all kernels, and whatever else can be chosen.
Problem random_problem(std::mt19937_64& generator) {
  const auto number = [&](std::int32_t low, std::int32_t high) {
    return std::uniform_int_distribution<std::int32_t>(low, high)(generator);
  };
  const std::int32_t key_heads = number(1, 2);
  Problem problem{{number(1, 2), key_heads * number(1, 2), key_heads, number(1, 100),
                   number(1, 100), 8 * number(2, number(0, 3) == 0 ? 32 : 12)},
                  number(4, 7)};
  problem.shared_layout = number(0, 1) == 0;
  problem.causal = number(0, 1) == 0;
  problem.padding = number(0, 1) == 0;
  for (bool& dim : problem.bias) dim = number(0, 1) == 0;
  problem.hidden = number(0, 1) * 0.2;
  problem.dropout = number(0, 1) * 0.3;
  problem.density = 0.1 * number(2, 10);
  return problem;
}

TYPED_TEST(CudaAttention, AnyChoiceOfMasksBiasDropoutAndSharedHeads) {
  auto generator = fresh_generator();
  for (int i = 0; i < 12; ++i) expect_right<TypeParam>(random_problem(generator), generator);
}

TYPED_TEST(CudaAttention, EveryShapeOfABiasHasItsGradient) {
  auto generator = fresh_generator();
  for (unsigned dims = 1; dims < 16; ++dims) {
    Problem problem{{2, 4, 2, 37, 45, 16}, 4};
    for (std::size_t i = 0; i < 4; ++i) problem.bias[i] = (dims >> i & 1) != 0;
    problem.shared_layout = dims % 2 == 0;
    expect_right<TypeParam>(problem, generator);
  }
}

// Nothing in the layout, no key left by the padding or before the first queries, no keys at all.
TYPED_TEST(CudaAttention, RowsThatSeeNothingAreZeros) {
  auto generator = fresh_generator();
  Problem problem{{1, 2, 1, 70, 70, 64}, 5};
  problem.density = 0.0;
  expect_right<TypeParam>(problem, generator);
  problem.density = 0.2;
  expect_right<TypeParam>(problem, generator);
  problem.density = 1.0;
  problem.causal = true;
  problem.sizes.key_length = 33;
  expect_right<TypeParam>(problem, generator);
  problem.sizes.key_length = 0;
  expect_right<TypeParam>(problem, generator);
  problem.sizes.key_length = 33;
  problem.bias = {false, false, false, true};
  problem.hidden = 1.0;
  expect_right<TypeParam>(problem, generator);
}

// Blocks of threads run in another order the second time.
TYPED_TEST(CudaAttention, ResultsAreTheSameBitsAgain) {
  auto generator = fresh_generator();
  Problem problem{{2, 4, 2, 90, 75, 64}, 4};
  for (const bool of_queries : {false, true}) {
    problem.bias = {false, false, of_queries, true};
    const Data<TypeParam> data = make_data<TypeParam>(problem, generator);
    std::array<Found<TypeParam>, 2> found;
    for (Found<TypeParam>& each : found) {
      run_forward<TypeParam, 64>(data, each, generator);
      run_backward<TypeParam, 64>(data, each, generator);
    }
    const auto same = [](const auto& one, const auto& two) {
      return one.size() == two.size() &&
             std::memcmp(one.data(), two.data(), one.size() * sizeof(one[0])) == 0;
    };
    EXPECT_TRUE(same(found[0].output, found[1].output));
    EXPECT_TRUE(same(found[0].grad_query, found[1].grad_query));
    EXPECT_TRUE(same(found[0].grad_key, found[1].grad_key));
    EXPECT_TRUE(same(found[0].grad_value, found[1].grad_value));
    EXPECT_TRUE(same(found[0].grad_bias, found[1].grad_bias));
  }
}

}  // namespace
}  // namespace zero_ext::testing
