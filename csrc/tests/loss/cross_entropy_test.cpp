#include "../../core/loss/cross_entropy.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "../test_support.h"

namespace zero_ext::core {
namespace {

using testing::available_isas;
using testing::fresh_generator;
using testing::kTypeOf;
using testing::normal_values;
using testing::SelectedIsa;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <class T>
constexpr double kRounding = 1e-6;
template <>
constexpr double kRounding<BFloat16> = 0.004;
template <>
constexpr double kRounding<Float16> = 0.0006;

double capped(double logit, float softcap) {
  return softcap == 0 ? logit : softcap * std::tanh(logit / softcap);
}

// A few rows and what their sums and gradients are in double.
template <class T>
struct Rows {
  std::int64_t count = 3;
  std::int64_t words;
  float softcap;
  std::vector<T> logits;
  std::vector<std::int64_t> labels;
  std::vector<float> largest, reference, scale, uniform, target;
  std::vector<float> sums[3];

  Rows(std::mt19937_64& generator, std::int64_t each, float cap) : words(each), softcap(cap) {
    const auto total = static_cast<std::size_t>(count * words);
    logits = normal_values<T>(generator, total);
    for (T& value : logits) value = from_float<T>(4 * to_float(value));
    for (std::int64_t row = 0; row < count; ++row) {
      double highest = -kInfinity;
      for (std::int64_t i = 0; i < words; ++i) highest = std::max(highest, at(row, i));
      largest.push_back(static_cast<float>(highest));
      labels.push_back(static_cast<std::int64_t>(generator() % static_cast<unsigned>(words)));
    }
    labels[1] = row_without_label(generator);
    for (auto* each_of : {&reference, &scale, &uniform, &target}) {
      *each_of = normal_values<float>(generator, static_cast<std::size_t>(count));
    }
    for (std::size_t row = 0; row < reference.size(); ++row) reference[row] += largest[row];
    for (auto& sum : sums) sum.assign(static_cast<std::size_t>(count), kNan);
  }

  std::int64_t row_without_label(std::mt19937_64& generator) const {
    return generator() % 2 == 0 ? -100 : words;
  }
  double at(std::int64_t row, std::int64_t word) const {
    return capped(to_float(logits[static_cast<std::size_t>(row * words + word)]), softcap);
  }
  LogitRows view() { return {logits.data(), kTypeOf<T>, words, labels.data(), softcap}; }
  void sum() {
    const SoftmaxSums found{largest.data(), sums[0].data(), sums[1].data(), sums[2].data()};
    sum_softmax(view(), found, 0, 1);
    sum_softmax(view(), found, 1, count);
  }
  void differentiate() {
    differentiate_softmax(view(), {reference.data(), scale.data(), uniform.data(), target.data()},
                          0, count);
  }
};

// Half of the last place of subnormals.
template <class T>
constexpr double kSmallest = 0;
template <>
constexpr double kSmallest<Float16> = 0x1p-25;

template <class T>
class CrossEntropy : public ::testing::Test {};
using Types = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(CrossEntropy, Types);

TYPED_TEST(CrossEntropy, SumsAreThoseInDouble) {
  auto generator = fresh_generator();
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    for (const std::int64_t words : {1, 7, 16, 33, 1000, 70001}) {
      for (const float softcap : {0.0F, 3.0F, 30.0F}) {
        Rows<TypeParam> rows(generator, words, softcap);
        rows.sum();
        for (std::int64_t row = 0; row < rows.count; ++row) {
          const auto r = static_cast<std::size_t>(row);
          double sum = 0;
          double rest = 0;
          double sizes = 0;
          for (std::int64_t i = 0; i < words; ++i) {
            const double difference = rows.at(row, i) - rows.largest[r];
            sum += std::exp(difference);
            rest += difference;
            sizes += std::abs(difference) + std::abs(rows.largest[r]);
          }
          const bool owned = rows.labels[r] >= 0 && rows.labels[r] < words;
          const double label = owned ? rows.at(row, rows.labels[r]) - rows.largest[r] : 0.0;
          EXPECT_NEAR(rows.sums[0][r], sum, (softcap == 0 ? 2e-6 : 4e-6) * sum)
              << words << " words, cap " << softcap;
          EXPECT_NEAR(rows.sums[1][r], label, 1e-6 * (1 + std::abs(rows.largest[r])));
          EXPECT_NEAR(rows.sums[2][r], rest, 1e-6 * (1 + sizes));
        }
      }
    }
  }
}

TYPED_TEST(CrossEntropy, GradientsAreThoseInDouble) {
  auto generator = fresh_generator();
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    for (const std::int64_t words : {1, 7, 16, 33, 1000}) {
      for (const float softcap : {0.0F, 3.0F, 30.0F}) {
        Rows<TypeParam> rows(generator, words, softcap);
        const Rows<TypeParam> before = rows;
        rows.differentiate();
        for (std::int64_t row = 0; row < rows.count; ++row) {
          const auto r = static_cast<std::size_t>(row);
          for (std::int64_t i = 0; i < words; ++i) {
            const double value = before.at(row, i);
            const double slope = softcap == 0 ? 1 : 1 - std::pow(value / softcap, 2);
            const double weight = std::exp(value - rows.reference[r]) * rows.scale[r];
            const double target = i == rows.labels[r] ? rows.target[r] : 0.0;
            const double expected = (weight - rows.uniform[r] - target) * slope;
            const double size = std::abs(weight) + std::abs(rows.uniform[r]) + std::abs(target);
            const auto at = static_cast<std::size_t>(row * words + i);
            EXPECT_NEAR(
                to_float(rows.logits[at]), expected,
                kRounding<TypeParam> * std::abs(expected) + kSmallest<TypeParam> + 3e-6 * size)
                << words << " words, cap " << softcap << ", word " << i;
          }
        }
      }
    }
  }
}

TYPED_TEST(CrossEntropy, EveryIsaHasTheSameBits) {
  auto generator = fresh_generator();
  for (const std::int64_t words : {5, 33, 5000}) {
    for (const float softcap : {0.0F, 3.0F}) {
      const Rows<TypeParam> inputs(generator, words, softcap);
      std::optional<Rows<TypeParam>> first;
      for (const Isa isa : available_isas()) {
        const SelectedIsa selected(isa);
        Rows<TypeParam> rows = inputs;
        rows.sum();
        rows.differentiate();
        if (!first) first = rows;
        for (int i = 0; i < 3; ++i) EXPECT_EQ(rows.sums[i], first->sums[i]);
        const std::size_t bytes = rows.logits.size() * sizeof(TypeParam);
        EXPECT_EQ(std::memcmp(rows.logits.data(), first->logits.data(), bytes), 0)
            << words << " words, cap " << softcap << ", instruction set " << static_cast<int>(isa);
      }
    }
  }
}

TEST(CrossEntropyOfBadLogits, NanAndInfinityAreTorchs) {
  auto generator = fresh_generator();
  for (const Isa isa : available_isas()) {
    const SelectedIsa selected(isa);
    for (const std::int64_t words : {5, 40}) {
      Rows<float> rows(generator, words, 0.0F);
      rows.logits[2] = kNan;                                      // of row 0
      rows.logits[static_cast<std::size_t>(words)] = -kInfinity;  // a word that cannot occur
      rows.labels = {0, -100, 1};
      rows.sum();
      EXPECT_TRUE(std::isnan(rows.sums[0][0]) && std::isnan(rows.sums[2][0]));
      EXPECT_TRUE(std::isfinite(rows.sums[0][1]) && rows.sums[2][1] == -kInfinity);
      rows.differentiate();
      EXPECT_TRUE(std::isnan(rows.logits[2]) && std::isfinite(rows.logits[3]));
      EXPECT_EQ(rows.logits[static_cast<std::size_t>(words)], -rows.uniform[1]);
    }
  }
}

}  // namespace
}  // namespace zero_ext::core
