// From the hyper-parameters of an Adam segment to the coefficients of its kernels, and what is
// wrong with them.
#pragma once

#include <cmath>

#include "../../base/host_device.h"
#include "adam_coefficients.h"
#include "hyperparameter_error.h"

namespace zero_ext::core {

inline constexpr int kAdamHyperparameters = 8;

// `row` holds kAdamHyperparameters numbers: lr, beta1, beta2, eps, weight_decay, step, decoupled,
// maximize.
ZERO_EXT_HOST_DEVICE HyperparameterError adam_hyperparameter_error(const double* row) {
  if (!is_finite(row[0])) return {DeviceField::lr, row[0], ExpectedValue::finite};
  if (!(row[1] >= 0 && row[1] < 1)) return {DeviceField::beta1, row[1], ExpectedValue::below_one};
  if (!(row[2] >= 0 && row[2] < 1)) return {DeviceField::beta2, row[2], ExpectedValue::below_one};
  if (!(is_finite(row[3]) && row[3] >= 0))
    return {DeviceField::eps, row[3], ExpectedValue::finite_not_negative};
  if (!is_finite(row[4])) return {DeviceField::weight_decay, row[4], ExpectedValue::finite};
  if (!(is_finite(row[5]) && row[5] >= 1))
    return {DeviceField::step, row[5], ExpectedValue::finite_at_least_one};
  if (row[6] != 0 && row[6] != 1)
    return {DeviceField::decoupled, row[6], ExpectedValue::zero_or_one};
  if (row[7] != 0 && row[7] != 1)
    return {DeviceField::maximize, row[7], ExpectedValue::zero_or_one};
  return {};
}

ZERO_EXT_HOST_DEVICE AdamHyperparameters adam_hyperparameters(const double* row) {
  return {row[0], row[1], row[2], row[3], row[4], row[5], row[6] == 1, row[7] == 1};
}

ZERO_EXT_HOST_DEVICE AdamCoefficients adam_coefficients_math(const AdamHyperparameters& hyper,
                                                             float gradient_scale) {
  const double correction1 = 1.0 - ::pow(hyper.beta1, hyper.step);
  const double correction2 = 1.0 - ::pow(hyper.beta2, hyper.step);
  AdamCoefficients coefficients{};
  coefficients.gradient_scale = hyper.maximize ? -gradient_scale : gradient_scale;
  coefficients.coupled_decay = hyper.decoupled ? 0.0F : static_cast<float>(hyper.weight_decay);
  coefficients.decoupled_decay =
      hyper.decoupled ? static_cast<float>(hyper.lr * hyper.weight_decay) : 0.0F;
  coefficients.average_weight = static_cast<float>(1.0 - hyper.beta1);
  coefficients.beta1 = static_cast<float>(hyper.beta1);
  coefficients.average_from_gradient = hyper.beta1 <= 0.5;
  coefficients.beta2 = static_cast<float>(hyper.beta2);
  coefficients.square_weight = static_cast<float>(1.0 - hyper.beta2);
  coefficients.inverse_root_correction = static_cast<float>(1.0 / ::sqrt(correction2));
  coefficients.eps = static_cast<float>(hyper.eps);
  coefficients.step_size = static_cast<float>(hyper.lr / correction1);
  return coefficients;
}

// Adam's rows of hyper-parameters, for what reads those of any rule.
struct AdamHyper {
  using Coefficients = AdamCoefficients;
  static constexpr int kCount = kAdamHyperparameters;
  static constexpr const char* kNames =
      "lr, beta1, beta2, eps, weight_decay, step, decoupled, maximize";

  static ZERO_EXT_HOST_DEVICE HyperparameterError error(const double* row) {
    return adam_hyperparameter_error(row);
  }
  static ZERO_EXT_HOST_DEVICE AdamCoefficients coefficients(const double* row,
                                                            float gradient_scale) {
    return adam_coefficients_math(adam_hyperparameters(row), gradient_scale);
  }
};

}  // namespace zero_ext::core
