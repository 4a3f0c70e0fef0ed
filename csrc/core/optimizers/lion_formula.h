// One Lion update of one vector of elements.
//
// Source: Chen, Liang, Huang, Real, Wang, Pham, Dong, Luong, Hsieh, Lu and Le, "Symbolic discovery
// of optimization algorithms", algorithm 2 (arXiv 2302.06675).
#pragma once

#include "../base/host_device.h"
#include "coefficients/lion_coefficients.h"

namespace zero_ext::core {

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
  using Coefficients = LionCoefficients;
  static constexpr int kMoments = 1;

  // `values` are the master weights and exp_avg. V is a vector type as described in
  // vector_scalar.h.
  template <class V>
  static ZERO_EXT_HOST_DEVICE void update(typename V::Float (&values)[1 + kMoments],
                                          typename V::Float gradient,
                                          const LionCoefficients& coefficients) {
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
