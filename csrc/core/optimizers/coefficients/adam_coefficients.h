// Hyper-parameters of one segment of an Adam step, as given and as the kernels use them.
#pragma once

namespace zero_ext::core {

// Double hyper-parameters of one segment, before any rounding.
struct AdamHyperparameters {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double step;  // 1-based count that includes this update
  bool decoupled;
  bool maximize;
};

// Float32 coefficients of one segment, prepared once from its double hyper-parameters.
struct AdamCoefficients {
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

// The coefficients for gradients that are multiplied by `gradient_scale` first.
AdamCoefficients adam_coefficients(const AdamHyperparameters& hyper, float gradient_scale);

}  // namespace zero_ext::core
