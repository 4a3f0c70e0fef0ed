// What the tests of optimizer steps share: of each rule, rows of hyper-parameters and its update in
// double; and problems of any types.
#pragma once

#include <array>
#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#include "../../core/optimizers/optimizer_buffers.h"
#include "../../core/optimizers/optimizer_rules.h"
#include "../../cuda/common/dispatch.h"
#include "../test_support.h"

namespace zero_ext::core::testing {

template <class List>
struct TypesOf;
template <class... Rules>
struct TypesOf<RuleList<Rules...>> {
  using All = ::testing::Types<Rules...>;
};

// update() is straight from the rule's paper. It turns weights and moments into the new ones, and
// returns whether rounding changes them by little.
template <class Rule>
struct Sample;

template <>
struct Sample<AdamRule> {
  // lr, beta1, beta2, eps, weight_decay, step, decoupled, maximize
  static constexpr std::array kRow{1e-2, 0.9, 0.999, 1e-8, 0.1, 3.0, 1.0, 0.0};
  static constexpr std::array kOther{2e-2, 0.2, 0.99, 1e-6, 0.2, 7.0, 0.0, 1.0};

  static bool update(double (&values)[3], double gradient, const double* row) {
    auto& [weight, exp_avg, exp_avg_sq] = values;
    double g = gradient * (row[7] == 1 ? -1 : 1);
    if (row[6] == 0) g += row[4] * weight;
    exp_avg = row[1] * exp_avg + (1 - row[1]) * g;
    exp_avg_sq = row[2] * exp_avg_sq + (1 - row[2]) * g * g;
    const double average = exp_avg / (1 - std::pow(row[1], row[5]));
    const double square = exp_avg_sq / (1 - std::pow(row[2], row[5]));
    if (row[6] == 1) weight *= 1 - row[0] * row[4];
    weight -= row[0] * average / (std::sqrt(square) + row[3]);
    return true;
  }
};

template <>
struct Sample<LambRule> {
  // lr, beta1, beta2, eps, weight_decay, correction1, correction2, eps_inside_sqrt, maximize,
  // trust_ratio
  static constexpr std::array kRow{1e-2, 0.9, 0.99, 1e-6, 0.1, 0.3, 0.04, 0.0, 0.0, 1.5};
  static constexpr std::array kOther{3e-2, 0.2, 0.5, 1e-1, 0.0, 1.0, 1.0, 1.0, 1.0, 0.3};

  static double direction(double (&values)[3], double gradient, const double* row) {
    auto& [weight, exp_avg, exp_avg_sq] = values;
    const double g = gradient * (row[8] == 1 ? -1 : 1);
    exp_avg = row[1] * exp_avg + (1 - row[1]) * g;
    exp_avg_sq = row[2] * exp_avg_sq + (1 - row[2]) * g * g;
    const double square = exp_avg_sq / row[6];
    const double root = row[7] == 1 ? std::sqrt(square + row[3]) : std::sqrt(square) + row[3];
    return exp_avg / row[5] / root + row[4] * weight;
  }
  static bool update(double (&values)[3], double gradient, const double* row) {
    values[0] -= row[0] * row[9] * direction(values, gradient, row);
    return true;
  }
};

template <>
struct Sample<LionRule> {
  // lr, beta1, beta2, weight_decay, maximize
  static constexpr std::array kRow{1e-2, 0.9, 0.99, 0.1, 0.0};
  static constexpr std::array kOther{3e-2, 0.2, 0.5, 0.0, 1.0};

  static bool update(double (&values)[2], double gradient, const double* row) {
    auto& [weight, exp_avg] = values;
    const double g = gradient * (row[4] == 1 ? -1 : 1);
    const double direction = row[1] * exp_avg + (1 - row[1]) * g;
    weight -= row[0] * (std::copysign(1.0, direction) + row[3] * weight);
    exp_avg = row[2] * exp_avg + (1 - row[2]) * g;
    return std::abs(direction) > 1e-6;
  }
};

constexpr NumericType kTypes[] = {NumericType::float32, NumericType::bfloat16,
                                  NumericType::float16};

// Random elements that start `shift` of them behind an address aligned for packs, and end with the
// allocation: a sanitizer sees any access past them.
class Buffer {
 public:
  Buffer(std::int64_t count, NumericType type, std::int64_t shift, std::mt19937_64& generator,
         bool positive = false)
      : type_(type),
        offset_(static_cast<std::size_t>(shift * element_size(type))),
        bytes_(offset_ + static_cast<std::size_t>(count * element_size(type))) {
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < count; ++i) {
      const float value = normal(generator);
      set(i, positive ? value * value : value);
    }
  }
  void* data() { return bytes_.data() + offset_; }
  bool operator==(const Buffer& other) const { return bytes_ == other.bytes_; }

  float at(std::int64_t i) const {
    float value = 0;
    visit(i, [&value]<class T>(const std::byte* from) {
      T element;
      std::memcpy(&element, from, sizeof(T));
      value = to_float(element);
    });
    return value;
  }
  // Rounded to the type.
  void set(std::int64_t i, float value) {
    visit(i, [this, value]<class T>(const std::byte* at) {
      const T element = from_float<T>(value);
      std::memcpy(bytes_.data() + (at - bytes_.data()), &element, sizeof(T));
    });
  }

 private:
  template <class Visit>
  void visit(std::int64_t i, const Visit& visit) const {
    cuda::with_type(type_, [&]<class T>(std::type_identity<T>) {
      visit.template operator()<T>(bytes_.data() + offset_ +
                                   i * static_cast<std::int64_t>(sizeof(T)));
    });
  }

  NumericType type_;
  std::size_t offset_;
  std::vector<std::byte> bytes_;  // from operator new, which aligns to 16 bytes
};

struct StepTypes {
  NumericType moments = NumericType::float32;
  NumericType grad = NumericType::bfloat16;
  std::optional<NumericType> param = NumericType::float16;
};

// All that a step of `Rule` may get: moments by gradients by parameters, or none of these.
inline std::vector<StepTypes> all_step_types() {
  std::vector<StepTypes> result;
  for (const NumericType moments : {NumericType::float32, NumericType::bfloat16}) {
    for (const NumericType grad : kTypes) {
      for (const NumericType param : kTypes) result.push_back({moments, grad, param});
      result.push_back({moments, grad, std::nullopt});
    }
  }
  return result;
}

inline std::ostream& operator<<(std::ostream& out, const StepTypes& types) {
  return out << "moments " << static_cast<int>(types.moments) << " grad "
             << static_cast<int>(types.grad) << " param "
             << (types.param ? static_cast<int>(*types.param) : -1);
}

template <class Rule>
struct StepProblem {
  std::int64_t count;
  StepTypes types;
  Buffer master;
  std::vector<Buffer> moments;
  Buffer grad;
  Buffer param;
  std::int32_t flag = 0;

  StepProblem(std::int64_t elements, const StepTypes& with, std::int64_t shift,
              std::mt19937_64& generator)
      : count(elements),
        types(with),
        master(count, NumericType::float32, shift, generator),
        grad(count, with.grad, shift, generator),
        param(count, with.param.value_or(NumericType::float32), shift, generator) {
    for (int m = 0; m < Rule::kMoments; ++m) {
      moments.emplace_back(count, with.moments, shift, generator, m == 1);
    }
  }

  StepBuffers buffers() {
    StepBuffers result{
        static_cast<float*>(master.data()),   {},          types.moments, grad.data(), types.grad,
        types.param ? param.data() : nullptr, types.param, &flag};
    for (int m = 0; m < Rule::kMoments; ++m) result.moments[m] = moments[m].data();
    return result;
  }
  bool operator==(const StepProblem& other) const {
    return master == other.master && moments == other.moments && grad == other.grad &&
           param == other.param;
  }
};

}  // namespace zero_ext::core::testing
