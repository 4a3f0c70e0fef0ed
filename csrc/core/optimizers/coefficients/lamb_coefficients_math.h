// From the hyper-parameters of a LAMB segment to the coefficients of its kernels, and what is wrong
// with them.
#pragma once

#include "../../base/host_device.h"
#include "hyperparameter_error.h"
#include "lamb_coefficients.h"

namespace zero_ext::core {

ZERO_EXT_HOST_DEVICE LambCoefficients lamb_coefficients_math(const LambHyperparameters& hyper,
                                                             float gradient_scale) {
  LambCoefficients coefficients{};
  coefficients.gradient_scale = hyper.maximize ? -gradient_scale : gradient_scale;
  coefficients.average_weight = static_cast<float>(1.0 - hyper.beta1);
  coefficients.beta1 = static_cast<float>(hyper.beta1);
  coefficients.average_from_gradient = hyper.beta1 <= 0.5;
  coefficients.beta2 = static_cast<float>(hyper.beta2);
  coefficients.square_weight = static_cast<float>(1.0 - hyper.beta2);
  coefficients.inverse_correction1 = static_cast<float>(1.0 / hyper.correction1);
  coefficients.inverse_correction2 = static_cast<float>(1.0 / hyper.correction2);
  coefficients.eps_inside = hyper.eps_inside_sqrt ? static_cast<float>(hyper.eps) : 0.0F;
  coefficients.eps_outside = hyper.eps_inside_sqrt ? 0.0F : static_cast<float>(hyper.eps);
  coefficients.weight_decay = static_cast<float>(hyper.weight_decay);
  coefficients.step_size = static_cast<float>(hyper.lr * hyper.trust_ratio);
  return coefficients;
}

// LAMB's rows of hyper-parameters; see AdamHyper. The corrections are given, not the step: a
// device's power function may round otherwise than the host's. Any trust ratio will do: that of
// norms which are not finite is NaN, and reaches the weights.
struct LambHyper {
  using Coefficients = LambCoefficients;
  static constexpr int kCount = 10;
  static constexpr const char* kNames =
      "lr, beta1, beta2, eps, weight_decay, correction1, correction2, eps_inside_sqrt, maximize, "
      "trust_ratio";

  static ZERO_EXT_HOST_DEVICE HyperparameterError error(const double* row) {
    if (!is_finite(row[0])) return {DeviceField::lr, row[0], ExpectedValue::finite};
    if (!(row[1] >= 0 && row[1] < 1)) return {DeviceField::beta1, row[1], ExpectedValue::below_one};
    if (!(row[2] >= 0 && row[2] < 1)) return {DeviceField::beta2, row[2], ExpectedValue::below_one};
    if (!(is_finite(row[3]) && row[3] >= 0))
      return {DeviceField::eps, row[3], ExpectedValue::finite_not_negative};
    if (!is_finite(row[4])) return {DeviceField::weight_decay, row[4], ExpectedValue::finite};
    if (!(row[5] > 0 && row[5] <= 1))
      return {DeviceField::correction1, row[5], ExpectedValue::up_to_one};
    if (!(row[6] > 0 && row[6] <= 1))
      return {DeviceField::correction2, row[6], ExpectedValue::up_to_one};
    if (row[7] != 0 && row[7] != 1)
      return {DeviceField::eps_inside_sqrt, row[7], ExpectedValue::zero_or_one};
    if (row[8] != 0 && row[8] != 1)
      return {DeviceField::maximize, row[8], ExpectedValue::zero_or_one};
    return {};
  }
  static ZERO_EXT_HOST_DEVICE LambCoefficients coefficients(const double* row,
                                                            float gradient_scale) {
    return lamb_coefficients_math(
        {row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7] == 1, row[8] == 1, row[9]},
        gradient_scale);
  }
};

}  // namespace zero_ext::core
