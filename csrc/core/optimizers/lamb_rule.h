// LAMB: hyper-parameters, and the update of one vector of elements.
//
// Source: You, Li, Reddi, Hseu, Kumar, Bhojanapalli, Song, Demmel, Keutzer and Hsieh, "Large batch
// optimization for deep learning: training BERT in 76 minutes", algorithm 2 (arXiv 1904.00962).
#pragma once

#include "hyperparameters.h"
#include "optimizer_list.h"

namespace zero_ext::core {

template <>
struct CoefficientsOf<LambRule> {
  float gradient_scale;  // unscale x clip, negative to maximize
  float average_weight;  // 1 - beta1
  float beta1;
  bool average_from_gradient;  // beta1 <= 0.5: interpolate from the gradient's side
  float beta2;
  float square_weight;        // 1 - beta2
  float inverse_correction1;  // 1 / correction1
  float inverse_correction2;  // 1 / correction2
  float eps_inside;           // eps under the root, or 0
  float eps_outside;          // eps beside the root, or 0
  float weight_decay;
  float step_size;  // lr * trust_ratio
};

struct LambRule {
  using Coefficients = CoefficientsOf<LambRule>;
  static constexpr const char* kOp = "lamb_step_";
  static constexpr int kMoments = 2;
  static constexpr const char* kMomentNames[kMoments] = {"exp_avg", "exp_avg_sq"};
  static constexpr int kHyper = 10;

  // correction1 is 1 - beta1^step, or 1 without bias correction. The corrections are given, not the
  // step: a device's power function may round otherwise than the host's. Any trust ratio will do:
  // that of norms which are not finite is NaN, and reaches the weights.
  static constexpr ZERO_EXT_HOST_DEVICE HyperField hyper_field(int i) {
    constexpr HyperField fields[kHyper] = {
        {DeviceField::lr, ExpectedValue::finite},
        {DeviceField::beta1, ExpectedValue::below_one},
        {DeviceField::beta2, ExpectedValue::below_one},
        {DeviceField::eps, ExpectedValue::finite_not_negative},
        {DeviceField::weight_decay, ExpectedValue::finite},
        {DeviceField::correction1, ExpectedValue::up_to_one},
        {DeviceField::correction2, ExpectedValue::up_to_one},
        {DeviceField::eps_inside_sqrt, ExpectedValue::zero_or_one},
        {DeviceField::maximize, ExpectedValue::zero_or_one},
        {DeviceField::trust_ratio, ExpectedValue::any},
    };
    return fields[i];
  }

  // For gradients that are multiplied by `scale` first.
  static ZERO_EXT_HOST_DEVICE Coefficients coefficients(const double* row, float scale) {
    const auto& [lr, beta1, beta2, eps, weight_decay, correction1, correction2, eps_inside_sqrt,
                 maximize, trust_ratio] = row_of<LambRule>(row);
    Coefficients result{};
    result.gradient_scale = maximize == 1 ? -scale : scale;
    result.average_weight = static_cast<float>(1.0 - beta1);
    result.beta1 = static_cast<float>(beta1);
    result.average_from_gradient = beta1 <= 0.5;
    result.beta2 = static_cast<float>(beta2);
    result.square_weight = static_cast<float>(1.0 - beta2);
    result.inverse_correction1 = static_cast<float>(1.0 / correction1);
    result.inverse_correction2 = static_cast<float>(1.0 / correction2);
    result.eps_inside = eps_inside_sqrt == 1 ? static_cast<float>(eps) : 0.0F;
    result.eps_outside = eps_inside_sqrt == 1 ? 0.0F : static_cast<float>(eps);
    result.weight_decay = static_cast<float>(weight_decay);
    result.step_size = static_cast<float>(lr * trust_ratio);
    return result;
  }

  // What the weights would move by for a step of 1; the moments become the new ones. `values` are
  // the master weights, exp_avg and exp_avg_sq. V is a vector type as described in vector_scalar.h.
  template <class V>
  static ZERO_EXT_HOST_DEVICE typename V::Float direction(typename V::Float (&values)[1 + kMoments],
                                                          typename V::Float gradient,
                                                          const Coefficients& coefficients) {
    using Float = typename V::Float;
    auto& [master, exp_avg, exp_avg_sq] = values;
    const Float g = V::mul(gradient, V::set(coefficients.gradient_scale));
    exp_avg = coefficients.average_from_gradient
                  ? V::fma(V::set(coefficients.beta1), V::sub(exp_avg, g), g)
                  : V::fma(V::set(coefficients.average_weight), V::sub(g, exp_avg), exp_avg);
    exp_avg_sq = V::fma(V::set(coefficients.beta2), exp_avg_sq,
                        V::mul(V::mul(V::set(coefficients.square_weight), g), g));
    const Float square = V::fma(V::set(coefficients.inverse_correction2), exp_avg_sq,
                                V::set(coefficients.eps_inside));
    const Float denominator = V::add(V::sqrt(square), V::set(coefficients.eps_outside));
    const Float average = V::mul(V::set(coefficients.inverse_correction1), exp_avg);
    return V::fma(V::set(coefficients.weight_decay), master, V::div(average, denominator));
  }

  template <class V>
  static ZERO_EXT_HOST_DEVICE void update(typename V::Float (&values)[1 + kMoments],
                                          typename V::Float gradient,
                                          const Coefficients& coefficients) {
    const auto move = direction<V>(values, gradient, coefficients);
    values[0] = V::fma(V::set(-coefficients.step_size), move, values[0]);
  }
};

}  // namespace zero_ext::core
