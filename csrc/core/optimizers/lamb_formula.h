// One LAMB update of one vector of elements.
//
// Source: You, Li, Reddi, Hseu, Kumar, Bhojanapalli, Song, Demmel, Keutzer and Hsieh, "Large batch
// optimization for deep learning: training BERT in 76 minutes", algorithm 2 (arXiv 1904.00962).
#pragma once

#include "../base/host_device.h"
#include "coefficients/lamb_coefficients.h"

namespace zero_ext::core {

struct LambRule {
  using Factors = LambFactors;
  static constexpr int kMoments = 2;

  // What the weights would move by for a step of 1; the moments become the new ones. `values` are
  // the master weights, exp_avg and exp_avg_sq. V is a vector type as described in vector_scalar.h.
  template <class V>
  static ZERO_EXT_HOST_DEVICE typename V::Float direction(typename V::Float (&values)[1 + kMoments],
                                                          typename V::Float gradient,
                                                          const LambFactors& factors) {
    using Float = typename V::Float;
    auto& [master, exp_avg, exp_avg_sq] = values;
    const Float g = V::mul(gradient, V::set(factors.gradient_scale));
    exp_avg = factors.average_from_gradient
                  ? V::fma(V::set(factors.beta1), V::sub(exp_avg, g), g)
                  : V::fma(V::set(factors.average_weight), V::sub(g, exp_avg), exp_avg);
    exp_avg_sq = V::fma(V::set(factors.beta2), exp_avg_sq,
                        V::mul(V::mul(V::set(factors.square_weight), g), g));
    const Float square =
        V::fma(V::set(factors.inverse_correction2), exp_avg_sq, V::set(factors.eps_inside));
    const Float denominator = V::add(V::sqrt(square), V::set(factors.eps_outside));
    const Float average = V::mul(V::set(factors.inverse_correction1), exp_avg);
    return V::fma(V::set(factors.weight_decay), master, V::div(average, denominator));
  }

  template <class V>
  static ZERO_EXT_HOST_DEVICE void update(typename V::Float (&values)[1 + kMoments],
                                          typename V::Float gradient, const LambFactors& factors) {
    const auto move = direction<V>(values, gradient, factors);
    values[0] = V::fma(V::set(-factors.step_size), move, values[0]);
  }
};

}  // namespace zero_ext::core
