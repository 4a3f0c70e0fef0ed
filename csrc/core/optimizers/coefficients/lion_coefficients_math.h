// From the hyper-parameters of a Lion segment to the coefficients of its kernels, and what is wrong
// with them.
#pragma once

#include "../../base/host_device.h"
#include "hyperparameter_error.h"
#include "lion_coefficients.h"

namespace zero_ext::core {

ZERO_EXT_HOST_DEVICE LionCoefficients lion_coefficients_math(const LionHyperparameters& hyper,
                                                             float gradient_scale) {
  LionCoefficients coefficients{};
  coefficients.gradient_scale = hyper.maximize ? -gradient_scale : gradient_scale;
  coefficients.beta1 = static_cast<float>(hyper.beta1);
  coefficients.direction_weight = static_cast<float>(1.0 - hyper.beta1);
  coefficients.beta2 = static_cast<float>(hyper.beta2);
  coefficients.average_weight = static_cast<float>(1.0 - hyper.beta2);
  coefficients.decay = static_cast<float>(hyper.lr * hyper.weight_decay);
  coefficients.lr = static_cast<float>(hyper.lr);
  return coefficients;
}

// Lion's rows of hyper-parameters; see AdamHyper.
struct LionHyper {
  using Coefficients = LionCoefficients;
  static constexpr int kCount = 5;
  static constexpr const char* kNames = "lr, beta1, beta2, weight_decay, maximize";

  static ZERO_EXT_HOST_DEVICE HyperparameterError error(const double* row) {
    if (!is_finite(row[0])) return {DeviceField::lr, row[0], ExpectedValue::finite};
    if (!(row[1] >= 0 && row[1] < 1)) return {DeviceField::beta1, row[1], ExpectedValue::below_one};
    if (!(row[2] >= 0 && row[2] < 1)) return {DeviceField::beta2, row[2], ExpectedValue::below_one};
    if (!is_finite(row[3])) return {DeviceField::weight_decay, row[3], ExpectedValue::finite};
    if (row[4] != 0 && row[4] != 1)
      return {DeviceField::maximize, row[4], ExpectedValue::zero_or_one};
    return {};
  }
  static ZERO_EXT_HOST_DEVICE LionCoefficients coefficients(const double* row,
                                                            float gradient_scale) {
    return lion_coefficients_math({row[0], row[1], row[2], row[3], row[4] == 1}, gradient_scale);
  }
};

}  // namespace zero_ext::core
