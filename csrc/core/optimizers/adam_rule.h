// Adam and AdamW: hyper-parameters, and the update of one vector of elements.
//
// Source: Kingma and Ba, "Adam", section 2 (arXiv 1412.6980); Loshchilov and Hutter, "Decoupled
// weight decay regularization", algorithm 2 (arXiv 1711.05101). The order of the operations is
// that of torch.optim's CPU kernels, so results agree to float32 rounding.
#pragma once

#include <cmath>

#include "hyperparameters.h"
#include "optimizer_list.h"

namespace zero_ext::core {

template <>
struct CoefficientsOf<AdamRule> {
  float gradient_scale;   // unscale x clip, negative to maximize
  float coupled_decay;    // weight_decay of Adam, 0 for AdamW
  float decoupled_decay;  // lr * weight_decay of AdamW, 0 for Adam
  float average_weight;   // 1 - beta1
  float beta1;
  bool average_from_gradient;  // beta1 <= 0.5: interpolate from the gradient's side
  float beta2;
  float square_weight;            // 1 - beta2
  float inverse_root_correction;  // 1 / sqrt(1 - beta2^step)
  float eps;
  float step_size;  // lr / (1 - beta1^step)
};

struct AdamRule {
  using Coefficients = CoefficientsOf<AdamRule>;
  static constexpr const char* kOp = "adam_step_";
  static constexpr int kMoments = 2;
  static constexpr const char* kMomentNames[kMoments] = {"exp_avg", "exp_avg_sq"};
  static constexpr int kHyper = 8;

  static constexpr ZERO_EXT_HOST_DEVICE HyperField hyper_field(int i) {
    constexpr HyperField fields[kHyper] = {
        {DeviceField::lr, ExpectedValue::finite},
        {DeviceField::beta1, ExpectedValue::below_one},
        {DeviceField::beta2, ExpectedValue::below_one},
        {DeviceField::eps, ExpectedValue::finite_not_negative},
        {DeviceField::weight_decay, ExpectedValue::finite},
        {DeviceField::step, ExpectedValue::finite_at_least_one},  // counts this update too
        {DeviceField::decoupled, ExpectedValue::zero_or_one},
        {DeviceField::maximize, ExpectedValue::zero_or_one},
    };
    return fields[i];
  }

  // For gradients that are multiplied by `scale` first.
  static ZERO_EXT_HOST_DEVICE Coefficients coefficients(const double* row, float scale) {
    const auto& [lr, beta1, beta2, eps, weight_decay, step, decoupled, maximize] =
        row_of<AdamRule>(row);
    Coefficients result{};
    result.gradient_scale = maximize == 1 ? -scale : scale;
    result.coupled_decay = decoupled == 1 ? 0.0F : static_cast<float>(weight_decay);
    result.decoupled_decay = decoupled == 1 ? static_cast<float>(lr * weight_decay) : 0.0F;
    result.average_weight = static_cast<float>(1.0 - beta1);
    result.beta1 = static_cast<float>(beta1);
    result.average_from_gradient = beta1 <= 0.5;
    result.beta2 = static_cast<float>(beta2);
    result.square_weight = static_cast<float>(1.0 - beta2);
    result.inverse_root_correction = static_cast<float>(1.0 / ::sqrt(1.0 - ::pow(beta2, step)));
    result.eps = static_cast<float>(eps);
    result.step_size = static_cast<float>(lr / (1.0 - ::pow(beta1, step)));
    return result;
  }

  // `values` are the master weights, exp_avg and exp_avg_sq. V is a vector type as described in
  // vector_scalar.h.
  template <class V>
  static ZERO_EXT_HOST_DEVICE void update(typename V::Float (&values)[1 + kMoments],
                                          typename V::Float gradient,
                                          const Coefficients& coefficients) {
    using Float = typename V::Float;
    auto& [master, exp_avg, exp_avg_sq] = values;
    Float g = V::mul(gradient, V::set(coefficients.gradient_scale));
    g = V::fma(V::set(coefficients.coupled_decay), master, g);
    const Float decayed = V::fma(V::set(-coefficients.decoupled_decay), master, master);

    exp_avg = coefficients.average_from_gradient
                  ? V::fma(V::set(coefficients.beta1), V::sub(exp_avg, g), g)
                  : V::fma(V::set(coefficients.average_weight), V::sub(g, exp_avg), exp_avg);
    exp_avg_sq = V::fma(V::set(coefficients.beta2), exp_avg_sq,
                        V::mul(V::mul(V::set(coefficients.square_weight), g), g));

    const Float denominator =
        V::fma(V::sqrt(exp_avg_sq), V::set(coefficients.inverse_root_correction),
               V::set(coefficients.eps));
    master = V::fma(V::set(-coefficients.step_size), V::div(exp_avg, denominator), decayed);
  }
};

}  // namespace zero_ext::core
