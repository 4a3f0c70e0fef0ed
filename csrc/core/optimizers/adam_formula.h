// One Adam / AdamW update of one vector of elements.
//
// Source: Kingma and Ba, "Adam", section 2 (arXiv 1412.6980); Loshchilov and Hutter, "Decoupled
// weight decay regularization", algorithm 2 (arXiv 1711.05101). The order of the operations is
// that of torch.optim's CPU kernels, so results agree to float32 rounding.
#pragma once

#include "../base/host_device.h"
#include "coefficients/adam_coefficients.h"

namespace zero_ext::core {

struct AdamRule {
  using Coefficients = AdamCoefficients;
  static constexpr int kMoments = 2;

  // `values` are the master weights, exp_avg and exp_avg_sq. V is a vector type as described in
  // vector_scalar.h.
  template <class V>
  static ZERO_EXT_HOST_DEVICE void update(typename V::Float (&values)[1 + kMoments],
                                          typename V::Float gradient,
                                          const AdamCoefficients& coefficients) {
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
