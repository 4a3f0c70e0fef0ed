// Hyper-parameters of one segment of a Lion step, as given and as the kernels use them.
#pragma once

namespace zero_ext::core {

// Double hyper-parameters of one segment, before any rounding.
struct LionHyperparameters {
  double lr;
  double beta1;
  double beta2;
  double weight_decay;
  bool maximize;
};

// Float32 coefficients of one segment, prepared once from its double hyper-parameters.
struct LionCoefficients {
  float gradient_scale;  // unscale x clip, negative to maximize
  float beta1;
  float direction_weight;  // 1 - beta1
  float beta2;
  float average_weight;  // 1 - beta2
  float decay;           // lr * weight_decay
  float lr;
};

// The coefficients for gradients that are multiplied by `gradient_scale` first.
LionCoefficients lion_coefficients(const LionHyperparameters& hyper, float gradient_scale);

}  // namespace zero_ext::core
