// What the attention kernels do over the library's layouts: products of tensor cores, loads of
// their fragments and copies of tiles. A clock would say more; none is needed for these bounds.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "../../../cuda/attention/attention_dkdv_kernel.h"
#include "../../../cuda/attention/attention_dq_kernel.h"
#include "../../../cuda/attention/attention_forward_kernel.h"
#include "cuda_attention_support.h"

namespace zero_ext::testing {
namespace {

using core::BFloat16;
using core::testing::fresh_generator;
using Counts = EmulatedThreadBlock::Counts;

constexpr int kDim = 64;
constexpr std::int32_t kLength = 512;

// A layout of the library, in blocks, with the defaults of its mode.
struct Pattern {
  const char* name;
  std::function<bool(std::int64_t row, std::int64_t column)> has;
  // With blocks of 16, at most, as a share of what blocks of threads of 16 rows copy: by rows, and
  // by columns, of which global ones want all rows.
  double copies;
  double column_copies;
};

std::vector<Pattern> patterns(std::mt19937_64& generator, std::int64_t blocks) {
  std::vector<std::int64_t> random(static_cast<std::size_t>(blocks));
  for (std::int64_t& each : random) {
    each = static_cast<std::int64_t>(generator() % static_cast<std::uint64_t>(blocks));
  }
  const auto near = [](std::int64_t row, std::int64_t column) {
    return std::abs(row - column) <= 1;
  };
  const auto longformer = [=](std::int64_t row, std::int64_t column) {
    return near(row, column) || row == 0 || column == 0;
  };
  const auto bigbird = [=](std::int64_t row, std::int64_t column) {
    return longformer(row, column) || random[static_cast<std::size_t>(row)] == column;
  };
  return {
      {"fixed",
       [](std::int64_t row, std::int64_t column) {
         return row / 4 == column / 4 || column % 4 == 3;
       },
       0.26, 0.9},
      {"bigbird", bigbird, 0.65, 0.65},
      {"bslongformer", longformer, 0.56, 0.58},
      {"local_sliding_window",
       [=](std::int64_t row, std::int64_t column) { return near(row, column) && column <= row; },
       0.64, 0.66}};
}

// Pairs of 16 queries and 16 keys that the layout has.
std::int64_t useful_pairs(const Data<BFloat16>& data) {
  const std::int64_t blocks = std::count(data.mask.begin(), data.mask.end(), 1);
  const std::int64_t bands = (1 << data.problem.shift) / 16;
  return blocks * bands * bands;
}

// What a pass may take at most.
struct Pass {
  const char* name;
  bool by_columns;
  int own;              // matrices whose rows a block of threads keeps
  int products;         // of matrices
  double loads;         // of fragments for each product of tensor cores, with blocks of 16
  double shared_loads;  // where all rows of a warp have the same blocks: those of 32
};

template <class Kernel>
void expect_work(const Pass& pass, const Pattern& pattern, const Data<BFloat16>& data,
                 const Kernel& kernel, std::mt19937_64& generator) {
  const Counts counts = emulate_blocks(kernel, generator);
  const std::int64_t pairs = useful_pairs(data);
  // A product of 16 x 16 x 64 takes eight by m16n8k16. None is wasted on blocks that rows lack.
  EXPECT_EQ(counts.products, pairs * pass.products * 8);
  const auto products = static_cast<double>(counts.products);
  const double loads = static_cast<double>(counts.matrix_loads) / products;
  const std::int64_t alone = pairs * 2 * 16 * kDim * 2;
  const std::int64_t own = pass.own * kLength * kDim * 2;
  const double copies = static_cast<double>(counts.copied_bytes - own) / static_cast<double>(alone);
  const bool small = data.problem.shift == 4;
  std::printf("%-20s blocks of %2d, %-16s %.2f loads per product, %.2f of the copies\n",
              pattern.name, 1 << data.problem.shift, pass.name, loads, copies);
  EXPECT_LE(loads, small ? pass.loads : pass.shared_loads);
  EXPECT_LE(copies, pass.by_columns ? pattern.column_copies : pattern.copies);
  EXPECT_EQ(counts.written_bytes, (pass.by_columns ? 2 : 1) * kLength * kDim * 2);
}

TEST(CudaAttentionWork, NoProductIsWastedAndRowsShareWhatIsLoaded) {
  auto generator = fresh_generator();
  for (const int shift : {4, 5}) {
    for (const Pattern& pattern : patterns(generator, kLength >> shift)) {
      SCOPED_TRACE(pattern.name);
      Problem problem{{1, 1, 1, kLength, kLength, kDim}, shift};
      const Data<BFloat16> data = make_data<BFloat16>(
          problem, generator,
          [&](auto, auto row, auto column) { return pattern.has(row, column); });
      using Forward = cuda::AttentionForward<BFloat16, kDim>;
      using Rows = cuda::AttentionDq<BFloat16, kDim>;
      using Columns = cuda::AttentionDkDv<BFloat16, kDim, cuda::DkDvOutputs::both>;
      std::vector<BFloat16> results(static_cast<std::size_t>(2 * kLength * kDim));
      std::vector<float> numbers(static_cast<std::size_t>(kLength));
      const cuda::OutputRows<BFloat16> first{results.data(), 1, kLength, kDim};
      const cuda::OutputRows<BFloat16> second{results.data() + kLength * kDim, 1, kLength, kDim};
      const Unions rows(data.layout(data.by_rows), shift, 64, generator);
      const Unions columns(data.layout(data.by_columns), shift, 64, generator);
      const Forward forward{data.rules(),
                            rows.lists,
                            data.queries(data.query),
                            data.keys(data.key),
                            data.keys(data.value),
                            first,
                            numbers.data()};
      expect_work({"forward", false, 1, 2, 0.55, 0.35}, pattern, data, forward, generator);
      const cuda::GradientInputs<BFloat16> inputs{
          data.rules(),          data.queries(data.query),       data.keys(data.key),
          data.keys(data.value), data.queries(data.grad_output), numbers.data(),
          numbers.data()};
      const Rows by_rows{{inputs, rows.lists, {}, 1, 1}, first};
      expect_work({"gradient of rows", false, 2, 3, 0.65, 0.45}, pattern, data, by_rows, generator);
      const Columns by_columns{{inputs, columns.lists, {}, 1, 1}, first, second};
      expect_work({"of columns", true, 2, 4, 0.75, 0.5}, pattern, data, by_columns, generator);
    }
  }
}

}  // namespace
}  // namespace zero_ext::testing
