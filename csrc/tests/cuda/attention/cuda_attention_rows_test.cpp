#include <cmath>
#include <limits>
#include <vector>

#include "../../../cuda/attention/attention_gradient.h"
#include "../../test_support.h"
#include "../emulated_launch.h"

namespace zero_ext::cuda {
namespace {

using core::testing::fresh_generator;
using zero_ext::testing::emulate_launch;

struct Case {
  std::int32_t batch;
  std::int32_t heads;
  std::int32_t length;
  std::int32_t dim;
  std::int64_t row_stride;  // of the gradients of outputs
  std::int64_t shift;       // elements past where rows are aligned
};

template <class T>
class CudaAttentionRows : public ::testing::Test {
 protected:
  void compare(const Case& of) {
    const AttentionSizes sizes{of.batch, of.heads, of.heads, of.length, of.length, of.dim};
    const auto rows = static_cast<std::size_t>(sizes.query_rows());
    const auto stride = static_cast<std::size_t>(of.row_stride);
    const auto dim = static_cast<std::size_t>(of.dim);
    const auto shift = static_cast<std::size_t>(of.shift);
    // Only what may be read, so that a sanitizer sees any other access.
    const auto grads =
        core::testing::normal_values<T>(generator_, shift + (rows - 1) * stride + dim);
    const auto outputs = core::testing::normal_values<T>(generator_, rows * dim);
    auto totals = core::testing::normal_values<float>(generator_, rows);
    for (float& total : totals) {
      if (generator_() % 5 == 0) total = kMasked;
    }
    std::vector<float> reference(rows, 7.0F);
    std::vector<float> delta(rows, 7.0F);
    const std::int64_t head = of.length * of.row_stride;
    const std::int64_t own = std::int64_t{of.length} * of.dim;
    emulate_launch(PrepareGradients<T>{sizes,
                                       {grads.data() + shift, of.heads * head, head, of.row_stride},
                                       {outputs.data(), of.heads * own, own, of.dim},
                                       totals.data(),
                                       reference.data(),
                                       delta.data()},
                   3, generator_);
    for (std::size_t row = 0; row < rows; ++row) {
      double sum = 0.0;
      double size = 0.0;
      for (std::size_t i = 0; i < dim; ++i) {
        const double term = static_cast<double>(core::to_float(grads[shift + row * stride + i])) *
                            static_cast<double>(core::to_float(outputs[row * dim + i]));
        sum += term;
        size += std::abs(term);
      }
      // Rounded once to float32, from a sum of float64.
      ASSERT_NEAR(delta[row], sum, std::abs(sum) * 0x1p-23 + size * 0x1p-46)
          << "row " << row << " of " << of.length << ", dim " << of.dim;
      const float expected =
          totals[row] == kMasked ? std::numeric_limits<float>::infinity() : totals[row];
      ASSERT_EQ(reference[row], expected) << "row " << row << " of " << of.length;
    }
  }

  std::mt19937_64 generator_ = fresh_generator();
};

using Types = ::testing::Types<float, core::BFloat16, core::Float16>;
TYPED_TEST_SUITE(CudaAttentionRows, Types);

TYPED_TEST(CudaAttentionRows, EveryHeadDimLengthAndAlignmentYieldsTheSumsOfTheRows) {
  for (const std::int32_t dim : {1, 4, 7, 8, 16, 31, 32, 40, 64, 96, 128, 200, 255, 256}) {
    this->compare({2, 3, 33, dim, dim, 0});
    this->compare({1, 2, 64, dim, (dim + 7) / 8 * 8 + 8, 0});
    this->compare({1, 1, 5, dim, dim + 3, 1});
  }
}

TYPED_TEST(CudaAttentionRows, EveryNumberOfRowsIsWritten) {
  for (std::int32_t length = 1; length <= 70; ++length) this->compare({2, 2, length, 64, 64, 0});
}

}  // namespace
}  // namespace zero_ext::cuda
