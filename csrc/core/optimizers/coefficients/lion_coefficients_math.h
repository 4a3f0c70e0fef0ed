// From the hyper-parameters of a Lion segment to the factors of its kernels, and what is wrong with
// them.
#pragma once

#include "../../base/host_device.h"
#include "hyperparameter_error.h"
#include "lion_coefficients.h"

namespace zero_ext::core {

ZERO_EXT_HOST_DEVICE LionFactors lion_factors_formula(const LionHyperParameters& hyper,
                                                      float gradient_scale) {
  LionFactors factors{};
  factors.gradient_scale = hyper.maximize ? -gradient_scale : gradient_scale;
  factors.beta1 = static_cast<float>(hyper.beta1);
  factors.direction_weight = static_cast<float>(1.0 - hyper.beta1);
  factors.beta2 = static_cast<float>(hyper.beta2);
  factors.average_weight = static_cast<float>(1.0 - hyper.beta2);
  factors.decay = static_cast<float>(hyper.lr * hyper.weight_decay);
  factors.lr = static_cast<float>(hyper.lr);
  return factors;
}

// Lion's rows of hyper-parameters; see AdamHyper.
struct LionHyper {
  using Factors = LionFactors;
  static constexpr int kCount = 5;
  static constexpr const char* kNames = "lr, beta1, beta2, weight_decay, maximize";

  static ZERO_EXT_HOST_DEVICE HyperFault fault(const double* row) {
    if (!is_finite(row[0])) return {DeviceField::lr, row[0], WantedValue::finite};
    if (!(row[1] >= 0 && row[1] < 1)) return {DeviceField::beta1, row[1], WantedValue::below_one};
    if (!(row[2] >= 0 && row[2] < 1)) return {DeviceField::beta2, row[2], WantedValue::below_one};
    if (!is_finite(row[3])) return {DeviceField::weight_decay, row[3], WantedValue::finite};
    if (row[4] != 0 && row[4] != 1)
      return {DeviceField::maximize, row[4], WantedValue::zero_or_one};
    return {};
  }
  static ZERO_EXT_HOST_DEVICE LionFactors factors(const double* row, float gradient_scale) {
    return lion_factors_formula({row[0], row[1], row[2], row[3], row[4] == 1}, gradient_scale);
  }
};

}  // namespace zero_ext::core
