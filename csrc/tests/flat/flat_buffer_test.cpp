#include "../../core/flat/flat_buffer.h"

#include <array>

#include "../test_support.h"

namespace zero_ext::core {
namespace {

using testing::available_isas;
using testing::fresh_generator;
using testing::normal_values;
using testing::SelectedIsa;
using testing::split_over_threads;

TEST(Flat, CopiesAndAddsWithACastAtEveryLength) {
  auto generator = fresh_generator();
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    for (std::size_t count = 0; count < 70; ++count) {
      const std::vector<float> source = normal_values<float>(generator, count);
      std::vector<BFloat16> target(count);
      const auto length = static_cast<std::int64_t>(count);
      copy_cast(target.data(), NumericType::bfloat16, source.data(), NumericType::float32, length);
      for (std::size_t i = 0; i < count; ++i) {
        EXPECT_EQ(target[i].bits, from_float<BFloat16>(source[i]).bits);
      }
      accumulate_cast(target.data(), NumericType::bfloat16, source.data(), NumericType::float32,
                      length);
      for (std::size_t i = 0; i < count; ++i) {
        const float sum = to_float(from_float<BFloat16>(source[i])) + source[i];
        EXPECT_EQ(target[i].bits, from_float<BFloat16>(sum).bits);
      }
    }
  }
}

TEST(Flat, SumsShardsInListOrderOverThreadsAndInPlace) {
  auto generator = fresh_generator();
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    std::array<std::vector<float>, 3> shards;
    for (auto& shard : shards) shard = normal_values<float>(generator, 1003);
    std::vector<float> expected(1003);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      expected[i] = 0.25F * ((shards[0][i] + shards[1][i]) + shards[2][i]) + shards[2][i];
    }
    const std::array<const void*, 3> sources{shards[0].data(), shards[1].data(), shards[2].data()};
    split_over_threads(1003, 3, [&](std::int64_t begin, std::int64_t end) {
      sum_shards(shards[2].data(), NumericType::float32, sources, NumericType::float32, begin, end,
                 0.25F, true);
    });
    EXPECT_EQ(shards[2], expected);
  }
}

}  // namespace
}  // namespace zero_ext::core
