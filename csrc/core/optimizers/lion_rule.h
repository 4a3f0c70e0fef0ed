// Lion: hyper-parameters, and the update of one vector of elements.
//
// Source: Chen, Liang, Huang, Real, Wang, Pham, Dong, Luong, Hsieh, Lu and Le, "Symbolic discovery
// of optimization algorithms", algorithm 2 (arXiv 2302.06675).
#pragma once

#include "hyperparameters.h"
#include "optimizer_list.h"

namespace zero_ext::core {

template <>
struct CoefficientsOf<LionRule> {
  float gradient_scale;  // unscale x clip, negative to maximize
  float beta1;
  float direction_weight;  // 1 - beta1
  float beta2;
  float average_weight;  // 1 - beta2
  float decay;           // lr * weight_decay
  float lr;
};

// -1, 0 or 1; a NaN stays one, so that it reaches the weights.
template <class V>
ZERO_EXT_HOST_DEVICE typename V::Float sign_of(typename V::Float value) {
  using Float = typename V::Float;
  const Float magnitude = V::abs(value);
  const Float zero = V::set(0.0F);
  const Float either = V::if_at_least(zero, magnitude, magnitude, V::set(1.0F));
  return V::copy_sign(V::if_at_least(magnitude, zero, either, magnitude), value);
}

struct LionRule {
  using Coefficients = CoefficientsOf<LionRule>;
  static constexpr const char* kOp = "lion_step_";
  static constexpr int kMoments = 1;
  static constexpr const char* kMomentNames[kMoments] = {"exp_avg"};
  static constexpr int kHyper = 5;

  static constexpr ZERO_EXT_HOST_DEVICE HyperField hyper_field(int i) {
    constexpr HyperField fields[kHyper] = {
        {DeviceField::lr, ExpectedValue::finite},
        {DeviceField::beta1, ExpectedValue::below_one},
        {DeviceField::beta2, ExpectedValue::below_one},
        {DeviceField::weight_decay, ExpectedValue::finite},
        {DeviceField::maximize, ExpectedValue::zero_or_one},
    };
    return fields[i];
  }

  // For gradients that are multiplied by `scale` first.
  static ZERO_EXT_HOST_DEVICE Coefficients coefficients(const double* row, float scale) {
    const auto& [lr, beta1, beta2, weight_decay, maximize] = row_of<LionRule>(row);
    Coefficients result{};
    result.gradient_scale = maximize == 1 ? -scale : scale;
    result.beta1 = static_cast<float>(beta1);
    result.direction_weight = static_cast<float>(1.0 - beta1);
    result.beta2 = static_cast<float>(beta2);
    result.average_weight = static_cast<float>(1.0 - beta2);
    result.decay = static_cast<float>(lr * weight_decay);
    result.lr = static_cast<float>(lr);
    return result;
  }

  // `values` are the master weights and exp_avg. V is a vector type as described in
  // vector_scalar.h.
  template <class V>
  static ZERO_EXT_HOST_DEVICE void update(typename V::Float (&values)[1 + kMoments],
                                          typename V::Float gradient,
                                          const Coefficients& coefficients) {
    using Float = typename V::Float;
    auto& [master, exp_avg] = values;
    const Float g = V::mul(gradient, V::set(coefficients.gradient_scale));
    const Float direction = V::fma(V::set(coefficients.beta1), exp_avg,
                                   V::mul(V::set(coefficients.direction_weight), g));
    const Float decayed = V::fma(V::set(-coefficients.decay), master, master);
    master = V::fma(V::set(-coefficients.lr), sign_of<V>(direction), decayed);
    exp_avg =
        V::fma(V::set(coefficients.beta2), exp_avg, V::mul(V::set(coefficients.average_weight), g));
  }
};

}  // namespace zero_ext::core
