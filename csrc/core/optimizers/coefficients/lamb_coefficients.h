// Hyper-parameters of one segment of a LAMB step, as given and as the kernels use them.
#pragma once

namespace zero_ext::core {

// Double hyper-parameters of one segment, before any rounding.
struct LambHyperparameters {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double correction1;  // 1 - beta1^step, or 1 without bias correction
  double correction2;  // 1 - beta2^step, or 1
  bool eps_inside_sqrt;
  bool maximize;
  double trust_ratio;
};

// Float32 coefficients of one segment, prepared once from its double hyper-parameters.
struct LambCoefficients {
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

// The coefficients for gradients that are multiplied by `gradient_scale` first.
LambCoefficients lamb_coefficients(const LambHyperparameters& hyper, float gradient_scale);

}  // namespace zero_ext::core
