// From the hyper-parameters of an Adam segment to the factors of its kernels, and what is wrong
// with them.
#pragma once

#include <cmath>

#include "../../base/host_device.h"
#include "adam_coefficients.h"
#include "hyperparameter_error.h"

namespace zero_ext::core {

inline constexpr int kAdamHyperParameters = 8;

// `row` holds kAdamHyperParameters numbers: lr, beta1, beta2, eps, weight_decay, step, decoupled,
// maximize.
ZERO_EXT_HOST_DEVICE HyperFault adam_hyper_fault(const double* row) {
  if (!is_finite(row[0])) return {DeviceField::lr, row[0], WantedValue::finite};
  if (!(row[1] >= 0 && row[1] < 1)) return {DeviceField::beta1, row[1], WantedValue::below_one};
  if (!(row[2] >= 0 && row[2] < 1)) return {DeviceField::beta2, row[2], WantedValue::below_one};
  if (!(is_finite(row[3]) && row[3] >= 0))
    return {DeviceField::eps, row[3], WantedValue::finite_not_negative};
  if (!is_finite(row[4])) return {DeviceField::weight_decay, row[4], WantedValue::finite};
  if (!(is_finite(row[5]) && row[5] >= 1))
    return {DeviceField::step, row[5], WantedValue::finite_at_least_one};
  if (row[6] != 0 && row[6] != 1) return {DeviceField::decoupled, row[6], WantedValue::zero_or_one};
  if (row[7] != 0 && row[7] != 1) return {DeviceField::maximize, row[7], WantedValue::zero_or_one};
  return {};
}

ZERO_EXT_HOST_DEVICE AdamHyperParameters adam_hyper_parameters(const double* row) {
  return {row[0], row[1], row[2], row[3], row[4], row[5], row[6] == 1, row[7] == 1};
}

ZERO_EXT_HOST_DEVICE AdamFactors adam_factors_formula(const AdamHyperParameters& hyper,
                                                      float gradient_scale) {
  const double correction1 = 1.0 - ::pow(hyper.beta1, hyper.step);
  const double correction2 = 1.0 - ::pow(hyper.beta2, hyper.step);
  AdamFactors factors{};
  factors.gradient_scale = hyper.maximize ? -gradient_scale : gradient_scale;
  factors.coupled_decay = hyper.decoupled ? 0.0F : static_cast<float>(hyper.weight_decay);
  factors.decoupled_decay =
      hyper.decoupled ? static_cast<float>(hyper.lr * hyper.weight_decay) : 0.0F;
  factors.average_weight = static_cast<float>(1.0 - hyper.beta1);
  factors.beta1 = static_cast<float>(hyper.beta1);
  factors.average_from_gradient = hyper.beta1 <= 0.5;
  factors.beta2 = static_cast<float>(hyper.beta2);
  factors.square_weight = static_cast<float>(1.0 - hyper.beta2);
  factors.inverse_root_correction = static_cast<float>(1.0 / ::sqrt(correction2));
  factors.eps = static_cast<float>(hyper.eps);
  factors.step_size = static_cast<float>(hyper.lr / correction1);
  return factors;
}

// Adam's rows of hyper-parameters, for what reads those of any rule.
struct AdamHyper {
  using Factors = AdamFactors;
  static constexpr int kCount = kAdamHyperParameters;
  static constexpr const char* kNames =
      "lr, beta1, beta2, eps, weight_decay, step, decoupled, maximize";

  static ZERO_EXT_HOST_DEVICE HyperFault fault(const double* row) { return adam_hyper_fault(row); }
  static ZERO_EXT_HOST_DEVICE AdamFactors factors(const double* row, float gradient_scale) {
    return adam_factors_formula(adam_hyper_parameters(row), gradient_scale);
  }
};

}  // namespace zero_ext::core
