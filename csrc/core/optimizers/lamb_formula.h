// One LAMB update of one vector of elements.
//
// Source: You, Li, Reddi, Hseu, Kumar, Bhojanapalli, Song, Demmel, Keutzer and Hsieh, "Large batch
// optimization for deep learning: training BERT in 76 minutes", algorithm 2 (arXiv 1904.00962).
#pragma once

#include "../base/host_device.h"
#include "coefficients/lamb_coefficients.h"

namespace zero_ext::core {

struct LambRule {
  using Coefficients = LambCoefficients;
  static constexpr int kMoments = 2;

  // What the weights would move by for a step of 1; the moments become the new ones. `values` are
  // the master weights, exp_avg and exp_avg_sq. V is a vector type as described in vector_scalar.h.
  template <class V>
  static ZERO_EXT_HOST_DEVICE typename V::Float direction(typename V::Float (&values)[1 + kMoments],
                                                          typename V::Float gradient,
                                                          const LambCoefficients& coefficients) {
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
                                          const LambCoefficients& coefficients) {
    const auto move = direction<V>(values, gradient, coefficients);
    values[0] = V::fma(V::set(-coefficients.step_size), move, values[0]);
  }
};

}  // namespace zero_ext::core
